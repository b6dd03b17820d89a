"""The decoder's contract with the runner: one pure hook call, equal layers, types."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.llama import Llama
from tests.models.attention import causal_attend, logits_of

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
)
IDS = np.array([5, 0, 96, 17, 17, 3, 42], np.int32)
POSITIONS = jnp.arange(7, dtype=jnp.int32)


def dummy(dtype=jnp.float32, **overrides) -> Llama:
    config = ModelConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__slots__}, **overrides})
    return load_model(None, config, dtype=dtype, load_format="dummy", progress=False)


def test_logits_of_a_prefix_do_not_depend_on_what_follows():
    model = dummy()
    whole, prefix = logits_of(model, IDS), logits_of(model, IDS[:4])
    np.testing.assert_allclose(whole[:4], prefix, rtol=1e-5, atol=1e-6)


def test_only_differences_of_positions_matter():
    model = dummy()
    here, there = logits_of(model, IDS), logits_of(model, IDS, first_position=100)
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5)


def test_a_block_calls_its_hook_once_and_splits_into_two_stages_under_jit():
    """What the runner does: one call that captures q, k, v and one that is given the result."""
    block = dummy().layers[1]
    graphdef, state = nnx.split(block)
    calls = []

    def attend(q, k, v):
        calls.append((q.shape, k.shape, v.shape))
        return causal_attend(0, q, k, v)

    x = jax.random.normal(jax.random.key(0), (7, CONFIG.hidden_size))
    expected = block(x, POSITIONS, attend)
    assert calls == [((7, 6, 16), (7, 2, 16), (7, 2, 16))]

    @jax.jit
    def before(state, x):
        captured = []

        def capture(q, k, v):
            captured.append((q, k, v))
            return jnp.zeros_like(q)

        nnx.merge(graphdef, state)(x, POSITIONS, capture)
        return captured[0]

    @jax.jit
    def after(state, x, attended):
        return nnx.merge(graphdef, state)(x, POSITIONS, lambda q, k, v: attended)

    result = after(state, x, causal_attend(0, *before(state, x)))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    # Attention's half is gone from the first stage: it holds one matrix product.
    assert before.lower(state, x).compile().as_text().count("dot(") == 1


def test_every_layer_has_the_same_graph_so_one_program_serves_all():
    graphdefs = {nnx.split(layer)[0] for layer in dummy().layers}
    assert len(graphdefs) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_hidden_states_keep_the_parameter_type_and_logits_are_float32(dtype):
    model = dummy(dtype)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}

    def after_a_layer(model):
        hidden = model.embed(jnp.asarray(IDS))
        assert hidden.dtype == dtype
        return model.layers[0](hidden, POSITIONS, lambda q, k, v: causal_attend(0, q, k, v))

    assert jax.eval_shape(after_a_layer, model).dtype == dtype
    logits, wide = logits_of(model, IDS), logits_of(dummy(jnp.float32), IDS)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, wide, atol=0.05 * np.abs(wide).max())


def test_tied_logits_are_the_product_with_the_embedding():
    model = dummy(tie_embeddings=True)
    x = jax.random.normal(jax.random.key(0), (2, CONFIG.hidden_size))
    expected = model.ends.norm(x) @ model.ends.embedding[...].T
    np.testing.assert_allclose(model.head(x), expected, rtol=1e-5, atol=1e-6)
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == model.config.num_parameters


def test_dummy_weights_depend_on_the_seed_alone_and_differ_between_layers():
    first, second = (
        load_model(None, CONFIG, dtype=jnp.float32, load_format="dummy", seed=seed, progress=False)
        for seed in (1, 2)
    )
    again = load_model(None, CONFIG, dtype=jnp.float32, load_format="dummy", seed=1)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first), nnx.state(again))
    assert not jnp.array_equal(first.layers[0].qkv.weight[...], second.layers[0].qkv.weight[...])
    assert not jnp.array_equal(first.layers[0].qkv.weight[...], first.layers[1].qkv.weight[...])
    assert float(first.ends.embedding[...].std()) == pytest.approx(0.02, rel=0.05)
