"""What a device-only engine does on a GPU: decode steps, prefill, and requests all at once.

Used by tests/gpu/sections.py.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from neojax.engine.core import EngineCore
from neojax.sampling_params import SamplingParams
from tests.gpu.load import Load

COPY_BYTES_PER_S = 4.28e12
"""Device copy of an H200, counting bytes read and written: what a floor of reading is taken at."""


def decode(engine: EngineCore, load: Load) -> dict[str, object]:
    """Decode step time at contexts around 1000, against reading weights and KV once."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    rows = {}
    for batch in load.decode_batches:
        for i in range(batch):
            prompt = rng.integers(0, engine.vocab_size, load.context - 64).tolist()
            engine.add_request(f"{batch}-{i}", prompt, params)
        steps, last = [], None
        while engine.has_work:
            plan = engine.step().plan
            now = time.perf_counter()
            if plan is not None and not plan.b0.chunks and len(plan.b0.decodes) == batch:
                if last is not None:
                    steps.append(now - last)
                last = now
        ms = 1e3 * statistics.median(steps)
        num_bytes = load.weight_bytes + batch * load.context * load.kv_bytes_per_token
        floor = 1e3 * num_bytes / COPY_BYTES_PER_S
        rows[batch] = {"ms": ms, "floor_ms": floor}
        print(
            f"decode: batch {batch:3}: {ms:6.2f} ms, floor {floor:5.2f}, {ms / floor:.2f}x",
            flush=True,
        )
    return {"decode": rows, "compiles_after_ready": engine.runner.num_compiles}


def prefill(engine: EngineCore, load: Load) -> dict[str, object]:
    """Time to first token of lone prompts, and prefill throughput of many long ones."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def run(count: int, length: int) -> float:
        for i in range(count):
            prompt = rng.integers(0, engine.vocab_size, length).tolist()
            engine.add_request(f"{length}-{i}", prompt, params)
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - started

    result: dict[str, object] = {}
    for length in load.prompts:
        ms = 1e3 * statistics.median(run(1, length) for _ in range(5))
        result[f"ttft_ms_{length}"] = ms
        print(f"prefill: one prompt of {length}: {ms:.1f} ms to its first token", flush=True)
    count, length = load.num_prompts, load.prompts[-1]
    rate = count * length / statistics.median(run(count, length) for _ in range(3))
    result[f"tokens_per_s_{count}x{length}"] = rate
    print(f"prefill: {count} prompts of {length}: {rate:,.0f} tokens/s", flush=True)
    return result


def throughput(engine: EngineCore, load: Load) -> dict[str, object]:
    """Requests of 1000 tokens in, 100 out, all at once."""
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    result = {}
    for count in load.num_at_once:
        for i in range(count):
            prompt = rng.integers(0, engine.vocab_size, load.prompts[0]).tolist()
            engine.add_request(f"t{count}-{i}", prompt, params)
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        rate = count / (time.perf_counter() - started)
        result[f"requests_per_s_{count}"] = rate
        print(
            f"throughput: {count} x {load.prompts[0]}/{load.output} at once: {rate:.1f} requests/s",
            flush=True,
        )
    return result
