"""start, join, store and fetch on the default device, compared with numpy. Needs no pytest, and
runs the swaps' checks too:

    PYTHONPATH=. python -m tests.gpu.lane_checks [WORD...]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

from neojax.environment import device_environment

os.environ.update(device_environment(0.5))

import jax
import jax.numpy as jnp
import numpy as np

from neojax.ops import host_attention
from tests.gpu import swap_checks
from tests.gpu.lane_rig import (
    BUCKETS,
    DELAYS_US,
    DEVICE_ROWS,
    HEAD_DIM,
    LENS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_Q_HEADS,
    SCALE,
    WIDTH,
    Rig,
    Stages,
    fill,
    launch_one_program,
    launch_pipelined,
    make_rig,
    run_steps,
)
from tests.native.reference import TOLERANCE, reference, relative_error


def check_decodes(
    dtype: str, launch: Callable, num_steps: int = 4, memory_operations: bool = True
) -> str:
    """Three job delays give the same bits, and those are numpy's numbers."""
    runs = []
    for delay_us in DELAYS_US:
        rig = make_rig(dtype, memory_operations=memory_operations)
        fill(rig)
        rig.lane.set_delay_us(delay_us)
        runs.append(run_steps(rig, launch, num_steps))
        assert rig.lane.error() is None, rig.lane.error()
        rig.lane.drain(10)
        counters = rig.lane.counters()
        last = rig
        if delay_us != DELAYS_US[-1]:
            rig.close()
    for delay_us, run in zip(DELAYS_US[1:], runs[1:], strict=True):
        for index, (a, b) in enumerate(zip(run, runs[0], strict=True)):
            np.testing.assert_array_equal(a, b, err_msg=f"array {index} at {delay_us} us a job")
    worst = compare(last, runs[0], num_steps, dtype)
    last.close()
    return (
        f"error {worst:.1e}, ties not in place {counters['tie_copies']} of {2 * counters['starts']}"
    )


def compare(rig: Rig, found: list[np.ndarray], num_steps: int, dtype: str) -> float:
    """Largest relative error of the layers' outputs; x must be exact."""
    per_step = 4 * NUM_LAYERS + 1
    worst = 0.0
    x = np.float32(np.arange(DEVICE_ROWS * WIDTH).reshape(DEVICE_ROWS, WIDTH) / 256)
    for _ in range(NUM_LAYERS):
        x = x * np.float32(0.5) + np.float32(0.25)
    np.testing.assert_array_equal(found[0], x)
    found = found[1 + len(BUCKETS) :]
    for step in range(num_steps):
        arrays = found[step * per_step : (step + 1) * per_step]
        for layer in range(NUM_LAYERS):
            x = x * np.float32(0.5) + np.float32(0.25)
            for channel, lens in enumerate(LENS):
                rows, out = arrays[4 * layer + channel], arrays[4 * layer + 2 + channel]
                n, split = len(lens), NUM_Q_HEADS * HEAD_DIM
                new = rows[:n, split:].reshape(n, 2, NUM_KV_HEADS, HEAD_DIM)
                ks, vs = rig.k[channel][layer], rig.v[channel][layer]
                for row in range(n):
                    ks[row] = np.concatenate([ks[row], new[row, 0][None]])
                    vs[row] = np.concatenate([vs[row], new[row, 1][None]])
                expected, _ = reference(rows[:n, :split], ks, vs, NUM_Q_HEADS, SCALE)
                worst = max(worst, relative_error(out[:n], expected))
                assert not out[n:].any(), "rows beyond n must be zero"
        np.testing.assert_array_equal(arrays[-1], x)
    assert worst <= TOLERANCE[dtype], f"relative error {worst:.1e}"
    return worst


def check_prefills(dtype: str, delay_us: int, memory_operations: bool = True) -> str:
    """Chunks through a ring far too small for them, their prefixes back, and at once a decode."""
    num_tokens, num_slots = 301, 260
    rig = make_rig(dtype, staging_bytes=1 << 14, memory_operations=memory_operations)
    rig.cache.fill(float("nan"))
    rig.lane.set_delay_us(delay_us)
    stages = Stages(rig)
    rng = np.random.default_rng(5)
    width = NUM_HEADS * HEAD_DIM
    # Two sequences of channel 0's tables, in two chunks each.
    tables = rig.tables[0][:2]
    parts = [
        np.array([[3, 96, 0, 0], [99, 128, 0, 0]]),
        np.array([[0, 77, 96, 1], [77, 90, 128, 97]]),
    ]
    lens = np.array([96 + 77 + 1, 128 + 90 + 1], np.int32)

    def prefill(
        x: jax.Array, rows: jax.Array, hdr: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, ...]:
        *ahead, tie = host_attention.start_fetch(hdr, k, v, x[:7], lane=rig.lane.id)
        done, tie = host_attention.store(rows, hdr, tie, lane=rig.lane.id)
        k, v, tie = host_attention.join_fetch(hdr, *ahead, tie, lane=rig.lane.id)
        return jnp.concatenate([tie, x[7:]]), k, v, done

    prefill = jax.jit(prefill, donate_argnums=(0, 3, 4))
    enter = jax.jit(stages.enter, static_argnums=3, donate_argnums=0)
    leave = jax.jit(stages.leave, static_argnums=3, donate_argnums=0)
    x = jnp.ones((DEVICE_ROWS, WIDTH), jnp.float32)
    old = rng.standard_normal((2, num_slots, NUM_KV_HEADS, HEAD_DIM)).astype(rig.dtype)
    scratch, k, v = [], [], []
    stored = rng.standard_normal((2, NUM_LAYERS, num_tokens, width)).astype(rig.dtype)
    on_device = [[jnp.asarray(rows) for rows in layers] for layers in stored]
    # Distinct buffers: each is donated.
    k, v = [[jnp.asarray(old[i]) for _ in range(NUM_LAYERS)] for i in (0, 1)]
    empty = np.zeros(0, np.int32), np.zeros((0, 14), np.int32)
    for part, chunks in enumerate(parts):
        rig.lane.set_plan(
            part, *empty, chunks.astype(np.int32), np.ascontiguousarray(tables), uses=NUM_LAYERS
        )
        for layer in range(NUM_LAYERS):
            hdr = jnp.asarray([part, layer, 2], jnp.int32)
            x, k[layer], v[layer], done = prefill(
                x, on_device[part][layer], hdr, k[layer], v[layer]
            )
            scratch.append((k[layer] * 1, v[layer] * 1, done))
    rig.lane.set_plan(2, lens, np.ascontiguousarray(tables), uses=NUM_LAYERS)
    h = jnp.asarray(rng.standard_normal((5, WIDTH)), rig.dtype)
    decodes = []
    for layer in range(NUM_LAYERS):
        x, rows, ticket = enter(x, h, jnp.asarray([2, layer, 2], jnp.int32), 0)
        x, _, out = leave(x, h, ticket, 0)
        decodes.append((rows, out))
    worst = 0.0
    for layer in range(NUM_LAYERS):
        rows, out = (np.asarray(a) for a in decodes[layer])
        ks, vs = [], []
        for row in range(2):
            kv = []
            for part in (0, 1):
                begin, count = parts[part][row][:2]
                kv.append(stored[part, layer, begin : begin + count, NUM_Q_HEADS * HEAD_DIM :])
            kv.append(rows[row, NUM_Q_HEADS * HEAD_DIM :][None])
            both = np.concatenate(kv).reshape(-1, 2, NUM_KV_HEADS, HEAD_DIM)
            ks.append(both[:, 0])
            vs.append(both[:, 1])
        expected, _ = reference(rows[:2, : NUM_Q_HEADS * HEAD_DIM], ks, vs, NUM_Q_HEADS, SCALE)
        worst = max(worst, relative_error(out[:2], expected))
        for side, whole in enumerate((ks, vs)):
            want = old[side].copy()
            np.testing.assert_array_equal(np.asarray(scratch[layer][side]), want)
            want[1:97], want[97:225] = whole[0][:96], whole[1][:128]
            np.testing.assert_array_equal(np.asarray(scratch[NUM_LAYERS + layer][side]), want)
    assert worst <= TOLERANCE[dtype], f"relative error {worst:.1e}"
    assert rig.lane.error() is None, rig.lane.error()
    assert not any(rig.lane.plan_in_use(plan) for plan in range(3))
    rig.close()
    return f"error {worst:.1e}"


def check_ties_of_their_own() -> str:
    """Without the alias XLA gives a tie's result a buffer of its own: the call must fill it."""
    rig = make_rig("float32")
    fill(rig)
    attributes = {"lane": np.int64(rig.lane.id), "channel": np.int64(0)}
    out = jax.ShapeDtypeStruct((4, NUM_Q_HEADS * HEAD_DIM), jnp.float32)

    @jax.jit
    def program(rows: jax.Array, hdr: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        like, token = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1,), jnp.int32)
        start = jax.ffi.ffi_call("neojax.start.v2", (token, like))
        join = jax.ffi.ffi_call("neojax.join.v1", (out, like))
        message = host_attention.message(rows, hdr)
        ticket, tie = start(message, x, rows=np.int64(4), dtype="float32", **attributes)
        attended, tie = join(ticket, tie * 2, **attributes)
        return attended, tie

    rig.lane.set_plan(0, np.array(LENS[0], np.int32), rig.tables[0], uses=1)
    rows = jnp.ones((4, NUM_HEADS * HEAD_DIM), jnp.float32)
    x = jnp.arange(DEVICE_ROWS * WIDTH, dtype=jnp.float32).reshape(DEVICE_ROWS, WIDTH)
    attended, tie = program(rows, jnp.asarray([0, 0, 4], jnp.int32), x)
    np.testing.assert_array_equal(np.asarray(tie), 2 * np.asarray(x))
    assert np.asarray(attended).any()
    copies = rig.lane.counters()["tie_copies"]
    assert copies == 2, copies
    assert rig.lane.error() is None
    rig.close()
    return "both ties copied"


def check_failures() -> str:
    """A job that fails, a wrong hdr and a late job end in errors; the lane works on."""
    rig = make_rig("float32")
    fill(rig)
    stages = Stages(rig)
    enter = jax.jit(stages.enter, static_argnums=3)
    leave = jax.jit(stages.leave, static_argnums=3)
    x, h = jnp.ones((DEVICE_ROWS, WIDTH), jnp.float32), jnp.ones((5, WIDTH), jnp.float32)

    def attend(hdr: list[int]) -> np.ndarray:
        y, _, ticket = enter(x, h, jnp.asarray(hdr, jnp.int32), 0)
        return np.asarray(leave(y, h, ticket, 0)[2])

    rig.lane.set_plan(0, np.array(LENS[0], np.int32), rig.tables[0], uses=4)
    rig.lane.fail_next_job("broken")
    assert not attend([0, 0, 4]).any()
    assert "broken" in str(rig.lane.error())
    rig.lane.clear_error()
    if rig.lane.cuda_report is not None:
        assert not attend([0, 99, 4]).any()
        assert "hdr[1] is layer 99" in str(rig.lane.error())
        rig.lane.clear_error()
    out = attend([0, 0, 4])
    assert out[:4].any()
    assert rig.lane.error() is None
    # Two starts that nobody joins, then a fresh beginning.
    for _ in range(2):
        enter(x, h, jnp.asarray([0, 0, 0], jnp.int32), 0)
    refusal = ""
    try:
        jax.block_until_ready(enter(x, h, jnp.asarray([0, 0, 0], jnp.int32), 0))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        refusal = str(error)
    assert "slots started and not joined" in refusal, refusal
    rig.lane.drain(10)
    rig.lane.set_plan(0, np.array(LENS[0], np.int32), rig.tables[0], uses=1)
    np.testing.assert_array_equal(attend([0, 0, 4]), out)
    rig.close()
    return "errors named, lane of use afterwards"


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and check; a check returns what it saw, or raises."""
    for dtype in ("float32", "bfloat16"):
        for launch in (launch_one_program, launch_pipelined):
            yield (
                f"decodes {dtype} {launch.__name__}",
                lambda dtype=dtype, launch=launch: check_decodes(dtype, launch),
            )
        for delay_us in (0, 2000):
            yield (
                f"prefills {dtype} delay {delay_us} us",
                lambda dtype=dtype, delay_us=delay_us: check_prefills(dtype, delay_us),
            )
    if host_attention.cuda_device() is not None:
        yield (
            "decodes with host functions",
            lambda: check_decodes("float32", launch_pipelined, memory_operations=False),
        )
        yield (
            "prefills with host functions",
            lambda: check_prefills("bfloat16", 2000, memory_operations=False),
        )
    yield "ties of their own", check_ties_of_their_own
    yield "failures", check_failures


def set_up() -> None:
    """float32 products as they are written, not as TF32; the targets registered."""
    jax.config.update("jax_default_matmul_precision", "highest")
    host_attention.ensure_registered()


def main(words: list[str]) -> int:
    """Run the checks whose names hold one of the words, or all; the number of failures."""
    set_up()
    rig = make_rig("bfloat16")
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {rig.lane.cuda_report}",
        flush=True,
    )
    rig.close()
    failures = 0
    for name, check in (*swap_checks.checks(), *checks()):
        if words and not any(word in name for word in words):
            continue
        began = time.monotonic()
        try:
            result = "ok: " + (check() or "")
        except Exception as error:
            failures += 1
            result = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name} ({time.monotonic() - began:.1f} s): {result}", flush=True)
    return failures


if __name__ == "__main__":
    # Threads of a device that hangs would keep the process: leave at once.
    os._exit(1 if main(sys.argv[1:]) else 0)
