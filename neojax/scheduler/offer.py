"""What a step could run, and what a policy takes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from neojax.scheduler.request import Placement, Request


class Chunk(NamedTuple):
    """A prefill chunk that a step could run."""

    request: Request
    placement: Placement
    num_tokens: int
    is_new: bool  # the request waits, and starts with this chunk

    @property
    def start(self) -> int:
        """Tokens computed before it."""
        return self.request.progress.token

    @property
    def stop(self) -> int:
        """Context at its end."""
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """All that could run in a step, each list in the order in which it should be served."""

    device_decodes: tuple[Request, ...]  # all run
    host_decodes: tuple[Request, ...]  # longest unserved first; not those between two layers
    chunks: tuple[Chunk, ...]  # as many as fit if no host row runs
    num_tokens: int  # for chunks and host rows together
    block_size: int
    num_due: int = 0
    """The first of host_decodes that should run soon: after another such time they must."""
    num_late: int = 0
    """The first of host_decodes that would not get their tokens within the target if they did not
    run in this step."""
    group: tuple[Request, ...] = ()
    """Host rows that would enter a ROLLING step together; none where the policy does not roll."""
    staying: tuple[tuple[int, int], ...] = ()
    """Rows and sum of contexts of the groups that such a step leaves under way."""
    num_under_way: int = 0
    """Rows between two layers, those that would leave included."""
    steps_parked: int = 0
    """Steps since these last advanced."""

    def trimmed(self, num_tokens: int, *, device_only: bool = False) -> tuple[Chunk, ...]:
        """The first chunks, so many tokens of them at most.

        A chunk of a HOST request that is not its last ends on a block boundary, so that the arena
        never holds a block that two steps write. A later chunk must fetch its prefix from the
        arena, so such a prompt is split only when it leads: waiting would not help it.
        device_only: up to the first chunk of a HOST request.
        """
        taken: list[Chunk] = []
        for chunk in self.chunks:
            on_host = chunk.placement is Placement.HOST
            if device_only and on_host:
                break
            n = min(chunk.num_tokens, num_tokens)
            if on_host and n < chunk.request.num_remaining:
                n = 0 if taken else n - (chunk.start + n) % self.block_size
            if n <= 0:
                break
            taken.append(chunk._replace(num_tokens=n))
            num_tokens -= n
        return tuple(taken)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What a policy takes of an offer, beside all device decodes.

    Each list keeps the offer's order; chunks only of the last one may be shorter than offered.
    """

    chunks: Sequence[Chunk] = ()
    host0: Sequence[Request] = ()  # host rows of b0
    host1: Sequence[Request] = ()  # host rows of b1
    reason: str = ""
    entering: Sequence[Request] | None = None
    """Not None: a ROLLING step, in which the groups under way advance and these host rows enter as
    one more. None: the groups stay where they are."""
