"""The table of a sweep: medians over repeats, and each policy beside device-only."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from neojax.bench.metrics import Distribution, Summary, median_of
from neojax.bench.report import (
    PLACEMENT_HEADER,
    SUMMARY_HEADER,
    placement_cells,
    summary_cells,
    table,
)

BASELINE = "device-only"


def sweep_table(lines: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of a sweep's JSON lines.

    A ratio is the median over repeats of requests per second beside device-only's in the same
    repeat; of settled tokens per second where a run of either was cut off, since what finishes
    before that says less of requests that take longer. Runs with other settings or hardware have
    rows of their own.
    """
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line in lines:
        groups[_conditions(line), line["cell"]][line["policy"]].append(line)
    rows = []
    for (_, cell), policies in groups.items():
        for policy, runs in policies.items():
            summary = median_of([read_summary(run["summary"]) for run in runs])
            counters = [run["counters"] for run in runs]
            steps = [sum(c[name] for c in counters) for name in STEP_COUNTERS]
            unfinished = sum(run["summary"]["num_errors"] for run in runs)
            rows.append(
                [
                    f"{cell} {policy}",
                    *summary_cells(summary),
                    *placement_cells(summary),
                    _ratio(runs, policies.get(BASELINE, [])),
                    "/".join(map(str, steps)),
                    f"{sum(c['steps_lost'] for c in counters)} "
                    f"({1e3 * sum(c['steps_lost_s'] for c in counters):.0f})",
                    str(len(runs)) + (f" ({unfinished} requests unfinished)" if unfinished else ""),
                ]
            )
    header = (
        "cell, policy",
        *SUMMARY_HEADER,
        *PLACEMENT_HEADER,
        f"x {BASELINE}",
        "steps device/pipelined/rolling",
        "lost steps (ms)",
        "runs",
    )
    return table(header, rows)


STEP_COUNTERS = ("steps_device_only", "steps_pipelined", "steps_rolling")


def read_summary(fields: dict[str, Any]) -> Summary:
    """A summary from its JSON object."""
    read: dict[str, Any] = {
        name: Distribution(**value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return Summary(**read)


def _conditions(line: dict[str, Any]) -> str:
    return f"{line['hardware']} {sorted(line['settings'].items())}"


def _ratio(runs: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> str:
    base = {run["repeat"]: run["summary"] for run in baseline}
    ratios = []
    for run in runs:
        ours, theirs = run["summary"], base.get(run["repeat"])
        if theirs is not None:
            is_cut = ours["num_errors"] or theirs["num_errors"]
            rate = "settled_tokens_per_s" if is_cut else "requests_per_s"
            ratios.append(ours[rate] / theirs[rate])
    return f"{statistics.median(ratios):.3f}" if ratios else "-"
