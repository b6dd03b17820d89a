"""The roofline against what was measured on an H200, and its tables against itself."""

from __future__ import annotations

import pytest

from neojax.plan.machine import MACHINES, NEO_KERNEL, NEOJAX_KERNEL
from neojax.plan.model_sizes import MODELS
from neojax.plan.roofline import Roofline
from neojax.scheduler.plan import Mode

H200 = Roofline(MACHINES["h200"], MODELS["llama-3.1-8b"])


@pytest.mark.parametrize(("rows", "us"), [(8, 123), (256, 202), (1024, 618), (2048, 1301)])
def test_matrix_products_of_a_layer_take_what_was_measured(rows: int, us: float):
    assert 1e6 * H200.linear(rows) == pytest.approx(us, rel=0.07)


@pytest.mark.parametrize(
    ("batch", "ms"), [(1, 4.46), (8, 4.77), (16, 5.05), (64, 7.13), (128, 9.70), (256, 15.84)]
)
def test_decode_steps_take_what_was_measured(batch: int, ms: float):
    layer = H200.linear(batch) + H200.device_decode(batch, 1000 * batch)
    assert 1e3 * (32 * layer + H200.per_step(batch)) == pytest.approx(ms, rel=0.07)


@pytest.mark.parametrize(("tokens", "ms"), [(1000, 27.3), (4096, 106.4)])
def test_prefill_takes_what_was_measured(tokens: int, ms: float):
    layer = H200.linear(tokens) + H200.prefill_attention(tokens, tokens)
    assert 1e3 * (32 * layer + H200.per_step(tokens)) == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize(("rows", "us"), [(8, 38), (64, 85)])
def test_a_hop_takes_what_was_measured(rows: int, us: float):
    assert 1e6 * H200.hop(rows) == pytest.approx(us, rel=0.1)


def test_host_kernels_attain_what_was_measured():
    h200 = MACHINES["h200"]
    assert NEOJAX_KERNEL.bytes_per_s(h200, group=4) == pytest.approx(119e9, rel=0.05)
    one_core = 1 / (NEO_KERNEL.seconds_per_byte + 4 * NEO_KERNEL.seconds_per_byte_and_head)
    assert one_core == pytest.approx(3.6e9, rel=0.05)


def test_a_chunks_attention_counts_each_pair_of_tokens_once():
    whole = H200.prefill_attention(512, 512)
    parts = sum(H200.prefill_attention(128, end) for end in (128, 256, 384, 512))
    assert parts == pytest.approx(whole)


def test_tables_are_the_functions_they_are_made_from():
    tables = H200.tables(4096, 100_000)
    for rows in (1, 3, 77, 1000, 4096):
        assert tables.linear[Mode.DEVICE_ONLY](rows) == pytest.approx(H200.linear(rows), rel=0.01)
        assert tables.hop(rows) == pytest.approx(H200.hop(rows), rel=0.01)
        context = 20 * rows
        exact = H200.prefill_attention(rows, context)
        assert tables.prefill_attention(rows, context) == pytest.approx(exact, rel=0.03)
        exact = H200.host_decode(rows, context)
        assert tables.host_decode(rows, context) == pytest.approx(exact, rel=0.01)
    one_program = tables.linear[Mode.DEVICE_ONLY](64)
    assert tables.linear[Mode.PIPELINED](64) == pytest.approx(one_program + 10e-6)


def test_two_devices_halve_the_work_and_pay_for_their_sums():
    one = Roofline(MACHINES["h200"], MODELS["llama-3.1-70b"])
    two = Roofline(MACHINES["2xh100"], MODELS["llama-3.1-70b"])
    halved = one.linear(1) * 4800 / (2 * 3350)
    assert halved < two.linear(1) < halved + 50e-6


def test_memory_is_counted_in_tokens():
    # 15 GiB of weights leave room for about 850,000 tokens of 128 KiB on 141 GB.
    assert H200.kv_token_bytes == 131072
    assert H200.device_kv_tokens == pytest.approx(840_000, rel=0.02)
    assert Roofline(MACHINES["t4-g4dn.4xlarge"], MODELS["llama-3.1-70b"]).device_kv_tokens == 0
