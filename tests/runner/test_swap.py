"""Swaps of whole requests as a runner launches them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from neojax.kv.geometry import KVGeometry
from neojax.runner.swap import MAX_CALL_BYTES, Due, Spread, chunk_blocks
from neojax.scheduler.request import Placement
from tests.engine.tiny import tiny_engine, tiny_model
from tests.runner.swap_checks import check_swaps, swap


@pytest.mark.parametrize("layers_per_program", [1, 3])
def test_blocks_go_out_and_come_back_in_place(layers_per_program: int):
    check_swaps(layers_per_program=layers_per_program)


def test_a_call_moves_as_many_blocks_as_fit_a_piece_of_the_ring():
    geometry = KVGeometry(32, 8, 128, 16, np.dtype(np.float16))
    per_block = geometry.block_bytes // 32
    assert chunk_blocks(geometry, 8) == MAX_CALL_BYTES // (8 * per_block) == 64
    assert chunk_blocks(KVGeometry(80, 64, 128, 256, np.dtype(np.float32)), 8) == 1


@pytest.mark.parametrize("num_launches", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("layers", [range(8), [1, 3, 5, 7], [7]])
def test_launches_are_spread_over_the_layers_in_order(num_launches: int, layers):
    made = []
    due = [
        Due((i + 1) / num_launches, lambda i=i: made.append(i) or jnp.zeros(()))
        for i in range(num_launches)
    ]
    spread = Spread(due, 8)
    spread(-1)
    assert not made
    counts = []
    for layer in layers:
        before = len(made)
        spread(layer)
        counts.append(len(made) - before)
    assert made == list(range(num_launches))
    assert max(counts) - min(counts) <= 1


def test_swaps_in_are_started_as_far_ahead_as_the_ring_allows():
    engine = tiny_engine(tiny_model(), num_device_blocks=400, num_host_blocks=400)
    assert engine.runner._swapper is not None
    blocks = list(range(300))
    launches = engine.runner._swapper.launches(
        [swap(Placement.DEVICE, blocks, blocks), swap(Placement.HOST, blocks, blocks)]
    )
    names = [due.launch.func.__name__ for due in launches if due.launch.func.__name__ != "launch"]
    assert names == ["start"] * 4 + ["join", "start"] + ["join"] * 4
    assert [due.share for due in launches[:5]] == [0, 0, 0, 0, 1 / 5]
    assert launches[-1].share == 1
    engine.close()
