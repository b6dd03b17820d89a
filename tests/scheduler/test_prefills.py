"""Sizes of the prefill that `auto` weighs: remembered, and yet as if each were cut anew."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neojax.scheduler.balance import Split, best_split
from neojax.scheduler.offer import Chunk, Offer
from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.prefills import CHUNK_STEP, Prefills
from neojax.scheduler.request import Placement
from tests.scheduler.tables import h200, t4
from tests.scheduler.test_scheduler import make_request

predictors = st.sampled_from([h200, t4]).map(functools.cache(lambda tables: Predictor(tables())))
prompts = st.lists(st.tuples(st.sampled_from(Placement), st.integers(1, 900)), max_size=6)


def make_offer(prompts: list[tuple[Placement, int]], num_decodes: int) -> Offer:
    chunks = [
        Chunk(make_request(i, n, 1), placement, n, True) for i, (placement, n) in enumerate(prompts)
    ]
    decodes = [make_request(100 + i, 50 + i, 9) for i in range(num_decodes)]
    return Offer(tuple(decodes), (), tuple(chunks), 2048, 16)


@given(
    predictor=predictors,
    prompts=prompts,
    num_decodes=st.integers(0, 40),
    rooms=st.lists(st.tuples(st.integers(0, 2048), st.booleans()), min_size=1, max_size=6),
    least=st.none() | st.integers(64, 300),
)
def test_each_size_is_as_if_cut_from_the_offer_anew(predictor, prompts, num_decodes, rooms, least):
    offer = make_offer(prompts, num_decodes)
    prefills = Prefills(offer, predictor, least)
    for room, device_only in rooms:
        full, *cuts = prefills.sizes(room, device_only=device_only)
        assert full.chunks == offer.trimmed(room, device_only=device_only)
        for prefill in (full, *cuts):
            assert prefill.num_tokens == sum(chunk.num_tokens for chunk in prefill.chunks) <= room
            assert prefill.load.num_rows == prefill.num_tokens + num_decodes
            assert prefill.load.num_decodes == num_decodes
            on_host = [c for c in prefill.chunks if c.placement is Placement.HOST]
            assert prefill.load.store_tokens == sum(chunk.num_tokens for chunk in on_host)
            assert not (device_only and on_host)
        for cut in cuts:
            assert least is not None
            assert 0 < cut.num_tokens < full.num_tokens


@given(
    predictor=predictors,
    prompts=prompts,
    num_decodes=st.integers(0, 40),
    host_s=st.floats(1e-6, 1e-2),
)
def test_what_hides_the_host_is_cut_to_just_cover_it(predictor, prompts, num_decodes, host_s):
    prefills = Prefills(make_offer(prompts, num_decodes), predictor, None)
    full = prefills.of(2048)
    hiding = prefills.hiding(full, host_s)

    def layer_s(load: Load) -> float:
        return predictor.layer_times(Mode.PIPELINED, load).linear0 + predictor.attention_s(load)

    assert hiding.num_tokens <= full.num_tokens
    if hiding.num_tokens < full.num_tokens and all(p is Placement.DEVICE for p, _ in prompts):
        assert layer_s(hiding.load) >= host_s
        less = hiding.num_tokens - CHUNK_STEP
        assert less <= predictor.knee_tokens or layer_s(prefills.of(less).load) <= host_s


@given(
    predictor=predictors,
    num_decodes=st.integers(0, 64),
    contexts=st.lists(st.integers(1, 4000), max_size=30),
    can_mix=st.booleans(),
)
def test_a_split_takes_as_long_as_a_step_so_divided(predictor, num_decodes, contexts, can_mix):
    device = Load(num_decodes=num_decodes, decode_context=300 * num_decodes)
    sums = [sum(contexts[:k]) for k in range(len(contexts) + 1)]
    split = best_split(predictor, device, sums, can_mix=can_mix)

    def divided(k: int) -> Split:
        b0 = device._replace(num_host_rows=k, host_context=sums[k])
        b1 = Load(num_host_rows=len(contexts) - k, host_context=sums[-1] - sums[k])
        return Split(predictor.seconds(Mode.PIPELINED, b0, b1), k)

    assert split.step_s == pytest.approx(divided(split.num_in_b0).step_s)
    ends = [0] if num_decodes else [len(contexts)]
    assert split.step_s <= min(divided(k).step_s for k in ends) * (1 + 1e-9)
    if num_decodes and not can_mix:
        assert not split.num_in_b0
