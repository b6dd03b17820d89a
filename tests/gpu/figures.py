"""The table of scripts/gpu_check: each figure beside its target, read from lines of its log.

Targets of speed are those of an H200 with Llama-3.1-8B's shapes; what must be right holds anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Line = dict[str, Any]


class Figure(NamedTuple):
    """One row of the table."""

    name: str
    value: float
    form: str = "{:,.0f}"
    at_most: float | None = None
    at_least: float | None = None
    is_of_speed: bool = True

    @property
    def target(self) -> str:
        """The bound, as the figure is written."""
        if self.at_most is not None:
            return f"≤ {self.form.format(self.at_most)}"
        return "" if self.at_least is None else f"≥ {self.form.format(self.at_least)}"

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps its bound, if it has one."""
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


VLLM_DECODE_MS = {"1": 4.98, "16": 5.58, "64": 7.46, "256": 16.7}
FLOOR_AIMS = {"16": 1.25, "64": 1.25}
VLLM_REQUESTS_PER_S = {"64": 28.6, "256": 33.2}


def _must(name: str, value: float, **bound: float) -> Figure:
    return Figure(name, value, **bound, is_of_speed=False)


def _tests(line: Line) -> Iterator[Figure]:
    yield Figure("passed", line["passed"], at_least=1)
    yield _must("failed", line["failed"], at_most=0)
    yield _must("skipped", line["skipped"])
    if not line["in_time"]:
        yield Figure("ended by the time limit", 1, at_most=0)


def _right(line: Line) -> Iterator[Figure]:
    yield _must("tokens compared with a plain forward pass", line["tokens"])
    yield _must("of them off", line["off"], at_most=0)
    yield Figure("models that the budget left out", len(line["left_out"]), at_most=0)


def _forced(line: Line) -> Iterator[Figure]:
    yield Figure(
        "bf16 logits' difference from fp32, of the largest", line["relative"], "{:.3f}",
        at_most=0.05, is_of_speed=False,
    )  # fmt: skip
    yield _must("clear choices", line["clear_rows"])
    yield _must("of them different", line["clear_rows_that_differ"], at_most=0)


def _soak(line: Line) -> Iterator[Figure]:
    yield Figure("tokens compared with a rerun", line["tokens"], at_least=100_000)
    yield Figure("time under random load", line["seconds"], "{:,.0f} s", at_least=240)
    yield _must("failures", int(line["failure"] is not None), at_most=0)


def _decode(line: Line) -> Iterator[Figure]:
    for batch, row in line["decode"].items():
        yield Figure(
            f"step, batch {batch}", row["ms"], "{:.2f} ms", at_most=VLLM_DECODE_MS.get(batch)
        )
        if batch in FLOOR_AIMS:
            over = row["ms"] / row["floor_ms"]
            yield Figure(
                f"over the floor, batch {batch}", over, "{:.2f}x", at_most=FLOOR_AIMS[batch]
            )
        if batch == "256":
            # Reading once, plus the arithmetic that is no longer hidden behind it.
            yield Figure(
                "over 12.8 ms, batch 256", row["ms"] / 12.8, "{:.2f}x", at_most=FLOOR_AIMS["64"]
            )
    yield _must("compiled after ready", line["compiles_after_ready"], at_most=0)


def _prefill(line: Line) -> Iterator[Figure]:
    for name, value in line.items():
        if name.startswith("ttft_ms_"):
            tokens = name.removeprefix("ttft_ms_")
            bound = 105.0 if tokens == "4096" else None
            yield Figure(f"first token of a prompt of {tokens}", value, "{:.1f} ms", at_most=bound)
        elif name.startswith("tokens_per_s_"):
            prompts = name.removeprefix("tokens_per_s_").replace("x", " prompts of ")
            yield Figure(prompts, value, "{:,.0f} tokens/s", at_least=41_000)


def _throughput(line: Line) -> Iterator[Figure]:
    for name, value in line.items():
        if name.startswith("requests_per_s_"):
            count = name.removeprefix("requests_per_s_")
            yield Figure(
                f"{count} requests at once", value, "{:.1f} requests/s",
                at_least=VLLM_REQUESTS_PER_S.get(count),
            )  # fmt: skip


def _lane(line: Line) -> Iterator[Figure]:
    points = line["points"]
    yield Figure("points of the grid", len(points))
    yield Figure("over two queues, median", line["median_ratio"], "{:.3f}x", at_most=1.05)
    yield Figure("over two queues, worst", line["worst_ratio"], "{:.3f}x", at_most=1.15)
    for rows, hop_us in sorted({point["rows"]: point["hop_us"] for point in points}.items()):
        yield Figure(f"hop of {rows} rows", hop_us, "{:.0f} µs", at_most=40)
    hidden = statistics.median(point["hidden"] for point in points)
    yield Figure("host attention hidden, median", hidden, "{:.0%}")


def _swap(line: Line) -> Iterator[Figure]:
    yield Figure("one request", line["alone_gbps"], "{:.1f} GB/s")
    yield Figure("of pinned copies", line["share_of_pinned"], "{:.0%}", at_least=0.8)
    yield Figure("slows decodes beside it by", line["slowdown"], "{:.1%}", at_most=0.05)


def _host_time(line: Line) -> Iterator[Figure]:
    for batch, row in line.items():
        if isinstance(row, dict):
            yield Figure(f"host's part of a step, batch {batch}", row["host_ms"], "{:.2f} ms")
            yield Figure(
                f"device idle between steps, batch {batch}", row["idle"], "{:.1%}", at_most=0.03
            )


def _compiles(line: Line) -> Iterator[Figure]:
    yield _must("requests of random load", line["requests"])
    yield _must("programs compiled for them", line["compiles"], at_most=0)


def _start(line: Line) -> Iterator[Figure]:
    yield Figure("nothing cached", line["cold_s"], "{:.1f} s")
    yield Figure("programs cached", line["warm_s"], "{:.1f} s", at_most=30)


def _rolling(line: Line) -> Iterator[Figure]:
    yield Figure("points of the grid", len(line["points"]))
    yield Figure("over device or host, median", line["median_ratio"], "{:.3f}x", at_most=1.05)
    yield Figure("over device or host, worst", line["worst_ratio"], "{:.3f}x")
    for rows, hop in line["hops"].items():
        yield Figure(f"hop beside {rows} device rows", hop["hop_us"], "{:.1f} µs", at_most=15)


# As in a run of all sections, which is the order of the table too.
FIGURES: dict[str, Callable[[Line], Iterable[Figure]]] = {
    "tests": _tests, "right": _right, "forced": _forced, "lane": _lane, "soak": _soak,
    "decode": _decode, "prefill": _prefill, "throughput": _throughput, "swap": _swap,
    "host_time": _host_time, "compiles": _compiles, "start": _start, "rolling": _rolling,
}  # fmt: skip


ERROR = "error"
"""The key under which a line says why its section gave no figures."""


class Row(NamedTuple):
    """A figure with where it is from."""

    section: str
    figure: str
    measured: str
    target: str
    is_met: str
    line: Line


def rows(lines: Iterable[Line]) -> list[Row]:
    """The newest figure of each name, load and device; lines come oldest first."""
    newest: dict[tuple[str, str, str], dict[str, Row]] = {}
    for line in lines:
        of_section = (line["section"], line.get("load", ""), line.get("device", ""))
        found = newest.setdefault(of_section, {})
        found.pop(ERROR, None)
        found |= {row.figure: row for row in _rows_of(line)}
    order = list(FIGURES)
    return [
        row
        for key in sorted(newest, key=lambda key: (order.index(key[0]), *key[1:]))
        for row in newest[key].values()
    ]


def _rows_of(line: Line) -> Iterator[Row]:
    section = line["section"]
    if ERROR in line:
        said = str(line[ERROR]).splitlines()[0]
        yield Row(section, ERROR, said[:100], "", "no", line)
        return
    try:
        found = list(FIGURES[section](line))
    except KeyError as missing:  # a line of another commit, which measured something else
        yield Row(section, ERROR, f"its line has no {missing}", "", "", line)
        return
    for figure in found:
        has_target = figure.target and not (figure.is_of_speed and line.get("load") == "tiny")
        yield Row(
            section,
            figure.name,
            figure.form.format(figure.value),
            figure.target if has_target else "",
            ("yes" if figure.is_met else "no") if has_target else "",
            line,
        )


def is_wrong(line: Line) -> bool:
    """Whether a section failed, or found what must not be anywhere."""
    return ERROR in line or any(
        not figure.is_met and not figure.is_of_speed for figure in FIGURES[line["section"]](line)
    )


def table(lines: Iterable[Line], *, with_origin: bool) -> str:
    """Markdown. with_origin: commit, load and device of each figure, which then may differ."""
    header = ["section", "figure", "measured", "target", "met"]
    header += ["commit", "load", "device"] if with_origin else []
    written = [header, ["---"] * len(header)]
    for row in rows(lines):
        cells = [row.section, row.figure, row.measured, row.target, row.is_met]
        if with_origin:
            cells += [str(row.line.get(name, "")) for name in ("commit", "load", "device")]
        written.append(cells)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in written
    )
