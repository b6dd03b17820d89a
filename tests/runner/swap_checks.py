"""Whole requests' blocks out of a real runner's pools and back, whatever the device."""

from __future__ import annotations

import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from neojax.runner.runner import Runner
from neojax.runner.stages import KV
from neojax.scheduler.plan import Mode, Plan, SubBatch, Swap
from neojax.scheduler.request import Placement
from tests.engine.tiny import tiny_engine, tiny_model


def swap(to: Placement, source: list[int], target: list[int], block_size: int = 16) -> Swap:
    """A swap of blocks that no request owns, the last one partly filled."""
    nobody = cast(Any, types.SimpleNamespace())
    return Swap(nobody, to, len(source) * block_size - 3, tuple(source), tuple(target))


def run(runner: Runner, *swaps: Swap) -> None:
    """A step of nothing but swaps."""
    plan = Plan(step=1, mode=Mode.DEVICE_ONLY, b0=SubBatch(), swaps=swaps)
    assert runner.enqueue(plan).tokens() == []


def check_swaps(*, num_blocks: int = 200, layers_per_program: int = 3) -> None:
    """More blocks than a call moves go out in scattered order, and come back to other places."""
    engine = tiny_engine(
        tiny_model(),
        num_device_blocks=num_blocks,
        num_host_blocks=num_blocks,
        layers_per_program=layers_per_program,
    )
    runner = engine.runner
    rng = np.random.default_rng()
    pools = runner._state.pools
    content = rng.standard_normal((len(pools), 2, *pools[0].k.shape)).astype(np.float32)
    runner._state.pools = [KV(jnp.asarray(k), jnp.asarray(v)) for k, v in content]
    n = num_blocks // 2
    out_of, kept = np.split(rng.permutation(num_blocks), 2)
    host = rng.permutation(num_blocks)[:n].tolist()
    # Two requests at once, each way.
    run(
        runner,
        swap(Placement.HOST, out_of[:70].tolist(), host[:70]),
        swap(Placement.HOST, out_of[70:n].tolist(), host[70:]),
    )
    back = rng.permutation(out_of)
    other = kept[:5].tolist()
    spare = [b for b in range(num_blocks) if b not in host][:5]
    pointers = [kv.k.unsafe_buffer_pointer() for kv in runner._state.pools]
    run(
        runner,
        swap(Placement.DEVICE, host[:70], back[:70].tolist()),
        swap(Placement.HOST, other, spare),
        swap(Placement.DEVICE, host[70:], back[70:n].tolist()),
    )
    after = [KV(*map(np.asarray, kv)) for kv in runner._state.pools]
    assert pointers == [kv.k.unsafe_buffer_pointer() for kv in runner._state.pools], "not in place"
    for layer, kv in enumerate(after):
        for side in (0, 1):
            np.testing.assert_array_equal(kv[side][back], content[layer, side, out_of])
            np.testing.assert_array_equal(kv[side][kept], content[layer, side, kept])
    assert runner.host is not None
    for layer in range(len(pools)):
        got = runner.host._cache.read(layer, np.asarray(spare, np.int32), 0, 5 * 16)
        for side in (0, 1):
            wanted = content[layer, side, other].reshape(got[side].shape)
            np.testing.assert_array_equal(got[side], wanted)
    assert runner.host.error() is None
    jax.block_until_ready(runner._state.tokens)
    engine.close()
