"""What /metrics shows: vLLM's names under neojax:, with the placement of requests and KV.

Counters and gauges of the engine are its latest `Stats`; latencies are measured here, as a client
sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from neojax.engine.messages import Ready
from neojax.engine.report import EngineStats
from neojax.serve.engine_metrics import EngineCollector

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH_BUCKETS = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5) if step * 10**power <= 2e5
)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All series of one server."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # a second series for each, which nobody reads
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.stats: Callable[[], EngineStats | None] = lambda: None
        self.ready: Callable[[], Ready | None] = lambda: None

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Arrival of a request to its first token",
            _TTFT_BUCKETS_S,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between tokens of a request", _ITL_BUCKETS_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its end", _LATENCY_BUCKETS_S
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt length of finished requests", _LENGTH_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Output length of finished requests", _LENGTH_BUCKETS
        )
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a finished request",
            _ITL_BUCKETS_S,
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "First to last token of a request", _LATENCY_BUCKETS_S
        )
        self._num_choices = self._histogram(
            "request_params_n", "Choices asked for in a request", (1, 2, 5, 10, 20, 50, 100)
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens allowed, for each choice", _LENGTH_BUCKETS
        )
        success = self._counter("request_success", "Finished requests", "finished_reason")
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISH_REASONS
        }
        self._rejections = self._counter(
            "admission_rejections", "Requests refused with 503", "reason"
        )
        self._registry.register(
            EngineCollector(lambda: self.stats(), lambda: self.ready(), self._labels)
        )

    def admitted(self, num_choices: int, max_tokens: Iterable[int | None]) -> None:
        """Note what one request asks for, and each of its choices."""
        self._num_choices.observe(num_choices)
        for each in max_tokens:
            if each is not None:
                self._max_tokens.observe(each)

    def finished(
        self,
        finish_reason: str,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        latency_s: float,
        decode_s: float,
    ) -> None:
        """Count one choice that has ended. decode_s: from its first token to its last."""
        self._success[finish_reason].inc()
        self._latency.observe(latency_s)
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(generation_tokens)
        self._decode_time.observe(decode_s)
        if generation_tokens > 1:
            self._time_per_token.observe(decode_s / (generation_tokens - 1))

    def rejected(self, reason: str) -> None:
        """Count one request refused before it reached the engine."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def render(self) -> bytes:
        """The text of /metrics, with the engine's latest numbers."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"neojax:{name}", text, list(self._labels), buckets=buckets, registry=self._registry
        )
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"neojax:{name}", text, [*self._labels, label], registry=self._registry)
