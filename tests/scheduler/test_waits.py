"""Host rows and the target for their tokens, where a step would rather pass them over."""

from __future__ import annotations

import dataclasses
import math

from neojax.scheduler.auto import Auto
from neojax.scheduler.offer import Choice, Offer
from neojax.scheduler.scheduler import Scheduler
from neojax.scheduler.situation import Situation
from neojax.scheduler.waits import PACE, Waits
from tests.scheduler.tables import make_tables
from tests.scheduler.test_rolling import LARGE
from tests.scheduler.test_scheduler import make_request, run_step


class Recording(Auto):
    """Remembers what it was offered."""

    def __init__(self) -> None:
        self.seen: list[tuple[Offer, Situation]] = []

    def choose(self, offer: Offer, now: Situation) -> Choice:
        self.seen.append((offer, now))
        return super().choose(offer, now)


def test_host_rows_that_would_be_late_run_whatever_a_step_is_worth():
    """A host so slow that the best step of the moment often leaves its rows out."""
    policy = Recording()
    limits = dataclasses.replace(LARGE, rolling_rows=0, num_device_blocks=250, can_swap=True)
    scheduler = Scheduler(limits, policy, make_tables(host_gbs=60))
    for i in range(200):
        scheduler.add(make_request(i, 1000 if i % 2 else 200, 100))
    passed_over = 0
    for _ in range(60):
        run_step(scheduler)
        offer, now = policy.seen[-1]
        if now.outlook is None or not now.outlook.num_host_rows:
            continue
        usual = Auto().choose(dataclasses.replace(offer, num_late=0), now)
        for late in range(1, len(offer.host_decodes) + 1):
            choice = Auto().choose(dataclasses.replace(offer, num_late=late), now)
            assert {*choice.host0, *choice.host1} >= set(offer.host_decodes[:late])
            passed_over += late > len(usual.host0) + len(usual.host1)
    assert passed_over


def test_a_row_is_late_when_another_step_would_make_it_so():
    waits = Waits(dataclasses.replace(LARGE, tpot_slo_s=1.0))
    rows = [make_request(i, 10, 10) for i in range(3)]
    for step in range(1, 21):
        for row in rows[: 3 if step < 5 else 2 if step < 8 else 0]:
            row.served_step = step
        waits.pass_time(0.1)
        first = sorted(rows, key=lambda row: row.served_step)
        waited_s = [0.1 * (step - row.served_step) for row in first]
        late = sum(wait_s + 0.1 >= PACE - 1e-9 for wait_s in waited_s)
        assert waits.num_late(first, step + 1) == late


def test_without_a_target_nobody_is_late():
    waits = Waits(dataclasses.replace(LARGE, tpot_slo_s=math.inf))
    for _ in range(1000):
        waits.pass_time(10.0)
    assert waits.num_late([make_request(0, 10, 10)], 1001) == 0
