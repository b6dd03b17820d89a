"""Compiled programs: a closed set, no copy of a pool, nothing compiled after ready."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from neojax.config import EngineConfig
from neojax.engine.build import ROLLING_ROWS
from neojax.runner import runner
from neojax.runner.shapes import Buckets, Shape
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode
from tests.engine.tiny import GREEDY, mixed_requests, run_all, tiny_engine, tiny_model
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
        "first_fetch",
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


@pytest.mark.parametrize("max_model_len", [2048, 8192, 131072])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_default_flags_need_at_most_120_programs(monkeypatch, is_gpu, max_model_len):
    """Counted, not compiled: on a GPU decodes have programs by table width."""

    def buckets(*args, **kwargs):
        return Buckets.of(*args, **{**kwargs, "is_gpu": is_gpu})

    monkeypatch.setattr(runner, "Buckets", Mock(of=buckets))
    c = EngineConfig()
    engine = tiny_engine(
        tiny_model(),
        max_model_len=max_model_len,
        max_num_seqs=c.max_num_seqs,
        max_num_batched_tokens=c.max_num_batched_tokens,
        token_buckets=None,
        rolling_rows=ROLLING_ROWS if is_gpu else 0,
    )
    num_programs = engine.runner.num_programs
    engine.close()
    # ROLLING steps, which auto has on a GPU, come on top of the others.
    assert 60 < num_programs <= (150 if is_gpu else 120)


def test_a_shape_is_the_smallest_that_fits():
    buckets = Buckets.of(100, 10, 32, has_host=True, is_gpu=False)
    assert buckets.tokens == (1, 4, 8, 16, 32, 64, 100)
    assert buckets.host_rows == (4, 10)
    assert buckets.shape(Mode.DEVICE_ONLY, 5, 0, has_chunks=True) == (8, 0)
    assert buckets.shape(Mode.PIPELINED, 5, 0, has_chunks=True) == (16, 0)
    assert buckets.shape(Mode.PIPELINED, 100, 3, has_chunks=True) == (100, 10)
    assert buckets.shape(Mode.PIPELINED, 0, 10, has_chunks=False) == (0, 10)
    shape = Shape(8, 0)
    assert buckets.attention(Mode.DEVICE_ONLY, shape, 3, has_chunks=False) == (32, True)


@settings(max_examples=200, derandomize=True)
@given(
    st.integers(1, 5000),
    st.integers(1, 300),
    st.booleans(),
    st.integers(1, 5000),
    st.data(),
)
def test_every_sub_batch_within_the_limits_has_programs(
    spare_tokens, max_num_seqs, is_gpu, table_width, data
):
    limit = max_num_seqs + 16 + spare_tokens
    buckets = Buckets.of(limit, max_num_seqs, table_width, has_host=True, is_gpu=is_gpu)
    host_rows = data.draw(st.integers(0, max_num_seqs))
    num_decodes = data.draw(st.integers(0, max_num_seqs - host_rows))
    num_prefilled = data.draw(st.integers(0, limit - num_decodes - host_rows))
    num_tokens = num_decodes + num_prefilled
    if not num_tokens + host_rows:
        return
    has_chunks = num_prefilled > 0
    if num_tokens:  # host rows of a ROLLING step ride in it, whatever its size
        padded = buckets.padded(Mode.ROLLING, num_tokens, has_chunks=has_chunks)
        assert num_tokens <= padded
        assert padded in buckets.grid(Mode.ROLLING)
    for mode in [Mode.PIPELINED] if host_rows else [Mode.DEVICE_ONLY, Mode.PIPELINED]:
        shape = buckets.shape(mode, num_tokens, host_rows, has_chunks=has_chunks)
        known = {
            Mode.DEVICE_ONLY: buckets.device_shapes,
            Mode.PIPELINED: [*buckets.pipelined_shapes, *buckets.host_shapes, *buckets.mixed],
        }
        assert shape in known[mode]
        assert shape.num_tokens >= num_tokens
        assert shape.num_host_rows >= host_rows
        if num_tokens:
            num_blocks = data.draw(st.integers(1, table_width))
            attention = buckets.attention(mode, shape, num_blocks, has_chunks=has_chunks)
            assert attention in buckets.attentions(mode, shape.num_tokens)
            assert attention.table_width >= num_blocks
            assert attention.has_chunks or not has_chunks
        assert buckets.head_rows(shape) >= shape.num_rows


def test_decodes_on_a_gpu_have_programs_of_their_own_by_table_width():
    buckets = Buckets.of(64, 16, 1024, has_host=True, is_gpu=True)
    assert buckets.table_widths == (64, 256, 1024)
    mode, shape = Mode.DEVICE_ONLY, Shape(8, 0)
    assert buckets.attention(mode, shape, 65, has_chunks=False) == (256, False)
    assert buckets.attention(mode, shape, 65, has_chunks=True) == (1024, True)
    assert buckets.shape(mode, 2, 0, has_chunks=True) == (16, 0)
    for shape in buckets.device_shapes:
        attentions = buckets.attentions(mode, shape.num_tokens)
        has_chunks = {attention.has_chunks for attention in attentions}
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
