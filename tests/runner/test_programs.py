"""Compiled programs: a closed set, no copy of a pool, nothing compiled after ready."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from neojax.config import EngineConfig
from neojax.runner.shapes import Buckets
from neojax.sampling_params import SamplingParams
from tests.engine.tiny import GREEDY, mixed_requests, run_all
from tests.runner.hlo import sizes_copied


def test_nothing_compiles_after_warm_up(warmed_up):
    engine, _ = warmed_up
    requests = mixed_requests(12, seed=2)
    sampled = [
        (prompt, dataclasses.replace(params, temperature=0.8, top_k=5, seed=3))
        for prompt, params in requests
    ]
    everything = [
        (prompt, dataclasses.replace(params, **fields))
        for (prompt, params), fields in zip(
            requests,
            [
                {"presence_penalty": 1.0, "temperature": 1.0},
                {"logit_bias": {3: 5.0}, "logprobs": 2},
                {"min_p": 0.1, "temperature": 1.0, "prompt_logprobs": 0},
                {"min_tokens": 1, "stop_token_ids": (1,)},
            ],
            strict=False,
        )
    ]
    for policy in ("device-only", "full", "auto"):
        engine.set_policy(policy)
        engine.set_block_limit(14 if policy == "auto" else None)
        run_all(engine, [*requests, *sampled, *everything])
    for length in range(1, 66):
        run_all(engine, [(list(range(length)), SamplingParams(temperature=0.0, max_tokens=2))])
    assert engine.runner.num_compiles == 0


def test_every_program_of_the_closed_set_was_compiled(warmed_up):
    engine, compiled = warmed_up
    assert len(compiled) == engine.runner.num_programs
    names = {signature.name for signature, _ in compiled}
    assert names == {
        "embed", "layers", "enter", "linear", "leave", "attend", "attend_host_chunks",
        "head_greedy", "head_sample", "head_full", "write_request", "write_masks",
        "swap_out", "start_swap_in", "join_swap_in",
    }  # fmt: skip


def test_no_program_copies_a_pool(warmed_up):
    engine, compiled = warmed_up
    state = engine.runner._state
    pools = {tuple(state.pools[0].k.shape), tuple(state.scratch[0].k.shape)}
    # A pool may appear in its flattened shape too; what counts is its number of elements.
    sizes = {int(np.prod(shape)) for shape in pools}
    for signature, program in compiled:
        assert not sizes_copied(program) & sizes, (signature.name, signature.shape)


def test_the_default_flags_need_at_most_120_programs():
    c = EngineConfig()
    buckets = Buckets.of(c.max_num_batched_tokens, c.max_num_seqs, 512, has_host=True, is_gpu=False)
    # Counted as `signatures` yields them: 9 per token bucket, 9 per host bucket of both channels,
    # a full head per number of rows, two that write the logit state, and three for swaps.
    per_host_shape = 2 * 3 + 3
    num_full = len({*buckets.tokens, *buckets.host_rows})
    num_programs = 9 * len(buckets.tokens) + per_host_shape * len(buckets.host_rows) + num_full + 5
    assert num_programs <= 120


def test_a_shape_is_the_smallest_that_fits():
    buckets = Buckets.of(100, 10, 32, has_host=True, is_gpu=False)
    assert buckets.tokens == (1, 4, 8, 16, 32, 64, 100)
    assert buckets.host_rows == (4, 10)
    assert buckets.shape(5, 0, has_chunks=True) == (8, 0)
    assert buckets.shape(100, 3, has_chunks=True) == (100, 4)
    assert buckets.shape(0, 10, has_chunks=False) == (0, 10)
    assert buckets.attention(3, has_chunks=False) == (32, True)


def test_decodes_on_a_gpu_have_programs_of_their_own_by_table_width():
    buckets = Buckets.of(64, 16, 400, has_host=False, is_gpu=True)
    assert buckets.table_widths == (50, 100, 200, 400)
    assert buckets.attention(51, has_chunks=False) == (100, False)
    assert buckets.attention(51, has_chunks=True) == (400, True)
    assert buckets.shape(2, 0, has_chunks=True) == (16, 0)
    for shape in buckets.device_shapes:
        has_chunks = {attention.has_chunks for attention in buckets.attentions(shape)}
        assert (True in has_chunks) == (shape.num_tokens >= 16)
        assert (False in has_chunks) == (shape.num_tokens <= 16)


def test_logits_are_kept_only_when_asked_for(warmed_up):
    engine, _ = warmed_up
    engine.add_request("r", [1, 2, 3], GREEDY)
    plan = engine.scheduler.schedule()
    handle = engine.runner.enqueue(plan)
    with pytest.raises(ValueError, match="logits"):
        handle.logits()
    engine.scheduler.update(plan, handle.tokens())
    engine.abort("r")
