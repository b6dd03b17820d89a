"""Host attention that goes wrong, and what is left after it or after many calls: nothing."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import DTYPES, make_case, relative_error
from tests.ops.host_programs import REFUSED, append_new, hdr, make_lane, pad_rows, start_and_join


def test_wrong_calls_name_the_argument_and_leave_the_lane_usable(pool: native.WorkerPool):
    case = make_case(pool, [40, 5])
    lane = make_lane(case, pool, max_rows=4)
    lane.set_plan(0, case.lens, case.tables, uses=1)
    tie = np.zeros((4, 4), np.float32)

    def refuses(message: str, *args, lane_: native.HostLane = lane, channel: int = 0) -> None:
        with pytest.raises(REFUSED, match=message):
            jax.block_until_ready(start_and_join(lane_, case, channel)(*args))

    refuses(r"hdr\[0\] is plan 9; the lane has 8", case.rows, hdr(9, 0, 1), tie)
    refuses(r"hdr\[0\] is plan -1", case.rows, hdr(-1, 0, 1), tie)
    refuses(r"hdr\[0\]: plan 3 is not set", case.rows, hdr(3, 0, 1), tie)
    refuses(r"hdr\[1\] is layer 2; the arena has 2", case.rows, hdr(0, 2, 1), tie)
    refuses(r"hdr\[2\] is n=3; rows has 2", case.rows, hdr(0, 0, 3), tie)
    refuses(r"hdr\[2\] is n=-1; rows has 2", case.rows, hdr(0, 0, -1), tie)
    refuses(r"hdr\[2\] is n=3; plan 0 has 2 rows", pad_rows(case.rows, 4), hdr(0, 0, 3), tie)
    refuses(r"rows has 5 rows; channel 0 takes 4", pad_rows(case.rows, 5),
            hdr(0, 0, 1), tie)  # fmt: skip
    refuses(r"message must be uint32 of 1296 elements or more for 2 rows, got uint32\[1294\]",
            case.rows[:, 1:], hdr(0, 0, 1), tie)  # fmt: skip
    raw = jax.ffi.ffi_call(
        "neojax.start.v2",
        (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct(tie.shape, tie.dtype)),
    )
    good = np.asarray(host_attention.message(*map(jnp.asarray, (case.rows, hdr(0, 0, 1)))))
    for args, dtype, message in (
        ((good.view(np.float32), tie), "float32", "message must be uint32 .* got float32"),
        ((good.reshape(1, -1), tie), "float32", r"message must be uint32 .* got uint32\[1, 1296\]"),
        ((good, tie), "bfloat16", "message must be uint16"),
        ((good, tie), "int8", "dtype must be float32, bfloat16 or float16, got int8"),
        ((good, tie[:2]), "float32", "tie must have the shape of its result"),
    ):
        with pytest.raises(REFUSED, match=message):
            jax.block_until_ready(
                raw(
                    *args,
                    lane=np.int64(lane.id),
                    channel=np.int64(0),
                    rows=np.int64(2),
                    dtype=dtype,
                )
            )
    refuses("channel is 2; the lane has 2", case.rows, hdr(0, 0, 1), tie, channel=2)
    with pytest.raises(REFUSED, match="channel 0 has no job started"):
        jax.block_until_ready(
            jax.jit(functools.partial(
                host_attention.join, lane=lane.id, channel=0, num_rows=2,
                num_q_heads=6, head_dim=64, dtype=jnp.float32,
            ))(np.zeros(1, np.int32), tie)
        )  # fmt: skip
    out, _ = start_and_join(lane, case)(case.rows, hdr(0, 1, 2), tie)
    append_new(case)
    assert relative_error(np.asarray(out), case.expected()[0]) <= 2e-6

    @jax.jit
    def put(rows: jax.Array, head: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.store(rows, head, tie, lane=lane.id)

    chunk = np.array([[1, 40, 0, 0]], np.int32)
    lane.set_plan(1, case.lens, case.tables, chunk, case.tables[:1], uses=1)
    with pytest.raises(REFUSED, match="rows has 2 rows; chunk 0 of plan 1"):
        jax.block_until_ready(put(case.rows, hdr(1, 0, 1), tie))
    with pytest.raises(REFUSED, match=r"hdr\[2\] is 2 chunks; plan 1 has 1"):
        jax.block_until_ready(put(case.rows, hdr(1, 0, 2), tie))

    program = start_and_join(lane, case)
    lane.close()
    with pytest.raises(REFUSED, match=f"lane {lane.id} does not exist or is"):
        jax.block_until_ready(program(case.rows, hdr(0, 1, 1), tie))


def test_bad_plans_are_refused_before_they_reach_a_worker(pool: native.WorkerPool):
    case = make_case(pool, [40, 5])
    lane = make_lane(case, pool)

    def refuses(message: str, *args, index: int = 0, uses: int = 1) -> None:
        with pytest.raises(ValueError, match=message):
            lane.set_plan(index, *args, uses=uses)

    refuses("index must be below num_plans=8, got 8", case.lens, case.tables, index=8)
    refuses("uses must be 0 or more, got -1", case.lens, case.tables, uses=-1)
    refuses(r"tables\[0, 3\] is block -1", np.array([60, 5], np.int32), case.tables)
    refuses("tables must have one row a sequence: 1 context_lens, 2 rows", case.lens[:1],
            case.tables)  # fmt: skip
    refuses("context_lens has 9 rows; the lane has max_rows=8", np.ones(9, np.int32),
            np.zeros((9, 1), np.int32))  # fmt: skip
    chunks = np.array([[0, 10, 0, 0]], np.int32)
    refuses("chunks and chunk_tables come together", case.lens, case.tables, chunks)
    refuses(r"chunks must be \[C, 4\]", case.lens, case.tables, chunks[:, :3], case.tables[:1])
    refuses(r"chunks\[0\] has a negative entry", case.lens, case.tables, -chunks, case.tables[:1])
    refuses(r"chunk_tables\[0\] has 4 blocks of 16 tokens; 110 tokens need 7", case.lens,
            case.tables, np.array([[0, 110, 0, 0]], np.int32), case.tables[:1])  # fmt: skip
    assert not lane.plan_in_use(0)
    lane.close()


def test_a_failed_job_gives_zeros_and_leaves_its_reason(pool: native.WorkerPool):
    case = make_case(pool, [40, 5])
    lane = make_lane(case, pool)
    program = start_and_join(lane, case)
    tie = np.zeros((4, 4), np.float32)
    lane.fail_next_job("injected")
    lane.set_plan(0, case.lens, case.tables, uses=2)
    out, _ = program(case.rows, hdr(0, 1, 2), tie)
    np.testing.assert_array_equal(out, 0)
    assert lane.error() == "injected (channel 0, plan 0, layer 1)"
    lane.clear_error()
    out, _ = program(case.rows, hdr(0, 1, 2), tie)
    append_new(case)
    assert relative_error(np.asarray(out), case.expected()[0]) <= 2e-6
    assert lane.error() is None
    lane.close()


def test_drain_waits_for_late_jobs_and_names_those_that_do_not_come(pool: native.WorkerPool):
    case = make_case(pool, [40])
    lane = make_lane(case, pool)
    lane.set_delay_us(1_000_000)
    lane.set_plan(0, case.lens, case.tables, uses=1)
    begin = jax.jit(functools.partial(host_attention.start, lane=lane.id, channel=1))
    begin(case.rows, hdr(0, 1, 1), np.zeros(1, np.float32))
    with pytest.raises(TimeoutError, match=r"on channels 1$"):
        lane.drain(0.02)
    lane.drain(60.0)
    assert lane.counters()["jobs"] == 1
    lane.close()


def test_a_tie_that_is_not_donated_is_still_passed_on(pool: native.WorkerPool):
    case = make_case(pool, [40])
    lane = make_lane(case, pool)
    both = np.arange(32, dtype=np.float32).reshape(2, 16)

    @jax.jit
    def program(rows: jax.Array, head: jax.Array, both: jax.Array) -> jax.Array:
        ticket, tie = host_attention.start(rows, head, both[1], lane=lane.id, channel=0)
        return jnp.stack([tie, both[1], both[0]]) + ticket[0].astype(jnp.float32)

    out = program(case.rows, hdr(0, 0, 0), both)
    np.testing.assert_array_equal(out, np.stack([both[1], both[1], both[0]]))
    lane.close()


def test_lane_ids_are_the_lowest_free_ones(pool: native.WorkerPool):
    case = make_case(pool, [40])
    lanes = [make_lane(case, pool) for _ in range(3)]
    base = lanes[0].id
    assert [lane.id for lane in lanes] == [base, base + 1, base + 2]
    lanes[1].close()
    again = make_lane(case, pool)
    assert again.id == base + 1
    for lane in (*lanes, again):
        lane.close()
        lane.close()


def test_dispatch_takes_the_fast_path(pool: native.WorkerPool):
    case = make_case(pool, [1])
    lane = make_lane(case, pool)
    program = start_and_join(lane, case)
    args = jax.device_put((case.rows, hdr(0, 0, 0), np.zeros((2, 2), np.float32)))
    for _ in range(3):
        program(*args)
    hlo = program.lower(*args).compile().as_text()
    assert hlo is not None
    assert "custom_call_has_side_effect" not in hlo
    lane.close()


def test_thousands_of_calls_and_restarts_leak_no_thread_and_no_memory():
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def resident_mib() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def session(num_calls: int) -> None:
        pool = native.WorkerPool(3)
        case = make_case(pool, [1, 33])
        lane = make_lane(case, pool)
        program = programs.setdefault(lane.id, start_and_join(lane, case))
        tie = np.zeros((4, 4), np.float32)
        for i in range(num_calls):
            lane.set_plan(i % 8, case.lens, case.tables, uses=1)
            jax.block_until_ready(program(case.rows, hdr(i % 8, i % 2, 2), tie))
        lane.close()
        pool.close()

    programs: dict[int, Callable] = {}
    session(200)
    gc.collect()
    threads_before, memory_before = threads(), resident_mib()
    for _ in range(20):
        session(150)
    gc.collect()
    assert threads() <= threads_before  # other tests' may have ended
    assert resident_mib() - memory_before < 16


def test_several_lanes_work_at_once_from_several_threads():
    results: dict[int, float] = {}

    def session(seed: int) -> None:
        pool = native.WorkerPool(2)
        case = make_case(pool, [700, 33], seed=seed)
        lane = make_lane(case, pool)
        append_new(case)
        expected, _ = case.expected()
        program = start_and_join(lane, case)
        worst = 0.0
        for _ in range(20):
            lane.set_plan(0, case.lens, case.tables, uses=1)
            out, _ = program(case.rows, hdr(0, 1, 2), np.zeros((4, 4), np.float32))
            worst = max(worst, relative_error(np.asarray(out), expected))
        lane.close()
        pool.close()
        results[seed] = worst

    workers = [threading.Thread(target=session, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    assert max(results.values()) <= 2e-6


@pytest.mark.slow
def test_a_soak_of_random_shapes_leaks_no_thread_and_no_memory():
    def resident_mib() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    rng = np.random.default_rng(0)
    pool = native.WorkerPool(3)
    threads = memory = 0.0
    for round_ in range(100):
        lens = [int(n) for n in rng.integers(1, 200, rng.integers(1, 5))]
        shape = {
            "num_kv_heads": int(rng.integers(1, 4)),
            "group": int(rng.integers(1, 9)),
            "head_dim": 8 * int(rng.integers(1, 17)),
            "dtype": str(rng.choice(sorted(DTYPES))),
        }
        case = make_case(pool, lens, seed=round_, **shape)
        lane = make_lane(case, pool)
        program = start_and_join(lane, case)
        tie = np.zeros((4, 4), np.float32)
        for i in range(1000):
            lane.set_plan(i % 8, case.lens, case.tables, uses=1)
            program(case.rows, hdr(i % 8, i % 2, len(lens)), tie)
        lane.close()
        if round_ % 20 == 0:
            jax.clear_caches()
            gc.collect()
        if round_ == 20:
            threads, memory = len(os.listdir("/proc/self/task")), resident_mib()
    jax.clear_caches()
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == threads
    assert resident_mib() - memory < 64
    pool.close()
