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
        self._knows_rolling = limits.rolling_rows > 0 and self.predictor.knows_rolling
        self.group_size = GroupSize(self.predictor if self._knows_rolling else None, limits)

    def look(
        self, step: int, requests: Iterable[Request], num_requests: int, num_device_blocks: int
    ) -> None:
        """Renew the outlook where it is due. requests: those that want service, in order."""
        if step % STEPS_BETWEEN_LOOKS == 1:
            sample = itertools.islice(requests, LOOK_SAMPLE)
            self.outlook.look(sample, num_requests, num_device_blocks)

    def of(self, plan: Plan, groups: Sequence[tuple[int, int]]) -> Prediction | None:
        """The plan's times, and what the device alone would take where host rows have a part.

        groups: rows and contexts of the groups under way. None for a ROLLING step that the tables
        do not know.
        """
        predictor = self.predictor
        b0, b1 = Load.of(plan.b0), Load.of(plan.b1)
        is_rolling = plan.mode is Mode.ROLLING
        group_rows = self._limits.rolling_rows if is_rolling else 0
        if self._knows_rolling:
            device = b0._replace(num_host_rows=0, host_context=0)
            self.group_size.observe(predictor.rolling_device_s(device, group_rows))
        elif is_rolling:
            return None
        alone = self._alone_s(b0, b1, groups)
        if is_rolling:
            return predictor.predict_rolling(b0, group_rows, groups, alone, plan.swaps)
        return predictor.predict(plan.mode, b0, b1, plan.swaps, alone)

    def _alone_s(self, b0: Load, b1: Load, groups: Sequence[tuple[int, int]]) -> float | None:
        """What the device alone would take for the tokens of a step; None without host rows."""
        under_way = sum(rows for rows, _ in groups)
        num_host = b0.num_host_rows + b1.num_host_rows + under_way
        if not num_host:
            return None
        context = b0.decode_context + b0.host_context + b1.host_context
        context += sum(context for _, context in groups)
        token_s = decode_token_s(
            self.predictor, b0.num_decodes, context / (b0.num_decodes + num_host),
            self.outlook.num_device_rows,
        )  # fmt: skip
        # A group under way gets on by a layer.
        num_tokens = num_host - under_way + under_way / max(1, self._limits.num_layers)
        return device_only_s(self.predictor, b0, num_tokens, token_s)
