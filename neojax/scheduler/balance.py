"""How host rows are best divided between the two sub-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Load, Predictor


class Split(NamedTuple):
    """A division of host rows and the step's time with it."""

    step_s: float
    num_in_b0: int  # the first rows; the others are b1


def best_split(
    predictor: Predictor, device: Load, contexts: Sequence[int], *, can_mix: bool
) -> Split:
    """Divide host rows, given the device work of b0 and the running sums of their contexts.

    contexts[k] is the sum of the first k rows' contexts. All in b1 hides them under b0's linear
    stages; all in b0 under its device attention, and reads the weights once; between them lies
    the division in which neither sub-batch waits for its own rows longer than the other.
    can_mix: whether b0 may have host rows beside device work.
    """
    num_rows = len(contexts) - 1
    has_device_work = device.num_rows > 0
    candidates = {0} if has_device_work else set[int]()
    if num_rows and (can_mix or not has_device_work):
        candidates |= {num_rows, _even(predictor, device, contexts)}
    return min(Split(_seconds(predictor, device, contexts, k), k) for k in candidates or {0})


def _seconds(predictor: Predictor, device: Load, contexts: Sequence[int], k: int) -> float:
    b0 = device._replace(num_host_rows=k, host_context=contexts[k])
    b1 = Load(num_host_rows=len(contexts) - 1 - k, host_context=contexts[-1] - contexts[k])
    return predictor.seconds(Mode.PIPELINED, b0, b1)


def _even(predictor: Predictor, device: Load, contexts: Sequence[int]) -> int:
    """Rows in b0 such that linear plus host attention is the same in both sub-batches."""
    num_rows = len(contexts) - 1
    b1 = Load(num_host_rows=num_rows, host_context=contexts[-1])
    times = predictor.layer_times(Mode.PIPELINED, device, b1)
    if not device.num_rows:
        return (num_rows + 1) // 2
    share = (times.host1 + times.linear1 - times.linear0) / (2 * times.host1 or 1.0)
    return min(max(round(share * num_rows), 0), num_rows)
