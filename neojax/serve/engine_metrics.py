"""The engine's own numbers, as series of /metrics at the moment of the scrape."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from neojax.engine.messages import Ready
from neojax.engine.report import Distribution, EngineStats, StepTotals


class EngineCollector:
    """Asks for the engine's latest words at each scrape."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        ready: Callable[[], Ready | None],
        labels: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._ready = ready
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        stats = self._stats()
        if stats is not None:
            yield from self._of_requests(stats)
            yield from self._of_lanes(stats)
            if stats.totals is not None:
                yield from self._of_steps(stats.totals)
        ready = self._ready()
        if ready is not None:
            yield self._gauge(
                "num_kv_blocks",
                "Blocks of each KV pool",
                {"device": ready.num_device_blocks, "host": ready.num_host_blocks},
                "pool",
            )

    def _of_requests(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running",
            "Requests in the batch, by where their KV lives",
            {"device": stats.num_running_device, "host": stats.num_running_host},
            "placement",
        )
        yield self._gauge("num_requests_waiting", "Requests not yet running", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Used share of each KV pool, 0 to 1",
            {"device": stats.device_kv_usage, "host": stats.host_kv_usage},
            "pool",
        )
        yield self._counter("num_preemptions", "Requests preempted", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.generation_tokens)
        yield self._counter(
            "requests_placed",
            "Requests by where their KV was placed",
            {"device": stats.requests_placed_device, "host": stats.requests_placed_host},
            "placement",
        )
        yield self._counter(
            "swaps",
            "Requests moved to the other KV pool, by where they went",
            {"device": stats.requests_swapped_in, "host": stats.requests_swapped_out},
            "placement",
        )
        yield self._counter(
            "requests_not_finite",
            "Requests ended because their logits were not finite",
            stats.num_not_finite,
        )

    def _of_lanes(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge(
            "last_step_age_seconds",
            "Time since the engine finished a step",
            max(0.0, time.time() - stats.last_step_unix_s),
        )
        yield self._counter(
            "iterations",
            "Engine steps, by mode",
            {
                "device_only": stats.steps_device_only,
                "pipelined": stats.steps_pipelined,
                "rolling": stats.steps_rolling,
            },
            "mode",
        )
        yield self._counter(
            "lane_busy_seconds",
            "Time in which a lane computed",
            {"host_attention": stats.host_attention_busy_s},
            "lane",
        )
        yield self._counter(
            "host_attention_bytes",
            "K and V that host attention has read",
            stats.host_attention_bytes,
        )
        yield self._counter(
            "compiles_after_ready",
            "Programs compiled while serving; 0 is right",
            stats.num_compiles_after_ready,
        )
        yield self._counter(
            "iterations_lost",
            "Steps with host rows that took longer than the device alone would have",
            stats.steps_lost,
        )
        yield self._counter(
            "iterations_lost_seconds", "Time that these steps took longer", stats.steps_lost_s
        )
        yield self._gauge(
            "predictor_ratio",
            "Measured over predicted time: of steps by mode, and of the host's attention",
            {
                "device_only": stats.correction_device_only,
                "pipelined": stats.correction_pipelined,
                "rolling": stats.correction_rolling,
                "host_attention": stats.correction_host_attention,
            },
            "term",
        )

    def _of_steps(self, totals: StepTotals) -> Iterator[Metric]:
        yield self._counter("step_seconds", "Time of steps, by mode", totals.seconds, "mode")
        yield self._counter(
            "pipeline_bubble_seconds",
            "Time in which a lane was idle in steps that had work for it",
            {"host_attention": totals.host_idle_s},
            "lane",
        )
        yield self._counter(
            "kv_swap_bytes", "K and V of swapped requests", totals.swap_bytes, "direction"
        )
        yield self._histogram("iteration_tokens_total", "Rows of a step", totals.tokens)
        yield self._histogram(
            "request_queue_time_seconds", "Arrival of a request to its first step", totals.queue_s
        )
        yield self._histogram(
            "request_prefill_time_seconds",
            "First step of a request to its first token",
            totals.prefill_s,
        )
        yield self._histogram(
            "predictor_relative_error",
            "Difference of predicted and measured time of a step, over the measured",
            totals.relative_error,
        )
        # Absent, not 1, where nothing was predicted: no claim about the host's help.
        if totals.predicted_gain is not None and totals.measured_gain is not None:
            text = "Time of the device alone over that of the last steps with host rows"
            yield self._gauge("predicted_gain_ratio", f"{text}, predicted", totals.predicted_gain)
            yield self._gauge("measured_gain_ratio", f"{text}, measured", totals.measured_gain)

    def _gauge(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(GaugeMetricFamily, name, text, value, label)

    def _counter(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, value, label)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        label: str | None,
    ) -> Metric:
        names = [*self._labels, label] if label is not None else list(self._labels)
        family = kind(f"neojax:{name}", text, labels=names)
        base = list(self._labels.values())
        if isinstance(value, Mapping):
            for label_value, number in value.items():
                family.add_metric([*base, label_value], number)
        else:
            family.add_metric(base, value)
        return family

    def _histogram(self, name: str, text: str, values: Distribution) -> Metric:
        bounds = [*map(str, map(float, values.bounds)), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(values.counts), strict=True))
        family = HistogramMetricFamily(f"neojax:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, values.total)
        return family
