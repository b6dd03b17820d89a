"""How long prompts and outputs are: the workloads that the field measures with, by name.

Decides lengths only; when requests arrive is `bench.arrivals`'s business, what stands in a prompt
the driver's. EOS is ignored everywhere, so a length asked for is the length generated.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
import re
from collections.abc import Callable
from typing import NamedTuple


class Lengths(NamedTuple):
    """Tokens of one request."""

    input: int
    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A named distribution of lengths."""

    name: str
    about: str
    draw_one: Callable[[random.Random], Lengths]

    def draw(self, count: int, seed: int) -> list[Lengths]:
        """The lengths of `count` requests; the same for the same seed on every machine."""
        rng = random.Random(seed)
        return [self.draw_one(rng) for _ in range(count)]


# Quantiles of the published traces, linear between points: inverse-CDF sampling, input and output
# drawn independently (their correlation is 0.12 at most). Azure's data are CC-BY 4.0,
# https://github.com/Azure/AzurePublicDataset (2023); OSC is the file of NEO's evaluation.
# fmt: off
_P = (0, .01, .05, .1, .2, .25, .3, .4, .5, .6, .7, .75, .8, .9, .95, .99, 1)
_AZURE_CODE = (
    (3, 17, 75, 147, 386, 578, 770, 1075, 1469, 1909, 2433, 2744, 3192, 5188, 7303, 7436, 7437),
    (6, 6, 6, 7, 8, 9, 9, 11, 13, 16, 20, 24, 29, 55, 90, 251, 1899),
)
_AZURE_CONV = (
    (2, 29, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 2734, 4083, 4142, 14050),
    (7, 16, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 424, 451, 601, 1000),
)
_OSC = (
    (29, 174, 201, 233, 275, 290, 307, 339, 371, 407, 441, 459, 475, 514, 536, 555, 589),
    (15, 25, 33, 35, 38, 39, 40, 43, 45, 47, 50, 51, 53, 56, 59, 65, 129),
)
# fmt: on


def _inverse_cdf(values: tuple[int, ...], p: float) -> int:
    i = min(bisect.bisect_right(_P, p), len(_P) - 1) - 1
    share = (p - _P[i]) / (_P[i + 1] - _P[i])
    return round(values[i] + share * (values[i + 1] - values[i]))


def _from_grid(
    grid: tuple[tuple[int, ...], tuple[int, ...]],
) -> Callable[[random.Random], Lengths]:
    inputs, outputs = grid
    return lambda rng: Lengths(
        _inverse_cdf(inputs, rng.random()), _inverse_cdf(outputs, rng.random())
    )


def _clipped_normal(rng: random.Random, mean: float, sd: float, low: int, high: int) -> int:
    return int(min(max(rng.gauss(mean, sd), low), high))


def _osc_normal(rng: random.Random) -> Lengths:
    """Input first, then output, each truncated: with seed 0, 200 requests of 75,060 tokens in."""
    tokens_in = _clipped_normal(rng, 372, 104, 29, 589)
    return Lengths(tokens_in, _clipped_normal(rng, 45, 9, 15, 129))


_NAMED = (
    Workload("ac", "Azure 2023 code completion, by quantiles", _from_grid(_AZURE_CODE)),
    Workload("azure-conv", "Azure 2023 conversation, by quantiles", _from_grid(_AZURE_CONV)),
    Workload("osc", "OpenAI summarize comparisons, by quantiles", _from_grid(_OSC)),
    Workload("osc-normal", "OSC as clipped normals: 372±104 in, 45±9 out", _osc_normal),
)
WORKLOADS = {workload.name: workload for workload in _NAMED}

_SYNTHETIC = re.compile(r"(\d+)/(\d+)(?:~(0?\.\d+))?")


def parse_workload(text: str) -> Workload:
    """A workload by name, `IN/OUT` (exact lengths) or `IN/OUT~0.1` (uniform within ±10 %).

    Raises ValueError naming what there is.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    match = _SYNTHETIC.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(
            f"workload {text!r} is none of {', '.join(WORKLOADS)}, nor IN/OUT such as 1000/100, "
            "nor IN/OUT~SPREAD such as 1000/100~0.1"
        )
    mean_in, mean_out, spread = int(match[1]), int(match[2]), float(match[3] or 0)

    def draw_one(rng: random.Random) -> Lengths:
        def around(mean: int) -> int:
            return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

        return Lengths(around(mean_in), around(mean_out))

    about = f"{mean_in} in, {mean_out} out" + (f", ±{spread:.0%} uniform" if spread else "")
    return Workload(text, about, draw_one)
