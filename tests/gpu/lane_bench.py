"""What the host lane costs and hides on a GPU, with Llama-3.1-8B's layers and random weights:

    PYTHONPATH=. python -m tests.gpu.lane_bench [--section hop pipelined rolling chunks]

Weights of eight layers are used in turn, so that none is in a cache when it is read. `--tiny`
runs it on small shapes, to see that it works. Each figure is the median of several steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable

from neojax.environment import device_environment

os.environ.update(device_environment(0.6))

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention

DISTINCT = 8
SECTIONS = ("hop", "pipelined", "rolling", "chunks")


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


def hop(model: Model) -> None:
    """One job in flight, no host rows: with the calls less without them."""
    for rows in (8, 64):
        host = Host(model.shape, rows, 16, channels=1)
        host.arm()
        programs = SubBatches(model, host, 8, 0)
        layers = model.shape.num_layers
        without, launch_without = time_steps(programs.only_b1)
        with_calls, launch_with = time_steps(programs.b1_with_calls)
        # `without` has a linear stage more than `with_calls`, which enters and leaves instead.
        cost = (with_calls - without * (layers - 1) / layers) / layers
        print(
            f"hop, {rows} rows, one in flight: {cost:.1f} us a hop (step {with_calls:.0f} us, "
            f"without calls {without:.0f}); launches {launch_with / layers:.1f} us a layer, "
            f"without {launch_without / layers:.1f}; ties not in place "
            f"{host.lane.counters()['tie_copies']}",
            flush=True,
        )
        host.close()


def pipelined(model: Model) -> None:
    """Layer time against two queues: b0's stage beside the host, then b1's."""
    layers = model.shape.num_layers
    grid = [
        (512, 8, 512),
        (64, 8, 512),
        (512, 48, 512),
        (256, 32, 512),
        (1024, 32, 2048),
        (2048, 64, 512),
    ]
    if model.shape == TINY:
        grid = [(16, 4, 64)]
    for b0, rows, context in grid:
        host = Host(model.shape, rows, context, channels=1)
        host.arm()
        programs = SubBatches(model, host, b0, rows)
        gpu0 = time_steps(programs.only_b0, 5)[0] / layers
        gpu1 = time_steps(programs.only_b1, 5)[0] / layers
        time_steps(programs.both, 1)
        before = host.busy()
        step, launch = (value / layers for value in time_steps(programs.both))
        after = host.busy()
        cpu = (after[0] - before[0]) / max(after[1] - before[1], 1) / 1e3
        ideal = max(gpu0, cpu) + gpu1
        gib = rows * context * 2 * model.shape.num_kv_heads * model.shape.head_dim * 2 / cpu / 1e3
        print(
            f"pipelined, b0 {b0}, {rows} host rows of {context}: {step:.0f} us a layer, two queues "
            f"{ideal:.0f} ({step / ideal:.3f}x); b0 {gpu0:.0f}, host {cpu:.0f} ({gib:.0f} GB/s), "
            f"b1 {gpu1:.0f}, launches {launch:.0f}",
            flush=True,
        )
        host.close()


def rolling(model: Model) -> None:
    """All hops of a step in one program, joined a step later: what a hop costs when many fly."""
    s = model.shape
    grid = [(60, 4, 16, False), (60, 4, 512, True), (60, 4, 1024, True), (14, 2, 16, True)]
    if s == TINY:
        grid = [(6, 2, 16, False), (6, 2, 64, True)]
    for tokens, rows, context, has_work in grid:
        host = Host(s, rows, context, channels=s.num_layers)
        host.arm()
        hdrs = host.hdrs(rows if has_work else 0)
        lane = host.lane.id

        def step(
            params: list, x: jax.Array, group: list, hdrs: list, *, calls: bool,
            lane: int = lane, rows: int = rows, tokens: int = tokens,
        ) -> tuple:  # fmt: skip
            a = jnp.ones((tokens, s.q_width), jnp.bfloat16)
            group, after = list(group), [None] * s.num_layers
            for i, p in enumerate(params):
                y, ticket = group[i]
                if calls:
                    out, x = model.join(ticket, x, lane, i, rows)
                else:
                    out = ticket
                both, qkv = model.linear(p, jnp.concatenate([x, y]), jnp.concatenate([a, out]))
                both = both * jnp.bfloat16(0.5)
                x, y, a = both[:tokens], both[tokens:], qkv[:tokens, : s.q_width]
                j = (i + 1) % s.num_layers
                if calls:
                    ticket, x = model.start(qkv[tokens:], hdrs[j], x, lane, j)
                else:
                    ticket = qkv[tokens:, : s.q_width]
                after[j] = (y, ticket)
            return x, after

        def first(x: jax.Array, hdrs: list, lane: int = lane, rows: int = rows) -> tuple:
            group = []
            for i in range(s.num_layers):
                qkv = jnp.zeros((rows, s.row_width), jnp.bfloat16) + x[:1, :1]
                ticket, x = model.start(qkv, hdrs[i], x, lane, i)
                group.append((jnp.ones((rows, s.width), jnp.bfloat16) * jnp.bfloat16(i), ticket))
            return x, group

        times = {}
        for calls in (False, True):
            program = jax.jit(
                lambda p, x, g, h, calls=calls, step=step: step(p, x, g, h, calls=calls),
                donate_argnums=(1, 2),
            )
            x = jnp.ones((tokens, s.width), jnp.bfloat16)
            if calls:
                x, group = jax.jit(first)(x, hdrs)
            else:
                group = [
                    (jnp.ones((rows, s.width), jnp.bfloat16) * jnp.bfloat16(i),
                     jnp.ones((rows, s.q_width), jnp.bfloat16) * jnp.bfloat16(i))
                    for i in range(s.num_layers)
                ]  # fmt: skip
            state = [x, group]

            def run(state: list = state, program: Callable = program, at: list = hdrs) -> jax.Array:
                state[0], state[1] = program(model.layers, state[0], state[1], at)
                return state[0]

            if calls:
                time_steps(run, 1)
            before = host.busy()
            times[calls] = time_steps(run)
            after = host.busy()
        counters = host.lane.counters()
        per_step = s.num_layers * (after[0] - before[0]) / max(after[1] - before[1], 1) / 1e6
        print(
            f"rolling, {tokens} device rows, {rows} host rows a layer of {context}: "
            f"{times[True][0] / 1e3:.2f} ms a step, without calls {times[False][0] / 1e3:.2f} "
            f"({(times[True][0] - times[False][0]) / s.num_layers:.1f} us a hop); host work "
            f"{per_step if has_work else 0:.2f} ms; launch {times[True][1] / 1e3:.2f} ms; ties not "
            f"in place {counters['tie_copies']} of {2 * counters['starts']}",
            flush=True,
        )
        host.close()


def chunks(model: Model) -> None:
    """Stores and fetches of long prefills: bytes a second to and from the arena."""
    s = model.shape
    tokens = 64 if s == TINY else 4096
    host = Host(s, 1, 2 * tokens, channels=1)
    lane = host.lane.id
    empty = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
    kv_bytes = tokens * 2 * s.num_kv_heads * s.head_dim * 2

    def store(x: jax.Array, rows: jax.Array, hdr: jax.Array) -> tuple:
        done, x = host_attention.store(rows, hdr, x, lane=lane)
        return x, done

    def fetch(hdr: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        return host_attention.fetch(hdr, k, v, lane=lane)

    store = jax.jit(store, donate_argnums=0)
    fetch = jax.jit(fetch, donate_argnums=(1, 2))
    rows = jnp.ones((tokens, s.row_width), jnp.bfloat16)
    x = jnp.ones((8, 8), jnp.bfloat16)
    scratch = [jnp.zeros((tokens, s.num_kv_heads, s.head_dim), jnp.bfloat16) for _ in (0, 1)]
    for n in (1, 0):
        host.lane.set_plan(
            0, *empty, np.array([[0, tokens, tokens, 0]], np.int32), host.tables, uses=1_000_000
        )
        hdrs = host.hdrs(n)

        def stores(hdrs: list = hdrs) -> jax.Array:
            nonlocal x
            for hdr in hdrs:
                x, _ = store(x, rows, hdr)
            return x

        def fetches(hdrs: list = hdrs) -> list:
            for hdr in hdrs:
                scratch[:] = fetch(hdr, *scratch)
            return scratch

        for name, step in (("store", stores), ("fetch", fetches)):
            us = time_steps(step, 5)[0] / s.num_layers
            began = time.perf_counter()
            step()
            host.lane.drain(20)
            drained = (time.perf_counter() - began) * 1e6 / s.num_layers
            host.lane.set_plan(
                0, *empty, np.array([[0, tokens, tokens, 0]], np.int32), host.tables, uses=1_000_000
            )
            rate = f", {kv_bytes / drained / 1e3:.1f} GB/s" if n else ""
            print(
                f"{name} of {tokens if n else 0} tokens ({kv_bytes * n / 1e6:.0f} MB): {us:.0f} us "
                f"a layer on the device, {drained:.0f} until the host is done{rate}",
                flush=True,
            )
        host.lane.drain(20)
    host.close()


def main() -> None:
    """Run the sections named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    host_attention.ensure_registered()
    model = Model(TINY if args.tiny else Shape())
    host = Host(model.shape, 8, 16, channels=1)
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {host.pool.num_threads} host "
        f"threads, {native.isa()} kernels; {host.lane.cuda_report}",
        flush=True,
    )
    host.close()
    for name in args.section:
        began = time.monotonic()
        {"hop": hop, "pipelined": pipelined, "rolling": rolling, "chunks": chunks}[name](model)
        print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
