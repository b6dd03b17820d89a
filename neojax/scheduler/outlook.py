"""Whether the host would help the present mix of requests in the long run, and how many.

A plan's choice is of one step; where a request's KV goes binds hundreds of steps. So the steady
state is weighed: the device full of decodes, a number of host rows beside them, and each step
(or each second, fourth, ... one) the prefill tokens that replace the requests which finish.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from neojax.scheduler.balance import best_split
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Load, Predictor
from neojax.scheduler.request import Request
from neojax.scheduler.rolling import STEPS_TO_ENTER
from neojax.scheduler.worth import decode_token_s, device_only_s, prompt_token_s

MIN_GAIN = 1.05
"""The host must be worth so much more than the device alone, or requests wait for the device. Each
time that steps with host rows turn out not to be, twice as much more is asked for."""

MOST_GAIN = 2.0
"""What is asked for at most."""

CALM = 1 / 1024
"""Share by which that returns to MIN_GAIN from look to look."""

LOOKS_TO_LEAVE = 16
"""Looks in a row that must find the device alone no worse before the host is left: filling it takes
seconds that only pay if it stays filled, and what steps are predicted to take varies meanwhile."""

WEIGHT = 1 / 32
"""Share of the newest finished request in the mean output."""

PARTS_OF_GROUPS = (0.125, 0.25, 0.5)
"""Of long contexts the host may have time for a row in every eighth group only."""

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the steps in which the host rows run, with all of the prefill tokens."""


class Regime(NamedTuple):
    """A steady state, in tokens per second of the decodes of all requests."""

    rate: float
    num_host_rows: int
    rolling_rows: float = 0  # of a group, where they run in ROLLING steps
    chunk_tokens: int = 0  # prefill tokens of a ROLLING step that has any


NONE = Regime(0.0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """The mean request."""

    prompt_tokens: float
    output_tokens: float
    fetch_s: float = 0.0
    """Seconds per layer in which its later chunks' prefixes come from the arena, if it is on the
    host: a prompt longer than a step is computed in chunks, and a few of these weigh much."""

    @property
    def context(self) -> float:
        """Mean length while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2

    def decodes(self, num_rows: int) -> Load:
        """So many of it that decode on the device."""
        return Load(num_decodes=num_rows, decode_context=int(num_rows * self.context))

    def chunks(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """So many prefill tokens: one chunk a prompt, with attention as over whole prompts."""
        count = max(1, round(num_tokens / self.prompt_tokens))
        return ((num_tokens // count, int(self.prompt_tokens)),) * count if num_tokens else ()


class Outlook:
    """The best steady state known, renewed by `look`."""

    def __init__(self, predictor: Predictor, limits: SchedulerLimits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._mean_output: float | None = None  # of finished requests
        self._least_gain = MIN_GAIN
        self._looks_without = 0  # in a row, in which the host did not pay
        self.num_device_rows = 1
        """Decodes that the device pool holds."""
        self.prompt_tokens = 0.0
        """Prompt tokens per step that replace the requests which finish on the device."""
        self.rows_per_step = 1.0
        """Rows of a step that serves the device and these host rows, prefill included."""
        self.prompt_token_s = 0.0
        """Price of a prompt's token, its attention aside."""
        self.decode_token_s = 0.0
        """Price of a decoded token where PIPELINED steps pay, else 0; see `_decode_token_s`."""
        self.num_host_rows = 0
        """Host rows of the best steady state; 0 where the device alone is as good."""
        self.rolling_rows = 0.0
        """Rows of its groups, where its host rows run in ROLLING steps; below 1, so many of the
        groups have one."""
        self.chunk_tokens = 0
        """Prefill tokens of its ROLLING steps."""
        self.mean_context = 1.0
        """Of a request while it decodes."""
        self.gain = 1.0
        """Its rate over that of the device alone."""

    def finished(self, request: Request) -> None:
        """Learn how long outputs are."""
        n = len(request.output_ids)
        mean = n if self._mean_output is None else self._mean_output
        self._mean_output = mean + WEIGHT * (n - mean)

    def look(self, requests: Iterable[Request], num_requests: int, num_device_blocks: int) -> None:
        """Weigh the steady states of these requests, a sample of num_requests that want service."""
        mix = self._mix(list(requests))
        if mix is None:
            return
        self.mean_context = mix.context
        limits = self._limits
        size = -(-mix.context // limits.block_size) + 1  # and a block to grow into
        most = min(limits.max_num_seqs, num_requests)
        self.num_device_rows = min(most, int(num_device_blocks // size))
        self.prompt_tokens = self.num_device_rows * mix.prompt_tokens / mix.output_tokens
        room = min(most - self.num_device_rows, int(limits.num_host_blocks // size))
        # With so many rows prefill fills every step. More wait for it, and cannot be in its way.
        tokens_per_row = 1 + mix.prompt_tokens / mix.output_tokens
        prefill_bound = int(limits.max_num_batched_tokens / tokens_per_row)
        num_host = min(room, prefill_bound - self.num_device_rows)
        alone = self._alone(mix)
        # Once requests are there, the host need only be no worse: mixes vary from look to look.
        self._least_gain += CALM * (MIN_GAIN - self._least_gain)
        least = Regime(alone if self.num_host_rows else self._least_gain * alone, 0)
        pipelined = self._best_pipelined(mix, num_host)
        if pipelined.num_host_rows == num_host > 0:
            pipelined = pipelined._replace(num_host_rows=room)
        best = max(least, self._preferred(pipelined, self._best_rolling(mix, room)))
        if self.num_host_rows and num_host > 0 and not best.num_host_rows:
            self._looks_without += 1
            if self._looks_without < LOOKS_TO_LEAVE:
                return
            # The gain was not there: another trial costs as much, so it must promise more.
            self._least_gain = min(2 * self._least_gain - 1, MOST_GAIN)
        self._looks_without = 0
        self.num_host_rows = best.num_host_rows
        served = self.num_device_rows + min(best.num_host_rows, num_host)
        self.rows_per_step = served * tokens_per_row
        self.prompt_token_s = prompt_token_s(self._predictor, self.rows_per_step)
        is_pipelined = best.num_host_rows and not best.rolling_rows
        self.decode_token_s = self._decode_token_s(mix, best) if is_pipelined else 0.0
        self.rolling_rows, self.chunk_tokens = best.rolling_rows, best.chunk_tokens
        self.gain = best.rate / alone if best.num_host_rows and alone else 1.0

    def _preferred(self, pipelined: Regime, rolling: Regime) -> Regime:
        """The better of both, but no change from one to the other for little: each needs its own
        number of requests on the host, and to come to it takes seconds.
        """
        bonus = MIN_GAIN if self.num_host_rows else 1.0
        if self.rolling_rows:
            return pipelined if pipelined.rate > bonus * rolling.rate else rolling
        return rolling if rolling.rate > bonus * pipelined.rate else pipelined

    def _best_pipelined(self, mix: Mix, num_host: int) -> Regime:
        regimes = (self._regime(mix, rows, share) for rows in _steps(num_host) for share in SHARES)
        return max(regimes, default=NONE)

    def _best_rolling(self, mix: Mix, room: int) -> Regime:
        if not (self._limits.rolling_rows and self._predictor.knows_rolling):
            return NONE
        sizes = (*PARTS_OF_GROUPS, *range(1, self._limits.rolling_rows + 1))
        regimes = (
            self._rolling_regime(mix, rows, share)
            for rows in sizes
            if self._steps_per_rolling_token * rows <= room
            for share in SHARES
        )
        return max(regimes, default=NONE)

    def _mix(self, requests: list[Request]) -> Mix | None:
        if not requests:
            return None
        mean_output = self._mean_output
        if mean_output is None:
            mean_output = sum(r.max_tokens for r in requests) / len(requests)
        step, fetch = self._limits.max_num_batched_tokens, self._predictor.tables.fetch
        prompts = [len(r.prompt_ids) for r in requests]
        fetch_s = sum(sum(map(fetch, range(step, prompt, step))) for prompt in prompts)
        n = len(prompts)
        return Mix(sum(prompts) / n, max(1.0, mean_output), fetch_s / n)

    def _decode_token_s(self, mix: Mix, best: Regime) -> float:
        """What a decoded token is worth there: its time less that of the prompt tokens it takes.

        Where the host decodes under prefill, little is left: prefill is what is short. At the
        price of the device alone, steps would be small and full of decodes, and most of their
        time would go into reading weights.
        """
        tables = self._predictor.tables
        prompt = max(1, int(mix.prompt_tokens))
        attention = tables.num_layers * tables.prefill_attention(prompt, prompt)
        prompt_s = mix.prompt_tokens * self.prompt_token_s + attention
        return max(self.prompt_token_s, 1 / best.rate - prompt_s / mix.output_tokens)

    def _alone(self, mix: Mix) -> float:
        """Rate of the device alone, a prompt or all that fits prefilled in one step."""
        rows = self.num_device_rows
        if not rows:
            return 0.0
        decodes = mix.decodes(rows)
        seconds = self._predictor.seconds
        without = seconds(Mode.DEVICE_ONLY, decodes)
        rates = [0.0]
        room = self._limits.max_num_batched_tokens - rows
        for chunk in {min(int(mix.prompt_tokens), room), room} if room > 0 else ():
            with_chunk = seconds(Mode.DEVICE_ONLY, decodes._replace(chunks=mix.chunks(chunk)))
            rates.append(rows / (without + self.prompt_tokens / chunk * (with_chunk - without)))
        return max(rates)

    def _regime(self, mix: Mix, host_rows: int, share: float) -> Regime:
        """Host rows and prefill in a share of the steps, the device's decodes alone in the rest."""
        rows, limits = self.num_device_rows, self._limits
        useful = rows + share * host_rows
        if not useful:
            return NONE
        prefill = int(useful * mix.prompt_tokens / mix.output_tokens / share)
        if prefill + rows + host_rows > limits.max_num_batched_tokens:
            return NONE
        on_host = host_rows * share / useful if host_rows else 0.0
        is_split = prefill < mix.prompt_tokens
        decodes = mix.decodes(rows)
        device = decodes._replace(
            chunks=mix.chunks(prefill),
            store_tokens=int(on_host * prefill),
            fetch_tokens=int(on_host * mix.prompt_tokens / 2) if is_split else 0,
        )
        without = self._predictor.seconds(Mode.DEVICE_ONLY, decodes) if rows else 0.0
        if not host_rows:
            with_chunk = self._predictor.seconds(Mode.DEVICE_ONLY, device)
            return Regime(useful / (share * with_chunk + (1 - share) * without), 0)
        contexts = [int(k * mix.context) for k in range(host_rows + 1)]
        with_host = best_split(self._predictor, device, contexts, can_mix=limits.can_mix).step_s
        num_prompts = on_host * prefill / mix.prompt_tokens
        with_host += self._predictor.tables.num_layers * num_prompts * mix.fetch_s
        token_s = decode_token_s(self._predictor, rows, mix.context, rows)
        if with_host > device_only_s(self._predictor, device, host_rows, token_s):
            return NONE  # no step would be chosen that loses by its host rows
        mean = share * with_host + (1 - share) * without
        if mean / share > limits.tpot_slo_s:
            return NONE
        return Regime(useful / mean, host_rows)

    @property
    def _steps_per_rolling_token(self) -> int:
        return self._limits.num_layers + STEPS_TO_ENTER

    def _rolling_regime(self, mix: Mix, group_rows: float, share: float) -> Regime:
        """Groups of host rows in every step, and prefill in a share of the steps."""
        rows, limits, predictor = self.num_device_rows, self._limits, self._predictor
        useful = rows + group_rows  # tokens a step: one group enters, one leaves
        prefill = int(useful * mix.prompt_tokens / mix.output_tokens / share)
        if prefill + rows > limits.max_num_batched_tokens:
            return NONE
        decodes, chunks = mix.decodes(rows), mix.chunks(prefill)
        on_host = int(prefill * group_rows / useful)
        host = group_rows, group_rows * mix.context
        seconds = [
            predictor.rolling_seconds(load, limits.rolling_rows, *host)
            for load in (decodes, decodes._replace(chunks=chunks, store_tokens=on_host))
        ]
        # Prompts on their way to the host come whole, or in pieces that fetch what is before them.
        whole = max(prefill, min(int(mix.prompt_tokens), limits.max_num_batched_tokens - rows))
        load = decodes._replace(chunks=mix.chunks(whole), store_tokens=whole)
        whole_s = predictor.rolling_seconds(load, limits.rolling_rows, *host)
        before = max(0, int(mix.prompt_tokens) - prefill)
        load = decodes._replace(chunks=chunks, store_tokens=on_host, fetch_tokens=before)
        piece_s = predictor.rolling_seconds(load, limits.rolling_rows, *host)
        seconds[1] += min(
            on_host / whole * (whole_s - seconds[1]),
            on_host / max(1, prefill) * (piece_s - seconds[1]),
        )
        mean = seconds[0] + share * (seconds[1] - seconds[0])
        if self._steps_per_rolling_token * mean > limits.tpot_slo_s:
            return NONE
        num_host = int(self._steps_per_rolling_token * group_rows)
        return Regime(useful / mean, num_host, group_rows, prefill)


def _steps(most: int) -> list[int]:
    """Powers of two and halves between them, up to `most`."""
    grid = itertools.chain.from_iterable((2**i, 3 * 2**i // 2) for i in range(20))
    return sorted({min(n, most) for n in grid if n <= 2 * most and most > 0})
