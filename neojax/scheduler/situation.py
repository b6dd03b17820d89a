"""What a policy may know when it decides."""

from __future__ import annotations

import dataclasses

from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.outlook import Outlook
from neojax.scheduler.prediction import Predictor


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """The engine as a step is scheduled."""

    limits: SchedulerLimits
    num_device: int  # running requests whose KV is on the device
    num_host: int  # on the host
    num_waiting: int
    predictor: Predictor | None  # None without cost tables, and so is the outlook
    outlook: Outlook | None
    num_rolling: int = 0
    """Requests that ROLLING steps keep busy, those about to enter included; 0: the policy does not
    roll."""
