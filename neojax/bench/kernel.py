"""How close host attention comes to the speed of memory.

Every case is timed beside a probe that only reads, in the same arena with the same threads; what
counts is the share of it. Between the two stands a walk: the same tiles in the kernel's order, with
nothing computed. What it loses against the probe is the price of the order, what the kernel loses
against it is that of arithmetic. Needs numpy and the native library; jax and torch are compared
with if they are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from neojax import _cpu_paged_attn as native

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
PROBES = [(streams, ahead) for streams in (1, 2, 4) for ahead in (0, 512, 2048)]
PROBE_BYTES = 4 << 30
# By threads, on the machines that figures are stated for: less, and a run says nothing.
MIN_PROBE_GB_PER_S = {2: 18.0, 16: 120.0}
MEASURE_S = 0.5
NUM_TURNS = 5  # of kernel and walk
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """What one line of the table measures."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_seqs: int
    context: int
    num_threads: int
    isa: str

    @property
    def bytes_per_call(self) -> int:
        """K and V of one layer."""
        tokens = self.num_seqs * self.context
        return 2 * tokens * self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Result:
    """A measured case. Rates are of the median call."""

    case: Case
    gb_per_s: float
    walk_gb_per_s: float
    probe_gb_per_s: float
    us_per_call: float
    us_best: float

    @property
    def share(self) -> float:
        """Of what the probe read."""
        return self.gb_per_s / self.probe_gb_per_s

    @property
    def is_void(self) -> bool:
        """Whether memory gave so little that something else was using it."""
        return self.probe_gb_per_s < MIN_PROBE_GB_PER_S.get(self.case.num_threads, 0.0)


class Arena:
    """A cache of one shape, big enough that no case stays in the processor's caches.

    Unless it has `num_blocks` only: then it is one layer, and sequences share its blocks.
    """

    def __init__(
        self,
        case: Case,
        pool: native.WorkerPool,
        num_bytes: int,
        *,
        num_blocks: int | None = None,
    ) -> None:
        layers = 1 if num_blocks else max(2, num_bytes // case.bytes_per_call)
        num_used = case.num_seqs * -(-case.context // BLOCK_SIZE)
        num_blocks = num_blocks or num_used
        self.pool = pool
        self.cache = native.HostKVCache(
            layers, num_blocks, case.num_kv_heads, case.head_dim, BLOCK_SIZE, case.dtype, pool
        )
        rng = np.random.default_rng(0)
        order = rng.permutation(num_used).astype(np.int32) % np.int32(num_blocks)
        self.tables = order.reshape(case.num_seqs, -1)
        width = (case.num_q_heads + 2 * case.num_kv_heads) * case.head_dim
        self.rows = rng.standard_normal((case.num_seqs, width)).astype(DTYPES[case.dtype])

    def probe(self, isa: str) -> float:
        """Bytes a second that the best of several loops reads."""
        passes = -(-PROBE_BYTES // (self.cache.num_bytes * len(PROBES)))
        seconds = min(
            native.time_read(self.cache, self.pool, streams=streams, ahead=ahead, isa=isa)
            for streams, ahead in PROBES
            for _ in range(passes)
        )
        return self.cache.num_bytes / seconds

    def seconds(
        self, case: Case, num_calls: int, *, asleep: bool = False, read_only: bool = False
    ) -> list[float]:
        """Of each call."""
        return native.time_attend(
            self.cache,
            self.pool,
            self.rows,
            np.full(case.num_seqs, case.context, np.int32),
            self.tables,
            num_q_heads=case.num_q_heads,
            scale=case.head_dim**-0.5,
            num_calls=num_calls,
            asleep=asleep,
            read_only=read_only,
            isa=case.isa,
        )

    def measure(self, case: Case) -> Result:
        """The case between two probes, the better of which counts."""
        probe_isa = max(native.available_isas(), key=native.available_isas().index)
        before = self.probe(probe_isa)
        layers = self.cache.num_layers
        warm = self.seconds(case, min(layers, 4))
        num_calls = int(np.clip(MEASURE_S / min(warm), layers, 20 * layers))
        walks, calls = [], []
        for _ in range(NUM_TURNS):
            walks += self.seconds(case, -(-num_calls // NUM_TURNS), read_only=True)
            calls += self.seconds(case, -(-num_calls // NUM_TURNS))
        median = float(np.median(calls))
        return Result(
            case,
            case.bytes_per_call / median / 1e9,
            case.bytes_per_call / float(np.median(walks)) / 1e9,
            max(before, self.probe(probe_isa)) / 1e9,
            median * 1e6,
            min(calls) * 1e6,
        )


def cases(num_threads: int, isa: str, *, full: bool) -> Iterator[list[Case]]:
    """Groups of cases that share an arena. The first case is the headline, with every kernel."""
    names = native.available_isas()
    for heads, dtype, loads in (
        ((32, 8, 128), "bfloat16", [(16, 1024), (64, 1024), (16, 4096), (1, 32768)]),
        ((32, 32, 128), "bfloat16", [(16, 1024), (1, 32768)]),
        ((28, 4, 128), "bfloat16", [(32, 1024)]),
        ((64, 8, 128), "bfloat16", [(16, 1024)]),
        ((9, 3, 64), "bfloat16", [(64, 1024)]),
        ((32, 8, 128), "float16", [(16, 1024)]),
        ((32, 8, 128), "float32", [(16, 1024)]),
    ):
        for num_seqs, context in loads:
            base = Case(*heads, dtype, num_seqs, context, num_threads, isa)
            headline = (heads, dtype, num_seqs) == ((32, 8, 128), "bfloat16", 16)
            others = names if headline and context == 1024 and full else ()
            yield [
                base,
                *(dataclasses.replace(base, isa=name) for name in reversed(others) if name != isa),
            ]


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def smallest_call(num_threads: int, isa: str) -> dict[str, float]:
    """Microseconds of one sequence of 16 tokens, with threads awake and asleep."""
    case = Case(32, 8, 128, "bfloat16", 1, 16, num_threads, isa)
    pool = native.WorkerPool(num_threads)
    arena = Arena(case, pool, 64 * case.bytes_per_call)
    arena.seconds(case, 200)
    result = {
        "armed": float(np.median(arena.seconds(case, 2000))) * 1e6,
        "asleep": float(np.median(arena.seconds(case, 50, asleep=True))) * 1e6,
    }
    pool.close()
    return result


def from_cache(isa: str) -> float:
    """GB/s at which one thread attends to what its core's caches hold: arithmetic alone."""
    case = Case(32, 8, 128, "bfloat16", 16, 1024, 1, isa)
    pool = native.WorkerPool(1)
    arena = Arena(case, pool, 0, num_blocks=8)  # 512 KiB
    arena.seconds(case, 2)
    seconds = float(np.median(arena.seconds(case, 50)))
    pool.close()
    return case.bytes_per_call / seconds / 1e9


def compare(case: Case) -> dict[str, float]:
    """GB/s at which others do the same work, from contiguous K and V: jax.numpy and torch."""
    shape = (case.num_seqs, case.context, case.num_kv_heads, case.head_dim)
    rates = {}
    for name, attend in (("jax.numpy", _jax_attention), ("torch", _torch_attention)):
        try:
            call = attend(shape, case.num_q_heads, case.num_threads)
        except ImportError:
            continue
        call()
        seconds = min(_time(call) for _ in range(5))
        rates[name] = case.bytes_per_call / seconds / 1e9
    return rates


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _jax_attention(
    shape: tuple[int, ...], num_q_heads: int, num_threads: int
) -> Callable[[], object]:
    del num_threads  # the backend's pool is as large as the machine
    import jax
    import jax.numpy as jnp

    @jax.jit
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        logits = jnp.einsum("bkgh,bskh->bkgs", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits * shape[-1] ** -0.5, axis=-1).astype(q.dtype)
        return jnp.einsum("bkgs,bskh->bkgh", weights, v)

    with jax.default_device(jax.devices("cpu")[0]):
        k = jnp.ones(shape, jnp.bfloat16)
        q = jnp.ones((shape[0], shape[2], num_q_heads // shape[2], shape[3]), jnp.bfloat16)
    return lambda: attend(q, k, k).block_until_ready()


def _torch_attention(
    shape: tuple[int, ...], num_q_heads: int, num_threads: int
) -> Callable[[], object]:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(num_threads)
    batch, context, num_kv_heads, head_dim = shape
    k = torch.ones(batch, num_kv_heads, context, head_dim, dtype=torch.bfloat16)
    q = torch.ones(batch, num_q_heads, 1, head_dim, dtype=torch.bfloat16)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)


HEADER = (
    f"{'isa':>11} {'threads':>7} {'N/K/H':>11} {'dtype':>9} {'seqs':>5} {'context':>7} "
    f"{'us/call':>9} {'best':>9} {'GB/s':>7} {'walk':>7} {'probe':>7} {'share':>6}"
)


def line(result: Result) -> str:
    """One line of the table."""
    case = result.case
    heads = f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}"
    return (
        f"{case.isa:>11} {case.num_threads:>7} {heads:>11} {case.dtype:>9} {case.num_seqs:>5} "
        f"{case.context:>7} {result.us_per_call:>9.1f} {result.us_best:>9.1f} "
        f"{result.gb_per_s:>7.1f} {result.walk_gb_per_s:>7.1f} {result.probe_gb_per_s:>7.1f} "
        f"{result.share:>6.2f}{' void: memory was busy' if result.is_void else ''}"
    )


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [
                text.split(":", 1)[1].strip() for text in file if text.startswith("model name")
            ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "usable_cores": native.usable_cores(),
        "isas": native.available_isas(),
        "load_before": os.getloadavg()[0],
    }


def plot(results: list[Result], path: str) -> None:
    """Bars of GB/s beside what the probe read."""
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]

    figure, axes = plt.subplots(figsize=(8, 0.4 * len(results) + 1.5))
    names = [
        f"{c.isa} {c.num_q_heads}/{c.num_kv_heads}/{c.head_dim} {c.dtype} {c.num_seqs}x{c.context}"
        f" on {c.num_threads}"
        for c in (r.case for r in results)
    ]
    places = np.arange(len(results))
    axes.barh(places, [r.probe_gb_per_s for r in results], color="lightgrey", label="memory read")
    axes.barh(places, [r.gb_per_s for r in results], height=0.5, label="host attention")
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Prints the table as it is measured."""
    parser = argparse.ArgumentParser(
        prog="python -m neojax.bench kernel", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--cpu-threads", help="comma-separated counts; default: usable cores")
    parser.add_argument("--cpu-isa", default="", help="kernels; default: the machine's best")
    parser.add_argument("--arena-gib", type=float, default=2.0, help="memory read in turn")
    parser.add_argument("--quick", action="store_true", help="the headline case only")
    parser.add_argument("--no-compare", action="store_true", help="leave jax and torch out")
    parser.add_argument("--output", help="write the numbers to this JSON file")
    parser.add_argument("--plot", help="draw them into this image file")
    args = parser.parse_args(argv)

    about = machine()
    isa = native.isa(args.cpu_isa)
    cores = native.usable_cores()
    counts = [int(n) for n in args.cpu_threads.split(",")] if args.cpu_threads else [cores]
    print(f"{about['cpu']}, {cores} usable cores, kernels {', '.join(native.available_isas())}")
    if float(os.getloadavg()[0]) > 0.25 * cores:
        print(f"warning: the machine is busy (load {about['load_before']:.1f}): figures are low")
    print(HEADER)
    results: list[Result] = []
    for i, num_threads in enumerate(counts):
        results += _run(num_threads, isa, args, sweep_threads=i == 0 and not args.cpu_threads)
    small = smallest_call(counts[0], isa)
    print(f"smallest call: {small['armed']:.1f} us awake, {small['asleep']:.1f} us asleep")
    cached = from_cache(isa)
    print(f"one thread, from its core's caches (32/8/128 bfloat16): {cached:.1f} GB/s")
    others = {} if args.no_compare else compare(results[0].case)
    for name, rate in others.items():
        print(f"{name} on the first line's work, contiguous K and V: {rate:.1f} GB/s")
    if args.output:
        lines = [{**dataclasses.asdict(r), "share": r.share, "void": r.is_void} for r in results]
        content = {
            "machine": about,
            "results": lines,
            "smallest_us": small,
            "cached_gb_per_s": cached,
            "others": others,
        }
        with open(args.output, "w") as file:
            json.dump(content, file, indent=1)
    if args.plot:
        plot(results, args.plot)
    return 0


def _run(
    num_threads: int, isa: str, args: argparse.Namespace, *, sweep_threads: bool
) -> list[Result]:
    results = []
    for group in cases(num_threads, isa, full=not args.quick):
        pool = native.WorkerPool(num_threads)
        arena = Arena(group[0], pool, int(args.arena_gib * 2**30))
        for case in group:
            results.append(arena.measure(case))
            print(line(results[-1]), flush=True)
        if sweep_threads and len(results) == len(group) and not args.quick:
            for fewer in thread_counts(num_threads)[:-1]:
                arena.pool = native.WorkerPool(fewer)
                results.append(arena.measure(dataclasses.replace(group[0], num_threads=fewer)))
                print(line(results[-1]), flush=True)
                arena.pool.close()
        pool.close()
        if args.quick:
            break
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
