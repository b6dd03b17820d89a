"""Results for people: Markdown tables that read well in a terminal too."""

from __future__ import annotations

from collections.abc import Sequence

from neojax.bench.metrics import Distribution, Summary


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    ruler = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(ruler), *map(line, rows)])


SUMMARY_HEADER = (
    "req/s", "out tok/s", "settled tok/s", "window req/s", "TTFT ms p50/p99", "TPOT ms p50/p99",
    "e2e s p50/p99", "s/token",
)  # fmt: skip
PLACEMENT_HEADER = ("on host", "device TPOT ms p50/p99", "host TPOT ms p50/p99")


def summary_cells(summary: Summary) -> list[str]:
    """A summary as cells under SUMMARY_HEADER."""
    return [
        f"{summary.requests_per_s:.2f}",
        f"{summary.output_tokens_per_s:.1f}",
        f"{summary.settled_tokens_per_s:.1f}",
        f"{summary.window_requests_per_s:.2f}",
        _p50_p99(summary.ttft_s, 1e3, 0),
        _p50_p99(summary.tpot_s, 1e3, 1),
        _p50_p99(summary.e2e_s, 1, 2),
        f"{summary.s_per_output_token:.3f}",
    ]


def placement_cells(summary: Summary) -> list[str]:
    """What came from the host, and how fast either side's tokens came, under PLACEMENT_HEADER."""
    return [
        f"{summary.host_share:.0%}",
        _p50_p99(summary.device_tpot_s, 1e3, 1),
        _p50_p99(summary.host_tpot_s, 1e3, 1),
    ]


def latency_table(summary: Summary) -> str:
    """Every latency of one run by mean and percentile, in milliseconds."""
    rows = [
        [name, *(f"{1e3 * value:.1f}" for value in (d.mean, d.p50, d.p90, d.p99))]
        for name, d in (
            ("time to first token", summary.ttft_s),
            ("time per output token", summary.tpot_s),
            ("inter-token latency", summary.itl_s),
            ("end to end", summary.e2e_s),
        )
    ]
    return table(("ms", "mean", "p50", "p90", "p99"), rows)


def _p50_p99(values: Distribution | None, scale: float, digits: int) -> str:
    if values is None:
        return "-"
    return f"{scale * values.p50:.{digits}f}/{scale * values.p99:.{digits}f}"
