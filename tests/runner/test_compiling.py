"""Compiling within the device's memory: what fails beside others is tried alone."""

from __future__ import annotations

import threading

import jax
import pytest

from neojax.config import EngineConfig
from neojax.kv.geometry import GIB
from neojax.runner.compiling import compile_all, free_memory, smaller_step
from neojax.runner.programs import Signature
from neojax.runner.shapes import Shape

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1018.00MiB."


class FakeProgram:
    """Like a jitted function without arguments whose first compilations raise."""

    def __init__(self, name: str, *errors: str) -> None:
        self.name = name
        self.errors = list(errors)
        self.compiled_in: list[threading.Thread] = []

    def __call__(self) -> None:
        raise AssertionError("only compiled")

    def lower(self) -> FakeProgram:
        return self

    def compile(self) -> jax.stages.Compiled:
        self.compiled_in.append(threading.current_thread())
        if self.errors:
            raise jax.errors.JaxRuntimeError(self.errors.pop(0))
        return jax.jit(lambda: len(self.name)).lower().compile()


def compile_programs(*programs):
    todo = [Signature(program.name, Shape(8, 0), program, ()) for program in programs]
    return compile_all(todo, num_threads=3, progress=False, remedy="a smaller model")


def test_what_runs_out_of_memory_beside_others_is_compiled_again_alone():
    programs = [FakeProgram("a"), FakeProgram("head", OUT_OF_MEMORY), FakeProgram("b")]
    compiled = compile_programs(*programs)
    assert [(s.name, int(program())) for s, program in compiled] == [
        ("a", 1),
        ("head", 4),
        ("b", 1),
    ]
    assert [len(program.compiled_in) for program in programs] == [1, 2, 1]
    # By then the pool's threads have ended.
    assert programs[1].compiled_in[1] is threading.main_thread()


def test_what_runs_out_of_memory_alone_is_an_error_that_says_what_to_try():
    head = FakeProgram("head", OUT_OF_MEMORY, OUT_OF_MEMORY)
    with pytest.raises(ValueError, match=r"compile head of 8 rows.*1018\.00MiB.*a smaller model"):
        compile_programs(head, FakeProgram("a"))


def test_other_errors_are_not_tried_again():
    broken = FakeProgram("a", "INTERNAL: ptxas")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"):
        compile_programs(broken)
    assert len(broken.compiled_in) == 1
    later = FakeProgram("a", OUT_OF_MEMORY, "INTERNAL: ptxas")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"):
        compile_programs(later)


def test_free_memory_is_told_in_gib_where_the_backend_knows():
    assert free_memory(None) == ""
    stats = {"bytes_limit": 8 * GIB, "bytes_in_use": int(7.5 * GIB)}
    assert free_memory(stats) == "; 0.50 of 8.00 GiB were free"


@pytest.mark.parametrize("sizes", [(256, 2048), (256, 272), (1, 17)])
def test_the_flags_to_try_are_smaller_and_accepted(sizes):
    words = smaller_step(*sizes, 16).replace(",", "").split()
    num_seqs, num_tokens = int(words[1]), int(words[3])
    EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    assert num_seqs <= sizes[0]
    assert num_tokens <= sizes[1]
