"""A lane with sequences in its arena, and the steps of a small model that attends through it.

Shapes are odd on purpose. Rows of a layer depend on what the layer before attended, so that an
early, late or swapped result shows in everything after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.native.reference import DTYPES

NUM_LAYERS = 9
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 24
NUM_HEADS = NUM_Q_HEADS + 2 * NUM_KV_HEADS
WIDTH = 40  # of activations
DEVICE_ROWS = 13
BUCKETS = (5, 3)  # rows of each channel's programs
LENS = ((33, 1, 200, 17), (70, 16, 5))  # context of its sequences; a bucket's other rows pad it
DELAYS_US = (0, 300, 5000)
SCALE = HEAD_DIM**-0.5


@dataclasses.dataclass
class Rig:
    """An arena with sequences in it, and their k, v [S, K, H] of each layer in numpy."""

    lane: native.HostLane
    cache: native.HostKVCache
    pool: native.WorkerPool
    dtype: np.dtype
    tables: list[np.ndarray]  # [B, W] of each channel
    k: list[list[list[np.ndarray]]]  # [channel][layer][sequence]
    v: list[list[list[np.ndarray]]]

    def close(self) -> None:
        self.lane.close()
        self.pool.close()


def make_rig(
    dtype: str,
    *,
    max_rows: int = 5,
    staging_bytes: int = 1 << 16,
    memory_operations: bool = True,
) -> Rig:
    """Sequences of LENS, less their newest token, in shuffled blocks."""
    rng = np.random.default_rng(7)
    pool = native.WorkerPool()
    cache = native.HostKVCache(NUM_LAYERS, 100, NUM_KV_HEADS, HEAD_DIM, 16, dtype, pool)
    lane = native.HostLane(
        cache, pool, NUM_Q_HEADS, 2, max_rows, SCALE,
        cuda_device=host_attention.cuda_device(), staging_bytes=staging_bytes, watchdog_s=20,
        memory_operations=memory_operations,
    )  # fmt: skip
    blocks = iter(rng.permutation(100).astype(np.int32))
    rig = Rig(lane, cache, pool, DTYPES[dtype], [], [], [])
    for lens in LENS:
        rig.tables.append(np.array([[next(blocks) for _ in range(14)] for _ in lens], np.int32))
        for kv in (rig.k, rig.v):
            kv.append(
                [
                    [
                        rng.standard_normal((n - 1, NUM_KV_HEADS, HEAD_DIM)).astype(rig.dtype)
                        for n in lens
                    ]
                    for _ in range(NUM_LAYERS)
                ]
            )
    return rig


def fill(rig: Rig) -> None:
    """Write the sequences' numpy k, v to the arena."""
    rig.cache.fill(float("nan"))
    for channel, tables in enumerate(rig.tables):
        for layer in range(NUM_LAYERS):
            for row, table in enumerate(tables):
                rig.cache.write(
                    layer, table, 0, rig.k[channel][layer][row], rig.v[channel][layer][row]
                )


class Stages:
    """The programs of a step: two sub-batches' host rows, and device rows in between."""

    def __init__(self, rig: Rig) -> None:
        rng = np.random.default_rng(3)
        self.dtype = rig.dtype
        self.into = jnp.asarray(
            rng.standard_normal((WIDTH, NUM_HEADS * HEAD_DIM)) * 0.3, self.dtype
        )
        self.back = jnp.asarray(
            rng.standard_normal((NUM_Q_HEADS * HEAD_DIM, WIDTH)) * 0.3, self.dtype
        )
        self.lane = rig.lane.id

    def enter(
        self, x: jax.Array, h: jax.Array, hdr: jax.Array, channel: int
    ) -> tuple[jax.Array, ...]:
        """x [DEVICE_ROWS, WIDTH] is the tie, cut so that it is a slice; h the host rows."""
        rows = jnp.dot(h, self.into)
        ticket, tie = host_attention.start(rows, hdr, x[:7], lane=self.lane, channel=channel)
        return jnp.concatenate([tie, x[7:]]), rows, ticket

    def leave(
        self, x: jax.Array, h: jax.Array, ticket: jax.Array, channel: int
    ) -> tuple[jax.Array, ...]:
        out, tie = host_attention.join(
            ticket, x[:7], lane=self.lane, channel=channel, num_rows=len(h),
            num_q_heads=NUM_Q_HEADS, head_dim=HEAD_DIM, dtype=h.dtype,
        )  # fmt: skip
        x = jnp.concatenate([tie, x[7:]])
        return x, jnp.tanh(h + jnp.dot(out, self.back)), out

    def work(self, x: jax.Array) -> jax.Array:
        """The device rows' stage; exact in float32."""
        return x * np.float32(0.5) + np.float32(0.25)

    def step(self, x: jax.Array, hs: tuple[jax.Array, ...], hdrs: jax.Array) -> tuple:
        """Everything in one program: order is up to the ties."""
        seen: list[tuple] = []
        tickets: list[jax.Array] = []
        hs = list(hs)
        for layer in range(NUM_LAYERS):
            for channel in (0, 1):
                x, rows, ticket = self.enter(x, hs[channel], hdrs[layer, channel], channel)
                tickets.append(ticket)
                seen.append(rows)
            x = self.work(x)
            for channel in (0, 1):
                x, hs[channel], out = self.leave(
                    x, hs[channel], tickets[2 * layer + channel], channel
                )
                seen.append(out)
        return x, tuple(hs), seen


def launch_one_program(stages: Stages) -> Callable:
    """step(x, hs, hdrs [L, 2, 3]) -> (x, hs, seen) by one program."""
    return jax.jit(stages.step, donate_argnums=(0, 1))


def launch_pipelined(stages: Stages) -> Callable:
    """The same by programs of a layer each, the sub-batches half a layer apart."""
    enter = jax.jit(stages.enter, static_argnums=3, donate_argnums=0)
    leave = jax.jit(stages.leave, static_argnums=3, donate_argnums=(0, 1))
    work = jax.jit(stages.work, donate_argnums=0)

    def step(x: jax.Array, hs: tuple[jax.Array, ...], hdrs: jax.Array) -> tuple:
        at = [[hdrs[layer, channel] for channel in (0, 1)] for layer in range(NUM_LAYERS)]
        hs, seen = list(hs), []
        rows, outs = {}, {}
        x, rows[0, 0], ticket0 = enter(x, hs[0], at[0][0], 0)
        ticket1 = None
        for layer in range(NUM_LAYERS):
            x = work(x)
            if ticket1 is not None:
                x, hs[1], outs[layer - 1, 1] = leave(x, hs[1], ticket1, 1)
            x, rows[layer, 1], ticket1 = enter(x, hs[1], at[layer][1], 1)
            x, hs[0], outs[layer, 0] = leave(x, hs[0], ticket0, 0)
            if layer + 1 < NUM_LAYERS:
                x, rows[layer + 1, 0], ticket0 = enter(x, hs[0], at[layer + 1][0], 0)
        x, hs[1], outs[NUM_LAYERS - 1, 1] = leave(x, hs[1], ticket1, 1)
        for layer in range(NUM_LAYERS):
            seen += [rows[layer, 0], rows[layer, 1], outs[layer, 0], outs[layer, 1]]
        return x, tuple(hs), seen

    return step


def run_steps(rig: Rig, launch: Callable, num_steps: int) -> list[np.ndarray]:
    """What every layer of every step saw; nothing waits between the steps."""
    stages = Stages(rig)
    step = launch(stages)
    rng = np.random.default_rng(11)
    x = jnp.asarray(np.arange(DEVICE_ROWS * WIDTH).reshape(DEVICE_ROWS, WIDTH) / 256, np.float32)
    hs = tuple(jnp.asarray(rng.standard_normal((n, WIDTH)), stages.dtype) for n in BUCKETS)
    # A warm-up with no host rows: a turn of the slots, no work.
    x, hs, seen = step(x, hs, jnp.zeros((NUM_LAYERS, 2, 3), jnp.int32))
    found = [x * 1, *(h * 1 for h in hs)]
    for index in range(num_steps):
        hdrs = np.zeros((NUM_LAYERS, 2, 3), np.int32)
        for channel, lens in enumerate(LENS):
            plan = 2 * index + channel
            rig.lane.set_plan(
                plan, np.array(lens, np.int32) + index, rig.tables[channel], uses=NUM_LAYERS
            )
            hdrs[:, channel, 0], hdrs[:, channel, 2] = plan, len(lens)
        hdrs[:, :, 1] = np.arange(NUM_LAYERS)[:, None]
        x, hs, seen = step(x, hs, jnp.asarray(hdrs))
        found += [*seen, x * 1]
    return [np.asarray(array) for array in found]
