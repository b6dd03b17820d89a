"""Sampling against plain numpy: thresholds exactly, draws by their frequencies."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from neojax.runner import sampling
from neojax.runner.step_meta import Sampling

V = 50
keep_top_k = jax.jit(sampling.keep_top_k)
keep_top_p = jax.jit(sampling.keep_top_p)
sample = jax.jit(sampling.sample)


@pytest.fixture(scope="module", params=[1, 4])
def num_bits(request):
    """Thresholds as a CPU finds them, and as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "bits_per_pass", lambda: request.param)
        keep_top_k.clear_cache()
        keep_top_p.clear_cache()
        yield request.param


def params(n, *, temperature=1.0, top_k=0, top_p=1.0, seeds=None, position=5):
    seeds = np.arange(n) if seeds is None else np.asarray(seeds)
    return Sampling(
        row=jnp.zeros(n, jnp.int32),
        slot=jnp.zeros(n, jnp.int32),
        position=jnp.full(n, position, jnp.int32),
        seed=jnp.asarray(np.stack([np.zeros(n), seeds], axis=1), jnp.int32),
        top_k=jnp.full(n, top_k, jnp.int32),
        temperature=jnp.full(n, temperature, jnp.float32),
        top_p=jnp.full(n, top_p, jnp.float32),
    )


@pytest.mark.usefixtures("num_bits")
@settings(max_examples=50, derandomize=True)
@given(seed=st.integers(0, 2**31), top_k=st.integers(0, V + 5), scale=st.sampled_from([0.1, 30.0]))
def test_top_k_keeps_the_k_largest(seed, top_k, scale):
    logits = (np.random.default_rng(seed).normal(size=(3, V)) * scale).astype(np.float32)
    kept = np.asarray(keep_top_k(jnp.asarray(logits), jnp.full(3, top_k, jnp.int32)))
    for row, mask in zip(logits, kept, strict=True):
        k = min(top_k, V) or V
        assert set(np.flatnonzero(mask)) == set(np.argsort(-row)[:k])


@pytest.mark.usefixtures("num_bits")
@settings(max_examples=50, derandomize=True)
@given(seed=st.integers(0, 2**31), top_p=st.floats(0.015625, 1.0, width=32))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(seed, top_p):
    logits = np.random.default_rng(seed).normal(size=(3, V)) * 3
    probs = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=-1))
    kept = np.asarray(keep_top_p(jnp.asarray(probs), jnp.full(3, top_p, jnp.float32)))
    for row, mask in zip(probs.astype(np.float64), kept, strict=True):
        if top_p < 1:
            assert row[mask].sum() > top_p - 1e-5
            assert row[mask].sum() - row[mask].min() < top_p + 1e-5
        assert row[mask].min() >= row[~mask].max(initial=0)


@pytest.mark.usefixtures("num_bits")
def test_equal_logits_at_the_threshold_are_all_kept():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0]], jnp.float32)
    assert keep_top_k(logits, jnp.asarray([2], jnp.int32)).tolist() == [[False, True, True, True]]


def test_draws_have_the_softmax_s_frequencies():
    logits = np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
    n = 20_000
    drawn = np.asarray(sample(jnp.tile(jnp.asarray(logits), (n, 1)), params(n, temperature=0.7)))
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    got = np.bincount(drawn, minlength=5) / n
    assert np.abs(got - expected).max() < 4 * np.sqrt(0.25 / n)


def test_draws_stay_inside_top_k_and_top_p():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, V)) * 2, jnp.float32)
    many = jnp.tile(logits, (4000, 1))
    best = np.argsort(-np.asarray(logits[0]))
    assert set(np.asarray(sample(many, params(4000, top_k=3))).tolist()) == set(best[:3].tolist())
    nucleus = np.flatnonzero(np.asarray(keep_top_p(jax.nn.softmax(logits), jnp.asarray([0.5])))[0])
    drawn = set(np.asarray(sample(many, params(4000, top_p=0.5))).tolist())
    assert drawn == set(nucleus.tolist())


def test_a_draw_depends_on_seed_and_position_alone():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, V)), jnp.float32)
    all_rows = np.asarray(sample(logits, params(64)))
    one_row = np.asarray(sample(logits[7:8], params(1, seeds=[7])))
    assert one_row[0] == all_rows[7]
    assert (np.asarray(sample(logits, params(64, position=6))) != all_rows).any()


def test_temperature_zero_is_greedy_also_beside_rows_that_draw():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, V)), jnp.float32)
    mixed = params(8)._replace(temperature=jnp.asarray([0, 1] * 4, jnp.float32))
    drawn = np.asarray(sample(logits, mixed))
    assert (drawn[::2] == np.asarray(logits).argmax(axis=-1)[::2]).all()


def test_tiny_temperatures_do_not_overflow():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(8, V)) * 1e4, jnp.float32)
    drawn = np.asarray(sample(logits, params(8, temperature=1e-6)))
    assert (drawn == np.asarray(logits).argmax(axis=-1)).all()
