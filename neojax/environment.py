"""Variables and options that must stand before the device is first used. Imports no jax."""

from __future__ import annotations

import os
from collections.abc import Mapping

MEM_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MAX_INFLIGHT = 512
"""Programs in flight: the runtime's 32 would block the launch of a pipelined step."""


def device_environment(
    gpu_memory_utilization: float, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What to set besides `env`, for an engine in a process of its own or in this one.

    A user's own choice stands; jaxlib refuses to start when both spellings of the memory share
    are set. More connections keep a stream that waits for the host from holding up another.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if not env.keys() & set(MEM_FRACTION):
        wanted[MEM_FRACTION[0]] = str(gpu_memory_utilization)
    return {name: value for name, value in wanted.items() if name not in env}
