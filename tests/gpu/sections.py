"""The sections of scripts/gpu_check, in a process that holds the device:

    PYTHONPATH=. python -m tests.gpu.sections right decode --load 8b --budget 60 --log LOG

Each appends one JSON line to the log. One that fails says so there and ends the process, since
what it leaves on the device is unknown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from neojax.config import EngineConfig
from neojax.engine.build import prepare_jax
from neojax.engine.core import EngineCore
from tests.gpu import engine_bench, step_bench
from tests.gpu.load import FULL, LOADS, Load, engine_of


class Terms(NamedTuple):
    """What a section is given."""

    load: Load
    budget_s: float
    tests_limit_s: float


Found = dict[str, object]


def tests(terms: Terms) -> Found:
    """The tests marked gpu."""
    from tests.gpu.suite import run_tests

    return run_tests(terms.tests_limit_s)


def start(terms: Terms) -> Found:
    """Seconds from nothing to ready, cold and warm."""
    from tests.gpu.start_bench import start

    (name,) = [name for name, load in LOADS.items() if load is terms.load]
    return start(name)


def right(terms: Terms) -> Found:
    """Tokens of tiny models against a plain forward pass."""
    from tests.gpu.forward_checks import right

    return right(terms.budget_s)


def forced(terms: Terms) -> Found:
    """bfloat16 and the fast attention on the plans and tokens of a float32 run."""
    from tests.gpu.teacher_forced import teacher_forced

    return teacher_forced(40 if terms.load is FULL else 4)


def lane(terms: Terms) -> Found:
    """Hop and pipelined layers, 8B shapes, against the two-queue prediction."""
    from neojax.ops import host_attention
    from tests.gpu import lane_bench, layers

    host_attention.ensure_registered()
    shape = layers.Shape() if terms.load is FULL else layers.TINY
    points = lane_bench.pipelined(layers.Model(shape), terms.budget_s)
    ratios = [point["ratio"] for point in points]
    return {
        "points": points, "median_ratio": statistics.median(ratios), "worst_ratio": max(ratios),
    }  # fmt: skip


def soak(terms: Terms) -> Found:
    """Random load on a tiny model, every finished request compared with a DEVICE_ONLY rerun."""
    from tests.soak import soak

    return soak(terms.budget_s, random.SystemRandom().getrandbits(31))


def decode(engine: EngineCore, terms: Terms) -> Found:
    """Decode steps against reading weights and KV once."""
    return step_bench.decode(engine, terms.load)


def prefill(engine: EngineCore, terms: Terms) -> Found:
    """Time to first token, and prefill throughput."""
    return step_bench.prefill(engine, terms.load)


def throughput(engine: EngineCore, terms: Terms) -> Found:
    """Many requests at once."""
    return step_bench.throughput(engine, terms.load)


def swap(engine: EngineCore, terms: Terms) -> Found:
    """A request that changes sides in every step."""
    load = terms.load
    return engine_bench.swap_figures(engine, load.swap_tokens, load.step_batches[0], load.context)


def host_time(engine: EngineCore, terms: Terms) -> Found:
    """How much of a decode step the host takes, and whether the device waits for it."""
    load = terms.load
    return {
        str(batch): engine_bench.host_time(engine, batch, load.context)
        for batch in load.step_batches
    }


def rolling(engine: EngineCore, terms: Terms) -> Found:
    """ROLLING steps over device rows, rows of a group and their context; and the hop."""
    from tests.gpu.rolling_bench import rolling_figures

    load = terms.load
    return rolling_figures(
        engine.runner, terms.budget_s, load.device_rows, load.group_rows, load.group_contexts,
        load.context,
    )  # fmt: skip


def compiles(engine: EngineCore, terms: Terms) -> Found:
    """Compilations under a random load, after an engine has said that it is ready."""
    load = terms.load
    return engine_bench.random_load(
        engine, terms.budget_s, load.sizes["max_model_len"] // 2, 3 * load.output
    )


# By the engine that they need; those of a row may share a process. In order of worth.
SECTIONS: dict[str, dict[str, Callable[..., Found]]] = {
    "tests": {"tests": tests},
    "": {"right": right, "forced": forced, "lane": lane, "soak": soak},
    "device": {"decode": decode, "prefill": prefill, "throughput": throughput},
    "host": {"swap": swap, "host_time": host_time},
    "ready": {"compiles": compiles},
    "start": {"start": start},
    "rolling": {"rolling": rolling},
}


def run(names: list[str], terms: Terms, append: Callable[[str, float, Found], None]) -> int:
    """Those sections, all of one row of SECTIONS; the exit status."""
    (kind,) = {kind for kind, row in SECTIONS.items() if row.keys() & set(names)}
    engine = None
    for name in names:
        began = time.monotonic()
        try:
            arguments: list[Any] = [terms]
            if kind not in ("", "tests", "start"):
                engine = engine or engine_of(kind, terms.load)
                arguments.insert(0, engine)
            found = SECTIONS[kind][name](*arguments)
        except Exception as error:
            traceback.print_exc()
            append(name, time.monotonic() - began, {"error": f"{type(error).__name__}: {error}"})
            return 1
        append(name, time.monotonic() - began, found)
    if engine is not None:
        engine.close()
    return 0


def main() -> int:
    """Run the sections named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="+")
    parser.add_argument("--load", choices=LOADS, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--tests-limit", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stamp", type=json.loads, default={}, help="JSON to put in each line")
    args = parser.parse_args()
    if not {"tests", "start"} & set(args.section):  # which leave the device to their own processes
        prepare_jax(EngineConfig(gpu_memory_utilization=0.9))

    def append(name: str, seconds: float, found: Found) -> None:
        line = {"section": name, **args.stamp, "seconds": round(seconds, 1), **found}
        with args.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    return run(args.section, Terms(LOADS[args.load], args.budget, args.tests_limit), append)


if __name__ == "__main__":
    sys.exit(main())
