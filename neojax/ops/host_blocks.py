"""Whole blocks between programs and the arena: the native library's calls, as JAX calls.

As in `host_attention`, the same program text runs on the CPU and the CUDA platform. A block is E
elements in the arena's own order (`kv/host_layout`), so that the host copies bytes; on a GPU they
go to and from pinned memory by copies that no stream of XLA's takes part in.

`hdr` is int32[M], M = 2 + C: the first of G neighbouring layers, n, and C block ids of the arena,
of which the first n count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

MAX_STARTED = 4
"""Swaps in that may be started and not joined: the pieces of the library's ring."""


def swap_out(
    blocks: Float[Array, "G C E"], hdr: Int32[Array, "M"], *, lane: int
) -> Int32[Array, "1"]:
    """Copies n blocks of each layer to the arena.

    Host attention and stores of plans that are set later find them there; those of the plans of
    this step do not wait. Returns a token that must be a result of the program, to keep the call.
    """
    call = jax.ffi.ffi_call("neojax.swap_out.v1", jax.ShapeDtypeStruct((1,), jnp.int32))
    return call(blocks, hdr, lane=np.int64(lane))


def start_swap_in(hdr: Int32[Array, "M"], *, lane: int, num_layers: int) -> Int32[Array, "1"]:
    """Begins to bring n blocks of `num_layers` layers from the arena; returns at once.

    They hold what was stored or swapped out before, and what joined host rows appended. Returns
    the ticket for `join_swap_in`; at most `MAX_STARTED` may await theirs.
    """
    call = jax.ffi.ffi_call("neojax.start_swap_in.v1", jax.ShapeDtypeStruct((1,), jnp.int32))
    return call(hdr, lane=np.int64(lane), layers=np.int64(num_layers))


def join_swap_in(
    ticket: Int32[Array, "1"],
    hdr: Int32[Array, "M"],
    *,
    lane: int,
    like: jax.ShapeDtypeStruct,
) -> Float[Array, "G C E"]:
    """Waits for the oldest swap in that was started, with the same hdr.

    like: shape [G, C, E] and dtype of the result; what lies beyond the first n blocks of a layer
    is arbitrary.
    """
    call = jax.ffi.ffi_call("neojax.join_swap_in.v1", like)
    return call(ticket, hdr, lane=np.int64(lane))
