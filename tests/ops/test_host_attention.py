"""start, join, store and fetch in jitted programs: order, overlap and donation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import DTYPES, TOLERANCE, Case, make_case, relative_error
from tests.ops.host_programs import REFUSED, append_new, hdr, make_lane, pad_rows, start_and_join

NUM_LAYERS = 3


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

    x = tie = jnp.ones((256, 256))
    jax.block_until_ready(work(x))
    lane.set_plan(1, case.lens, case.tables, uses=1)
    before = time.monotonic_ns()
    ticket, tie = begin(case.rows, hdr(1, 1, 2), x)
    # The job ends while the device works on: nobody has joined it.
    while not len(lane.intervals()):
        assert time.monotonic_ns() < before + 60e9
        tie = jax.block_until_ready(work(tie))
    jax.block_until_ready(end(ticket, tie))
    after = time.monotonic_ns()
    (interval,) = lane.intervals()
    assert interval[:3].tolist() == [0, 1, 1]
    assert before <= interval[3] < interval[4] <= after
    assert interval[4] - interval[3] >= 60e6
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
    with pytest.raises(REFUSED, match="channel 1 has all its 2 slots started"):
        jax.block_until_ready(begin(case.rows, hdr(0, 1, 1), tie))
    assert lane.plan_in_use(0)
    with pytest.raises(RuntimeError, match="plan 0 still has 3 joins or stores outstanding"):
        lane.set_plan(0, case.lens, case.tables, uses=1)
    lane.drain(60.0)
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
        *ahead, tie = host_attention.start_fetch(head, k, v, jnp.arange(2), lane=lane.id)
        k, v, _ = host_attention.join_fetch(head, *ahead, tie, lane=lane.id)
        return k, v

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
