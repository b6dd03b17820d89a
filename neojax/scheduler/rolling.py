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

STEPS_TO_ENTER = 2
"""A row enters again in the second step after it left, when its token has been read: so it gets a
token in as many steps as there are layers and these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a request that stopped in mid-flight owned: its row is still to be computed."""

    request: Request
    placement: Placement
    blocks: list[int]
    slot: int


class RollingGroups:
    """A shift register: a group enters at one end and leaves at the other, `num_layers` steps on.

    Between two ROLLING steps, however many others there are, the groups are parked where they are.
    A request that stops, or gives its blocks up, while its row is under way leaves them here: the
    host lane goes on to write to them until the group has left.
    """

    def __init__(self, num_layers: int) -> None:
        self._groups: deque[Sequence[Row]] = deque([()] * num_layers)
        self._loads: deque[tuple[int, int]] = deque([(0, 0)] * num_layers)
        self._held: list[Held] = []
        self.advanced_step = 0
        """The newest ROLLING step."""

    @property
    def rows(self) -> Iterator[Row]:
        """Rows under way."""
        for group in self._groups:
            yield from group

    @property
    def loads(self) -> list[tuple[int, int]]:
        """Rows of each group that has some, and the sum of their contexts; the newest first."""
        return [load for load in self._loads if load[0]]

    @property
    def staying_loads(self) -> list[tuple[int, int]]:
        """The same without the group that leaves in the next ROLLING step."""
        return self.loads[:-1] if self._groups and self._groups[-1] else self.loads

    @property
    def num_rows(self) -> int:
        """How many rows are under way."""
        return sum(rows for rows, _ in self._loads)

    @property
    def held(self) -> Sequence[Held]:
        """Of requests that have stopped."""
        return self._held

    def __bool__(self) -> bool:
        return any(self._groups)

    def advance(self, entering: Sequence[Row], step: int) -> tuple[Row, ...]:
        """A ROLLING step: the group that leaves in it. Rows of stopped requests do not sample."""
        self.advanced_step = step
        leaving = self._groups.pop() if self._groups else ()
        self._groups.appendleft(entering)
        self._loads.appendleft((len(entering), sum(row.stop for row in entering)))
        self._loads.pop()
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
        self._loads = deque([(0, 0)] * len(self._loads))
        return held


class GroupSize:
    """How many rows enter together: as many as the host attends to while the device computes.

    The host has a layer of each group to attend to in a step, so it is the sum over the groups, by
    their contexts and not their rows, that the device's part of a step must cover.

    predictor: None where nothing is known of ROLLING steps: groups are as large as they can be.
    """

    def __init__(self, predictor: Predictor | None, limits: SchedulerLimits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._device_s: float | None = None  # mean of the device's part of a step

    def observe(self, device_s: float) -> None:
        """Take in the device's part of a step. A group stays for as many steps as there are
        layers, so what counts is the mean.
        """
        mean = device_s if self._device_s is None else self._device_s
        self._device_s = mean + (device_s - mean) / self._limits.num_layers

    def fitting(self, contexts: Iterable[int], staying: Sequence[tuple[int, int]] = ()) -> int:
        """How many of these rows enter now, beside groups that stay (rows, sum of contexts).

        Not more than an even share of the host's time, the last row rounded up. Without other
        groups one row enters, however long it takes.
        """
        contexts = itertools.islice(contexts, self._limits.rolling_rows)
        if self._predictor is None:
            return sum(1 for _ in contexts)
        budget_s = self._device_s or 0.0
        group_s = self._predictor.host_s
        others_s = sum(group_s(*load) for load in staying)
        count = total = 0
        for context in contexts:
            total += context
            seconds = group_s(count + 1, total)
            if others_s + seconds > budget_s and (count or staying):
                break
            count += 1
            if seconds * self._limits.num_layers >= budget_s:
                break
        return count

    def capacity(self, mean_context: float) -> int:
        """Requests that groups of such rows keep busy, those that are about to enter included."""
        limits = self._limits
        layers, most = limits.num_layers, limits.num_layers * limits.rolling_rows
        if self._predictor is not None:
            most = min(most, max(1, int(self._rows_under_way(mean_context))))
        # One step more than it takes to enter, so that no group is short.
        return most + -(-most * (STEPS_TO_ENTER + 1) // layers)

    def _rows_under_way(self, mean_context: float) -> float:
        """Rows of all groups whose attention takes the host as long as the device's part."""
        assert self._predictor is not None
        budget_s, layers = self._device_s or 0.0, self._limits.num_layers
        below_s = 0.0
        for rows in range(1, self._limits.rolling_rows + 1):
            seconds = self._predictor.rolling_host_s(rows, rows * mean_context)
            if seconds > budget_s:
                return layers * (rows - 1 + (budget_s - below_s) / (seconds - below_s))
            below_s = seconds
        return layers * self._limits.rolling_rows
