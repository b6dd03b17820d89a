"""`python -m neojax.bench throughput`: tokens per second of the engine, without HTTP.

A closed loop: at each concurrency so many requests are kept running. Greedy, EOS ignored, random
prompts. Policies are compared in one process, one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neojax.cli import parse
from neojax.config import EngineConfig

PROG = "python -m neojax.bench throughput"

if TYPE_CHECKING:
    from neojax.engine.core import EngineCore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(EngineConfig):
    """The engine's settings and the workload's."""

    concurrency: str = "1,4,16"
    """Requests kept running at the same time: a list such as 1,4,16, one measurement each."""
    input_len: int = 64
    """Tokens in a prompt."""
    output_len: int = 32
    """Tokens generated for each."""
    requests_per_client: int = 3
    """Requests that each of the concurrent clients sends, one after the other."""
    policies: str = "auto"
    """Offload policies to compare: a list such as device-only,full. The engine is built with the
    first; start with one that gives it host memory if another needs it."""
    repeats: int = 3
    """Runs of each measurement; the median is reported."""
    output: Path | None = None
    """Write the results as JSON to this file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Medians over the repeats of one policy and concurrency."""

    policy: str
    concurrency: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: float  # median over requests
    tpot_ms: float  # median over requests
    spread: float  # (fastest - slowest) / median of output tokens per second


def main(argv: list[str]) -> int:
    """Run the benchmark and print its table."""
    config = parse(argv, ThroughputConfig, prog=PROG, positional=None)
    from neojax.hub import resolve_checkpoint

    levels = [int(level) for level in config.concurrency.split(",")]
    policies = config.policies.split(",")
    if max(levels) > config.max_num_seqs:
        sys.exit(f"--concurrency {max(levels)} needs --max-num-seqs {max(levels)} or more")
    from neojax.engine.build import build_engine

    names = [field.name for field in dataclasses.fields(EngineConfig)]
    settings = {name: getattr(config, name) for name in names}
    settings["offload_policy"] = policies[0]
    engine = build_engine(EngineConfig(**settings), resolve_checkpoint(config.model))
    results: list[Measurement] = []
    print(f"{config.model}, {config.input_len} in / {config.output_len} out, {_hardware()}")
    print(f"{'policy':12} {'conc.':>5} {'out tok/s':>10} {'all tok/s':>10} "
          f"{'TTFT ms':>8} {'TPOT ms':>8} {'spread':>7}")  # fmt: skip
    for policy, concurrency in itertools.product(policies, levels):
        engine.set_policy(policy)
        m = measure(engine, config, policy, concurrency)
        results.append(m)
        print(f"{m.policy:12} {m.concurrency:5} {m.output_tokens_per_s:10.1f} "
              f"{m.total_tokens_per_s:10.1f} {m.ttft_ms:8.1f} {m.tpot_ms:8.2f} "
              f"{m.spread:7.1%}", flush=True)  # fmt: skip
    engine.close()
    if config.output is not None:
        report = {
            "hardware": _hardware(),
            "command": ["python", "-m", "neojax.bench", "throughput", *argv],
            "results": [dataclasses.asdict(m) for m in results],
        }
        config.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(
    engine: EngineCore, config: ThroughputConfig, policy: str, concurrency: int
) -> Measurement:
    """One cell of the table."""
    runs = [_run(engine, config, concurrency, seed) for seed in range(config.repeats)]
    rates = [run.output_tokens / run.seconds for run in runs]
    rate = statistics.median(rates)
    prompt_share = (config.input_len + config.output_len) / config.output_len
    return Measurement(
        policy=policy,
        concurrency=concurrency,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate * prompt_share,
        ttft_ms=1e3 * statistics.median(t for run in runs for t in run.ttft_s),
        tpot_ms=1e3 * statistics.median(t for run in runs for t in run.tpot_s),
        spread=(max(rates) - min(rates)) / rate,
    )


@dataclasses.dataclass(slots=True)
class _Run:
    seconds: float = 0.0
    output_tokens: int = 0
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    tpot_s: list[float] = dataclasses.field(default_factory=list)


def _run(engine: EngineCore, config: ThroughputConfig, concurrency: int, seed: int) -> _Run:
    from neojax.sampling_params import SamplingParams

    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=config.output_len, ignore_eos=True)
    run = _Run()
    started_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    ids = (f"{seed}-{i}" for i in itertools.count())
    left = concurrency * config.requests_per_client

    def send() -> None:
        nonlocal left
        if left:
            left -= 1
            request_id = next(ids)
            prompt = [rng.randrange(engine.vocab_size) for _ in range(config.input_len)]
            started_s[request_id] = time.perf_counter()
            engine.add_request(request_id, prompt, params)

    begun = time.perf_counter()
    for _ in range(concurrency):
        send()
    while engine.has_work:
        for output in engine.step().outputs:
            now = time.perf_counter()
            run.output_tokens += len(output.token_ids)
            first_s.setdefault(output.request_id, now)
            if output.finish_reason is not None:
                first = first_s[output.request_id]
                run.ttft_s.append(first - started_s[output.request_id])
                run.tpot_s.append((now - first) / max(1, config.output_len - 1))
                send()
    run.seconds = time.perf_counter() - begun
    return run


def _hardware() -> str:
    import jax

    device = jax.devices()[0]
    with open("/proc/cpuinfo") as f:
        models = [line.split(":")[1].strip() for line in f if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    return f"{device.device_kind}, {len(models)} x {cpu}, jax {jax.__version__}"
