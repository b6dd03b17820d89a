"""Which device attention to run: the one named, or the fastest that proves itself here."""

from __future__ import annotations

import functools
import logging
import warnings

import jax
import numpy as np

from neojax.ops import attention, attention_case, attention_xla
from neojax.ops.attention import Append, Attend, DeviceAttention, Geometry, Implementation

logger = logging.getLogger(__name__)

FASTEST_FIRST: tuple[Implementation, ...] = ("cudnn", "pallas")
TOLERANCE = 1e-2
"""Relative L2 error against float64: a few times what bfloat16 operands cost."""
# XLA's Triton needs 8.0, cuDNN's packed sequences need 9.0.
MIN_CAPABILITY = {"cudnn": (9, 0), "pallas": (8, 0)}
MAX_HEAD_DIM = 256
TEST_WINDOW = 48


def choose(implementation: Implementation | None, geometry: Geometry | None) -> DeviceAttention:
    """See `attention.device_attention`."""
    is_gpu = jax.default_backend() == "gpu"
    xla = assemble("xla", None if geometry is None else geometry.window)
    if implementation == "xla" or (implementation is None and not is_gpu):
        return xla
    reasons = []
    for name in FASTEST_FIRST if implementation is None else (implementation,):
        reason = _unsupported(name, geometry)
        if reason is None:
            assert geometry is not None
            reason = _failure(name, geometry)
            if reason is None:
                logger.info("Device attention: %s.", name)
                return assemble(name, geometry.window)
        reasons.append(f"{name}: {reason}")
    if implementation is not None:
        raise ValueError(
            f"Device attention {implementation!r} was asked for but cannot run here "
            f"({reasons[0]}). Leave the choice open, or ask for 'xla', which always works."
        )
    logger.warning("Device attention: xla, which is slow on a GPU (%s).", "; ".join(reasons))
    return xla


def assemble(name: Implementation, window: int | None = None) -> DeviceAttention:
    """An implementation, unchecked, with what writes its pools."""
    return DeviceAttention(name, load(name, window), load_append(name))


def load_append(name: Implementation) -> Append:
    """What writes K and V where this implementation attends."""
    if name == "xla":
        return attention.append
    if name == "pallas":
        from neojax.ops import paged_append

        return paged_append.append
    from neojax.ops import attention_cudnn

    return attention_cudnn.append


def load(name: Implementation, window: int | None = None, *, is_test: bool = False) -> Attend:
    """An implementation, unchecked; for a test, with every path taken however small the step.

    window: tokens that each token looks back; None: all.

    Imported only when needed: a jax that lost one of them still serves with another.
    """
    if name == "xla":
        is_static = jax.default_backend() == "gpu"
        return functools.partial(attention_xla.attend, window=window, is_static=is_static)
    if name == "pallas":
        from neojax.ops import attention_pallas

        return functools.partial(attention_pallas.attend, window=window)
    from neojax.ops import attention_cudnn

    more = {"min_tokens": 0} if is_test else {}
    return functools.partial(attention_cudnn.attend, window=window, **more)


def _unsupported(name: Implementation, geometry: Geometry | None) -> str | None:
    """Why this device or model rules an implementation out; None if neither does."""
    if jax.default_backend() != "gpu":
        return f"it needs an NVIDIA GPU; the backend is {jax.default_backend()}"
    if geometry is None:
        return "the model's heads and dtype are not known"
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "0.0"))
    needed = MIN_CAPABILITY[name]
    if tuple(int(part) for part in capability.split(".")) < needed:
        return f"it needs compute capability {needed[0]}.{needed[1]}; this GPU has {capability}"
    if geometry.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {geometry.dtype}"
    head_dim = geometry.head_dim
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"it takes head sizes of 16, 32 and so on up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def _failure(name: Implementation, geometry: Geometry) -> str | None:
    """Runs a small step and compares it with the reference; None if it is right."""
    if geometry.window is not None:
        # One that cuts through this step: the model's own would be longer than all of it.
        geometry = geometry._replace(window=min(geometry.window, TEST_WINDOW))
    case = attention_case.make(
        np.random.default_rng(0),
        geometry,
        chunks=[(0, 200), (75, 50), (0, 33)],
        decodes=[1, 70, 130],
        num_tokens=320,
        table_width=-(-200 // geometry.block_size),
        num_blocks=64,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Pallas's, of its backend
            out = jax.jit(load(name, geometry.window, is_test=True))(*case.arguments)
            error = case.error(out)
            writes = attention_case.writes_alike(jax.jit(load_append(name)), case)
    except Exception as e:  # whatever a private or deprecated interface may raise
        return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    if not writes:
        return "it writes other keys and values to the pools than XLA does"
    if error < TOLERANCE:
        return None
    return f"its results differ from the reference by {error:.2g} (tolerance {TOLERANCE:g})"
