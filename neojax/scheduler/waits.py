"""How long host rows have waited for their tokens, in the predicted time of the steps since."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.request import Request

PACE = 0.95
"""Share of the target in which a row is to get its token: predictions are not exact."""

REMEMBERED_STEPS = 256
"""Host rows are served more often than once in so many steps."""


class Waits:
    """A clock of planned steps, read against `tpot_slo_s`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._token_s = PACE * limits.tpot_slo_s
        self._newest_s = 0.0  # of the newest step
        self._ends: deque[float] = deque([0.0], maxlen=REMEMBERED_STEPS)  # of it and those before

    def pass_time(self, step_s: float) -> None:
        """A step was planned that takes so long."""
        self._newest_s = step_s
        self._ends.append(self._ends[-1] + step_s)

    def num_late(self, host_decodes: Sequence[Request], step: int) -> int:
        """How many of these, the longest unserved first, must run in `step`: if it takes as long as
        the one before it, those that do not get their tokens in it are too late.
        """
        ends = self._ends
        latest_s = ends[-1] + self._newest_s - self._token_s

        def is_late(request: Request) -> bool:
            return ends[-min(step - request.served_step, len(ends))] <= latest_s

        return sum(1 for _ in itertools.takewhile(is_late, host_decodes))
