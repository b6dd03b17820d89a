"""How host rows are best divided between the two sub-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import LayerTimes, Load, Predictor, layer_period


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
    num_rows, device_rows = len(contexts) - 1, device.num_rows
    # The device's own attention and copies: no division changes them.
    alone = predictor.layer_times(Mode.PIPELINED, device)
    host_s = predictor.host_s(num_rows, contexts[-1])

    def divided(k: int) -> Split:
        rows0, rows1 = device_rows + k, num_rows - k
        times = LayerTimes(
            linear0=predictor.linear_s(Mode.PIPELINED, rows0, k),
            linear1=predictor.linear_s(Mode.PIPELINED, rows1, rows1),
            attention0=alone.attention0,
            host0=predictor.host_s(k, contexts[k]) if rows1 else host_s,
            host1=predictor.host_s(rows1, contexts[-1] - contexts[k]) if k else host_s,
            copies_down=alone.copies_down,
            copies_up=alone.copies_up,
        )
        return Split(predictor.step_s(Mode.PIPELINED, layer_period(times), rows0, rows1), k)

    candidates = {0} if device_rows else set[int]()
    if not device_rows:
        candidates |= {num_rows, (num_rows + 1) // 2}
    elif num_rows and can_mix:
        linear_s = predictor.linear_s(Mode.PIPELINED, num_rows, num_rows)
        # Rows in b0 such that linear plus host attention is the same in both sub-batches.
        share = (host_s + linear_s - alone.linear0) / (2 * host_s or 1.0)
        candidates |= {num_rows, min(max(round(share * num_rows), 0), num_rows)}
    return min(divided(k) for k in candidates)
