"""Compiled programs, one set per shape: what is jitted and donated, and compiling ahead of time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from neojax.runner.logit_state import LogitState
from neojax.runner.shapes import AttentionShape, Shape
from neojax.runner.stages import KV, Leaves, Stages


class Head(enum.Enum):
    """What the last stage must be able to do: one program each, so that plain steps pay nothing."""

    GREEDY = enum.auto()
    SAMPLE = enum.auto()  # temperature, top-k, top-p
    FULL = enum.auto()  # whatever a request may ask for


class Programs:
    """The jitted stages of one shape. Pools, tokens and activations are donated.

    attentions: the attention shapes that `layers` and `attend` have programs for.
    head_full: shared by all shapes.
    ends: programs of the same shape on another channel; embedding and head are shared with them.
    """

    def __init__(
        self,
        stages: Stages,
        attentions: Sequence[AttentionShape],
        head_full: Callable[..., Any],
        ends: Programs | None = None,
    ) -> None:
        self.stages = stages
        self.owns_ends = ends is None
        jit = jax.jit
        self.layers = {
            shape: jit(functools.partial(stages.layers, shape=shape), donate_argnums=(1, 3))
            for shape in attentions
        }
        self.attend = {
            shape: jit(functools.partial(stages.attend, shape=shape)) for shape in attentions
        }
        self.enter = jit(stages.enter, donate_argnums=(3, 4))
        self.linear = jit(stages.linear, donate_argnums=(4, 7))
        self.leave = jit(stages.leave)
        self.attend_host_chunks = jit(stages.attend_host_chunks, donate_argnums=(3, 4))
        self.head_full = head_full
        if ends is not None:
            self.embed, self.logits = ends.embed, ends.logits
            self.head_greedy, self.head_sample = ends.head_greedy, ends.head_sample
            return
        self.embed = jit(stages.embed)
        self.logits = jit(stages.logits)
        self.head_greedy = jit(functools.partial(stages.head, is_greedy=True), donate_argnums=3)
        self.head_sample = jit(functools.partial(stages.head, is_greedy=False), donate_argnums=3)

    @property
    def shape(self) -> Shape:
        """The padded size these programs are for."""
        return self.stages.layout.shape


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """One program and the arguments (arrays or their shapes) it will be called with."""

    name: str
    shape: Shape
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def compile(self) -> jax.stages.Compiled:
        """Compile into jit's own cache, so that the first call finds it there."""
        return self.function.lower(*self.args).compile()


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """What programs are called with besides the activations."""

    ends: Leaves
    layers: tuple[Leaves, ...]
    pools: tuple[KV, ...]
    scratch: KV | None
    tokens: jax.Array
    logit_state: LogitState
    layer_ids: tuple[jax.Array, ...]
    layers_per_program: int
    hidden_size: int
    dtype: Any


def signatures(programs: Programs, a: Arguments, *, has_host: bool) -> Iterator[Signature]:
    """Every program of a shape that a step may run."""
    stages, shape = programs.stages, programs.shape
    model, num_tokens = stages.model, shape.num_tokens
    spec = jax.ShapeDtypeStruct
    packed_host = np.zeros(stages.layout.size, np.int32)
    packed = spec(packed_host.shape, jnp.int32)
    x = spec((shape.num_rows, a.hidden_size), a.dtype)
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    rows = spec((shape.num_rows, width), a.dtype)
    attended = spec((num_tokens, model.num_heads, model.head_dim), a.dtype) if num_tokens else None
    ticket = spec((1,), jnp.int32) if shape.num_host_rows else None
    kv = a.pools[0] if num_tokens else None
    first, last, layer = a.layers[0], a.layers[-1], a.layer_ids[0]

    def of(name: str, *args: Any, function: Any = None) -> Signature:
        return Signature(name, shape, function or getattr(programs, name), args)

    if programs.owns_ends:
        yield of("embed", a.ends, packed_host, a.tokens)
        yield of("head_greedy", a.ends, packed, x, a.tokens)
        yield of("head_sample", a.ends, packed, x, a.tokens)
    if num_tokens:
        group = a.layers_per_program
        for function in programs.layers.values():
            args = (a.layers[:group], a.pools[:group], packed, x)
            yield of("layers", *args, function=function)
    if not has_host:
        return
    yield of("enter", first, packed, layer, x, kv)
    yield of("leave", last, packed, x, attended, ticket)
    if len(a.layers) > 1:
        yield of("linear", first, last, packed, layer, x, attended, ticket, kv)
    if num_tokens:
        for function in programs.attend.values():
            yield of("attend", packed, rows, kv, function=function)
        yield of("attend_host_chunks", packed, layer, rows, attended, a.scratch)


def head_signatures(all_programs: Iterable[Programs], a: Arguments) -> Iterator[Signature]:
    """The full head of every number of rows; one serves all shapes that have it."""
    by_rows = {p.shape.num_rows: p for p in all_programs}
    for num_rows, programs in sorted(by_rows.items()):
        x = jax.ShapeDtypeStruct((num_rows, a.hidden_size), a.dtype)
        packed = np.zeros((10, programs.stages.layout.num_samples), np.int32)
        args = (a.ends, packed, x, a.tokens, a.logit_state)
        yield Signature("head_full", programs.shape, programs.head_full, args)


def compile_all(
    todo: list[Signature], *, num_threads: int, progress: bool
) -> list[tuple[Signature, jax.stages.Compiled]]:
    """Compile every program; XLA works outside the GIL, so threads help."""
    with (
        concurrent.futures.ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=len(todo), desc="Compiling programs", disable=not progress) as bar,
    ):
        futures = [pool.submit(s.compile) for s in todo]
        for _ in concurrent.futures.as_completed(futures):
            bar.update()
    return [(s, f.result()) for s, f in zip(todo, futures, strict=True)]
