"""What the parts of a step cost: tables that the runner measures or the simulator computes.

Pure numbers. Between the points of its grid a table interpolates linearly, below the first it is
constant, beyond the last it goes on with the last slope; no work costs nothing. Measurements are
noisy and costs are not: a table is made monotone, so that more work is never predicted cheaper.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from neojax.scheduler.plan import Mode


@dataclasses.dataclass(frozen=True, slots=True)
class Table1:
    """Seconds ys at amounts of work xs, which ascend and are above 0. ValueError otherwise."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        xs, ys = _grid(self.xs, "xs"), tuple(float(y) for y in self.ys)
        if len(ys) != len(xs):
            raise ValueError(f"a cost table has {len(xs)} points and {len(ys)} values")
        _check_costs(ys)
        object.__setattr__(self, "xs", xs)
        object.__setattr__(self, "ys", tuple(itertools.accumulate(ys, max)))

    def __call__(self, x: float) -> float:
        """Seconds for x units of work; 0 for none."""
        xs, ys = self.xs, self.ys
        if x <= 0:
            return 0.0
        if x <= xs[0]:
            return ys[0]
        i = min(bisect.bisect_left(xs, x), len(xs) - 1)
        if i == 0:
            return ys[0]
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])

    def most_for(self, x: float) -> float:
        """The most work that costs no more than x: programs are padded to buckets."""
        i = bisect.bisect_left(self.xs, x)
        cost, most = self(x), x
        while i < len(self.xs) and self.ys[i] <= cost:
            most = max(most, self.xs[i])
            i += 1
        return most


@dataclasses.dataclass(frozen=True, slots=True)
class Table2:
    """Seconds values[i][j] at (xs[i], ys[j]); both ascend and are above 0. ValueError otherwise.

    Beyond the grid each axis goes on with its last slope, or a steeper one of less work on the
    other axis. The two are added: their product would make small errors of measurement large.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        xs, ys = _grid(self.xs, "xs"), _grid(self.ys, "ys")
        rows = [tuple(float(v) for v in row) for row in self.values]
        if len(rows) != len(xs) or any(len(row) != len(ys) for row in rows):
            raise ValueError(f"a cost table of {len(xs)} x {len(ys)} points has other values")
        for row in rows:
            _check_costs(row)
        rows = [tuple(itertools.accumulate(row, max)) for row in rows]
        rows = list(
            itertools.accumulate(rows, lambda a, b: tuple(map(max, a, b)))  # along xs
        )
        object.__setattr__(self, "xs", xs)
        object.__setattr__(self, "ys", ys)
        object.__setattr__(self, "values", tuple(rows))

    def __call__(self, x: float, y: float) -> float:
        """Seconds for x units of work whose second measure is y; 0 when x is 0."""
        if x <= 0:
            return 0.0
        xs, ys = self.xs, self.ys
        x = x if x > xs[0] else xs[0]
        y = y if y > ys[0] else ys[0]
        if x >= xs[-1] or y >= ys[-1]:
            return self._beyond(x, y)
        i, j = bisect.bisect_right(xs, x), bisect.bisect_right(ys, y)
        low, high = self.values[i - 1], self.values[i]
        tx = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        ty = (y - ys[j - 1]) / (ys[j] - ys[j - 1])
        at_low = low[j - 1] + (low[j] - low[j - 1]) * ty
        at_high = high[j - 1] + (high[j] - high[j - 1]) * ty
        return at_low + (at_high - at_low) * tx

    def _beyond(self, x: float, y: float) -> float:
        i, tx, beyond_x = _cell(self.xs, x)
        j, ty, beyond_y = _cell(self.ys, y)
        i1, j1 = min(i + 1, len(self.xs) - 1), min(j + 1, len(self.ys) - 1)
        low, high = self.values[i], self.values[i1]
        at_y = low[j] + (low[j1] - low[j]) * ty, high[j] + (high[j1] - high[j]) * ty
        cost = at_y[0] + (at_y[1] - at_y[0]) * tx
        if beyond_x:
            columns = tuple(zip(*self.values, strict=True))
            cost += _last_slope(columns, j, ty) * beyond_x
        if beyond_y:
            cost += _last_slope(self.values, i, tx) * beyond_y
        return cost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostTables:
    """Seconds per layer, unless said. rows: tokens of a sub-batch, host rows included."""

    num_layers: int
    linear: dict[Mode, Table1]
    """rows -> linear stage: grouped programs in DEVICE_ONLY, per-layer ones in PIPELINED."""
    prefill_attention: Table2
    """(tokens of a chunk, context at its end) -> its attention on the device."""
    device_decode: Table2
    """(rows, sum of their contexts) -> decode attention on the device."""
    host_decode: Table2
    """(rows, sum of their contexts) -> decode attention of the worker pool alone."""
    hop: Table1
    """host rows -> device time that one start and join add to a layer."""
    store: Table1
    """tokens of a HOST chunk -> copy of its K/V to the arena."""
    fetch: Table1
    """tokens before a HOST chunk -> copy of their K/V from the arena."""
    swap_out: Table1
    """tokens -> copy of their K/V from the device pool to the arena."""
    swap_in: Table1
    """tokens -> copy of their K/V from the arena to the device pool."""
    per_step: dict[Mode, Table1]
    """rows -> embed, head, sampling and launches of one sub-batch, seconds per STEP."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers}")
        for name in ("linear", "per_step"):
            needed = (Mode.DEVICE_ONLY, Mode.PIPELINED)
            if missing := [mode.value for mode in needed if mode not in getattr(self, name)]:
                raise ValueError(f"cost table {name} lacks {', '.join(missing)}")

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostTables:
        """Tables from the text of `to_json`. ValueError when it is damaged or of another kind."""
        try:
            data: dict[str, Any] = json.loads(text)
            kinds = {"prefill_attention": Table2, "device_decode": Table2, "host_decode": Table2}
            tables: dict[str, Any] = {
                name: kinds.get(name, Table1)(**data[name])
                for name in data.keys() - {"num_layers", *_BY_MODE}
            }
            by_mode: dict[str, Any] = {
                name: {Mode(mode): Table1(**table) for mode, table in data[name].items()}
                for name in _BY_MODE
            }
            return cls(num_layers=int(data["num_layers"]), **tables, **by_mode)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a set of cost tables: {error!r}") from error


_BY_MODE = ("linear", "per_step")


def _grid(points: Sequence[float], name: str) -> tuple[float, ...]:
    grid = tuple(float(x) for x in points)
    if not grid or grid[0] <= 0 or any(a >= b for a, b in itertools.pairwise(grid)):
        raise ValueError(f"{name} of a cost table must ascend from above 0, got {grid}")
    return grid


def _check_costs(costs: Sequence[float]) -> None:
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"a cost must be a number of seconds, 0 or more; got {tuple(costs)}")


def _cell(grid: Sequence[float], x: float) -> tuple[int, float, float]:
    """Cell i and place in it, 0..1; and how many last cells x lies beyond the grid."""
    last = len(grid) - 1
    if x <= grid[0] or last == 0:
        return 0, 0.0, 0.0
    if x >= grid[last]:
        return last - 1, 1.0, (x - grid[last]) / (grid[last] - grid[last - 1])
    i = bisect.bisect_right(grid, x) - 1
    return i, (x - grid[i]) / (grid[i + 1] - grid[i]), 0.0


def _last_slope(lines: Sequence[Sequence[float]], at: int, between: float) -> float:
    """What the last cell adds along lines that end the grid: the steepest up to line `at`.

    Interpolated to the next line by `between`. As it grows with the line, so do the costs.
    """
    steps = [line[-1] - line[-2] for line in lines[: at + 2]]
    here = max(steps[: at + 1])
    return here + (max(steps) - here) * between
