"""When requests arrive: a closed loop, all at once, a random process, or a recorded trace.

Joined with lengths it is a `Traffic`, which the in-process driver, the HTTP client and the
simulator all replay.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neojax.bench.workload import Lengths, Workload

FORMS = "all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV, steady:CLIENTS, or trace:FILE"


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival, and when they are sent.

    at_s: offsets from the start, ascending; None where `clients` decides: each of so many clients
    sends its next request when its last has finished.
    """

    name: str
    lengths: tuple[Lengths, ...]
    at_s: tuple[float, ...] | None
    clients: int | None

    def __post_init__(self) -> None:
        assert (self.at_s is None) != (self.clients is None)


def make_traffic(workload: Workload, arrivals: str, count: int, seed: int) -> Traffic:
    """Draw `count` requests of a workload, arriving as said (see FORMS).

    A trace brings its own lengths, of which the first `count` are taken. Raises ValueError for a
    form that is none.
    """
    form, _, rest = arrivals.partition(":")
    if form == "trace" and rest:
        return _truncated(read_trace(Path(rest)), count)
    lengths = tuple(workload.draw(count, seed))
    name = f"{workload.name} {arrivals}"
    try:
        match form, [float(value) for value in rest.split(":") if rest]:
            case "all", []:
                return Traffic(name, lengths, (0.0,) * count, None)
            case "closed", [clients] if clients >= 1 and clients == int(clients):
                return Traffic(name, lengths, None, int(clients))
            case "steady", [clients] if clients >= 1 and clients == int(clients):
                return Traffic(name, _begun(lengths, int(clients), seed), None, int(clients))
            case "poisson", [rate] if rate > 0:
                # A gamma process whose gaps have a coefficient of variation of 1.
                return Traffic(name, lengths, _gamma(rate, 1.0, count, seed), None)
            case "gamma", [rate, cv] if rate > 0 and cv > 0:
                return Traffic(name, lengths, _gamma(rate, cv, count, seed), None)
    except ValueError:
        pass  # a part that is no number
    raise ValueError(f"arrivals {arrivals!r} must be {FORMS}, with numbers above 0")


def _begun(lengths: tuple[Lengths, ...], clients: int, seed: int) -> tuple[Lengths, ...]:
    """With the first request of each client cut to a random part of its output.

    As if the clients had been at it for long: a closed loop begins with all requests in step, and
    where they take a minute each, waves of prefill and of decoding go on for many.
    """
    rng = random.Random(f"begun {seed}")
    first = (size._replace(output=rng.randint(1, size.output)) for size in lengths[:clients])
    return (*first, *lengths[clients:])


def _gamma(rate: float, cv: float, count: int, seed: int) -> tuple[float, ...]:
    """Arrival times with gamma-distributed gaps of mean 1/rate; the first request is at 0."""
    rng = random.Random(f"arrivals {seed}")  # apart from the lengths' numbers of the same seed
    shape = cv**-2
    gaps = (rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count - 1))
    return tuple(itertools.accumulate(gaps, initial=0.0))


def read_trace(path: Path) -> Traffic:
    """A recorded trace: Azure's CSV, or JSON lines as Mooncake's.

    CSV: columns TIMESTAMP (ISO), ContextTokens, GeneratedTokens. JSON lines: `timestamp` in
    milliseconds, `input_length`, `output_length`. Raises ValueError saying what is missing.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_csv_rows(file) if path.suffix == ".csv" else map(_json_row, file))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"trace {path} is neither a .csv with TIMESTAMP, ContextTokens and GeneratedTokens nor "
            f"JSON lines with timestamp, input_length and output_length: {error!r}"
        ) from error
    if not rows:
        raise ValueError(f"trace {path} holds no requests")
    rows.sort(key=lambda row: row[0])
    start_s = rows[0][0]
    lengths = tuple(lengths for _, lengths in rows)
    return Traffic(f"trace {path.name}", lengths, tuple(at - start_s for at, _ in rows), None)


def _csv_rows(file: Any) -> Iterator[tuple[float, Lengths]]:
    for row in csv.DictReader(file):
        # Azure writes seven digits of a second; Python reads six.
        stamp = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        stamp = stamp.replace(tzinfo=datetime.UTC)
        yield (
            stamp.timestamp(),
            Lengths(int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))),
        )


def _json_row(line: str) -> tuple[float, Lengths]:
    row = json.loads(line)
    lengths = Lengths(int(row["input_length"]), max(1, int(row["output_length"])))
    return row["timestamp"] / 1e3, lengths


def _truncated(traffic: Traffic, count: int) -> Traffic:
    assert traffic.at_s is not None
    return dataclasses.replace(traffic, lengths=traffic.lengths[:count], at_s=traffic.at_s[:count])
