"""Rotary frequencies and the ways a checkpoint stretches them. No jax: configs import this."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, slots=True)
class PerFrequencyRopeScaling:
    """Each frequency divided by its own factor: how GGUF files store the llama3 scaling."""

    factors: tuple[float, ...]  # [H/2]


@dataclasses.dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Frequencies between two numbers of turns ramp from kept to divided by `factor`; queries and
    keys grow by `attention_factor`, which sharpens attention over the longer context."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicRopeScaling:
    """Kept up to the original context; beyond it theta grows with the length (dynamic NTK).

    A token at position i turns as the last one of a sequence of i + 1 tokens, which is what
    transformers computes while it generates. It must not depend on what follows: the key stays in
    the cache as it is.
    """

    factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by its own factor: a short one where the context served is the
    original one, a long one otherwise. Queries and keys grow by `attention_factor`."""

    short_factors: tuple[float, ...]  # [H/2]
    long_factors: tuple[float, ...]  # [H/2]
    original_max_position_embeddings: int
    attention_factor: float


RopeScaling: TypeAlias = (
    LinearRopeScaling
    | Llama3RopeScaling
    | PerFrequencyRopeScaling
    | YarnRopeScaling
    | DynamicRopeScaling
    | LongRopeScaling
)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, context: int = 0
) -> np.ndarray:
    """Angle per position of each pair of a head, float32 [H/2]; of a dynamic scaling, that within
    the original context.

    context: longest context served, in tokens; LongRopeScaling depends on it.
    Computed in float64 and rounded once: at position 8192 an error of one float32 ulp in a
    frequency is already 5e-4 of a radian.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case LinearRopeScaling(factor):
            frequencies = frequencies / factor
        case PerFrequencyRopeScaling(factors):
            frequencies = frequencies / np.asarray(factors, np.float64)
        case Llama3RopeScaling():
            frequencies = _llama3_frequencies(frequencies, scaling)
        case YarnRopeScaling():
            frequencies = _yarn_frequencies(frequencies, theta, scaling)
        case LongRopeScaling(short, long, original):
            frequencies = frequencies / np.asarray(long if context > original else short)
        case DynamicRopeScaling() | None:
            pass
    return frequencies.astype(np.float32)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What rotated queries and keys are multiplied by."""
    has_factor = isinstance(scaling, YarnRopeScaling | LongRopeScaling)
    return scaling.attention_factor if has_factor else 1.0


def _llama3_frequencies(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_frequencies(
    frequencies: np.ndarray, theta: float, scaling: YarnRopeScaling
) -> np.ndarray:
    def index_of(turns: float) -> float:
        """Index, not whole, of the frequency that makes so many turns in the original context."""
        ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return len(frequencies) * math.log(ratio) / math.log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    # At least a thousandth apart, as in the reference: they may coincide.
    divided = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return frequencies * (1 - divided) + frequencies / scaling.factor * divided
