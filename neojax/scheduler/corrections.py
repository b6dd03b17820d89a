"""What measured steps say of the cost tables: the ratio of observed to predicted, per term."""

from __future__ import annotations

from neojax.scheduler.plan import Mode, Prediction

BOUND = 4.0
"""No ratio leaves [1/4, 4]: a machine that is busy for a while must not blind the planner."""

WEIGHT = 1 / 16
"""Share of the newest step in a ratio."""

FADING = 1 / 512
"""Share by which the ratio of a mode that does not run returns to 1: else a bad spell would keep
the mode from ever being tried again."""


class Corrections:
    """Factors that multiply what the tables say; 1 before anything was measured."""

    def __init__(self) -> None:
        self.step = dict.fromkeys(Mode, 1.0)
        """Step wall time, by mode."""
        self.host_attention = 1.0
        """The worker pool's busy time."""

    def observe(
        self, mode: Mode, predicted: Prediction, step_s: float, host_attention_s: float
    ) -> None:
        """Take in a completed step: its wall time, and the time the workers were busy in it."""
        for other in Mode:
            if other is not mode:
                self.step[other] += FADING * (1 - self.step[other])
        self.step[mode] = _follow(self.step[mode], step_s, predicted.step_s)
        if host_attention_s > 0:
            self.host_attention = _follow(
                self.host_attention, host_attention_s, predicted.host_attention_s
            )


def _follow(factor: float, observed: float, predicted: float) -> float:
    """The factor after one more step; `predicted` contains the factor of its time."""
    if predicted <= 0:
        return factor
    wanted = min(max(factor * observed / predicted, 1 / BOUND), BOUND)
    return factor + WEIGHT * (wanted - factor)
