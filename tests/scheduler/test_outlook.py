"""The steady states that `auto` weighs: what they are worth, and what their tokens cost."""

from __future__ import annotations

import dataclasses
import math

import pytest

from neojax.scheduler.costs import CostTables
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.outlook import Outlook
from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Predictor
from neojax.scheduler.worth import decode_token_s
from tests.scheduler.tables import h200, make_tables, t4
from tests.scheduler.test_scheduler import make_request

LIMITS = SchedulerLimits(
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=16_384,
    block_size=16,
    num_device_blocks=100,
    num_host_blocks=8000,
    max_num_chunks=8,
    scratch_tokens=16_384 + 128,
    tpot_slo_s=math.inf,
)


def look(tables: CostTables, lengths: list[tuple[int, int]], num_requests: int = 200) -> Outlook:
    outlook = Outlook(Predictor(tables), LIMITS)
    requests = [make_request(i, *pair) for i, pair in enumerate(lengths)]
    outlook.look(requests, num_requests, LIMITS.num_device_blocks)
    return outlook


@pytest.mark.parametrize("lengths", [(372, 45), (1500, 30), (100, 300)])
@pytest.mark.parametrize("tables", [t4(), h200(), make_tables(host_gbs=20)])
def test_a_decode_is_worth_less_where_the_host_helps_and_never_less_than_a_prompts_token(
    tables: CostTables, lengths: tuple[int, int]
):
    outlook = look(tables, [lengths])
    if not outlook.num_host_rows:
        assert outlook.gain == 1
        assert outlook.decode_token_s == 0  # the device's own price holds
        return
    rows = outlook.num_device_rows
    alone_s = decode_token_s(Predictor(tables), rows, outlook.mean_context, rows)
    assert outlook.gain > 1
    # Nothing, where so few rows a step cost no more than reading the weights.
    assert 0 <= outlook.prompt_token_s <= outlook.decode_token_s < alone_s


def test_the_state_in_which_prefill_fills_every_step_is_among_those_weighed():
    # 44 tokens of prompt for each of output: 45 rows and their prompts fill a step of 2048.
    outlook = look(t4(), [(1320, 30)])
    assert outlook.num_host_rows > 40
    assert 1900 < outlook.rows_per_step <= 2048


def test_a_few_prompts_longer_than_a_step_can_make_the_host_not_pay():
    # On the host every later chunk fetches those before it. The mean prompt fits a step.
    slow_link = make_tables(kv_bytes=16384, link_gbs=10, host_gbs=200)
    even = [(1400, 60)] * 16
    uneven = [(600, 60)] * 14 + [(7000, 60)] * 2
    assert sum(prompt for prompt, _ in even) == sum(prompt for prompt, _ in uneven)
    assert look(slow_link, uneven).gain < look(slow_link, even).gain


def test_a_gain_that_was_not_there_must_promise_more_to_be_tried_again():
    # Steps with host rows take three times what was predicted; once they stop, that is forgotten.
    predictor = Predictor(h200())
    outlook = Outlook(predictor, LIMITS)
    trials = 0
    for _ in range(200):
        before = outlook.num_host_rows
        outlook.look([make_request(0, 372, 45)], 200, num_device_blocks=250)
        trials += outlook.num_host_rows > 0 == before
        predictor.corrections.step[Mode.PIPELINED] = 3.0 if outlook.num_host_rows else 1.0
    assert 1 <= trials <= 10  # of 100, if it were tried whenever it looks well


def test_neither_way_of_running_host_rows_gives_place_to_the_other_for_little():
    """Once in force, one stays until the other is better by more than MIN_GAIN."""
    limits = dataclasses.replace(LIMITS, rolling_rows=8)
    mix = [make_request(0, 1000, 100)]

    def kinds(corrections: list[float]) -> list[bool]:
        predictor = Predictor(h200())
        outlook = Outlook(predictor, limits)
        found = []
        for factor in corrections:
            predictor.corrections.step[Mode.PIPELINED] = factor
            outlook.look(mix, 300, num_device_blocks=250)
            assert outlook.num_host_rows
            found.append(outlook.rolling_rows > 0)
        return found

    grid = [0.5 + i / 50 for i in range(40)]
    up, down = kinds(grid), kinds(grid[::-1])[::-1]
    assert (up[0], up[-1], down[0], down[-1]) == (False, True, False, True)
    assert sum(down) > sum(up), "it changed back as soon as it had changed"
