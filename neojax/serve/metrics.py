"""What /metrics shows: vLLM's names under neojax:, with the placement of requests and KV.

Counters and gauges of the engine are its latest `Stats`; latencies are measured here, as a client
sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from neojax.engine.messages import Ready
from neojax.engine.report import EngineStats

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
        self._registry.register(_EngineCollector(self, self._labels))

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


class _EngineCollector:
    """The engine's numbers at the moment of the scrape."""

    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        stats = self._metrics.stats()
        if stats is not None:
            yield from self._of_stats(stats)
        ready = self._metrics.ready()
        if ready is not None:
            yield self._family(
                GaugeMetricFamily,
                "num_kv_blocks",
                "Blocks of each KV pool",
                "pool",
                {"device": ready.num_device_blocks, "host": ready.num_host_blocks},
            )

    def _of_stats(self, stats: EngineStats) -> Iterator[Metric]:
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._family(
            gauge,
            "num_requests_running",
            "Requests in the batch, by where their KV lives",
            "placement",
            {"device": stats.num_running_device, "host": stats.num_running_host},
        )
        yield self._family(
            gauge,
            "last_step_age_seconds",
            "Time since the engine finished a step",
            None,
            max(0.0, time.time() - stats.last_step_unix_s),
        )
        yield self._family(
            gauge, "num_requests_waiting", "Requests not yet running", None, stats.num_waiting
        )
        yield self._family(
            gauge,
            "kv_cache_usage_perc",
            "Used share of each KV pool, 0 to 1",
            "pool",
            {"device": stats.device_kv_usage, "host": stats.host_kv_usage},
        )
        yield self._family(
            counter, "num_preemptions", "Requests preempted", None, stats.num_preemptions
        )
        yield self._family(
            counter, "prompt_tokens", "Prompt tokens processed", None, stats.prompt_tokens
        )
        yield self._family(
            counter, "generation_tokens", "Tokens generated", None, stats.generation_tokens
        )
        yield self._family(
            counter,
            "iterations",
            "Engine steps, by mode",
            "mode",
            {
                "device_only": stats.steps_device_only,
                "pipelined": stats.steps_pipelined,
                "rolling": stats.steps_rolling,
            },
        )
        yield self._family(
            counter,
            "requests_placed",
            "Requests by where their KV was placed",
            "placement",
            {"device": stats.requests_placed_device, "host": stats.requests_placed_host},
        )
        yield self._family(
            counter,
            "lane_busy_seconds",
            "Time in which a lane computed",
            "lane",
            {"host_attention": stats.host_attention_busy_s},
        )
        yield self._family(
            counter,
            "host_attention_bytes",
            "K and V that host attention has read",
            None,
            stats.host_attention_bytes,
        )
        yield self._family(
            counter,
            "requests_not_finite",
            "Requests ended because their logits were not finite",
            None,
            stats.num_not_finite,
        )
        yield self._family(
            counter,
            "swaps",
            "Requests moved to the other KV pool, by where they went",
            "placement",
            {"device": stats.requests_swapped_in, "host": stats.requests_swapped_out},
        )
        yield self._family(
            counter,
            "iterations_lost",
            "Steps with host rows that took longer than the device alone would have",
            None,
            stats.steps_lost,
        )
        yield self._family(
            counter,
            "iterations_lost_seconds",
            "Time that these steps took longer",
            None,
            stats.steps_lost_s,
        )
        yield self._family(
            gauge,
            "predictor_ratio",
            "Measured over predicted time: of steps by mode, and of the host's attention",
            "term",
            {
                "device_only": stats.correction_device_only,
                "pipelined": stats.correction_pipelined,
                "host_attention": stats.correction_host_attention,
            },
        )
        yield self._family(
            counter,
            "compiles_after_ready",
            "Programs compiled while serving; 0 is right",
            None,
            stats.num_compiles_after_ready,
        )

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str | None,
        value: float | dict[str, int] | dict[str, float],
    ) -> Metric:
        names = [*self._labels, label] if label is not None else list(self._labels)
        family = kind(f"neojax:{name}", text, labels=names)
        base = list(self._labels.values())
        if isinstance(value, dict):
            for label_value, number in value.items():
                family.add_metric([*base, label_value], number)
        else:
            family.add_metric(base, value)
        return family
