"""start, join, store and fetch in jitted programs: order, overlap, failures, nothing left over."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import DTYPES, TOLERANCE, Case, make_case, relative_error

NUM_LAYERS = 3

# What an FFI error becomes: the first where XLA runs the program inline, the other elsewhere.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    host_attention.ensure_registered()


@pytest.fixture
def pool() -> native.WorkerPool:
    return native.WorkerPool(2)


def make_lane(case: Case, pool: native.WorkerPool, **kwargs) -> native.HostLane:
    kwargs = {"num_channels": 2, "max_rows": 8, **kwargs}
    return native.HostLane(case.cache, pool, case.num_q_heads, scale=case.scale, **kwargs)


def pad_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Rows of a bucket: what lies beyond the sequences is poison."""
    padding = np.full((num_rows - len(rows), rows.shape[1]), np.nan, rows.dtype)
    return np.concatenate([rows, padding])


def start_and_join(lane: native.HostLane, case: Case, channel: int = 0) -> Callable:
    """A program that starts and joins one job, with work in between."""

    @jax.jit
    def program(rows: jax.Array, hdr: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        ticket, tie = host_attention.start(rows, hdr, tie, lane=lane.id, channel=channel)
        tie = tie @ tie
        return host_attention.join(
            ticket,
            tie,
            lane=lane.id,
            channel=channel,
            num_rows=rows.shape[0],
            num_q_heads=case.num_q_heads,
            head_dim=case.cache.head_dim,
            dtype=rows.dtype,
        )

    return program


def hdr(plan: int, layer: int, n: int) -> np.ndarray:
    return np.array([plan, layer, n], np.int32)


def append_new(case: Case) -> None:
    """What the reference expects after a call: the rows' own k, v at the end of each sequence."""
    for row, n in enumerate(case.lens):
        case.k[row][n - 1], case.v[row][n - 1] = case.new_kv(row)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_joined_job_has_appended_and_attended(dtype: str, pool: native.WorkerPool):
    case = make_case(pool, [1, 40, 700], dtype=dtype)
    lane = make_lane(case, pool)
    lane.set_plan(0, case.lens, case.tables, uses=1)
    assert lane.plan_in_use(0)
    tie = np.eye(64, dtype=np.float32) * 2
    out, tie_out = start_and_join(lane, case)(pad_rows(case.rows, 8), hdr(0, 1, 3), tie)
    append_new(case)
    expected, _ = case.expected()
    assert relative_error(np.asarray(out)[:3], expected) <= TOLERANCE[dtype]
    np.testing.assert_array_equal(np.asarray(out)[3:].astype(np.float32), 0)
    np.testing.assert_array_equal(tie_out, tie @ tie)
    assert not lane.plan_in_use(0)
    lane.close()


def test_a_call_without_rows_is_a_turn_without_work(pool: native.WorkerPool):
    case = make_case(pool, [40])
    lane = make_lane(case, pool)
    tie = np.zeros((64, 64), np.float32)
    for _ in range(5):
        out, _ = start_and_join(lane, case)(case.rows, hdr(0, 0, 0), tie)
        np.testing.assert_array_equal(out, 0)
    assert lane.counters()["jobs"] == 0
    assert lane.counters()["joins"] == 5
    lane.close()


def two_lane_step(lane: native.HostLane, case: Case, ties: list[int]) -> Callable:
    """A pipelined step in the shape of the engine's: two programs a layer, two channels.

    Sub-batch c's rows of layer i + 1 are made from its joined output of layer i, so a job that ran
    out of order, twice or not at all changes the result. The activation of the other sub-batch is
    the tie. `ties` receives the addresses of the activations, to see donation at work.
    """
    width = case.num_q_heads * case.cache.head_dim

    def next_rows(rows: jax.Array, out: jax.Array) -> jax.Array:
        q = rows[:, :width] * 0.5 + out
        return jnp.concatenate([q, rows[:, width:] + 0.125], axis=1)

    @functools.partial(jax.jit, donate_argnums=(0, 3), static_argnames=("channel",))
    def stage(
        rows: jax.Array, layer: jax.Array, ticket: jax.Array, other: jax.Array, *, channel: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        out, other = host_attention.join(
            ticket,
            other,
            lane=lane.id,
            channel=channel,
            num_rows=rows.shape[0],
            num_q_heads=case.num_q_heads,
            head_dim=case.cache.head_dim,
            dtype=rows.dtype,
        )
        rows = next_rows(rows, out)
        head = jnp.concatenate([jnp.array([channel], jnp.int32), layer + 1, layer * 0 + 2])
        ticket, other = host_attention.start(rows, head, other, lane=lane.id, channel=channel)
        return rows, ticket, other, out

    @functools.partial(jax.jit, donate_argnums=(1,), static_argnames=("channel",))
    def first(rows: jax.Array, other: jax.Array, *, channel: int) -> tuple[jax.Array, jax.Array]:
        head = jnp.array([channel, 0, 2], jnp.int32)
        return host_attention.start(rows, head, other, lane=lane.id, channel=channel)

    @functools.partial(jax.jit, donate_argnums=(1,), static_argnames=("channel",))
    def last(ticket: jax.Array, other: jax.Array, *, channel: int) -> tuple[jax.Array, jax.Array]:
        return host_attention.join(
            ticket,
            other,
            lane=lane.id,
            channel=channel,
            num_rows=2,
            num_q_heads=case.num_q_heads,
            head_dim=case.cache.head_dim,
            dtype=case.rows.dtype,
        )

    def step(rows: list[np.ndarray]) -> list[np.ndarray]:
        act = [jnp.array(r) for r in rows]
        outs: list[list[jax.Array]] = [[], []]
        tickets = [None, None]
        tickets[0], act[1] = first(act[0], act[1], channel=0)
        tickets[1], act[0] = first(act[1], act[0], channel=1)
        for layer in range(NUM_LAYERS - 1):
            for channel in (0, 1):
                at = jnp.array([layer], jnp.int32)
                act[channel], tickets[channel], act[1 - channel], out = stage(
                    act[channel], at, tickets[channel], act[1 - channel], channel=channel
                )
                outs[channel].append(out)
                ties.append(act[1 - channel].unsafe_buffer_pointer())
        for channel in (0, 1):
            out, act[1 - channel] = last(tickets[channel], act[1 - channel], channel=channel)
            outs[channel].append(out)
        return [np.stack([np.asarray(x) for x in out]) for out in outs]

    return step


def numpy_step(case: Case, rows: list[np.ndarray]) -> list[np.ndarray]:
    """The same step, one job after the other, by direct calls on the same arena."""
    width = case.num_q_heads * case.cache.head_dim
    results = []
    for channel in (0, 1):
        x, outs = rows[channel], []
        part = slice(2 * channel, 2 * channel + 2)
        for layer in range(NUM_LAYERS):
            out, _ = native.attend(
                case.cache,
                native.WorkerPool(1),
                x,
                case.lens[part],
                case.tables[part],
                layer,
                num_q_heads=case.num_q_heads,
                scale=case.scale,
                append=True,
            )
            outs.append(out)
            x = np.concatenate(
                [x[:, :width] * np.float32(0.5) + out, x[:, width:] + np.float32(0.125)], axis=1
            )
        results.append(np.stack(outs))
    return results


@pytest.mark.parametrize("delay_us", [0, 3000])
def test_pipelined_programs_agree_with_serial_calls_whatever_the_delay(
    delay_us: int, pool: native.WorkerPool
):
    case = make_case(pool, [20, 200, 17, 90], num_layers=NUM_LAYERS)
    for layer in range(NUM_LAYERS - 1):
        for row in range(4):
            case.cache.write(layer, case.tables[row], 0, case.k[row], case.v[row])
    rows = [case.rows[:2], case.rows[2:]]
    expected = numpy_step(case, rows)

    lane = make_lane(case, pool)
    lane.set_delay_us(delay_us)
    ties: list[int] = []
    step = two_lane_step(lane, case, ties)
    for _ in range(3):  # appends are idempotent, so the step may be repeated
        for channel in (0, 1):
            part = slice(2 * channel, 2 * channel + 2)
            lane.set_plan(channel, case.lens[part], case.tables[part], uses=NUM_LAYERS)
        got = step(rows)
        for channel in (0, 1):
            np.testing.assert_allclose(got[channel], expected[channel], rtol=2e-5, atol=2e-6)
            assert not lane.plan_in_use(channel)
    assert lane.counters()["jobs"] == 3 * 2 * NUM_LAYERS
    assert lane.counters()["tie_copies"] == 0
    # Two donated activations, swapping no buffers: nothing was copied on the way.
    assert len(set(ties[-2 * (NUM_LAYERS - 1) :])) == 2
    assert lane.error() is None
    lane.close()


def test_host_jobs_overlap_device_work_and_are_recorded(pool: native.WorkerPool):
    case = make_case(pool, [40, 50])
    lane = make_lane(case, pool)
    lane.set_delay_us(60_000)
    lane.record(True)

    @jax.jit
    def begin(rows: jax.Array, head: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.start(rows, head, tie, lane=lane.id, channel=0)

    @jax.jit
    def work(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return x

    @jax.jit
    def end(ticket: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.join(
            ticket,
            tie,
            lane=lane.id,
            channel=0,
            num_rows=2,
            num_q_heads=case.num_q_heads,
            head_dim=64,
            dtype=jnp.float32,
        )

    x = jnp.ones((256, 256))
    jax.block_until_ready(work(x))
    lane.set_plan(1, case.lens, case.tables, uses=1)
    before = time.monotonic_ns()
    ticket, tie = begin(case.rows, hdr(1, 1, 2), x)
    tie = jax.block_until_ready(work(tie))
    worked = time.monotonic_ns()
    jax.block_until_ready(end(ticket, tie))
    after = time.monotonic_ns()
    (interval,) = lane.intervals()
    assert interval[:3].tolist() == [0, 1, 1]
    assert before <= interval[3] < worked < interval[4] <= after
    lane.record(True)
    assert lane.intervals().shape == (0, 5)
    lane.close()


def test_two_jobs_may_be_in_flight_on_a_channel_and_a_third_is_refused(pool: native.WorkerPool):
    case = make_case(pool, [40])
    lane = make_lane(case, pool)
    lane.set_plan(0, case.lens, case.tables, uses=3)

    @jax.jit
    def begin(rows: jax.Array, head: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.start(rows, head, tie, lane=lane.id, channel=1)

    tie = np.zeros(3, np.float32)
    tickets = [begin(case.rows, hdr(0, 1, 1), tie)[0] for _ in range(2)]
    assert [int(t[0]) for t in tickets] == [0, 1]
    with pytest.raises(REFUSED, match="channel 1 has two jobs started"):
        jax.block_until_ready(begin(case.rows, hdr(0, 1, 1), tie))
    assert lane.plan_in_use(0)
    with pytest.raises(RuntimeError, match="plan 0 still has 3 joins or stores outstanding"):
        lane.set_plan(0, case.lens, case.tables, uses=1)
    lane.drain(5.0)
    assert not lane.plan_in_use(0)
    assert int(begin(case.rows, hdr(0, 1, 1), tie)[0][0]) == 0
    lane.close()


def test_a_stored_prefill_is_fetched_back_and_attended_to(pool: native.WorkerPool):
    case = make_case(pool, [48, 33], dtype="float32")
    lane = make_lane(case, pool)
    num_kv_heads, head_dim, width = 2, 64, case.num_q_heads * 64
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((64, width + 2 * num_kv_heads * head_dim)).astype(np.float32)
    k, v = np.split(rows[:, width:].reshape(64, -1, head_dim), 2, axis=1)

    @functools.partial(jax.jit, donate_argnums=(2,))
    def put(rows: jax.Array, head: jax.Array, tie: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.store(rows, head, tie, lane=lane.id)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def get(head: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return host_attention.fetch(head, k, v, lane=lane.id)

    # Sequence 0 in chunks of 32 and 16 tokens, sequence 1 in one of 33; the second step's chunk
    # sees what the first stored.
    first = np.array([[0, 32, 0, 0], [32, 32, 0, 0]], np.int32)
    second = np.array([[1, 16, 32, 5], [20, 1, 32, 50]], np.int32)
    none = np.zeros((0,), np.int32), np.zeros((0, 1), np.int32)
    lane.set_plan(0, *none, first, case.tables, uses=1)
    lane.set_plan(1, *none, second, case.tables, uses=1)
    done, tie = put(rows, hdr(0, 1, 2), jnp.arange(3))
    assert int(done[0]) == 2
    np.testing.assert_array_equal(tie, [0, 1, 2])
    put(rows, hdr(1, 1, 2), jnp.arange(3))
    scratch = [jnp.full((90, num_kv_heads, head_dim), -7.0) for _ in range(2)]
    pointer = scratch[0].unsafe_buffer_pointer()
    got_k, got_v = get(hdr(1, 1, 2), *scratch)
    assert got_k.unsafe_buffer_pointer() == pointer
    for got, stored in ((np.asarray(got_k), k), (np.asarray(got_v), v)):
        np.testing.assert_array_equal(got[5:37], stored[:32])
        np.testing.assert_array_equal(got[50:82], stored[32:64])
        np.testing.assert_array_equal(np.delete(got, [*range(5, 37), *range(50, 82)], axis=0), -7)
    case.k = [np.concatenate([k[:32], k[1:17]]), np.concatenate([k[32:64], k[20:21]])]
    case.v = [np.concatenate([v[:32], v[1:17]]), np.concatenate([v[32:64], v[20:21]])]
    append_new(case)
    lane.set_plan(0, case.lens, case.tables, uses=1)
    tie = np.zeros((4, 4), np.float32)
    out, _ = start_and_join(lane, case)(case.rows, hdr(0, 1, 2), tie)
    assert relative_error(np.asarray(out), case.expected()[0]) <= 2e-6
    lane.close()


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
    refuses(r"rows has 5 rows; the lane takes max_rows=4", pad_rows(case.rows, 5),
            hdr(0, 0, 1), tie)  # fmt: skip
    refuses(r"rows must be .* 640 columns, got float32\[2, 639\]", case.rows[:, 1:],
            hdr(0, 0, 1), tie)  # fmt: skip
    raw = jax.ffi.ffi_call(
        "neojax.start.v1",
        (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct(tie.shape, tie.dtype)),
    )
    for args, message in (
        (
            (case.rows.astype(np.int32), hdr(0, 0, 1), tie),
            "rows must be float32, bfloat16 or float16",
        ),
        ((case.rows, hdr(0, 0, 1)[:2], tie), r"hdr must be int32\[3\], got int32\[2\]"),
        ((case.rows, hdr(0, 0, 1), tie[:2]), "tie must have the shape of its result"),
    ):
        with pytest.raises(REFUSED, match=message):
            jax.block_until_ready(raw(*args, lane=np.int64(lane.id), channel=np.int64(0)))
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
    lane.set_delay_us(200_000)
    lane.set_plan(0, case.lens, case.tables, uses=1)
    begin = jax.jit(functools.partial(host_attention.start, lane=lane.id, channel=1))
    begin(case.rows, hdr(0, 1, 1), np.zeros(1, np.float32))
    with pytest.raises(TimeoutError, match=r"on channels 1$"):
        lane.drain(0.02)
    lane.drain(10.0)
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
            program(case.rows, hdr(i % 8, i % 2, 2), tie)
        lane.close()
        pool.close()

    programs: dict[int, Callable] = {}
    session(200)
    gc.collect()
    threads_before, memory_before = threads(), resident_mib()
    for _ in range(20):
        session(150)
    gc.collect()
    assert threads() == threads_before
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
