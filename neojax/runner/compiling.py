"""Compiling all programs ahead of time, within the device's memory."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence

import jax
from tqdm import tqdm

from neojax.kv.geometry import GIB
from neojax.runner.programs import Signature


def compile_all(
    todo: Sequence[Signature], *, num_threads: int, progress: bool, remedy: str
) -> list[tuple[Signature, jax.stages.Compiled]]:
    """Compile every program; XLA works outside the GIL, so threads help.

    On a GPU XLA tries kernels on arrays of the real size, so a program may run out of device memory
    beside others. It is compiled again when nothing else is; ValueError if that fails too, with
    `remedy`: what to try.
    """
    with (
        concurrent.futures.ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=len(todo), desc="Compiling programs", disable=not progress) as bar,
    ):
        futures = [pool.submit(s.compile) for s in todo]
        for _ in concurrent.futures.as_completed(futures):
            bar.update()
    compiled: list[tuple[Signature, jax.stages.Compiled]] = []
    for signature, future in zip(todo, futures, strict=True):
        try:
            program = future.result()
        except jax.errors.JaxRuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            program = _compile_alone(signature, remedy)
        compiled.append((signature, program))
    return compiled


def _compile_alone(signature: Signature, remedy: str) -> jax.stages.Compiled:
    try:
        return signature.compile()
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        room = free_memory(jax.devices()[0].memory_stats())
        raise ValueError(
            f"no device memory to compile {signature.name} of {signature.shape.num_rows} rows, "
            f"though nothing else was being compiled{room}: {error}. Try {remedy}"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def free_memory(stats: Mapping[str, int] | None) -> str:
    """How much of the device's memory is free, to go on a sentence; "" where it is not told."""
    if stats is None:
        return ""
    limit = stats["bytes_limit"]
    free = limit - stats["bytes_in_use"]
    return f"; {free / GIB:.2f} of {limit / GIB:.2f} GiB were free"


def smaller_step(max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> str:
    """What to try where programs want too much memory: flags that the config accepts."""
    num_seqs = max(1, max_num_seqs // 2)
    num_tokens = max(num_seqs + block_size, max_num_batched_tokens // 2)
    return (
        f"--max-num-seqs {num_seqs} --max-num-batched-tokens {num_tokens}, a higher "
        "--gpu-memory-utilization, or a smaller model"
    )
