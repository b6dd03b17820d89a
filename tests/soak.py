"""Random load for a long time: every finished request must have the tokens of a DEVICE_ONLY rerun.

    PYTHONPATH=. python -m tests.soak --seconds 1800 --log soak.jsonl

A tiny float32 model, so that tokens are comparable. Policies, placements, the mode of each step,
block limits, swaps of whole requests, late host jobs and aborts are drawn at random, by a new seed
each run; a block that becomes free is overwritten with large values, so that whoever still reads it
says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from neojax.engine.core import EngineCore
from neojax.runner.stages import KV
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode, Swap
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing
from neojax.scheduler.swapping import Swapping
from tests.engine.tiny import BASE, assert_same_tokens, run_all, tiny_engine, tiny_model
from tests.scheduler.random_modes import RandomModes

POISON = 3e4
"""Finite: masked tokens have a weight of exactly zero, which would not silence a NaN."""


class RandomSwapping(Swapping):
    """Moves any decode to the other side with some probability, where it has room."""

    def __init__(self, engine: EngineCore, rng: random.Random, probability: float) -> None:
        super().__init__(engine.scheduler.limits, engine.scheduler._memory)
        self.rng = rng
        self.probability = probability
        self.count = 0

    def schedule(
        self, step: int, running: Sequence[Request], standing: Standing, policy: OffloadPolicy,
        now: Situation,
    ) -> list[Swap]:  # fmt: skip
        """Without regard to cost."""
        swaps = []
        for request in running:
            if not (request.is_decoding and request.wants_more and request.progress.layer == 0):
                continue
            to = Placement.HOST if request.placement is Placement.DEVICE else Placement.DEVICE
            there = sum(r.placement is to for r in running) + len(swaps)
            need = self._memory.num_blocks(request.num_tokens) + there
            if self.rng.random() < self.probability and need < self._memory.pools[to].num_free:
                swaps.append(self._move(request, to, step, "at random"))
        self.count += len(swaps)
        return swaps


class Poisoner:
    """Overwrites blocks of both pools as they become free."""

    SIZE = 16

    def __init__(self, engine: EngineCore) -> None:
        self.runner = engine.runner
        self.count = 0
        for placement, pool in engine.scheduler.pools.items():
            pool.release = functools.partial(self._release, placement, pool, pool.release)

        @functools.partial(jax.jit, donate_argnums=0)
        def fill(pools: list[KV], blocks: jax.Array) -> list[KV]:
            return jax.tree.map(lambda x: x.at[blocks].set(POISON, mode="drop"), pools)

        self._fill = fill

    def _release(self, placement: Placement, pool, release, step: int) -> None:
        before = len(pool._free)
        release(step)
        freed = list(pool._free)[before:]
        self.count += len(freed)
        for first in range(0, len(freed), self.SIZE):
            some = np.asarray(freed[first : first + self.SIZE], np.int32)
            if placement is Placement.HOST:
                self._poison_host(some)
            else:
                padding = np.full(self.SIZE - len(some), pool.num_blocks, np.int32)
                blocks = np.concatenate([some, padding])
                self.runner._state.pools = self._fill(self.runner._state.pools, blocks)

    def _poison_host(self, blocks: np.ndarray) -> None:
        g, host = self.runner.geometry, self.runner.host
        if host is None:
            return
        kv = np.full((len(blocks) * g.block_size, g.num_kv_heads, g.head_dim), POISON, g.dtype)
        for layer in range(g.num_layers):
            host._cache.write(layer, blocks, 0, kv, kv)


@dataclasses.dataclass
class Totals:
    """What a soak has done so far."""

    rounds: int = 0
    requests: int = 0
    tokens: int = 0  # compared
    aborted: int = 0
    aborted_in_flight: int = 0  # between two layers
    preemptions: int = 0
    swaps: int = 0
    poisoned_blocks: int = 0
    steps_device_only: int = 0
    steps_pipelined: int = 0
    steps_rolling: int = 0
    steps_parked: int = 0  # of the other modes, with groups under way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a round goes through."""

    policy: str = RandomModes.name
    mode_change: float = 0.3  # probability in each step, with random modes
    device_blocks: int = 40  # the limits of the pools, times the scale
    host_blocks: int = 80
    swaps: float = 0.1  # probability in each step, for each request
    delay_us: int = 0  # of every host job
    aborts: float = 0.01  # probability in each step

    @classmethod
    def draw(cls, rng: random.Random) -> Conditions:
        """At random."""
        return cls(
            policy=rng.choice(["auto", "full", "rolling", *3 * [RandomModes.name]]),
            mode_change=rng.choice([0.02, 0.3, 1.0]),
            device_blocks=rng.randint(16, 120),
            host_blocks=rng.randint(16, 160),
            swaps=rng.choice([0.0, 0.02, 0.1, 0.5]),
            delay_us=rng.choice([0, 0, 200, 1500]),
            aborts=rng.choice([0.0, 0.01]),
        )


class Soak:
    """Rounds of random load on one engine.

    scale: factor on rows, tokens and blocks; a step of a GPU takes as long for many as for few.
    """

    def __init__(self, seed: int, scale: int = 1) -> None:
        self.rng = random.Random(seed)
        self.scale = scale
        self.engine = tiny_engine(
            tiny_model(), num_device_blocks=160 * scale, num_host_blocks=160 * scale,
            max_num_seqs=16 * scale, max_num_batched_tokens=96 * scale,
            token_buckets=(16 * scale, 96 * scale), rolling_rows=4 * scale,
        )  # fmt: skip
        self.poisoner = Poisoner(self.engine)
        self.totals = Totals()

    def round(
        self, num_requests: int | None = None, most_tokens: int = 90,
        conditions: Conditions | None = None,
    ) -> None:  # fmt: skip
        """Random load, then the same requests DEVICE_ONLY. Raises AssertionError."""
        rng, engine = self.rng, self.engine
        num_requests = num_requests or 24 * self.scale
        c = conditions or Conditions.draw(rng)
        requests = [
            (
                [rng.randrange(BASE.vocab_size) for _ in range(rng.randint(1, 120))],
                SamplingParams(temperature=0.0, max_tokens=rng.randint(1, most_tokens)),
            )
            for _ in range(num_requests)
        ]
        if c.policy == RandomModes.name:
            engine.scheduler.set_policy(RandomModes(rng, c.mode_change))
        else:
            engine.set_policy(c.policy)
        engine.set_block_limit(c.device_blocks * self.scale)
        engine.scheduler.pools[Placement.HOST].set_limit(c.host_blocks * self.scale)
        swapping = RandomSwapping(engine, rng, c.swaps)
        usual, engine.scheduler._swapping = engine.scheduler._swapping, swapping
        assert engine.runner.host is not None
        engine.runner.host.lane.set_delay_us(c.delay_us)
        before = engine.stats()
        got, aborted = self._load(requests, c.aborts)
        engine.runner.host.lane.set_delay_us(0)
        engine.scheduler._swapping = usual
        after = engine.stats()
        engine.set_policy("device-only")
        engine.set_block_limit(None)
        engine.scheduler.pools[Placement.HOST].set_limit(None)
        finished = [i for i in range(num_requests) if i not in aborted]
        wanted = run_all(engine, [requests[i] for i in finished])
        assert_same_tokens(
            tiny_model(), [requests[i] for i in finished], wanted, [got[i] for i in finished]
        )
        t = self.totals
        t.rounds += 1
        t.requests += len(finished)
        t.tokens += sum(len(got[i]) for i in finished)
        t.aborted += len(aborted)
        t.swaps += swapping.count
        t.poisoned_blocks = self.poisoner.count
        t.preemptions += after.num_preemptions - before.num_preemptions
        t.steps_device_only += after.steps_device_only - before.steps_device_only
        t.steps_pipelined += after.steps_pipelined - before.steps_pipelined
        t.steps_rolling += after.steps_rolling - before.steps_rolling

    def _load(
        self, requests: Sequence[tuple[list[int], SamplingParams]], abort_probability: float
    ) -> tuple[list[list[int]], set[int]]:
        """Tokens of each request, arriving a few at a time, and which of them were aborted."""
        engine, rng = self.engine, self.rng
        tokens: list[list[int]] = [[] for _ in requests]
        arrived, aborted = 0, set[int]()
        while arrived < len(requests) or engine.has_work:
            while arrived < len(requests) and (
                rng.random() < 1 - 0.7 / self.scale or not engine.has_work
            ):
                engine.add_request(str(arrived), *requests[arrived])
                arrived += 1
            if rng.random() < abort_probability:
                victim = rng.randrange(arrived)
                if len(tokens[victim]) < requests[victim][1].max_tokens:
                    under_way = {row.request.request_id for row in engine.scheduler.rows_under_way}
                    in_flight = victim not in aborted and str(victim) in under_way
                    self.totals.aborted_in_flight += in_flight
                    engine.abort(str(victim))
                    aborted.add(victim)
            is_under_way = engine.scheduler.has_rows_under_way
            result = engine.step()
            if result.plan is not None and result.plan.mode is not Mode.ROLLING:
                self.totals.steps_parked += is_under_way
            for output in result.outputs:
                assert output.message is None, output.message
                tokens[int(output.request_id)] += output.token_ids
        engine.scheduler.check_integrity()
        stats = engine.stats()
        assert stats.device_kv_usage == stats.host_kv_usage == 0, "blocks have leaked"
        return tokens, aborted

    def run(self, seconds: float) -> None:
        """Rounds until the time is over, a progress line a minute."""
        began = said = time.monotonic()
        while time.monotonic() - began < seconds:
            self.round()
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"{said - began:.0f} s: {self.totals}", flush=True)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def soak(seconds: float, seed: int) -> dict[str, object]:
    """What to log of a run; a wrong token is in `failure`."""
    jax.config.update("jax_default_matmul_precision", "highest")
    jnp.zeros(()).block_until_ready()
    began = time.monotonic()
    run = Soak(seed, scale=8 if jax.default_backend() == "gpu" else 1)
    failure = None
    try:
        run.run(seconds)
    except AssertionError as error:
        failure = f"round {run.totals.rounds}: {error}"
    found = {
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": round(time.monotonic() - began),
        **dataclasses.asdict(run.totals),
        "failure": failure,
    }
    if failure is None:
        run.close()
    jax.config.update("jax_default_matmul_precision", None)
    return found


def main() -> int:
    """One run, appended to the log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"))
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else args.seed
    found = soak(args.seconds, seed)
    line = json.dumps(found)
    print(line)
    with args.log.open("a") as log:
        log.write(line + "\n")
    return 1 if found["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())
