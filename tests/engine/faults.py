"""What goes wrong in an engine on purpose, and what must hold then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from neojax.engine.core import EngineCore
from neojax.scheduler.plan import Plan
from tests.engine.tiny import GREEDY, run_all


def fail_launch(
    engine: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: BaseException,
    *,
    loses_pools: bool = False,
) -> list[Plan]:
    """The launch of that number raises instead, once. Returns the plans, also of those to come."""
    enqueue, plans = engine.runner.enqueue, []

    def enqueue_or_fail(plan: Plan):
        plans.append(plan)
        if len(plans) != number:
            return enqueue(plan)
        if loses_pools:  # they were donated to the program that failed
            for kv in engine.runner._state.pools:
                kv.k.delete()
        raise error

    monkeypatch.setattr(engine.runner, "enqueue", enqueue_or_fail)
    return plans


def assert_only_the_host_fails(
    engine: EngineCore, message: str, before_step: Callable[[int], object] = lambda number: None
) -> None:
    """A request on either side, side by side: the host's ends with the message, and works again.

    before_step: called with the number of each step, to break something.
    """
    engine._steps_since_failure = 100
    prompt = list(range(20))
    device, host = (dataclasses.replace(GREEDY, kv_placement=s) for s in ("device", "host"))
    (expected,) = run_all(engine, [(prompt, device)])
    engine.add_request("device", prompt, device)
    engine.add_request("host", prompt, host)
    outputs, number = [], 0
    while engine.has_work:
        number += 1
        before_step(number)
        outputs += engine.step().outputs
    assert [t for o in outputs if o.request_id == "device" for t in o.token_ids] == expected
    (failed,) = [o for o in outputs if o.finish_reason == "error"]
    assert failed.request_id == "host"
    assert message in (failed.message or "")
    assert run_all(engine, [(prompt, host)]) == [expected]
