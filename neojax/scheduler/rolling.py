"""The groups of host rows between two ROLLING steps, as the scheduler keeps them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

from neojax.scheduler.plan import Row
from neojax.scheduler.request import Placement, Request, RequestState


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a request that stopped in mid-flight owned: its row is still to be computed."""

    request: Request
    placement: Placement
    blocks: list[int]
    slot: int


class RollingGroups:
    """A shift register: a group enters at one end and leaves at the other, `num_layers` steps on.

    A request that stops, or gives its blocks up, while its row is under way leaves them here: the
    host lane goes on to write to them until the group has left.
    """

    def __init__(self, num_layers: int) -> None:
        self._groups: deque[Sequence[Row]] = deque([()] * num_layers)
        self._held: list[Held] = []

    @property
    def rows(self) -> Iterator[Row]:
        """Rows under way."""
        for group in self._groups:
            yield from group

    @property
    def held(self) -> Sequence[Held]:
        """Of requests that have stopped."""
        return self._held

    def __bool__(self) -> bool:
        return any(self._groups)

    def advance(self, entering: Sequence[Row]) -> tuple[Row, ...]:
        """A ROLLING step: the group that leaves in it. Rows of stopped requests do not sample."""
        leaving = self._groups.pop() if self._groups else ()
        self._groups.appendleft(entering)
        return tuple(
            dataclasses.replace(
                row,
                samples=row.request.state is RequestState.RUNNING
                and row.epoch == row.request.num_preemptions,
            )
            for row in leaving
        )

    def hold(self, held: Held) -> None:
        """Keep what a request under way gives up."""
        self._held.append(held)

    def release(self, leaving: Sequence[Row]) -> list[Held]:
        """What was held for the rows that leave."""
        gone = {id(row.request) for row in leaving}
        freed = [held for held in self._held if id(held.request) in gone]
        self._held = [held for held in self._held if id(held.request) not in gone]
        return freed

    def clear(self) -> list[Held]:
        """Forget all groups; returns everything held."""
        held, self._held = self._held, []
        self._groups = deque([()] * len(self._groups))
        return held
