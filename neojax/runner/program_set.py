"""The programs of every shape and channel, and which of them shapes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from neojax.runner.programs import Programs
from neojax.runner.rolling import RollingPrograms
from neojax.runner.shapes import Buckets, Shape
from neojax.runner.stages import Stages
from neojax.scheduler.plan import Mode

B0, B1, DEEP = 0, 1, 2
"""The host lane's channels: of the two sub-batches, and of ROLLING steps' groups."""

ProgramSet: TypeAlias = dict[tuple[Shape, int], Programs]


def make_programs(
    buckets: Buckets,
    rolling_shapes: Sequence[Shape],
    stages: Callable[[Shape, int, int], Stages],
    head_full: Callable[..., Any],
) -> ProgramSet:
    """Programs by shape and channel, not yet compiled.

    Args:
        rolling_shapes: those of ROLLING steps, if there are any.
        stages: makes the stages of a shape on a channel whose head takes so many rows.
        head_full: the jitted head that does everything.
    """
    made: ProgramSet = {}

    def make(
        shape: Shape,
        channel: int,
        *modes: Mode,
        twin: Programs | None = None,
        attend: Programs | None = None,
    ) -> None:
        head_rows = buckets.head_rows(shape)
        made[shape, channel] = Programs(
            stages(shape, channel, head_rows),
            {mode: buckets.attentions(mode, shape.num_tokens) for mode in modes},
            head_full,
            twin=twin,
            head=made.get((Shape(head_rows, 0), B0)),
            attend=attend,
        )

    for shape in buckets.device_shapes:
        is_pipelined = shape in buckets.pipelined_shapes
        make(shape, B0, Mode.DEVICE_ONLY, *([Mode.PIPELINED] if is_pipelined else []))
    for shape in buckets.mixed:
        make(shape, B0, Mode.PIPELINED, attend=made[Shape(shape.num_tokens, 0), B0])
    for shape in buckets.host_shapes:
        make(shape, B0, Mode.PIPELINED)
        make(shape, B1, Mode.PIPELINED, twin=made[shape, B0])
    for shape in rolling_shapes:
        # Its layers are one program for all groups of layers, so nothing pads for the head.
        attentions = buckets.attentions(Mode.ROLLING, shape.num_tokens)
        made[shape, DEEP] = RollingPrograms(
            stages(shape, DEEP, shape.num_rows),
            attentions,
            head_full,
            parks=shape == rolling_shapes[0],
        )
    return made
