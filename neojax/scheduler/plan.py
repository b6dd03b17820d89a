"""What one step runs."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from neojax.scheduler.request import Placement, Progress, Request


class Mode(enum.StrEnum):
    """How a step uses the two lanes."""

    DEVICE_ONLY = "device_only"
    """No row needs the host: one batch, many layers per program."""
    PIPELINED = "pipelined"
    """Two sub-batches alternate per layer (b1 may be empty)."""
    ROLLING = "rolling"
    """One batch; groups of host rows ride in it and advance by one layer per step."""


class Row(NamedTuple):
    """The part of a request that one step computes."""

    request: Request
    start: Progress
    num_tokens: int
    samples: bool  # this row reaches the newest token, so the next one is sampled from it
    slot: int
    placement: Placement
    epoch: int  # preemptions so far: a row of an earlier life says nothing of the present blocks
    blocks: tuple[int, ...]  # those of positions [0, start.token + num_tokens)

    @property
    def stop(self) -> int:
        """Position after the last computed token: the context length of a decode row."""
        return self.start.token + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SubBatch:
    """Rows that go through the linear stages together."""

    chunks: tuple[Row, ...] = ()  # prefill chunks; a HOST-placed one stores its K/V in the arena
    decodes: tuple[Row, ...] = ()  # DEVICE-placed
    host_decodes: tuple[Row, ...] = ()  # attention on the host lane

    @property
    def num_device_tokens(self) -> int:
        """Tokens whose attention runs on the device."""
        return sum(row.num_tokens for row in self.chunks) + len(self.decodes)

    @property
    def host_chunks(self) -> tuple[Row, ...]:
        """Prefill chunks of HOST-placed requests."""
        return tuple(row for row in self.chunks if row.placement is Placement.HOST)

    @property
    def rows(self) -> Iterator[Row]:
        """In the order of the token arrays."""
        return itertools.chain(self.chunks, self.decodes, self.host_decodes)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes or self.host_decodes)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rolling:
    """Host rows that enter and leave the layers in a ROLLING step.

    A group that enters in one ROLLING step leaves in the L-th after it, for L layers; the steps
    between carry the groups of others too, which only the runner needs to know of.
    """

    entering: tuple[Row, ...] = ()  # their layer 0 begins; none of them samples yet
    leaving: tuple[Row, ...] = ()  # their last layer ends, and they sample
    num_under_way: int = 0
    """Rows between two layers when the step has been launched, whatever its mode."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """A whole request moves to the other pool, layer by layer, under the step's computation.

    The copies of plan t are enqueued before step t's stages. The request has no row in step t and
    may have one in t+1. The source blocks are retired with step t, the targets owned at once.
    """

    request: Request
    placement_to: Placement
    num_tokens: int  # tokens whose K and V move
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    reason: str = ""

    @property
    def is_out(self) -> bool:
        """From the device to the host."""
        return self.placement_to is Placement.HOST


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A request started, was moved or gave up its blocks, and why."""

    request: Request
    placement: Placement | None  # where it is now; None: it waits again
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds that a step is predicted to take, in all and by term (terms overlap)."""

    step_s: float
    linear_s: float  # linear stages, both sub-batches, all layers
    device_attention_s: float  # prefill chunks and device decodes
    host_attention_s: float  # the worker pool's busy time
    hop_s: float  # starts and joins
    copies_s: float  # store, fetch and swaps
    per_step_s: float  # embed, head, sampling, launches
    device_only_s: float | None = None
    """What the DEVICE_ONLY candidate's rate would take for this step's tokens; None without one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: its mode, its sub-batches (b1 only in PIPELINED mode), its ROLLING groups."""

    step: int
    mode: Mode
    b0: SubBatch
    b1: SubBatch = SubBatch()
    rolling: Rolling = Rolling()
    swaps: tuple[Swap, ...] = ()
    moves: tuple[Move, ...] = ()  # since the plan before
    reason: str = ""  # why the policy chose it
    prediction: Prediction | None = None  # None without cost tables

    @property
    def sub_batches(self) -> tuple[SubBatch, ...]:
        """b0, and b1 where it has rows."""
        return (self.b0, self.b1) if self.b1 else (self.b0,)

    @property
    def rows(self) -> Iterator[Row]:
        """All rows that the step completes, b0's first: those that enter have far to go."""
        return itertools.chain(self.b0.rows, self.b1.rows, self.rolling.leaving)

    @property
    def sampled_rows(self) -> list[Row]:
        """Rows whose step gives a token, in the order of `StepHandle.tokens`."""
        return [row for row in self.rows if row.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(row.num_tokens for row in self.rows)
