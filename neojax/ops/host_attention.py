"""Host attention inside jitted programs: `start` a job in one program, `join` it in a later one.

The same program text runs on the CPU and the CUDA platform; the lane must be made for the one in
use (`cuda_device`).

Decides how the native library's FFI targets are called; knows neither scheduling nor models.
A `tie` is an activation that passes through a call in place and so keeps the call alive and
ordered: what is computed from it comes after. Never has_side_effect, which would cost the fast
dispatch path.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Float, Int32, Shaped, UInt


HEADER_BYTES = 64
"""Of a message: what is before its rows."""


def message(
    rows: Float[Array, "B C"], hdr: Int32[Array, "3"], *riders: Float[Array, "..."]
) -> UInt[Array, "M"]:
    """All that starts a job, in one array: one kernel writes and one copy moves it.

    By bits, as unsigned integers of the rows' size: no arithmetic may touch the header's.

    Args:
      rows, hdr: as for `start`.
      riders: arrays of the rows' type that ride behind them; no business of the lane.
    """
    unsigned = jnp.uint32 if rows.dtype.itemsize == 4 else jnp.uint16
    # Computed word by word: to reinterpret the header would be a kernel of its own.
    pieces = 4 // rows.dtype.itemsize  # of a word, the lowest first
    index = jnp.arange(HEADER_BYTES // rows.dtype.itemsize, dtype=jnp.int32)
    words = sum(jnp.where(index // pieces == i, hdr[i], 0) for i in range(3))
    shifts = index % pieces * (8 * rows.dtype.itemsize)
    header = jax.lax.shift_right_logical(words, shifts).astype(unsigned)
    bits = [jax.lax.bitcast_convert_type(a, unsigned).reshape(-1) for a in (rows, *riders)]
    return jnp.concatenate([header, *bits])


def last_rider(
    message: UInt[Array, "M"], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "..."]:
    """The last array that rides in a message."""
    bits = message[len(message) - math.prod(shape) :].reshape(shape)
    return jax.lax.bitcast_convert_type(bits, dtype)


def start(
    rows: Float[Array, "B C"],
    hdr: Int32[Array, "3"],
    tie: Shaped[Array, "..."],
    *,
    lane: int,
    channel: int,
) -> tuple[Int32[Array, "1"], Shaped[Array, "..."]]:
    """Queues host attention of the first hdr[2] rows and returns at once.

    Args:
      rows: [B, (N+2K)*H], q|k|v of each sequence after rope; float32, bfloat16 or float16.
      hdr: (plan, layer, n); n = 0 is no work, but still a turn of the channel's slots.
      lane: `HostLane.id`.
      channel: below the lane's num_channels; at most two of its starts may await their join.

    Returns:
      The ticket for `join`, and the tie.
    """
    call = jax.ffi.ffi_call("neojax.start.v2", (_TICKET, _like(tie)), input_output_aliases={1: 1})
    ticket, tie = call(
        message(rows, hdr),
        tie,
        lane=np.int64(lane),
        channel=np.int64(channel),
        rows=np.int64(len(rows)),
        dtype=rows.dtype.name,
    )
    return ticket, tie


def exchange(
    message: UInt[Array, "M"],
    ticket: Int32[Array, "1"],
    *,
    lane: int,
    channel: int,
    num_rows: int,
    num_q_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B NH"], Int32[Array, "1"]]:
    """A start and the join of the channel's oldest job in one call.

    It needs no tie where the rows come of what the last exchange gave, and what it gives is used:
    that is an order. A stream of kernels is cut once instead of twice.

    Args:
      message: of the job that starts: num_rows rows of dtype, what comes back likewise.
      ticket: of the job to join, of as many rows.

    Returns:
      out [B, N*H] as `join` gives it, and the ticket of the job that started.
    """
    out = jax.ShapeDtypeStruct((num_rows, num_q_heads * head_dim), dtype)
    call = jax.ffi.ffi_call("neojax.exchange.v1", (out, _TICKET), input_output_aliases={1: 1})
    attended, ticket = call(
        message,
        ticket,
        lane=np.int64(lane),
        channel=np.int64(channel),
        dtype=jnp.dtype(dtype).name,
    )
    return attended, ticket


def join(
    ticket: Int32[Array, "1"],
    tie: Shaped[Array, "..."],
    *,
    lane: int,
    channel: int,
    num_rows: int,
    num_q_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B NH"], Shaped[Array, "..."]]:
    """Waits for the channel's oldest job.

    Args:
      ticket: what `start` or `exchange` returned.
      num_rows: B of the rows given to `start`.
      dtype: that of the rows.

    Returns:
      out [B, N*H], zero in rows from hdr[2] on, and the tie.
    """
    out = jax.ShapeDtypeStruct((num_rows, num_q_heads * head_dim), dtype)
    call = jax.ffi.ffi_call("neojax.join.v1", (out, _like(tie)), input_output_aliases={1: 1})
    attended, tie = call(ticket, tie, lane=np.int64(lane), channel=np.int64(channel))
    return attended, tie


def store(
    rows: Float[Array, "T C"],
    hdr: Int32[Array, "3"],
    tie: Shaped[Array, "..."],
    *,
    lane: int,
) -> tuple[Int32[Array, "1"], Shaped[Array, "..."]]:
    """Writes k, v of prefilled tokens to the arena.

    Args:
      rows: [T, (N+2K)*H]; chunk c of the plan owns num_tokens rows from row_offset on.
      hdr: (plan, layer, number of the plan's chunks that take part).

    Returns:
      A token that must be consumed, int32[1], and the tie.
    """
    call = jax.ffi.ffi_call(
        "neojax.store.v1",
        (_TICKET, _like(tie)),
        input_output_aliases={2: 1},
    )
    done, tie = call(rows, hdr, tie, lane=np.int64(lane))
    return done, tie


def start_fetch(
    hdr: Int32[Array, "3"],
    k_scratch: Float[Array, "S K H"],
    v_scratch: Float[Array, "S K H"],
    tie: Shaped[Array, "..."],
    *,
    lane: int,
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"], Shaped[Array, "..."]]:
    """Begins to copy the earlier tokens of chunked prefills from the arena into scratch, in place.

    Returns at once. Nothing may touch the scratch before `join_fetch`; on a GPU a join is refused
    that gets other memory than the start. Two scratches may wait for theirs; a start that is not
    joined ends with the next into the same scratch.

    Args:
      hdr: (plan, layer, number of the plan's chunks that take part); tokens [0, start) of each
        go to scratch slots from its scratch_slot on. Their stores must be launched before: on a
        GPU what is stored after the start is not waited for.

    Returns:
      The scratch arrays for the join, and the tie.
    """
    return _fetch_call("neojax.start_fetch.v1", hdr, k_scratch, v_scratch, tie, lane)


def join_fetch(
    hdr: Int32[Array, "3"],
    k_scratch: Float[Array, "S K H"],
    v_scratch: Float[Array, "S K H"],
    tie: Shaped[Array, "..."],
    *,
    lane: int,
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"], Shaped[Array, "..."]]:
    """Waits for what was started into this scratch, with the same hdr.

    Returns:
      The scratch arrays, in which slots that no chunk names are as they were, and the tie.
    """
    return _fetch_call("neojax.join_fetch.v1", hdr, k_scratch, v_scratch, tie, lane)


def _fetch_call(
    target: str, hdr: jax.Array, k: jax.Array, v: jax.Array, tie: jax.Array, lane: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    passed = (_like(k), _like(v), _like(tie))
    call = jax.ffi.ffi_call(target, passed, input_output_aliases={1: 0, 2: 1, 3: 2})
    k, v, tie = call(hdr, k, v, tie, lane=np.int64(lane))
    return k, v, tie


_TICKET = jax.ShapeDtypeStruct((1,), jnp.int32)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def cuda_device() -> int | None:
    """What a lane for programs of the default device needs: its CUDA ordinal, None on the CPU."""
    device = jax.devices()[0]
    return device.local_hardware_id if device.platform == "gpu" else None


@functools.cache
def ensure_registered() -> None:
    """Registers the FFI targets and makes one tiny call, compared with numpy. Once a process.

    Raises:
      RuntimeError: this jaxlib refuses the library or the call gives wrong numbers; the text
        says what to do.
    """
    try:
        for name, target in native.registrations().items():
            jax.ffi.register_ffi_target(name, target, platform="cpu")
        for name, target in native.cuda_registrations().items():
            jax.ffi.register_ffi_target(name, target, platform="CUDA")
        error = _self_test()
    except jax.errors.JaxRuntimeError as e:
        raise RuntimeError(_refusal(str(e))) from e
    if error > 1e-5:
        raise RuntimeError(
            f"the host attention's self-test is off by {error:.1e} with the {native.isa()} "
            "kernels; try NEOJAX_CPU_ISA=scalar and report this machine's CPU"
        )


def _self_test() -> float:
    """Largest error of one sequence of two tokens, the second brought by the call.

    On the default device: the platform that will be used.
    """
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 1, 8), np.float32)  # [n, K, H] each
    q = rng.standard_normal((2, 8), np.float32)
    pool = native.WorkerPool(1)
    cache = native.HostKVCache(1, 1, 1, 8, 16, "float32", pool)
    lane = native.HostLane(cache, pool, 2, 1, 1, 1.0, cuda_device=cuda_device(), staging_bytes=0)
    try:
        table = np.zeros((1, 1), np.int32)
        cache.write(0, table[0], 0, k[:1], v[:1])
        lane.set_plan(0, np.array([2], np.int32), table, uses=1)
        rows = np.concatenate([q.ravel(), k[1].ravel(), v[1].ravel()])[None]

        def program(rows: jax.Array, hdr: jax.Array, tie: jax.Array) -> jax.Array:
            ticket, tie = start(rows, hdr, tie, lane=lane.id, channel=0)
            out, tie = join(
                ticket, tie, lane=lane.id, channel=0,
                num_rows=1, num_q_heads=2, head_dim=8, dtype=jnp.float32,
            )  # fmt: skip
            return out + tie

        out = jax.jit(program)(rows, np.array([0, 0, 1], np.int32), np.zeros((), np.float32))
        out = np.asarray(out).reshape(2, 8)
        if (failure := lane.error()) is not None:
            raise RuntimeError(f"the host attention's self-test failed: {failure}")
    finally:
        lane.close()
        pool.close()
    logits = q @ k[:, 0].T  # [N, S]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ v[:, 0]
    return float(np.abs(out - expected).max())


def _refusal(reason: str) -> str:
    built = ".".join(map(str, native.ffi_api_version()))
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    minor = re.search(r"XLA_FFI_API_MINOR\s+(\d+)", header.read_text()) if header.exists() else None
    runtime = f"0.{minor[1]}" if minor else "unknown"
    return (
        f"this jaxlib (of jax {jax.__version__}) refuses the native library: it was built for "
        f"XLA FFI API {built}, jaxlib has {runtime}. A library runs on the same or a newer API: "
        f"install jax >= 0.10.2, or rebuild with `pip install --force-reinstall --no-deps .`. "
        f"XLA says: {reason}"
    )
