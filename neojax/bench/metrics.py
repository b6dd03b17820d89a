"""What a run of requests amounts to: latencies and rates, from the times of each token.

Definitions, beside vLLM's where it has them: TTFT from sending to the first token; TPOT the mean
gap after it, per request; ITL every single gap; end to end from sending to the last token. NEO's
paper reports end to end over output tokens (figures 6), and the throughput between the 30th and
the 70th percent of completions (figures 8 to 10).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One finished request: when it was sent and when its tokens came, in seconds."""

    index: int  # order of sending
    input_tokens: int
    sent_s: float
    token_s: list[float] = dataclasses.field(default_factory=list[float])
    token_on_host: list[bool] = dataclasses.field(default_factory=list[bool])
    """Of each token: whether the KV of its row lay on the host. Empty where that is not known."""
    is_finished: bool = False
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens received."""
        return len(self.token_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.token_s[-1] - self.sent_s

    def tpot_s(self, *, on_host: bool) -> float | None:
        """Mean gap before those tokens after the first that came from one side; None without."""
        gaps = [gap for gap, at in zip(self.gaps_s, self.token_on_host[1:], strict=False)
                if at is on_host]  # fmt: skip
        return statistics.fmean(gaps) if gaps else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between neighbouring tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear between ranks); all NaN without values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """From the values themselves."""
        if not values:
            return cls(*[float("nan")] * 4)
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(statistics.fmean(values), p50, p90, p99)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run without its warm-up. Times in seconds, rates per second."""

    num_requests: int
    num_errors: int
    input_tokens: int
    output_tokens: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    window_requests_per_s: float  # between the 30th and the 70th percent of completions
    s_per_output_token: float  # end to end over output tokens, mean over requests
    host_share: float  # of output tokens: those whose row had its KV on the host
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    device_tpot_s: Distribution | None = None  # of tokens that came from the device; None: of none
    host_tpot_s: Distribution | None = None  # and from the host: a request may have some of both
    settled_tokens_per_s: float = float("nan")
    """Output tokens in the last two thirds of the run, those of requests cut off included: what is
    served where requests take longer than the run."""


def summarise(
    records: Sequence[RequestRecord], *, start_s: float, warm_up: int = 0, cool_down: int = 0
) -> Summary:
    """Sum up a run that began at start_s.

    warm_up: so many requests are dropped. Latencies leave out those sent first. Rates count the
    completions after the first `warm_up` ones, over the time since the last of these, so that
    neither filling up nor the order of completion matters. cool_down: rates leave out so many of
    the last completions too, when ever fewer requests are left. Raises ValueError when nothing is
    left.
    """
    good = sorted(
        (r for r in records if r.is_finished and r.error is None), key=lambda r: r.token_s[-1]
    )
    if len(good) <= warm_up + cool_down:
        errors = [r.error for r in records if r.error is not None]
        why = f"; the first error: {errors[0]}" if errors else ""
        dropped = warm_up + cool_down
        raise ValueError(f"{len(good)} requests finished; dropping {dropped} leaves none{why}")
    counted = good[warm_up : len(good) - cool_down]
    begin_s = good[warm_up - 1].token_s[-1] if warm_up else start_s
    seconds = counted[-1].token_s[-1] - begin_s
    timed = [r for r in good if r.index >= warm_up]
    tokens_in = sum(r.input_tokens for r in counted)
    tokens_out = sum(r.output_tokens for r in counted)
    on_host = sum(sum(r.token_on_host) for r in counted)
    return Summary(
        num_requests=len(counted),
        num_errors=len(records) - len(good),
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        seconds=seconds,
        requests_per_s=_rate(len(counted), seconds),
        output_tokens_per_s=_rate(tokens_out, seconds),
        total_tokens_per_s=_rate(tokens_in + tokens_out, seconds),
        window_requests_per_s=window_rate([r.token_s[-1] for r in good]),
        s_per_output_token=statistics.fmean(r.e2e_s / r.output_tokens for r in timed),
        host_share=on_host / tokens_out,
        ttft_s=Distribution.of([r.ttft_s for r in timed]),
        tpot_s=Distribution.of([statistics.fmean(r.gaps_s) for r in timed if r.output_tokens > 1]),
        itl_s=Distribution.of([gap for r in timed for gap in r.gaps_s]),
        e2e_s=Distribution.of([r.e2e_s for r in timed]),
        device_tpot_s=_tpot(timed, on_host=False),
        host_tpot_s=_tpot(timed, on_host=True),
        settled_tokens_per_s=_settled_rate(records, start_s),
    )


def _settled_rate(records: Sequence[RequestRecord], start_s: float) -> float:
    times_s = [at_s for record in records for at_s in record.token_s]
    end_s = max(times_s)
    begin_s = start_s + (end_s - start_s) / 3
    return _rate(sum(at_s > begin_s for at_s in times_s), end_s - begin_s)


def _tpot(records: Sequence[RequestRecord], *, on_host: bool) -> Distribution | None:
    means = (record.tpot_s(on_host=on_host) for record in records)
    known = [mean for mean in means if mean is not None]
    return Distribution.of(known) if known else None


def window_rate(completions_s: Sequence[float]) -> float:
    """Requests per second between the 30th and the 70th percent of completions, ascending.

    NaN for fewer than five requests, or where all of the window completes at once.
    """
    n = len(completions_s)
    first, last = round(0.3 * n), round(0.7 * n)
    if n < 5:
        return float("nan")
    return _rate(last - first, completions_s[last - 1] - completions_s[first - 1])


def median_of(summaries: Sequence[Summary]) -> Summary:
    """The median of every figure over repeats."""

    def median(values: Sequence[Any]) -> Any:
        values = [value for value in values if value is not None]
        if not values:
            return None
        if isinstance(values[0], Distribution):
            columns = zip(*map(dataclasses.astuple, values), strict=True)
            return Distribution(*map(statistics.median, columns))
        return statistics.median(values)

    names = [field.name for field in dataclasses.fields(Summary)]
    return Summary(**{name: median([getattr(s, name) for s in summaries]) for name in names})


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else float("nan")
