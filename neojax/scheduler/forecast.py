"""What cost tables tell the scheduler: the outlook, and how long each step will take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.outlook import Outlook
from neojax.scheduler.plan import Mode, Plan, Prediction
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Request
from neojax.scheduler.rolling import GroupSize
from neojax.scheduler.worth import decode_token_s, device_only_s

STEPS_BETWEEN_LOOKS = 16
"""The outlook is of the long run: it need not be renewed at every step."""

LOOK_SAMPLE = 64
"""Requests that stand for all in the outlook."""


class Forecast:
    """Predictor, outlook and the size of ROLLING groups, which all rest on the same tables."""

    def __init__(self, costs: CostTables, limits: SchedulerLimits) -> None:
        self.predictor = Predictor(costs)
        self.outlook = Outlook(self.predictor, limits)
        self._limits = limits
        self._group_size: GroupSize | None = None
        if limits.rolling_rows and self.predictor.knows_rolling:
            self._group_size = GroupSize(self.predictor, limits)

    def look(
        self, step: int, requests: Iterable[Request], num_requests: int, num_device_blocks: int
    ) -> None:
        """Renew the outlook where it is due. requests: those that want service, in order."""
        if step % STEPS_BETWEEN_LOOKS == 1:
            sample = itertools.islice(requests, LOOK_SAMPLE)
            self.outlook.look(sample, num_requests, num_device_blocks)

    def rolling_rows(self, contexts: Iterable[int] | None = None) -> int:
        """How many rows of these contexts enter a ROLLING step; by default, of the mean one."""
        if self._group_size is None:
            return self._limits.rolling_rows
        if contexts is None:
            contexts = itertools.repeat(int(self.outlook.mean_context))
        return self._group_size.fitting(contexts)

    def of(self, plan: Plan, groups: Sequence[tuple[int, int]]) -> Prediction | None:
        """The plan's times, and what the device alone would take where host rows have a part.

        groups: rows and contexts of the groups under way. None for a ROLLING step that the tables
        do not know.
        """
        predictor = self.predictor
        b0, b1 = Load.of(plan.b0), Load.of(plan.b1)
        if self._group_size is not None:
            rows = self._limits.rolling_rows if plan.mode is Mode.ROLLING else 0
            self._group_size.observe(predictor.rolling_device_s(b0, rows))
        elif plan.mode is Mode.ROLLING:
            return None
        if plan.mode is Mode.ROLLING:
            return predictor.predict_rolling(b0, self._limits.rolling_rows, groups)
        num_host = b0.num_host_rows + b1.num_host_rows
        if not num_host:
            return predictor.predict(plan.mode, b0, b1, plan.swaps)
        context = b0.decode_context + b0.host_context + b1.host_context
        token_s = decode_token_s(
            predictor, b0.num_decodes, context / (b0.num_decodes + num_host),
            self.outlook.num_device_rows,
        )  # fmt: skip
        alone = device_only_s(predictor, b0, num_host, token_s)
        return predictor.predict(plan.mode, b0, b1, plan.swaps, alone)
