"""Cost tables of machines that exist, from rough rooflines: enough to tell regimes apart."""

from __future__ import annotations

from collections.abc import Callable

from neojax.scheduler.costs import CostTables, Table1, Table2
from neojax.scheduler.plan import Mode

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (16, 256, 1024, 4096, 16384, 65536, 262144)


def line(f: Callable[[float], float]) -> Table1:
    return Table1(ROWS, tuple(f(x) for x in ROWS))


def plane(f: Callable[[float, float], float]) -> Table2:
    return Table2(ROWS, CONTEXTS, tuple(tuple(f(x, y) for y in CONTEXTS) for x in ROWS))


def make_tables(
    *,
    num_layers: int = 32,
    layer_bytes: float = 0.436e9,
    kv_bytes: float = 4096,
    tflops: float = 600,
    device_gbs: float = 4000,
    host_gbs: float = 110,
    link_gbs: float = 50,
    hop_us: float = 30,
) -> CostTables:
    """The defaults are an 8B model in bfloat16 on an H200 with 16 host cores."""

    def linear(rows: float) -> float:
        return max(layer_bytes / (device_gbs * 1e9), rows * layer_bytes / (tflops * 1e12))

    def copy(tokens: float) -> float:
        return tokens * kv_bytes / (link_gbs * 1e9)

    return CostTables(
        num_layers=num_layers,
        linear={mode: line(linear) for mode in Mode},
        prefill_attention=plane(lambda n, s: n * s * kv_bytes * 4 / (tflops * 1e12)),
        device_decode=plane(lambda n, s: max(n, s) * kv_bytes / (device_gbs * 1e9)),
        host_decode=plane(lambda n, s: 5e-6 + max(n, s) * kv_bytes / (host_gbs * 1e9)),
        hop=line(lambda _: hop_us * 1e-6),
        store=line(copy),
        fetch=line(copy),
        swap_out=line(copy),
        swap_in=line(copy),
        per_step={mode: line(lambda rows: 4e-4 + 1e-6 * rows) for mode in Mode},
    )


def h200() -> CostTables:
    """Llama-3.1-8B on an H200: the host is slow beside it."""
    return make_tables()


def t4() -> CostTables:
    """Llama-2-7B on a T4: the host reads a seventh of what the device does."""
    return make_tables(
        layer_bytes=0.405e9, kv_bytes=16384, tflops=40, device_gbs=260, host_gbs=45, link_gbs=10
    )
