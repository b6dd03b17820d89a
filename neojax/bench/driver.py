"""Sends a `Traffic` to an engine in this process and notes when each token comes.

The engine may be the real one or a simulated one with a clock of its own: the loop is the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from neojax.bench.arrivals import Traffic
from neojax.bench.metrics import RequestRecord
from neojax.sampling_params import SamplingParams


class Tokens(Protocol):
    """New tokens of one request."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def placement(self) -> str: ...
    @property
    def message(self) -> str | None: ...


class StepOutputs(Protocol):
    """What one step gave."""

    @property
    def outputs(self) -> Sequence[Tokens]: ...


class Engine(Protocol):
    """What the driver needs of an engine."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def add_request(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> StepOutputs: ...


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float: ...
    def wait_until(self, at_s: float) -> None: ...


class WallClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def wait_until(self, at_s: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, at_s - self.now_s()))


class Run(NamedTuple):
    """A served traffic."""

    start_s: float
    records: list[RequestRecord]  # in order of sending


def drive(
    engine: Engine,
    traffic: Traffic,
    *,
    seed: int = 0,
    clock: Clock | None = None,
    max_s: float = math.inf,
    progress: str | None = None,
) -> Run:
    """Serve all of the traffic, greedily and without end tokens.

    A request that the engine refuses has the reason as its record's error. max_s: after so long the
    rest is aborted, and its records say so. progress: the text of a progress bar, None for none.
    """
    clock = clock or WallClock()
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, engine.vocab_size, n.input).tolist() for n in traffic.lengths]
    records: dict[str, RequestRecord] = {}
    to_send = deque(range(len(prompts)))
    start_s = clock.now_s()

    def send(sent_s: float) -> bool:
        """Send the next request; whether the engine took it."""
        index = to_send.popleft()
        lengths = traffic.lengths[index]
        params = SamplingParams(temperature=0.0, max_tokens=lengths.output, ignore_eos=True)
        record = records[str(index)] = RequestRecord(index, lengths.input, sent_s)
        try:
            engine.add_request(str(index), prompts[index], params)
        except ValueError as error:
            record.error = str(error)
            bar.update()
        return record.error is None

    def send_for_client(sent_s: float) -> None:
        while to_send and not send(sent_s):
            pass

    with tqdm(total=len(prompts), desc=progress, disable=progress is None, leave=False) as bar:
        for _ in range(traffic.clients or 0):
            send_for_client(start_s)
        while engine.has_work or to_send:
            if clock.now_s() - start_s > max_s:
                _cut_off(engine, records, to_send)
            if traffic.at_s is not None:
                while to_send and start_s + traffic.at_s[to_send[0]] <= clock.now_s():
                    send(start_s + traffic.at_s[to_send[0]])
                if not engine.has_work and to_send:
                    clock.wait_until(start_s + traffic.at_s[to_send[0]])
                    continue
            for output in engine.step().outputs:
                record, now_s = records[output.request_id], clock.now_s()
                if record.error is not None:
                    continue  # cut off; a step in flight still gave it a token
                record.token_s += [now_s] * len(output.token_ids)
                record.token_on_host += [output.placement == "host"] * len(output.token_ids)
                if output.finish_reason is None:
                    continue
                record.is_finished = True
                record.error = output.message
                bar.update()
                if traffic.clients is not None:
                    send_for_client(now_s)
    return Run(start_s, list(records.values()))


def _cut_off(engine: Engine, records: dict[str, RequestRecord], to_send: deque[int]) -> None:
    to_send.clear()
    for request_id, record in records.items():
        if record.error is None and not record.is_finished:
            record.error = "cut off"
            engine.abort(request_id)
