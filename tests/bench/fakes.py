"""An engine with a clock of its own: so many tokens a second for each of so many places."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from neojax.engine.report import RequestTokens
from neojax.sampling_params import SamplingParams


class FakeClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, at_s: float) -> None:
        self.time_s = max(self.time_s, at_s)


@dataclasses.dataclass
class FakeEngine:
    """Serves `places` requests at a time, one token each per step of `step_s`."""

    clock: FakeClock
    places: int = 2
    step_s: float = 1.0
    vocab_size: int = 50
    reject: str | None = None

    def __post_init__(self) -> None:
        self.queue: dict[str, int] = {}
        self.prompts: list[list[int]] = []
        self.most_at_once = 0
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.queue)

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        assert params.ignore_eos
        assert params.is_greedy
        if request_id == self.reject:
            raise ValueError("too long")
        self.queue[request_id] = params.max_tokens or 0
        self.prompts.append(prompt_ids)
        self.most_at_once = max(self.most_at_once, len(self.queue))

    def abort(self, request_id: str) -> None:
        del self.queue[request_id]

    def step(self) -> SimpleNamespace:
        self.clock.time_s += self.step_s
        self.num_steps += 1
        outputs = []
        for request_id in list(self.queue)[: self.places]:
            self.queue[request_id] -= 1
            done = self.queue[request_id] == 0
            if done:
                del self.queue[request_id]
            outputs.append(RequestTokens(request_id, [1], "length" if done else None))
        return SimpleNamespace(outputs=outputs)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            steps_device_only=self.num_steps,
            steps_pipelined=0,
            steps_rolling=0,
            num_preemptions=0,
            requests_placed_host=0,
            steps_lost=0,
            steps_lost_s=0.0,
        )
