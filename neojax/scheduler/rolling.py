"""The groups of host rows between two ROLLING steps, as the scheduler keeps them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.plan import Row
from neojax.scheduler.prediction import Predictor
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
    def loads(self) -> list[tuple[int, int]]:
        """Rows of each group, and the sum of their contexts."""
        return [(len(group), sum(row.stop for row in group)) for group in self._groups]

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
            row._replace(
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


class GroupSize:
    """How many rows enter together: as many as the host attends to while the device computes.

    A group stays as it is for as many steps as there are layers, so what counts is the mean step.
    """

    def __init__(self, predictor: Predictor, limits: SchedulerLimits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._device_s: float | None = None  # mean of the device's part of a step

    def observe(self, device_s: float) -> None:
        """Take in the device's part of a step."""
        mean = device_s if self._device_s is None else self._device_s
        self._device_s = mean + (device_s - mean) / self._limits.num_layers

    def fitting(self, contexts: Iterable[int]) -> int:
        """How many of these rows, one at least, the host can attend to in a step."""
        if self._device_s is None:
            return 1
        count = total = 0
        for context in itertools.islice(contexts, self._limits.rolling_rows):
            total += context
            if count and self._predictor.rolling_host_s(count + 1, total) > self._device_s:
                break
            count += 1
        return max(1, count)
