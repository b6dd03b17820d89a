"""Messages, and exchange: a start and a join in one call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import DTYPES, TOLERANCE, make_case, relative_error
from tests.ops.host_programs import REFUSED, append_new, hdr, make_lane

NUM_SEQS = 3


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_message_holds_every_bit(dtype: str):
    """Headers are subnormal numbers or NaNs where read as floats; rows may hold NaNs too."""
    rng = np.random.default_rng(0)
    bits = np.uint32 if dtype == "float32" else np.uint16
    rows, rider = (
        rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
        for shape in ((3, 40), (2, 5))
    )

    @jax.jit
    def program(rows: jax.Array, head: jax.Array, rider: jax.Array) -> tuple[jax.Array, ...]:
        rows, rider = (jax.lax.bitcast_convert_type(a, dtype) for a in (rows, rider))
        message = host_attention.message(rows, head, rider)
        again = host_attention.last_rider(message, (2, 5), dtype)
        return message, jax.lax.bitcast_convert_type(again, bits)

    head = np.array([3, -1, 0x7FC01234], np.int32)
    message, again = program(rows, head, rider)
    got = np.asarray(message)
    assert got[: 12 // got.itemsize].view(np.int32).tolist() == head.tolist()
    body = got[host_attention.HEADER_BYTES // got.itemsize :]
    np.testing.assert_array_equal(body, np.concatenate([rows.ravel(), rider.ravel()]))
    np.testing.assert_array_equal(again, rider)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_joined_is_the_oldest_start(dtype: str, pool: native.WorkerPool):
    """Two jobs take turns, each joined where the step before started it."""
    case = make_case(pool, [1, 40, 700], dtype=dtype)
    device = host_attention.cuda_device()
    lane = make_lane(case, pool, deep_slots=3, deep_rows=NUM_SEQS, cuda_device=device)
    deep = {"lane": lane.id, "channel": 2}

    @jax.jit
    def begin(rows: jax.Array) -> jax.Array:
        ticket, _ = host_attention.start(rows, jnp.zeros(3, jnp.int32), jnp.zeros(4), **deep)
        return ticket

    @jax.jit
    def step(rows: jax.Array, hdrs: list, tickets: list) -> tuple[list, list]:
        outs, after = [], []
        for head, ticket in zip(hdrs, tickets, strict=True):
            message = host_attention.message(rows, head, jnp.ones((2, 2), rows.dtype))
            out, ticket = host_attention.exchange(
                message, ticket, **deep, num_rows=NUM_SEQS, num_q_heads=case.num_q_heads,
                head_dim=case.cache.head_dim, dtype=rows.dtype,
            )  # fmt: skip
            rows = rows + (out[0, 0] * 0).astype(rows.dtype)  # the next call comes after this one
            outs.append(out)
            after.append(ticket)
        return outs, after

    tickets = [begin(case.rows) for _ in range(2)]
    lane.set_plan(0, case.lens, case.tables, uses=2)
    empty, tickets = step(case.rows, [hdr(0, 1, NUM_SEQS), hdr(0, 1, 1)], tickets)
    full, tickets = step(case.rows, [hdr(0, 1, 0), hdr(0, 1, 0)], tickets)
    np.testing.assert_array_equal(np.stack(empty).astype(np.float32), 0)
    append_new(case)
    expected, _ = case.expected()
    for out, n in zip(full, (NUM_SEQS, 1), strict=True):
        assert relative_error(np.asarray(out)[:n], expected[:n]) <= TOLERANCE[dtype]
        assert not np.asarray(out)[n:].any()
    assert not lane.plan_in_use(0)
    assert lane.counters()["jobs"] == 2
    assert lane.counters()["starts"] == lane.counters()["joins"] + 2
    lane.close()


def test_wrong_calls_name_the_argument(pool: native.WorkerPool):
    case = make_case(pool, [40, 5])
    lane = make_lane(case, pool)

    def refuses(text: str, rows: np.ndarray, num_rows: int, heads: int = 0) -> None:
        message = host_attention.message(jnp.asarray(rows), jnp.asarray(hdr(0, 0, 0)))
        with pytest.raises(REFUSED, match=text):
            jax.block_until_ready(
                host_attention.exchange(
                    message, jnp.zeros(1, jnp.int32), lane=lane.id, channel=0, num_rows=num_rows,
                    num_q_heads=heads or case.num_q_heads, head_dim=64, dtype=jnp.float32,
                )
            )  # fmt: skip

    refuses("message must be uint32 of 1936 elements or more for 3 rows", case.rows, 3)
    refuses(r"out must be .* 384 columns", case.rows, 2, heads=5)
    lane.drain(5)
    lane.close()
