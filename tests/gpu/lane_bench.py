"""What the host lane costs and hides on a GPU, with Llama-3.1-8B's layers and random weights:

    PYTHONPATH=. python -m tests.gpu.lane_bench [--section hop pipelined chunks]

`--tiny` runs it on small shapes, to see that it works. Each figure is the median of several
steps. `pipelined` takes `--budget` seconds at most, the grid's points in an order that shows its
corners first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from neojax.environment import device_environment

os.environ.update(device_environment(0.6))

import jax
import jax.numpy as jnp
import numpy as np

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention
from tests.gpu.layers import TINY, Host, Model, Shape, SubBatches, time_steps

SECTIONS = ("hop", "pipelined", "chunks")


def hop_us(model: Model, programs: SubBatches) -> float:
    """One job in flight and no host rows: what a step costs with the calls, less without."""
    layers = model.shape.num_layers
    without, _ = time_steps(programs.only_b1)
    with_calls, _ = time_steps(programs.b1_with_calls)
    # `without` has a linear stage more than `with_calls`, which enters and leaves instead.
    return (with_calls - without * (layers - 1) / layers) / layers


def hop(model: Model) -> dict[int, float]:
    """Microseconds of a hop, by rows."""
    found = {}
    for rows in (8, 64):
        host = Host(model.shape, rows, 16, channels=1)
        host.arm()
        found[rows] = hop_us(model, SubBatches(model, host, 8, 0))
        print(
            f"hop, {rows} rows, one in flight: {found[rows]:.1f} us; ties not in place "
            f"{host.lane.counters()['tie_copies']}",
            flush=True,
        )
        host.close()
    return found


GRID = [
    (b0, rows, context)
    for context, rows, b0s in (
        (512, 32, (256, 1024)),
        (2048, 8, (256, 1024)),
        (512, 8, (64, 256, 1024, 2048)),
        (512, 64, (1024, 2048)),
        (2048, 32, (1024, 2048)),
        (2048, 64, (2048,)),
        (512, 32, (64, 2048)),
        (2048, 8, (64, 2048)),
        (512, 64, (64, 256)),
        (2048, 32, (64, 256)),
        (2048, 64, (64, 256, 1024)),
    )
    for b0 in b0s
]
"""b0 tokens 64 to 2048, 8 to 64 host rows, contexts of 512 and 2048."""


def pipelined(model: Model, budget_s: float) -> list[dict[str, float]]:
    """Layer time against two queues: b0's stage beside the host and its hop, then b1's."""
    layers = model.shape.num_layers
    deadline = time.monotonic() + budget_s
    hops: dict[int, float] = {}
    points = []
    for b0, rows, context in [(16, 4, 64)] if model.shape == TINY else GRID:
        if time.monotonic() > deadline:
            break
        host = Host(model.shape, rows, context, channels=1)
        host.arm()
        if rows not in hops:
            hops[rows] = hop_us(model, SubBatches(model, host, b0, 0))
        programs = SubBatches(model, host, b0, rows)
        gpu0 = time_steps(programs.only_b0, 5)[0] / layers
        gpu1 = time_steps(programs.only_b1, 5)[0] / layers
        time_steps(programs.both, 1)
        before = host.busy()
        step, launch = (value / layers for value in time_steps(programs.both, 8))
        after = host.busy()
        cpu = (after[0] - before[0]) / max(after[1] - before[1], 1) / 1e3
        ideal = max(gpu0, cpu + hops[rows]) + gpu1
        gbps = rows * context * 2 * model.shape.num_kv_heads * model.shape.head_dim * 2 / cpu / 1e3
        hidden = max(0.0, 1 - max(0.0, step - gpu0 - gpu1) / cpu)
        points.append(
            {
                "b0": b0, "rows": rows, "context": context, "us": step, "predicted_us": ideal,
                "ratio": step / ideal, "hidden": hidden, "b0_us": gpu0, "b1_us": gpu1,
                "host_us": cpu, "hop_us": hops[rows],
            }
        )  # fmt: skip
        print(
            f"pipelined, b0 {b0}, {rows} host rows of {context}: {step:.0f} us a layer, two queues "
            f"{ideal:.0f} ({step / ideal:.3f}x), {100 * hidden:.0f} % of the host hidden; "
            f"b0 {gpu0:.0f}, host {cpu:.0f} ({gbps:.0f} GB/s), hop {hops[rows]:.0f}, "
            f"b1 {gpu1:.0f}, launches {launch:.0f}",
            flush=True,
        )
        host.close()
    return points


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
        k, v, tie = host_attention.start_fetch(hdr, k, v, jnp.zeros(1), lane=lane)
        k, v, _ = host_attention.join_fetch(hdr, k, v, tie, lane=lane)
        return k, v

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
    parser.add_argument("--json", type=Path, help="also write what the sections found here")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for `pipelined`")
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
    found = {}
    for name in args.section:
        began = time.monotonic()
        if name == "pipelined":
            found[name] = pipelined(model, args.budget)
        else:
            found[name] = {"hop": hop, "chunks": chunks}[name](model)
        print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
