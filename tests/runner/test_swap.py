"""Swaps of whole requests as a runner launches them."""

from __future__ import annotations

import pytest

from neojax.kv.geometry import KVGeometry
from neojax.runner.swap import MAX_CALL_BYTES, Spread, chunk_blocks
from tests.runner.swap_checks import check_swaps


@pytest.mark.parametrize("layers_per_program", [1, 3])
def test_blocks_go_out_and_come_back_in_place(layers_per_program: int):
    check_swaps(layers_per_program=layers_per_program)


def test_a_call_moves_as_many_blocks_as_fit_a_piece_of_the_ring():
    import numpy as np

    geometry = KVGeometry(32, 8, 128, 16, np.dtype(np.float16))
    per_block = geometry.block_bytes // 32
    assert chunk_blocks(geometry, 8) == MAX_CALL_BYTES // (8 * per_block) == 64
    assert chunk_blocks(KVGeometry(80, 64, 128, 256, np.dtype(np.float32)), 8) == 1


@pytest.mark.parametrize("num_launches", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("layers", [range(8), [1, 3, 5, 7], [7]])
def test_launches_are_spread_over_the_layers_in_order(num_launches: int, layers):
    made = []
    spread = Spread([lambda i=i: made.append(i) for i in range(num_launches)], 8)
    counts = []
    for layer in layers:
        before = len(made)
        spread(layer)
        counts.append(len(made) - before)
    assert made == list(range(num_launches))
    assert max(counts) - min(counts) <= 1
