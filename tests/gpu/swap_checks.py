"""Whole blocks and whole requests between the default device's pools and the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from neojax.ops import host_attention
from tests.native.reference import DTYPES
from tests.ops.block_programs import check_many_in_flight, check_round_trip
from tests.runner.swap_checks import check_swaps


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and check, as in `lane_checks`."""
    has_gpu = host_attention.cuda_device() is not None
    for memory_operations in (True, False) if has_gpu else (True,):
        how = "" if memory_operations else " with host functions"
        for dtype in DTYPES:
            yield (
                f"blocks {dtype}{how}",
                lambda dtype=dtype, flags=memory_operations: check_round_trip(
                    dtype, 16, memory_operations=flags
                ),
            )
        for delay_us in (0, 500):
            yield (
                f"many moves, each {delay_us} us late{how}",
                lambda delay_us=delay_us, flags=memory_operations: check_many_in_flight(
                    delay_us, memory_operations=flags
                ),
            )
    yield "a runner's swaps", check_swaps
