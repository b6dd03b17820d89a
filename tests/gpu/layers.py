"""Layers of a model with random weights, in programs with and without the host lane.

Weights of eight layers are used in turn, so that none is in a cache when it is read.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention

DISTINCT = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's layer."""

    num_layers: int = 32
    width: int = 4096
    ffn: int = 14336
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def row_width(self) -> int:
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


TINY = Shape(4, 64, 128, 4, 2, 16)


class Model:
    """Weights, and the linear stage: second half of a layer, first half of the next."""

    def __init__(self, shape: Shape) -> None:
        self.shape = s = shape

        @jax.jit
        def make(key: jax.Array) -> tuple[jax.Array, ...]:
            sizes = (
                (s.width, s.row_width),
                (s.q_width, s.width),
                (s.width, 2 * s.ffn),
                (s.ffn, s.width),
            )
            keys = jax.random.split(key, len(sizes))
            return tuple(
                jax.random.normal(k, size, jnp.bfloat16) * jnp.bfloat16(0.02)
                for k, size in zip(keys, sizes, strict=True)
            )

        distinct = [make(jax.random.key(i)) for i in range(min(DISTINCT, s.num_layers))]
        self.layers = [distinct[i % len(distinct)] for i in range(s.num_layers)]

    def linear(self, p: tuple[jax.Array, ...], x: jax.Array, a: jax.Array) -> tuple[jax.Array, ...]:
        """x [T, D], attended a [T, N*H] -> x, rows [T, (N+2K)*H]."""
        qkv, o, gate_up, down = p
        x = x + jnp.dot(a, o)
        gate, up = jnp.split(jnp.dot(norm(x), gate_up), 2, axis=1)
        x = x + jnp.dot(jax.nn.silu(gate) * up, down)
        return x, jnp.dot(norm(x), qkv)

    def start(
        self, rows: jax.Array, hdr: jax.Array, tie: jax.Array, lane: int, channel: int
    ) -> tuple:
        return host_attention.start(rows, hdr, tie, lane=lane, channel=channel)

    def join(self, ticket: jax.Array, tie: jax.Array, lane: int, channel: int, rows: int) -> tuple:
        return host_attention.join(
            ticket, tie, lane=lane, channel=channel, num_rows=rows,
            num_q_heads=self.shape.num_q_heads, head_dim=self.shape.head_dim, dtype=jnp.bfloat16,
        )  # fmt: skip


def norm(x: jax.Array) -> jax.Array:
    """RMS norm without a weight."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + np.float32(1e-5))).astype(
        x.dtype
    )


class Host:
    """An arena of a few layers, used in turn, and a lane over it."""

    def __init__(
        self, shape: Shape, rows: int, context: int, *, channels: int, chunks: int = 0
    ) -> None:
        blocks = rows * -(-context // 16)
        # Enough that no layer is left in a cache; not so much that touching it takes long.
        layer_bytes = blocks * 16 * 2 * shape.num_kv_heads * shape.head_dim * 2
        self.num_layers = int(min(shape.num_layers, max(2, (4 << 30) // max(layer_bytes, 1))))
        self.pool = native.WorkerPool()
        self.cache = native.HostKVCache(
            self.num_layers, blocks, shape.num_kv_heads, shape.head_dim, 16, "bfloat16", self.pool
        )
        self.lane = native.HostLane(
            self.cache, self.pool, shape.num_q_heads, channels, rows, shape.head_dim**-0.5,
            cuda_device=host_attention.cuda_device(),
        )  # fmt: skip
        self.tables = np.arange(blocks, dtype=np.int32).reshape(rows, -1)
        self.lens = np.full(rows, context, np.int32)
        self.rows = rows
        self.num_calls = shape.num_layers

    def hdrs(self, n: int) -> list[jax.Array]:
        """One a layer of the model."""
        return [
            jnp.asarray([0, layer % self.num_layers, n], jnp.int32)
            for layer in range(self.num_calls)
        ]

    def arm(self) -> None:
        self.lane.set_plan(0, self.lens, self.tables, uses=1_000_000)

    def busy(self) -> tuple[int, int]:
        counters = self.lane.counters()
        return counters["busy_ns"], counters["jobs"]

    def close(self) -> None:
        assert self.lane.error() is None, self.lane.error()
        self.lane.drain(20)
        self.lane.close()
        self.pool.close()


def time_steps(step: Callable[[], object], repeats: int = 12) -> tuple[float, float]:
    """Microseconds of a step, and of its launches alone. Three steps warm up."""
    for _ in range(3):
        jax.block_until_ready(step())
    whole, launches = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        result = step()
        launched = time.perf_counter()
        jax.block_until_ready(result)
        whole.append(time.perf_counter() - began)
        launches.append(launched - began)
    return statistics.median(whole) * 1e6, statistics.median(launches) * 1e6


class SubBatches:
    """PIPELINED programs of one layer: b0 on the device alone, b1 attended by the host."""

    def __init__(self, model: Model, host: Host, b0: int, n: int) -> None:
        self.model, self.host = model, host
        lane, rows, s = host.lane.id, host.rows, model.shape

        def b0_stage(p: tuple, x: jax.Array, a: jax.Array) -> tuple:
            x, qkv = model.linear(p, x, a)
            return x * jnp.bfloat16(0.5), qkv[:, : s.q_width]

        def b1_stage(p: tuple, x: jax.Array, hdr: jax.Array, ticket: jax.Array) -> tuple:
            out, x = model.join(ticket, x, lane, 0, rows)
            x, qkv = model.linear(p, x, out)
            ticket, x = model.start(qkv, hdr, x * jnp.bfloat16(0.5), lane, 0)
            return x, ticket

        def enter(x: jax.Array, hdr: jax.Array) -> tuple:
            qkv = jnp.zeros((rows, s.row_width), x.dtype) + x[:, :1]
            ticket, x = model.start(qkv, hdr, x, lane, 0)
            return x, ticket

        def leave(x: jax.Array, ticket: jax.Array) -> jax.Array:
            out, x = model.join(ticket, x, lane, 0, rows)
            return x + out[:, :1]

        self.b0_stage = jax.jit(b0_stage, donate_argnums=(1, 2))
        self.b1_stage = jax.jit(b1_stage, donate_argnums=1)
        self.enter = jax.jit(enter, donate_argnums=0)
        self.leave = jax.jit(leave, donate_argnums=0)
        self.x0 = jnp.ones((b0, s.width), jnp.bfloat16)
        self.a0 = jnp.ones((b0, s.q_width), jnp.bfloat16)
        self.x1 = jnp.ones((rows, s.width), jnp.bfloat16)
        self.a1 = jnp.ones((rows, s.q_width), jnp.bfloat16)
        self.hdrs = host.hdrs(n)

    def only_b0(self) -> jax.Array:
        for p in self.model.layers:
            self.x0, self.a0 = self.b0_stage(p, self.x0, self.a0)
        return self.x0

    def only_b1(self) -> jax.Array:
        """b1's linear stages without start and join."""
        for p in self.model.layers:
            self.x1, self.a1 = self.b0_stage(p, self.x1, self.a1)
        return self.x1

    def b1_with_calls(self) -> jax.Array:
        self.x1, ticket = self.enter(self.x1, self.hdrs[0])
        for layer, p in enumerate(self.model.layers[1:], 1):
            self.x1, ticket = self.b1_stage(p, self.x1, self.hdrs[layer], ticket)
        self.x1 = self.leave(self.x1, ticket)
        return self.x1

    def both(self) -> tuple[jax.Array, jax.Array]:
        layers = self.model.layers
        self.x1, ticket = self.enter(self.x1, self.hdrs[0])
        for layer, p in enumerate(layers):
            self.x0, self.a0 = self.b0_stage(p, self.x0, self.a0)
            if layer + 1 < len(layers):
                self.x1, ticket = self.b1_stage(
                    layers[layer + 1], self.x1, self.hdrs[layer + 1], ticket
                )
        self.x1 = self.leave(self.x1, ticket)
        return self.x0, self.x1
