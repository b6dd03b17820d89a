"""Host memory in which parameters are put together on their way to the device."""

from __future__ import annotations

import math

import jax
import numpy as np

ALIGNMENT = 64
"""What the CPU backend asks of an array that it takes over instead of copying it."""


class Staging:
    """Buffers for parameters, used again where the device copies from them.

    Fresh memory costs more than the copy into it: the system hands it out page by page.
    """

    def __init__(self) -> None:
        self._is_copied = jax.default_backend() != "cpu"
        self._free: list[np.ndarray] = []
        self._taken: dict[int, np.ndarray] = {}  # by address
        self._in_flight: tuple[np.ndarray, jax.Array] | None = None

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        fitting = [raw for raw in self._free if len(raw) >= size]
        if fitting:
            raw = min(fitting, key=len)
            self._free = [other for other in self._free if other is not raw]
        else:
            raw = np.empty(size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            raw = raw[start : start + size]
        self._taken[raw.ctypes.data] = raw
        return raw[:size].view(dtype).reshape(shape)

    def send(self, array: np.ndarray) -> jax.Array:
        """Start the transfer of an array that `take` gave; it is not the caller's any more.

        One transfer is under way at a time: a disk faster than the bus must not fill host memory.
        """
        self.wait()
        sent = jax.device_put(array)
        raw = self._taken.pop(array.ctypes.data)
        if self._is_copied:
            self._in_flight = (raw, sent)
        return sent

    def wait(self) -> None:
        """Wait for the transfer under way; its buffer is free again."""
        if self._in_flight is None:
            return
        raw, sent = self._in_flight
        jax.block_until_ready(sent)
        self._free.append(raw)
        self._in_flight = None
