"""The attention kernels against numpy, over every shape and instruction set they claim."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neojax import _cpu_paged_attn as native
from tests.native.reference import DTYPES, TOLERANCE, Case, make_case, reference, relative_error

ISAS = native.available_isas()


@pytest.fixture(scope="module")
def pool() -> native.WorkerPool:
    return native.WorkerPool(2)


def attend(case: Case, pool: native.WorkerPool, **kwargs) -> tuple[np.ndarray, np.ndarray]:
    return native.attend(
        case.cache,
        pool,
        case.rows,
        case.lens,
        case.tables,
        case.layer,
        num_q_heads=case.num_q_heads,
        scale=case.scale,
        **kwargs,
    )


def at_odd_address(array: np.ndarray) -> np.ndarray:
    """The same values one byte past a multiple of the element's size."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    out = np.ndarray(array.shape, array.dtype, memory.data, offset=1)
    out[...] = array
    return out


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_agrees_with_numpy(isa: str, pool: native.WorkerPool, data: st.DataObject):
    dtype = data.draw(st.sampled_from(sorted(DTYPES)), label="dtype")
    lengths = st.one_of(
        st.sampled_from([1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128]), st.integers(1, 700)
    )
    case = make_case(
        pool,
        data.draw(st.lists(lengths, min_size=1, max_size=5), label="lens"),
        num_kv_heads=data.draw(st.integers(1, 4), label="K"),
        group=data.draw(st.integers(1, 32), label="G"),
        head_dim=8 * data.draw(st.integers(1, 32), label="H/8"),
        block_size=data.draw(st.sampled_from([16, 32, 48]), label="block_size"),
        dtype=dtype,
        rows_dtype=data.draw(st.sampled_from(sorted(DTYPES)), label="rows_dtype"),
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    out, lse = attend(case, pool, isa=isa)
    expected, expected_lse = case.expected()
    rows_dtype = str(case.rows.dtype)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[rows_dtype])
    # Some kernels round queries to a bfloat16 cache's type: that moves the logits themselves.
    rounds_queries = dtype == "bfloat16" and rows_dtype != "bfloat16"
    assert relative_error(out, expected) <= (3e-2 if rounds_queries else tolerance)
    atol = 3e-2 if rounds_queries else 1e-5
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=10)
@given(data=st.data())
def test_any_lengths_up_to_thousands_agree_with_numpy(
    isa: str, pool: native.WorkerPool, data: st.DataObject
):
    dtype = data.draw(st.sampled_from(sorted(DTYPES)), label="dtype")
    lengths = st.one_of(st.sampled_from([1023, 1024, 1025, 8192, 8193]), st.integers(1, 8193))
    case = make_case(
        pool,
        data.draw(st.lists(lengths, min_size=1, max_size=3), label="lens"),
        num_kv_heads=data.draw(st.integers(1, 2), label="K"),
        group=data.draw(st.integers(1, 9), label="G"),
        head_dim=8 * data.draw(st.integers(1, 8), label="H/8"),
        block_size=data.draw(st.sampled_from([16, 64]), label="block_size"),
        dtype=dtype,
        seed=data.draw(st.integers(0, 2**32 - 1), label="seed"),
    )
    out, lse = attend(case, pool, isa=isa)
    expected, expected_lse = case.expected()
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("isa", ISAS)
def test_a_long_sequence_is_split_and_merged(isa: str, dtype: str, pool: native.WorkerPool):
    case = make_case(pool, [8193, 1, 4095], num_kv_heads=1, group=5, head_dim=32, dtype=dtype)
    out, lse = attend(case, pool, isa=isa)
    expected, expected_lse = case.expected()
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("isa", ISAS)
def test_every_thread_count_gives_the_same_numbers(isa: str, dtype: str):
    results = []
    for num_threads in (1, 2, 3):
        pool = native.WorkerPool(num_threads)
        case = make_case(pool, [700, 1, 2000, 33], dtype=dtype, head_dim=128)
        results.append(attend(case, pool, isa=isa))
        pool.close()
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@settings(max_examples=40)
@given(data=st.data())
def test_any_spread_over_numa_nodes_agrees_with_numpy(data: st.DataObject):
    core = min(os.sched_getaffinity(0))
    num_nodes = data.draw(st.integers(1, 8), label="nodes")
    num_threads = data.draw(st.integers(1, 4), label="threads")
    pool = native.WorkerPool(num_threads, nodes=[[core]] * num_nodes)
    assert pool.num_nodes == min(num_nodes, num_threads)
    lens = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4), label="lens")
    window = data.draw(st.sampled_from([0, 1, 17, 100, 10**6]), label="window")
    block_size = data.draw(st.sampled_from([16, 48]), label="block_size")
    case = make_case(pool, lens, block_size=block_size, num_kv_heads=3, group=2, seed=len(lens))
    out, lse = attend(case, pool, window=window)
    expected, expected_lse = case.expected(window=window)
    assert relative_error(out, expected) <= 2e-6
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    pool.close()


def test_threads_are_spread_over_nodes_by_their_cores_and_bad_nodes_are_refused():
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    pool = native.WorkerPool(3, nodes=[[core], [core], [core]])
    make_case(pool, [50])
    assert os.sched_getaffinity(0) == before  # the caller touched memory too
    assert pool.num_nodes == 3
    assert native.WorkerPool(2, cpus=[core, core], nodes=[[core], [core]]).num_nodes == 1
    assert native.WorkerPool(2, nodes=[]).num_nodes == 1
    with pytest.raises(ValueError, match="each must name cores that this process may use"):
        native.WorkerPool(2, nodes=[[core], [100000]])
    with pytest.raises(ValueError, match="nodes must be at most 8, got 9"):
        native.WorkerPool(2, nodes=[[core]] * 9)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("logit_scale", [1e2, 1e4, 1e15])
def test_extreme_logits_do_not_overflow(
    isa: str, dtype: str, logit_scale: float, pool: native.WorkerPool
):
    case = make_case(pool, [1, 40, 700], dtype=dtype, logit_scale=logit_scale)
    out, lse = attend(case, pool, isa=isa)
    assert np.isfinite(out.astype(np.float32)).all()
    expected, expected_lse = case.expected()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    if logit_scale < 1e3:  # beyond, float32 logits decide near ties otherwise than float64's
        assert relative_error(out, expected) <= max(TOLERANCE[dtype], 1e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("softcap", "window"), [(5.0, 0), (0.0, 100), (50.0, 17), (0.0, 10**6)])
def test_softcap_and_window_agree_with_numpy(
    isa: str, softcap: float, window: int, pool: native.WorkerPool
):
    case = make_case(pool, [1, 16, 99, 100, 101, 1200], logit_scale=3.0)
    out, lse = attend(case, pool, isa=isa, softcap=softcap, window=window)
    expected, expected_lse = case.expected(softcap=softcap, window=window)
    assert relative_error(out, expected) <= 2e-6
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_append_is_seen_by_its_own_call_and_may_be_repeated(dtype: str, pool: native.WorkerPool):
    case = make_case(pool, [1, 16, 17, 700], dtype=dtype)
    for row, n in enumerate(case.lens):
        case.k[row][n - 1], case.v[row][n - 1] = case.new_kv(row)
    expected, _ = case.expected()
    first, _ = attend(case, pool, append=True)
    assert relative_error(first, expected) <= TOLERANCE[dtype]
    again, _ = attend(case, pool, append=True)
    np.testing.assert_array_equal(again, first)
    for row, n in enumerate(case.lens):
        k, v = case.cache.read(case.layer, case.tables[row], 0, int(n))
        np.testing.assert_array_equal(k, case.k[row])
        np.testing.assert_array_equal(v, case.v[row])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_written_is_read_back_and_nothing_else_changes(dtype: str, pool: native.WorkerPool):
    case = make_case(pool, [50, 20], block_size=32, dtype=dtype)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 7, 2, 64)).astype(DTYPES[dtype])
    case.cache.write(case.layer, case.tables[0], 29, k, v)
    case.k[0][29:36], case.v[0][29:36] = k, v
    for row, n in enumerate(case.lens):
        got_k, got_v = case.cache.read(case.layer, case.tables[row], 0, int(n))
        assert got_k.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(got_k, case.k[row])
        np.testing.assert_array_equal(got_v, case.v[row])
    other, _ = case.cache.read(0, case.tables[0], 0, 50)
    assert np.isnan(other.astype(np.float32)).all()


def test_a_bfloat16_cache_rounds_float32_rows(pool: native.WorkerPool):
    case = make_case(pool, [40], dtype="bfloat16", rows_dtype="float32")
    attend(case, pool, append=True)
    k, _ = case.cache.read(case.layer, case.tables[0], 39, 1)
    np.testing.assert_array_equal(k[0], case.new_kv(0)[0].astype(DTYPES["bfloat16"]))


def test_bad_arguments_are_named(pool: native.WorkerPool):
    case = make_case(pool, [40, 5])

    def refuses(message: str, **changes) -> None:
        changed = Case(**{**vars(case), **changes})
        with pytest.raises(ValueError, match=message):
            attend(changed, pool)

    bad_block = case.tables.copy()
    bad_block[1, 0] = case.cache.num_blocks
    refuses(r"tables\[1, 0\] is block 7; the arena has blocks 0 to 6", tables=bad_block)
    refuses(r"tables\[0, 0\] is block -5", tables=np.full_like(case.tables, -5))
    refuses(r"context_lens\[1\] must be at least 1, got 0", lens=np.array([40, 0], np.int32))
    refuses(r"context_lens\[0\] must be at least 1, got -3", lens=np.array([-3, 5], np.int32))
    refuses(r"tables\[0\] has 4 blocks .* 9000 tokens need 563", lens=np.array([9000, 5], np.int32))
    refuses(r"rows must be \[B, \(N\+2K\)\*H\] = \[2, 640\], got \[2, 639\]",
            rows=np.ascontiguousarray(case.rows[:, :-1]))  # fmt: skip
    refuses(
        "rows must be float32, bfloat16 or float16, got float64", rows=case.rows.astype(np.float64)
    )
    refuses("layer must be below 2, got 2", layer=2)
    refuses("num_q_heads must be a multiple of the 2 kv heads, got 5", num_q_heads=5)
    with pytest.raises(ValueError, match="isa=avx9 cannot run on this machine; available: scalar"):
        attend(case, pool, isa="avx9")
    with pytest.raises(ValueError, match="softcap must be 0"):
        attend(case, pool, softcap=-1.0)
    for name, message in (
        ("rows", "rows must lie at a multiple of 4 bytes, is 1 past one"),
        ("tables", "tables must lie at a multiple of 4 bytes, is 1 past one"),
        ("lens", "context_lens must lie at a multiple of 4 bytes, is 1 past one"),
    ):
        refuses(message, **{name: at_odd_address(getattr(case, name))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head_dim must be a multiple of 8 up to 256, got 12"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 up to 256, got 264"),
        ({"block_size": 24}, "block_size must be a multiple of 16, got 24"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16, got int8"),
    ],
)
def test_a_cache_no_kernel_takes_is_refused(change: dict, message: str, pool: native.WorkerPool):
    arguments = {
        "num_layers": 1,
        "num_blocks": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "block_size": 16,
        "dtype": "float32",
    }
    with pytest.raises(ValueError, match=message):
        native.HostKVCache(**{**arguments, **change}, pool=pool)
    arguments.pop("num_blocks")
    if "num_layers" not in change:
        with pytest.raises(ValueError, match=message):
            native.HostKVCache.bytes_per_block(**{**arguments, **change})


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEOJAX_CPU_ISA", "scalar")
    assert native.isa() == "scalar"
    monkeypatch.setenv("NEOJAX_CPU_ISA", "sve9")
    with pytest.raises(ValueError, match="NEOJAX_CPU_ISA=sve9 cannot run on this machine"):
        native.isa()
    monkeypatch.delenv("NEOJAX_CPU_ISA")
    assert native.isa() == ISAS[-1]


def test_bytes_per_block_is_the_arenas_size(pool: native.WorkerPool):
    cache = native.HostKVCache(3, 5, 2, 64, 32, "bfloat16", pool)
    per_block = native.HostKVCache.bytes_per_block(3, 2, 64, 32, "bfloat16")
    assert per_block == 3 * 2 * 2 * 32 * 64 * 2
    assert cache.num_bytes == 5 * per_block


def test_a_closed_pool_still_computes(pool: native.WorkerPool):
    closed = native.WorkerPool(3)
    closed.close()
    case = make_case(closed, [300])
    out, _ = attend(case, closed)
    q = case.rows[:, : case.num_q_heads * 64]
    expected, _ = reference(q, case.k, case.v, case.num_q_heads, case.scale)
    assert relative_error(out, expected) <= 2e-6
