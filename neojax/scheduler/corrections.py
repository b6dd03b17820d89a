"""What measured steps say of the cost tables: observed over predicted time, per term.

A single step says little: its end is seen when the host thread gets to it, and the first steps with
host rows wake workers for hardly any work. So the sums over some seconds are compared.
"""

from __future__ import annotations

import math

from neojax.scheduler.plan import Mode, Prediction

BOUND = 4.0
"""No ratio leaves [1/4, 4]: a machine that is busy for a while must not blind the planner."""

WINDOW_S = 3.0
"""Predicted seconds after which what was observed counts a third."""

PRIOR_S = 0.5
"""Predicted seconds that count as observed just so before anything was."""

FADING_S = 5.0
"""Seconds of other steps in which the ratio of what does not run returns to 1 by two thirds: else a
bad spell would keep it from ever being tried again."""


class Ratio:
    """Observed over predicted seconds of one term."""

    def __init__(self) -> None:
        self._observed_s = self._predicted_s = PRIOR_S

    @property
    def value(self) -> float:
        """By which predictions are to be multiplied."""
        return min(max(self._observed_s / self._predicted_s, 1 / BOUND), BOUND)

    def observe(self, observed_s: float, predicted_s: float) -> None:
        """Take in what took `observed_s`, and would have taken `predicted_s` by the tables."""
        kept = math.exp(-predicted_s / WINDOW_S)
        self._observed_s = kept * self._observed_s + min(observed_s, BOUND * predicted_s)
        self._predicted_s = kept * self._predicted_s + predicted_s

    def fade(self, seconds: float) -> None:
        """Forget, for so long a step in which the term had no part."""
        kept = math.exp(-seconds / FADING_S)
        excess = self._observed_s / self._predicted_s - 1
        # Down to the prior: what comes next counts as if it were the first.
        self._predicted_s = PRIOR_S + kept * (self._predicted_s - PRIOR_S)
        self._observed_s = self._predicted_s * (1 + kept * excess)


class Corrections:
    """Factors that multiply what the tables say; 1 before anything was measured."""

    def __init__(self) -> None:
        self._steps = {mode: Ratio() for mode in Mode}
        self._host = Ratio()
        self.step = dict.fromkeys(Mode, 1.0)
        """Step wall time, by mode."""
        self.host_attention = 1.0
        """The worker pool's busy time."""

    def observe(
        self, mode: Mode, predicted: Prediction, step_s: float, host_attention_s: float
    ) -> None:
        """Take in a completed step: its wall time, and the time the workers were busy in it."""
        for other, ratio in self._steps.items():
            if other is not mode:
                ratio.fade(step_s)
        # What was predicted has these factors in it.
        if predicted.step_s > 0:
            self._steps[mode].observe(step_s, predicted.step_s / self.step[mode])
        if host_attention_s > 0 and predicted.host_attention_s > 0:
            host_s = predicted.host_attention_s / self.host_attention
            self._host.observe(host_attention_s, host_s)
        else:
            self._host.fade(step_s)
        self.step = {each: ratio.value for each, ratio in self._steps.items()}
        self.host_attention = self._host.value
