"""Whole blocks through programs to the arena and back, packed on the device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.native.reference import DTYPES
from tests.ops.block_programs import (
    HEAD_DIM,
    NUM_KV_HEADS,
    Rig,
    check_many_in_flight,
    check_round_trip,
)
from tests.ops.host_programs import REFUSED


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_blocks_land_where_attention_reads_them_and_come_back(dtype: str, block_size: int):
    check_round_trip(dtype, block_size)


@pytest.mark.parametrize("delay_us", [0, 500])
def test_many_moves_in_flight_stay_in_order(delay_us: int):
    check_many_in_flight(delay_us)


def test_wrong_moves_name_what_is_wrong_and_leave_the_lane_usable():
    rig = Rig("float32", 16)
    kv = np.zeros((2, 2, 16, NUM_KV_HEADS, HEAD_DIM), np.float32)

    def refuses(message: str, *hdr: int) -> None:
        with pytest.raises(REFUSED, match=message):
            jax.block_until_ready(rig.put(kv, kv, np.array(hdr, np.int32)))
        with pytest.raises(REFUSED, match=message):
            rig.get(np.array(hdr, np.int32))

    refuses(r"hdr\[0\] is layer 4, the first of 2; the arena has 5", 4, 1, 0, 0)
    refuses(r"hdr\[0\] is layer -1", -1, 1, 0, 0)
    refuses(r"hdr\[1\] is n=3; there is room for 2 blocks", 0, 3, 0, 0)
    refuses(r"hdr\[1\] is n=-1", 0, -1, 0, 0)
    refuses(r"hdr\[3\] is block 9; the arena has 9", 0, 2, 0, 9)
    with pytest.raises(REFUSED, match=r"hdr must be int32\[4\], got int32\[5\]"):
        jax.block_until_ready(rig.put(kv, kv, np.zeros(5, np.int32)))
    with pytest.raises(REFUSED, match=r"blocks must be float32\[G, C, 2304\], got bfloat16"):
        jax.block_until_ready(rig.put(*2 * [kv.astype(DTYPES["bfloat16"])], np.zeros(4, np.int32)))
    assert rig.lane.error() is None
    rig.lane.fail_next_job("broken")
    jax.block_until_ready(rig.put(kv, kv, np.array([0, 1, 3, 0], np.int32)))
    assert rig.lane.error() == "swap out: broken"
    rig.lane.clear_error()
    rig.cache.fill(2.0)
    assert (rig.get(np.array([0, 1, 3, 0], np.int32))[0][:, 0] == 2).all()
    rig.close()
