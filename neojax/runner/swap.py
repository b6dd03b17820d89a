"""Whole requests change sides under a step's computation: the programs, and when they launch.

A plan's swaps are lists of blocks. A call moves up to `MAX_CHUNK_BLOCKS` of them through some
layers: gather and pack on the device, then copies that run beside XLA's stream (swap out), or the
way back (swap in). The calls are spread evenly over the step's layers, so that each copy has the
computation of the layers around it to hide behind. A swap in is started as far ahead of its join as
the library's ring allows, the first ones before the step's first stage: the device waits at a join.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neojax.kv import host_layout
from neojax.kv.geometry import KVGeometry
from neojax.ops import host_blocks
from neojax.runner.lanes import DeviceState
from neojax.runner.programs import Signature
from neojax.runner.shapes import Shape
from neojax.runner.stages import KV
from neojax.scheduler.plan import Swap
from neojax.scheduler.request import Placement

MAX_CHUNK_BLOCKS = 64
MAX_CALL_BYTES = 32 << 20
"""A call's blocks: enough that a copy runs at the link's speed, few enough that the library's
rings of four such pieces each way are no burden on the device's memory."""

Launch = Callable[[], jax.Array]
"""Makes one call; gives an array that is ready when the device is past it."""


class Due(NamedTuple):
    """A call, and the share of the step's layers after which it is to be made."""

    share: float
    launch: Launch


def chunk_blocks(geometry: KVGeometry, layers_per_program: int) -> int:
    """C: blocks that one call moves through each of its layers."""
    bytes_per_block = geometry.block_bytes // geometry.num_layers * layers_per_program
    return max(1, min(MAX_CHUNK_BLOCKS, MAX_CALL_BYTES // bytes_per_block))


@dataclasses.dataclass(frozen=True, slots=True)
class SwapStages:
    """What a call computes. `packed` is int32[1 + 2C]: n, device blocks, arena blocks."""

    lane: int
    geometry: KVGeometry
    num_layers: int  # G: layers of a call
    num_blocks: int  # C

    def swap_out(
        self, pools: tuple[KV, ...], packed: Int[Array, "M"], layer: Int[Array, ""]
    ) -> tuple[Int[Array, "M"], Int[Array, "1"]]:
        """Blocks of G layers, `layer` the first, to the arena. Returns `packed` for later calls."""
        hdr, device_blocks = self._unpack(packed, layer)
        blocks = jnp.stack(
            [host_layout.pack(kv.k[device_blocks], kv.v[device_blocks]) for kv in pools]
        )
        return packed, host_blocks.swap_out(blocks, hdr, lane=self.lane)

    def start_swap_in(
        self, packed: Int[Array, "M"], layer: Int[Array, ""]
    ) -> tuple[Int[Array, "M"], Int[Array, "1"]]:
        """Begin to bring blocks of G layers from the arena."""
        hdr, _ = self._unpack(packed, layer)
        return packed, host_blocks.start_swap_in(hdr, lane=self.lane, num_layers=self.num_layers)

    def join_swap_in(
        self,
        pools: tuple[KV, ...],
        packed: Int[Array, "M"],
        layer: Int[Array, ""],
        ticket: Int[Array, "1"],
    ) -> tuple[tuple[KV, ...], Int[Array, "1"]]:
        """Put them into the device pools, in place. Returns the ticket too, when they are."""
        g = self.geometry
        hdr, device_blocks = self._unpack(packed, layer)
        elements = host_layout.block_elements(g.block_size, g.num_kv_heads, g.head_dim)
        like = jax.ShapeDtypeStruct((self.num_layers, self.num_blocks, elements), g.dtype)
        blocks = host_blocks.join_swap_in(ticket, hdr, lane=self.lane, like=like)
        # Beyond the last block of the pool: dropped.
        is_padding = jnp.arange(self.num_blocks, dtype=jnp.int32) >= packed[0]
        to = jnp.where(is_padding, pools[0].k.shape[0], device_blocks)
        pools = tuple(self._put(kv, to, x) for kv, x in zip(pools, blocks, strict=True))
        return pools, ticket

    def _put(self, kv: KV, to: Int[Array, "C"], blocks: Float[Array, "C E"]) -> KV:
        g = self.geometry
        new = host_layout.unpack(blocks, g.block_size, g.num_kv_heads, g.head_dim)
        return KV(*(pool.at[to].set(x, mode="drop") for pool, x in zip(kv, new, strict=True)))

    def _unpack(
        self, packed: Int[Array, "M"], layer: Int[Array, ""]
    ) -> tuple[Int[Array, "H"], Int[Array, "C"]]:
        device_blocks, host_ids = jnp.split(packed[1:], 2)
        return jnp.concatenate([layer[None], packed[:1], host_ids]), device_blocks


class Swapper:
    """Launches the swaps of a plan."""

    def __init__(
        self, state: DeviceState, geometry: KVGeometry, lane: int, layers_per_program: int
    ) -> None:
        self._state = state
        self._num_layers = geometry.num_layers
        self._block_size = geometry.block_size
        self._group = layers_per_program
        self._chunk = chunk_blocks(geometry, layers_per_program)
        stages = SwapStages(lane, geometry, self._group, self._chunk)
        self._swap_out = jax.jit(stages.swap_out)
        self._start_swap_in = jax.jit(stages.start_swap_in)
        self._join_swap_in = jax.jit(stages.join_swap_in, donate_argnums=0)

    def launches(self, swaps: Sequence[Swap]) -> list[Due]:
        """The calls of a plan's swaps, in the order in which they must be made."""
        out = self._packed([s for s in swaps if s.placement_to is Placement.HOST])
        into = self._packed([s for s in swaps if s.placement_to is Placement.DEVICE])
        # Stable: calls of one direction stay in their order.
        return sorted([*self._swaps_out(out), *self._swaps_in(into)], key=lambda due: due.share)

    def empty_launches(self) -> list[Launch]:
        """One call of every program for each group of layers, without a block."""
        empty = np.zeros(1 + 2 * self._chunk, np.int32)
        return [due.launch for due in (*self._swaps_out([empty]), *self._swaps_in([empty]))]

    def signatures(self, pools: tuple[KV, ...]) -> Iterator[Signature]:
        """The programs, and what they are called with. pools: of all layers, or their shapes."""
        shape = Shape(0, 0)
        pools = pools[: self._group]
        packed = np.zeros(1 + 2 * self._chunk, np.int32)
        ticket = jax.ShapeDtypeStruct((1,), jnp.int32)
        layer = self._state.layer_ids[0]
        yield Signature("swap_out", shape, self._swap_out, (pools, packed, layer))
        yield Signature("start_swap_in", shape, self._start_swap_in, (packed, layer))
        yield Signature("join_swap_in", shape, self._join_swap_in, (pools, packed, layer, ticket))

    def _packed(self, swaps: Sequence[Swap]) -> list[np.ndarray]:
        """Block lists of swaps in one direction, cut into calls."""
        pairs = []  # device block, arena block
        for swap in swaps:
            n = -(-swap.num_tokens // self._block_size)
            sides = (swap.source_blocks[:n], swap.target_blocks[:n])
            if swap.placement_to is Placement.DEVICE:
                sides = sides[::-1]
            pairs += zip(*sides, strict=True)
        chunks = []
        for first in range(0, len(pairs), self._chunk):
            some = pairs[first : first + self._chunk]
            packed = np.zeros(1 + 2 * self._chunk, np.int32)
            packed[0] = len(some)
            packed[1:].reshape(2, -1)[:, : len(some)] = np.transpose(some)
            chunks.append(packed)
        return chunks

    def _calls(self, chunks: Sequence[np.ndarray]) -> Iterator[tuple[int, list[Any]]]:
        """(first layer, metadata in a cell that the first call leaves on the device)."""
        cells: list[list[Any]] = [[chunk] for chunk in chunks]
        for first in range(0, self._num_layers, self._group):
            for cell in cells:
                yield first, cell

    def _swaps_out(self, chunks: Sequence[np.ndarray]) -> list[Due]:
        def launch(first: int, cell: list[Any]) -> jax.Array:
            pools = tuple(self._state.pools[first : first + self._group])
            cell[0], done = self._swap_out(pools, cell[0], self._state.layer_ids[first])
            return done

        calls = list(self._calls(chunks))
        # None before the first layer: the step's first host job would wait for it.
        return [
            Due((i + 1) / len(calls), functools.partial(launch, *call))
            for i, call in enumerate(calls)
        ]

    def _swaps_in(self, chunks: Sequence[np.ndarray]) -> list[Due]:
        tickets: list[jax.Array] = []

        def start(first: int, cell: list[Any]) -> jax.Array:
            cell[0], ticket = self._start_swap_in(cell[0], self._state.layer_ids[first])
            tickets.append(ticket)
            return ticket

        def join(first: int, cell: list[Any]) -> jax.Array:
            group = slice(first, first + self._group)
            self._state.pools[group], done = self._join_swap_in(
                tuple(self._state.pools[group]),
                cell[0],
                self._state.layer_ids[first],
                tickets.pop(0),
            )
            return done

        calls = list(self._calls(chunks))
        starts = [functools.partial(start, *call) for call in calls]
        ahead = host_blocks.MAX_STARTED
        launches = [Due(0.0, launch) for launch in starts[:ahead]]
        for i, call in enumerate(calls):
            share = (i + 1) / len(calls)
            launches.append(Due(share, functools.partial(join, *call)))
            # Its piece of the ring is free now.
            launches += [Due(share, launch) for launch in starts[ahead + i : ahead + i + 1]]
        return launches


class Spread:
    """Makes calls as a step's layers are launched, the last of them with its last layer."""

    def __init__(self, launches: Sequence[Due], num_layers: int) -> None:
        self.done: list[jax.Array] = []  # of the calls made so far
        self._launches = launches
        self._num_layers = num_layers

    def __call__(self, layer: int) -> None:
        """Everything up to `layer`, -1 for nothing yet, has been launched: make what is due."""
        share = (layer + 1) / self._num_layers
        for due in self._launches[len(self.done) :]:
            if due.share > share:
                break
            self.done.append(due.launch())


def spread(swapper: Swapper | None, swaps: Sequence[Swap], num_layers: int) -> Spread:
    """A step's swaps over its layers. ValueError where there is no host pool to swap with."""
    if not swaps:
        return Spread([], num_layers)
    if swapper is None:
        raise ValueError("the plan has swaps, and this engine has no host KV memory")
    return Spread(swapper.launches(swaps), num_layers)
