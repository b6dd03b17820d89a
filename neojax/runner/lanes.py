"""The order in which a step's programs are launched: where the two lanes overlap.

DEVICE_ONLY: one batch, several layers per program.

PIPELINED, steady state of layer i; everything is only enqueued, nothing here waits:

    device | linear b0 (i) | attention b0 (i+1) | linear b1 (i) | linear b0 (i+1) | ...
    host   |  attention of b1's rows (layer i)  | attention of b0's host rows (i+1) | ...

A linear stage of b0 joins its host rows of layer i and starts those of layer i+1; while it and
b0's device attention run, the host attends for b1's layer i, which the linear stage of b1 joins.

ROLLING: as DEVICE_ONLY, with a group of host rows passing through each layer (see `rolling`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from neojax.runner.logit_state import LogitState
from neojax.runner.programs import Head, Programs
from neojax.runner.rolling import Parked, RollingPrograms
from neojax.runner.scores import Scores
from neojax.runner.shapes import AttentionShape
from neojax.runner.stages import KV, Leaves
from neojax.runner.step_meta import Packed

AfterLayer: TypeAlias = Callable[[int], None]
"""Called with -1 before the first stage, and when a layer of every sub-batch has been launched, in
ascending order and at last with the last: what else the step does is spread between."""


class Batch(NamedTuple):
    """A sub-batch about to be launched."""

    programs: Programs
    packed: np.ndarray
    attention: AttentionShape
    head: Head
    has_host_chunks: bool
    sample_rows: np.ndarray | None = None  # `SampleRows` of a full head
    prompt_rows: tuple[np.ndarray, ...] = ()  # `SampleRows` of prompts to score
    wants_logits: bool = False


class Sampled(NamedTuple):
    """What a sub-batch gives: tokens [S], and what was asked for beside them."""

    tokens: jax.Array
    logits: jax.Array | None  # float32 [S, V]
    scores: Scores | None  # of the tokens; from a full head
    prompt_scores: tuple[Scores, ...]  # one for each of the batch's prompt_rows


class DeviceState:
    """Arrays that live from step to step. Donated to programs and replaced by their results."""

    def __init__(
        self,
        ends: Leaves,
        layers: tuple[Leaves, ...],
        pools: list[KV],
        scratch: list[KV],
        tokens: jax.Array,
        logit_state: LogitState,
        layer_ids: tuple[jax.Array, ...],
        parked: list[Parked],
    ) -> None:
        self.ends = ends
        self.layers = layers
        self.pools = pools
        self.scratch = scratch  # two, used by even and odd layers; empty without a host pool
        self.tokens = tokens  # [max_num_seqs] newest token of each request slot
        self.logit_state = logit_state
        self.layer_ids = layer_ids
        self.parked = parked  # one a layer; empty without ROLLING programs


def run_device_only(
    state: DeviceState,
    batch: Batch,
    layers_per_program: int,
    after_layer: AfterLayer = lambda layer: None,
) -> Sampled:
    """Launch a DEVICE_ONLY step."""
    after_layer(-1)
    programs = batch.programs
    layers = programs.layers[batch.attention]
    packed, x = programs.embed(state.ends, batch.packed, state.tokens)
    for first in range(0, len(state.layers), layers_per_program):
        group = slice(first, first + layers_per_program)
        pools, x = layers(state.layers[group], tuple(state.pools[group]), packed, x)
        state.pools[group] = pools
        after_layer(first + len(pools) - 1)
    return _head(state, batch, packed, x)


def run_rolling(
    state: DeviceState,
    batch: Batch,
    layers_per_program: int,
    after_layer: AfterLayer = lambda layer: None,
) -> Sampled:
    """Launch a ROLLING step."""
    after_layer(-1)
    programs = batch.programs
    assert isinstance(programs, RollingPrograms)
    layers = programs.rolling[batch.attention]
    if batch.has_host_chunks:
        start_first_fetch(state, batch)
    packed, x = programs.embed(state.ends, batch.packed, state.tokens)
    for first in range(0, len(state.layers), layers_per_program):
        group = slice(first, first + layers_per_program)
        this, following = first % 2, 1 - first % 2
        scratch = None
        if batch.has_host_chunks:
            scratch = (state.scratch[this], state.scratch[following])
        pools, scratch, parked, x = layers(
            state.layers[group],
            tuple(state.pools[group]),
            scratch,
            tuple(state.parked[group]),
            packed,
            state.layer_ids[group],
            x,
        )
        state.pools[group], state.parked[group] = pools, parked
        if scratch is not None:
            state.scratch[this], state.scratch[following] = scratch
        after_layer(first + len(pools) - 1)
    return _head(state, batch, packed, x)


def run_pipelined(
    state: DeviceState, batches: list[Batch], after_layer: AfterLayer = lambda layer: None
) -> list[Sampled]:
    """Launch a PIPELINED step of one or two sub-batches."""
    after_layer(-1)
    lanes = [SubBatchLane(state, batch) for batch in batches]
    for lane in lanes:
        lane.enter()
    after_layer(0)
    for layer in range(1, len(state.layers)):
        for lane in lanes:
            lane.linear(layer)
        after_layer(layer)
    return [lane.leave() for lane in lanes]


class SubBatchLane:
    """One sub-batch on its way through the layers."""

    def __init__(self, state: DeviceState, batch: Batch) -> None:
        self.state = state
        self.batch = batch
        self.has_device_tokens = batch.programs.shape.num_tokens > 0
        self.packed: Any = None
        self.x: Any = None
        self.ticket: Any = None  # of the host rows' attention in flight
        self.attended: Any = None  # device attention of the layer entered last

    def enter(self) -> None:
        state, programs = self.state, self.batch.programs
        if self.batch.has_host_chunks:
            start_first_fetch(state, self.batch)
        self.packed, x = programs.embed(state.ends, self.batch.packed, state.tokens)
        entered = programs.enter(state.layers[0], self.packed, state.layer_ids[0], x, self._kv(0))
        self._attend(0, *entered)

    def linear(self, layer: int) -> None:
        """Second half of the layer before, first half of `layer`."""
        state = self.state
        entered = self.batch.programs.linear(
            state.layers[layer - 1],
            state.layers[layer],
            self.packed,
            state.layer_ids[layer],
            self.x,
            self.attended,
            self.ticket,
            self._kv(layer),
        )
        self._attend(layer, *entered)

    def leave(self) -> Sampled:
        x = self.batch.programs.leave(
            self.state.layers[-1], self.packed, self.x, self.attended, self.ticket
        )
        return _head(self.state, self.batch, self.packed, x)

    def _kv(self, layer: int) -> KV | None:
        return self.state.pools[layer] if self.has_device_tokens else None

    def _attend(self, layer: int, kv: KV | None, rows: Any, x: jax.Array, ticket: Any) -> None:
        state, programs = self.state, self.batch.programs
        self.x, self.ticket = x, ticket
        if kv is None:
            return
        state.pools[layer] = kv
        meta = self.packed.attention
        self.attended = programs.attend[self.batch.attention](meta, rows, kv)
        if self.batch.has_host_chunks:
            this, following = layer % 2, 1 - layer % 2
            state.scratch[this], state.scratch[following], self.attended, _ = (
                programs.attend_host_chunks(
                    meta,
                    state.layer_ids[layer],
                    rows,
                    self.attended,
                    state.scratch[this],
                    state.scratch[following],
                )
            )


def start_first_fetch(state: DeviceState, batch: Batch) -> None:
    """Begin to bring the prefixes of a step's HOST chunks for layer 0; each layer starts the next.

    As early as possible: nothing of the step hides it but the embedding.
    """
    programs = batch.programs
    assert programs.first_fetch is not None
    hdr = programs.stages.layout.fetch_hdr(batch.packed)
    state.scratch[0] = programs.first_fetch(hdr, state.scratch[0])


def _head(state: DeviceState, batch: Batch, packed: Packed, x: jax.Array) -> Sampled:
    programs, sampling = batch.programs, packed.sampling
    logits = programs.logits(state.ends, sampling, x) if batch.wants_logits else None
    if batch.head is not Head.FULL:
        head = programs.head_greedy if batch.head is Head.GREEDY else programs.head_sample
        state.tokens, tokens = head(state.ends, sampling, x, state.tokens)
        return Sampled(tokens, logits, None, ())
    results = []
    for rows in (batch.sample_rows, *batch.prompt_rows):
        state.tokens, state.logit_state, *result = programs.head_full(
            state.ends, rows, x, state.tokens, state.logit_state
        )
        results.append(result)
    (tokens, scores), *prompts = results
    return Sampled(tokens, logits, scores, tuple(scores for _, scores in prompts))
