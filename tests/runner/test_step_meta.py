"""What the packed metadata says, against the plan it was made from."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from neojax.ops.attention import TILE
from neojax.runner.shapes import Buckets, Shape
from neojax.runner.step_meta import MetaLayout
from neojax.sampling_params import SamplingParams
from neojax.scheduler.auto import Auto
from neojax.scheduler.limits import MAX_CHUNKS, SchedulerLimits, scratch_tokens
from neojax.scheduler.plan import Mode
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.scheduler import Scheduler

BLOCK = 16
LIMITS = SchedulerLimits(
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_model_len=128,
    block_size=BLOCK,
    num_device_blocks=12,
    num_host_blocks=40,
    max_num_chunks=MAX_CHUNKS,
    scratch_tokens=scratch_tokens(128, BLOCK),
)
BUCKETS = Buckets.of(128, 8, 8, has_host=True, is_gpu=False)


def layout_of(batch) -> MetaLayout:
    shape = BUCKETS.shape(
        Mode.PIPELINED,
        batch.num_device_tokens,
        len(batch.host_decodes),
        has_chunks=bool(batch.chunks),
    )
    return MetaLayout(
        shape=shape,
        max_num_seqs=LIMITS.max_num_seqs,
        block_size=BLOCK,
        table_width=8,
        num_device_slots=12 * BLOCK,
        num_scratch_slots=LIMITS.scratch_tokens,
        head_rows=BUCKETS.head_rows(shape),
    )


def request(index: int, num_prompt: int, max_tokens: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_k=3, top_p=0.5)
    prompt = list(range(1000 * index, 1000 * index + num_prompt))
    return Request(f"r{index}", prompt, params, max_tokens, frozenset(), seed, index)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 20)), min_size=1, max_size=12),
    seed=st.integers(0, 2**63 - 1),
    num_steps=st.integers(1, 12),
)
def test_every_row_finds_its_tokens_slots_and_blocks(lengths, seed, num_steps):
    scheduler = Scheduler(LIMITS, Auto())
    for index, (num_prompt, max_tokens) in enumerate(lengths):
        scheduler.add(request(index, num_prompt, max_tokens, seed))
    for _ in range(num_steps):
        plan = scheduler.schedule()
        if plan is None:
            break
        for batch in plan.sub_batches:
            check(batch, *layout_of(batch).pack(batch, plan_index=3))
        scheduler.update(plan, [7] * len(plan.sampled_rows))


def check(batch, packed, host_plan) -> None:
    layout = layout_of(batch)
    f = layout.views(packed)
    assert packed.dtype == np.int32
    assert packed.size == layout.size
    plan_index, num_rows, num_chunks, num_tiles, num_host_tiles, first_decode = f["scalars"]
    assert plan_index == 3
    assert num_rows == len(batch.host_decodes)
    assert num_chunks == len(batch.host_chunks)
    assert first_decode == sum(row.num_tokens for row in batch.chunks)

    index = 0
    expected_kv = np.full(layout.shape.num_tokens, layout.num_device_slots)
    for row in (*batch.chunks, *batch.decodes):
        span = slice(index, index + row.num_tokens)
        positions = np.arange(row.start.token, row.stop)
        assert f["rows"][0, span].tolist() == row.request.token_ids(row.start.token, row.stop)
        assert f["rows"][1, span].tolist() == positions.tolist()
        assert (f["rows"][2, span] == row.slot).all()
        if row.placement is Placement.DEVICE:
            blocks = np.asarray(row.blocks)
            expected_kv[span] = blocks[positions // BLOCK] * BLOCK + positions % BLOCK
        index += row.num_tokens
    assert (f["slots"][0] == expected_kv).all()
    written = expected_kv[expected_kv < layout.num_device_slots]
    assert len(set(written.tolist())) == len(written)

    tiles = {Placement.DEVICE: ("tiles", num_tiles), Placement.HOST: ("host_tiles", num_host_tiles)}
    for placement, (name, count) in tiles.items():
        token, length, position, _ = f[name][:, :count]
        assert ((length >= 1) & (length <= TILE)).all()
        covered = [t for a, n in zip(token, length, strict=True) for t in range(a, a + n)]
        starts = np.cumsum([0, *(row.num_tokens for row in batch.chunks)])
        mine = [
            (t, row.start.token + t - first)
            for row, first in zip(batch.chunks, starts, strict=False)
            if row.placement is placement
            for t in range(first, first + row.num_tokens)
        ]
        assert covered == [t for t, _ in mine]
        assert [dict(mine)[t] for t in token] == position.tolist()

    scratch = f["slots"][1][f["slots"][1] < layout.num_scratch_slots]
    assert len(scratch) == sum(row.num_tokens for row in batch.host_chunks)
    assert len(set(scratch.tolist())) == len(scratch)
    if host_plan is None:
        assert not batch.host_decodes
        assert not batch.host_chunks
        return
    assert host_plan.context_lens.tolist() == [row.stop for row in batch.host_decodes]
    taken = set()
    for (offset, n, start, slot), row in zip(host_plan.chunks, batch.host_chunks, strict=True):
        assert f["slots"][1, offset : offset + n].tolist() == list(
            range(slot + start, slot + row.stop)
        )
        region = set(range(slot, slot + -(-row.stop // BLOCK) * BLOCK))
        assert max(region) < layout.num_scratch_slots
        assert not region & taken
        taken |= region


def test_padding_goes_to_slots_that_are_dropped():
    layout = MetaLayout(
        shape=Shape(16, 0),
        max_num_seqs=8,
        block_size=BLOCK,
        table_width=8,
        num_device_slots=192,
        num_scratch_slots=256,
        head_rows=16,
    )
    f = layout.views(layout.empty())
    assert (f["slots"][0] == 192).all()
    assert (f["slots"][1] == 256).all()
    assert (f["sampling"][1] == 8).all()
    assert not f["decode_lengths"].any()


def test_sampling_parameters_and_the_seed_s_two_words_survive_the_packing():
    scheduler = Scheduler(LIMITS, Auto())
    seed = (5 << 32) | 0xFFFFFFFE
    scheduler.add(request(0, 20, 4, seed))
    plan = scheduler.schedule()
    assert plan is not None
    layout = layout_of(plan.b0)
    packed, _ = layout.pack(plan.b0, 0)
    s = layout.views(packed)["sampling"][:, 0]
    assert s[0] == 19  # the last of the prompt's rows
    assert s[2] == 20  # position of the new token
    assert s[3] == 5
    assert s[4].view(np.uint32) == 0xFFFFFFFE
    assert s[5] == 3
    assert s[6:].view(np.float32).tolist() == [np.float32(0.7), np.float32(0.5)]
