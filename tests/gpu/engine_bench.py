"""What a real engine does on a GPU beside its decode steps: swaps, and the host's part.

Used by scripts/gpu_check; needs an engine with a host pool.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from neojax.engine.core import EngineCore
from neojax.runner import lanes
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Plan, Swap
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing
from neojax.scheduler.swapping import Swapping


class EveryStep(Swapping):
    """Moves one request out and in again, step by step, so that it never has a row."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__(engine.scheduler.limits, engine.scheduler._memory)
        self.moving: str | None = None

    def schedule(
        self, step: int, running: Sequence[Request], standing: Standing, policy: OffloadPolicy,
        now: Situation,
    ) -> list[Swap]:  # fmt: skip
        """The request named, whichever way it can go."""
        found = [r for r in running if r.request_id == self.moving and r.is_decoding]
        return [
            self._move(
                r,
                Placement.HOST if r.placement is Placement.DEVICE else Placement.DEVICE,
                step,
                "named",
            )
            for r in found
        ]


@contextmanager
def swapping(engine: EngineCore) -> Iterator[EveryStep]:
    """The engine's swaps are `EveryStep`'s."""
    scheduler = engine.scheduler
    usual, scheduler._swapping = scheduler._swapping, EveryStep(engine)
    try:
        yield scheduler._swapping
    finally:
        scheduler._swapping = usual


def add(engine: EngineCore, name: str, count: int, tokens: int, seed: int = 0) -> None:
    """Requests that decode until they are aborted."""
    rng = np.random.default_rng(seed)
    room = engine.max_model_len - tokens
    for i in range(count):
        prompt = rng.integers(0, engine.vocab_size, tokens).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        engine.add_request(f"{name}{i}", prompt, params)


def end(engine: EngineCore) -> None:
    """Abort everything."""
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()


def until(engine: EngineCore, is_it: Callable[[Plan], bool]) -> Plan:
    """Step until a plan is launched of which that is true."""
    while True:
        plan = engine.step().plan
        if plan is not None and is_it(plan):
            return plan


def step_ms(engine: EngineCore, num_steps: int) -> float:
    """Median time between launches."""
    times = []
    for _ in range(num_steps + 1):
        while engine.step().plan is None:
            pass
        times.append(time.perf_counter())
    return 1e3 * statistics.median(np.diff(times).tolist())


def pinned_rates(num_bytes: int) -> tuple[float, float]:
    """GB/s of plain copies of that size, device to pinned host memory and back."""
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.int32), here)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(6):
        began = time.perf_counter()
        y = jax.block_until_ready(jax.device_put(x, pinned))
        middle = time.perf_counter()
        x = jax.block_until_ready(jax.device_put(y, here))
        rates[0].append(num_bytes / (middle - began) / 1e9)
        rates[1].append(num_bytes / (time.perf_counter() - middle) / 1e9)
    return statistics.median(rates[0]), statistics.median(rates[1])


def swap_figures(
    engine: EngineCore, tokens: int, batch: int, context: int, num_steps: int = 60
) -> dict[str, float]:
    """A request of `tokens` tokens that moves in every step: alone, and beside `batch` decodes."""
    g = engine.runner.geometry
    num_bytes = -(-tokens // g.block_size) * g.block_bytes
    down, up = pinned_rates(num_bytes)
    engine.set_policy("auto")
    with swapping(engine) as swaps:
        add(engine, "moves", 1, tokens - 1)
        until(engine, lambda plan: bool(plan.b0.decodes))
        swaps.moving = "moves0"
        step_ms(engine, 6)
        alone = step_ms(engine, num_steps)
        swaps.moving = None
        end(engine)
        add(engine, "stays", batch, context)
        add(engine, "moves", 1, tokens - 1)
        until(engine, lambda plan: len(plan.b0.decodes) == batch + 1)
        swaps.moving = "moves0"
        step_ms(engine, 6)
        beside = step_ms(engine, num_steps)
        swaps.moving = None
        engine.abort("moves0")
        step_ms(engine, 6)
        without = step_ms(engine, num_steps)
        end(engine)
    rate = num_bytes / alone / 1e6
    found = {
        "bytes": num_bytes, "pinned_down_gbps": down, "pinned_up_gbps": up, "alone_ms": alone,
        "alone_gbps": rate, "share_of_pinned": rate / ((down + up) / 2), "decode_ms": without,
        "decode_and_swap_ms": beside, "slowdown": beside / without - 1,
    }  # fmt: skip
    print(
        f"swap: {num_bytes / 1e6:.0f} MB; pinned copies {down:.1f} down, {up:.1f} GB/s up; a step "
        f"of nothing else {alone:.2f} ms, {rate:.1f} GB/s "
        f"({found['share_of_pinned']:.2f} of pinned); {batch} decodes {without:.2f} ms, "
        f"with a swap in every step {beside:.2f} "
        f"({100 * found['slowdown']:+.1f} %)",
        flush=True,
    )
    return found


def host_time(
    engine: EngineCore, batch: int, context: int, num_steps: int = 60
) -> dict[str, float]:
    """A decode step: the host's part, the device's, and how long the device idles between steps."""
    engine.set_policy("auto")
    add(engine, "r", batch, context, seed=batch)
    until(engine, lambda plan: len(plan.b0.decodes) == batch)
    step_ms(engine, 6)
    waits, walls = [], []
    for _ in range(num_steps):
        handle = engine._in_flight[0][1] if engine._in_flight else None
        began = time.perf_counter()
        waited = 0.0
        if handle is not None:
            tokens = handle.tokens

            def timed(tokens=tokens):
                nonlocal waited
                start = time.perf_counter()
                result = tokens()
                waited += time.perf_counter() - start
                return result

            handle.tokens = timed
        engine.step()
        walls.append(time.perf_counter() - began)
        waits.append(waited)
    step = 1e3 * statistics.median(walls)
    host = 1e3 * statistics.median(np.subtract(walls, waits).tolist())
    plan = until(engine, lambda plan: True)
    runner = engine.runner
    (one,) = runner._batches.of(plan)
    group = runner.config.layers_per_program

    def device(count: int) -> float:
        jax.block_until_ready(runner._state.tokens)
        began = time.perf_counter()
        for _ in range(count):
            lanes.run_device_only(runner._state, one, group)
        jax.block_until_ready(runner._state.tokens)
        return time.perf_counter() - began

    device(3)
    alone = 1e3 * statistics.median((device(22) - device(2)) / 20 for _ in range(3))
    end(engine)
    found = {"step_ms": step, "host_ms": host, "device_ms": alone, "idle": 1 - alone / step}
    print(
        f"host_time: batch {batch}: step {step:.2f} ms; host {host:.2f} of it (schedule, prepare, "
        f"enqueue, postprocess); device alone {alone:.2f}: idle {100 * found['idle']:.1f} %",
        flush=True,
    )
    return found


def random_load(
    engine: EngineCore, seconds: float, max_prompt: int, max_output: int
) -> dict[str, int]:
    """Requests of every length and kind on both sides, some aborted, and what was compiled."""
    rng = np.random.default_rng()
    deadline = time.monotonic() + seconds
    count, steps, before = 0, 0, engine.runner.num_compiles
    while time.monotonic() < deadline:
        if rng.random() < 0.3 or not engine.has_work:
            prompt = rng.integers(0, engine.vocab_size, int(rng.integers(1, max_prompt))).tolist()
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.7])), top_k=int(rng.choice([0, 40])),
                max_tokens=int(rng.integers(1, max_output)), seed=count, ignore_eos=True,
                kv_placement=str(rng.choice(["auto", "host", "device"])),
            )  # fmt: skip
            engine.add_request(f"load{count}", prompt, params)
            count += 1
        if rng.random() < 0.02 and count:
            engine.abort(f"load{int(rng.integers(count))}")
        engine.step()
        steps += 1
    end(engine)
    return {"requests": count, "steps": steps, "compiles": engine.runner.num_compiles - before}
