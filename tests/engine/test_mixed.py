"""Device tokens and host rows in one sub-batch, whatever a policy may decide."""

from __future__ import annotations

import dataclasses
import random

from neojax.scheduler.plan import Mode, SubBatch
from tests.engine.tiny import assert_same_tokens, mixed_requests, run_all, tiny_model


def regroup(plan, rng):
    """The plan with its host rows dealt anew: some or all into b0, which has all the rest."""
    if plan is None or plan.mode is not Mode.PIPELINED:
        return plan
    host = [*plan.b0.host_decodes, *plan.b1.host_decodes]
    count = rng.choice([len(host), rng.randint(0, len(host))])
    if not (plan.b0.num_device_tokens or count):
        count = len(host)  # b0 is never empty
    b0 = SubBatch(plan.b0.chunks, plan.b0.decodes, tuple(host[:count]))
    b1 = SubBatch(host_decodes=tuple(host[count:]))
    return dataclasses.replace(plan, b0=b0, b1=b1)


def test_mixed_sub_batches_give_the_same_tokens(engine_of, monkeypatch):
    engine = engine_of(policy="device-only")
    rng, kinds = random.Random(0), set()
    for seed in range(3):
        requests = mixed_requests(12, seed=seed)
        engine.set_policy("device-only")
        engine.set_block_limit(None)
        expected = run_all(engine, requests)
        engine.set_policy("auto")
        engine.set_block_limit(14)
        with monkeypatch.context() as patch:
            schedule = engine.scheduler.schedule

            def scheduled(schedule=schedule):
                plan = regroup(schedule(), rng)
                if plan is not None and plan.b0.num_device_tokens and plan.b0.host_decodes:
                    kinds.add((bool(plan.b0.chunks), bool(plan.b0.decodes), bool(plan.b1)))
                return plan

            patch.setattr(engine.scheduler, "schedule", scheduled)
            assert_same_tokens(tiny_model(), requests, expected, run_all(engine, requests))
    assert {(True, True, True), (False, True, True), (False, True, False)} <= kinds
