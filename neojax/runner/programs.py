"""Compiled programs, one set per shape: what is jitted and donated, and what it is called with."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neojax.runner.logit_state import LogitState
from neojax.runner.shapes import AttentionShape, Shape
from neojax.runner.stages import KV, Leaves, Stages, first_fetch
from neojax.scheduler.plan import Mode


class Head(enum.Enum):
    """What the last stage must be able to do: one program each, so that plain steps pay nothing."""

    GREEDY = enum.auto()
    SAMPLE = enum.auto()  # temperature, top-k, top-p
    FULL = enum.auto()  # whatever a request may ask for


class Programs:
    """The jitted stages of one shape. Pools, tokens and activations are donated.

    attentions: by mode, the attention shapes that `layers` and `attend` have programs for.
    head_full: shared by all shapes.
    twin: programs of the same shape on another channel; embedding and head are shared with them.
    head: programs whose head takes as many rows; it is shared with them.
    attend: programs of as many device tokens; attention on the device is shared with them.
    """

    def __init__(
        self,
        stages: Stages,
        attentions: Mapping[Mode, Sequence[AttentionShape]],
        head_full: Callable[..., Any],
        *,
        twin: Programs | None = None,
        head: Programs | None = None,
        attend: Programs | None = None,
    ) -> None:
        self.stages = stages
        self.modes = frozenset(attentions)
        jit = jax.jit
        self.embed = twin.embed if twin else jit(stages.embed)
        self.layers = {
            shape: jit(functools.partial(stages.layers, shape=shape), donate_argnums=(1, 3))
            for shape in attentions.get(Mode.DEVICE_ONLY, ())
        }
        self.enter = jit(stages.enter, donate_argnums=(3, 4))
        self.linear = jit(stages.linear, donate_argnums=(4, 7))
        self.leave = jit(stages.leave)
        if attend:
            self.attend, self.attend_host_chunks = attend.attend, attend.attend_host_chunks
        else:
            self.attend = {
                shape: jit(functools.partial(stages.attend, shape=shape))
                for shape in attentions.get(Mode.PIPELINED, ())
            }
            self.attend_host_chunks = jit(stages.attend_host_chunks, donate_argnums=(3, 4, 5))
        self.first_fetch = first_fetch(stages.channel.lane) if stages.channel else None
        self.head_full = head_full
        if head := twin or head:
            self.logits = head.logits
            self.head_greedy, self.head_sample = head.head_greedy, head.head_sample
        else:
            self.logits = jit(stages.logits)
            self.head_greedy = jit(functools.partial(stages.head, is_greedy=True), donate_argnums=3)
            self.head_sample = jit(
                functools.partial(stages.head, is_greedy=False), donate_argnums=3
            )

    @property
    def shape(self) -> Shape:
        """The padded size these programs are for."""
        return self.stages.layout.shape

    def signatures(self, a: Arguments) -> Iterator[Signature]:
        """Every program that a step of this shape may run."""
        layout, shape, model = self.stages.layout, self.shape, self.stages.model
        num_tokens = shape.num_tokens
        spec = jax.ShapeDtypeStruct
        packed_host = np.zeros(layout.size, np.int32)
        packed = jax.eval_shape(layout.split, packed_host)
        x = spec((shape.num_rows, a.hidden_size), a.dtype)
        last_x = spec((layout.head_rows, a.hidden_size), a.dtype)
        first, last, layer = a.layers[0], a.layers[-1], a.layer_ids[0]

        def of(name: str, *args: Any, function: Any = None) -> Signature:
            return Signature(name, shape, function or getattr(self, name), args)

        yield of("embed", a.ends, packed_host, a.tokens)
        yield of("head_greedy", a.ends, packed.sampling, last_x, a.tokens)
        yield of("head_sample", a.ends, packed.sampling, last_x, a.tokens)
        group = a.layers_per_program
        for function in self.layers.values():
            yield of("layers", a.layers[:group], a.pools[:group], packed, x, function=function)
        if Mode.PIPELINED not in self.modes:
            return
        rows = spec((num_tokens, model.row_width), a.dtype)
        attended = (
            spec((num_tokens, model.num_heads, model.head_dim), a.dtype) if num_tokens else None
        )
        ticket = spec((1,), jnp.int32) if shape.num_host_rows else None
        kv = a.pools[0] if num_tokens else None
        yield of("enter", first, packed, layer, x, kv)
        yield of("leave", last, packed, x, attended, ticket)
        if len(a.layers) > 1:
            yield of("linear", first, last, packed, layer, x, attended, ticket, kv)
        if num_tokens:
            for function in self.attend.values():
                yield of("attend", packed.attention, rows, kv, function=function)
            scratch = a.scratch
            yield of(
                "attend_host_chunks", packed.attention, layer, rows, attended, scratch, scratch
            )
            yield of("first_fetch", np.zeros(3, np.int32), scratch)


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
    """What programs are called with besides the activations: arrays, or their shapes."""

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


def signatures(all_programs: Iterable[Programs], a: Arguments) -> list[Signature]:
    """Every program that a step may run; one that several shapes share is there once."""
    found: dict[tuple[int, Any], Signature] = {}
    for programs in all_programs:
        for signature in programs.signatures(a):
            # A function has one program for each of the optional arguments that it may get.
            key = (id(signature.function), jax.tree.structure(signature.args))
            found.setdefault(key, signature)
    return [*found.values(), *_head_signatures(all_programs, a)]


def _head_signatures(all_programs: Iterable[Programs], a: Arguments) -> Iterator[Signature]:
    """The full head of every number of rows; one serves all shapes that have it."""
    by_rows = {p.stages.layout.head_rows: p for p in all_programs}
    for num_rows, programs in sorted(by_rows.items()):
        x = jax.ShapeDtypeStruct((num_rows, a.hidden_size), a.dtype)
        packed = np.zeros((10, programs.stages.layout.num_samples), np.int32)
        args = (a.ends, packed, x, a.tokens, a.logit_state)
        yield Signature("head_full", programs.shape, programs.head_full, args)
