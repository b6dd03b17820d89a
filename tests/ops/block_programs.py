"""Programs that move whole blocks, over a lane for the platform in use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.kv import host_layout
from neojax.ops import host_attention, host_blocks
from tests.native.reference import DTYPES

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, NUM_BLOCKS = 5, 3, 24, 9


class Rig:
    """An arena, and programs on G layers' blocks [G, C, p, K, H] of it."""

    def __init__(
        self, dtype: str, block_size: int, num_layers: int = 2, *, memory_operations: bool = True
    ) -> None:
        self.dtype = DTYPES[dtype]
        self.block_size = block_size
        self.num_layers = num_layers
        pool = native.WorkerPool(2)
        self.cache = native.HostKVCache(
            NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM, block_size, dtype, pool
        )
        self.lane = native.HostLane(
            self.cache, pool, NUM_KV_HEADS, 1, 1, 1.0,
            cuda_device=host_attention.cuda_device(), swap_bytes=1 << 20,
            memory_operations=memory_operations,
        )  # fmt: skip

        @jax.jit
        def put(k: jax.Array, v: jax.Array, hdr: jax.Array) -> jax.Array:
            blocks = jnp.stack([host_layout.pack(*kv) for kv in zip(k, v, strict=True)])
            return host_blocks.swap_out(blocks, hdr, lane=self.lane.id)

        @jax.jit
        def start(hdr: jax.Array) -> jax.Array:
            return host_blocks.start_swap_in(hdr, lane=self.lane.id, num_layers=num_layers)

        @jax.jit
        def join(ticket: jax.Array, hdr: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
            elements = host_layout.block_elements(block_size, NUM_KV_HEADS, HEAD_DIM)
            like = jax.ShapeDtypeStruct((num_layers, len(hdr) - 2, elements), self.dtype)
            blocks = host_blocks.join_swap_in(ticket, hdr, lane=self.lane.id, like=like)
            return [host_layout.unpack(b, block_size, NUM_KV_HEADS, HEAD_DIM) for b in blocks]

        self.put, self.start, self.join = put, start, join

    def get(self, hdr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k, v by a swap in that is joined at once."""
        out = self.join(self.start(hdr), hdr)
        k, v = (np.stack([np.asarray(kv[i]) for kv in out]) for i in (0, 1))
        return k, v

    def close(self) -> None:
        self.lane.close()


def check_round_trip(dtype: str, block_size: int, *, memory_operations: bool = True) -> None:
    """Blocks land where attention reads them, nothing else changes, and they come back."""
    rig = Rig(dtype, block_size, memory_operations=memory_operations)
    rig.cache.fill(7.0)
    rng = np.random.default_rng()
    k, v = rng.standard_normal((2, 2, 4, block_size, NUM_KV_HEADS, HEAD_DIM)).astype(rig.dtype)
    ids = [6, 2, 3]
    hdr = np.array([1, 3, *ids, 99], np.int32)  # the fourth block is padding
    jax.block_until_ready(rig.put(k, v, hdr))
    rig.lane.await_swaps_out(rig.lane.num_swaps_out)
    for layer in range(NUM_LAYERS):
        for block in range(NUM_BLOCKS):
            got = rig.cache.read(layer, np.array([block], np.int32), 0, block_size)
            for side, sent in zip(got, (k, v), strict=True):
                if layer in (1, 2) and block in ids:
                    np.testing.assert_array_equal(side, sent[layer - 1, ids.index(block)])
                else:
                    assert (side == 7).all(), (layer, block)
    for side, sent in zip(rig.get(hdr), (k, v), strict=True):
        np.testing.assert_array_equal(side[:, :3], sent[:, :3])
    counters = rig.lane.counters()
    assert counters["blocks_out"] == counters["blocks_in"] == 6
    assert rig.lane.error() is None
    rig.close()


def check_many_in_flight(delay_us: int, *, memory_operations: bool = True) -> None:
    """Far more calls than the rings hold, each swap in launched right behind its swap out."""
    rig = Rig("float32", 16, memory_operations=memory_operations)
    rig.lane.set_delay_us(delay_us)
    rng = np.random.default_rng()
    sent, got = [], []
    tickets: list[tuple[jax.Array, np.ndarray]] = []
    for call in range(40):
        k, v = rng.standard_normal((2, 2, 2, 16, NUM_KV_HEADS, HEAD_DIM)).astype(np.float32)
        # A block has one owner: it is written again only when its reader has been joined.
        ids = np.arange(2) + 2 * (call % host_blocks.MAX_STARTED)
        n = int(rng.integers(0, 3))
        hdr = np.array([call % (NUM_LAYERS - 1), n, *ids], np.int32)
        rig.put(k, v, hdr)
        tickets.append((rig.start(hdr), hdr))
        sent.append((k, v, n))
        if len(tickets) == host_blocks.MAX_STARTED:
            got.append(rig.join(*tickets.pop(0)))
    got += [rig.join(*pair) for pair in tickets]
    for (k, v, n), out in zip(sent, got, strict=True):
        for layer, (k_got, v_got) in enumerate(out):
            np.testing.assert_array_equal(np.asarray(k_got)[:n], k[layer, :n])
            np.testing.assert_array_equal(np.asarray(v_got)[:n], v[layer, :n])
    assert rig.lane.error() is None
    rig.close()
