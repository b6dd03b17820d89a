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


RopeScaling: TypeAlias = LinearRopeScaling | Llama3RopeScaling | PerFrequencyRopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of each pair of a head, float32 [H/2].

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
        case None:
            pass
    return frequencies.astype(np.float32)


def _llama3_frequencies(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
