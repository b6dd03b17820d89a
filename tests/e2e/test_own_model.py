"""docs/examples/gpt_neox.py: a Flax model that neojax does not know, served with host offload."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from docs.examples.gpt_neox import Config, GPTNeoX, Layer
from neojax import LLM, SamplingParams
from neojax.config import EngineConfig
from neojax.models.decoder import check_decoder, load_model_class
from tests.models import golden_models
from tests.models.attention import causal_attend
from tests.tiny_checkpoint import write_tiny_checkpoint

MODEL_CLASS = "docs.examples.gpt_neox:GPTNeoX"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny model with a tokenizer of one token per byte."""
    directory = tmp_path_factory.mktemp("neox")
    tokenizer = write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return golden_models.write_gpt_neox(directory)


def forward_of(model: GPTNeoX) -> Callable[[np.ndarray], jax.Array]:
    """ids [T] to float32 [T, V] by plain causal attention."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, ids):
        model = nnx.merge(graphdef, state)
        x = model.ends.embed(ids)
        for layer in model.layers:
            x = layer(x, jnp.arange(len(ids)), lambda q, k, v: causal_attend(0, q, k, v))
        return model.ends.head(x)

    return functools.partial(forward, state)


def test_its_logits_equal_transformers(checkpoint):
    model = load_model_class(MODEL_CLASS, checkpoint, jnp.float32)
    ours = np.asarray(forward_of(model)(golden_models.prompt_ids("gpt_neox")))
    theirs = np.load(golden_models.GOLDENS / "gpt_neox.npz")["logits"]
    error = np.abs(ours[golden_models.LOGIT_POSITIONS] - theirs)
    assert error.max() < 1e-4 * np.abs(theirs).max()


def test_it_is_served_with_its_cache_on_both_sides(checkpoint):
    llm = LLM(
        str(checkpoint),
        model_class=MODEL_CLASS,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=18,
        cpu_kv_gib=0.05,
        enforce_eager=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, 40, 17, 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    try:
        forward = forward_of(load_model_class(MODEL_CLASS, checkpoint, jnp.float32))
        for policy, limit in (("device-only", None), ("auto", 4)):
            llm.set_policy(policy)
            llm.set_block_limit(limit)
            for output in llm.generate(prompts, greedy, use_tqdm=False):
                tokens = output.outputs[0].token_ids
                ids = np.asarray(output.prompt_token_ids + tokens, np.int32)
                # One compilation: what lies behind a token does not change it.
                logits = np.asarray(forward(np.pad(ids, (0, 64 - len(ids)))))
                logits = logits[len(output.prompt_token_ids) - 1 :][: len(tokens)]
                picked = logits[np.arange(len(tokens)), tokens]
                assert (logits.max(axis=-1) - picked < 1e-4 * np.abs(logits).max()).all()
        stats = llm.engine.stats()
        assert stats.requests_placed_host > 0
        assert stats.steps_pipelined > 0
    finally:
        llm.close()


def test_what_the_page_shows_is_what_the_example_says():
    page = (ROOT / "docs" / "bring_your_own_model.md").read_text(encoding="utf-8")
    example = (ROOT / "docs" / "examples" / "gpt_neox.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    assert [block for block in blocks if block not in example] == []


class NoHook(Layer):
    """Forgets to attend."""

    def __call__(self, x, positions, attend):
        return x


class WideKeys(Layer):
    """Hands over keys of twice the size."""

    def __call__(self, x, positions, attend):
        heads = self.qkv(x).reshape(len(x), 4, 96)
        return attend(heads[..., :32], heads[..., 32:], heads[..., :32]).reshape(x.shape)


def with_layers(checkpoint: Path, *kinds: type[Layer]) -> GPTNeoX:
    config = dataclasses.replace(Config.read(checkpoint), num_layers=len(kinds))
    model = GPTNeoX(config, jnp.float32, nnx.Rngs(0))
    types = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    model.layers = nnx.List([kind(config, **types) for kind in kinds])
    return model


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ((NoHook,), "must call attend once, it did 0 times"),
        ((WideKeys,), r"k of m: expected float32 \(2, 4, 32\) for two tokens, got .*\(2, 4, 64\)"),
        ((Layer, NoHook), "layer 1 of m differs in structure from layer 0"),
    ],
)
def test_layers_that_break_the_contract_are_refused_by_what_they_do(checkpoint, kinds, named):
    with pytest.raises(ValueError, match=named):
        check_decoder(with_layers(checkpoint, *kinds), jnp.float32, "m")


def test_missing_parts_and_wrong_types_are_named(checkpoint):
    model = load_model_class(MODEL_CLASS, checkpoint, jnp.float32)
    with pytest.raises(ValueError, match=r"embed of m: expected bfloat16 \(2, 128\)"):
        check_decoder(model, jnp.bfloat16, "m")
    with pytest.raises(ValueError, match="m has no attribute 'config'"):
        check_decoder(object(), jnp.float32, "m")
    config, model.config = model.config, object()
    with pytest.raises(ValueError, match="the config of m has no num_layers, num_heads"):
        check_decoder(model, jnp.float32, "m")
    model.config = dataclasses.replace(config, num_layers=7)
    with pytest.raises(ValueError, match="m has 2 layers, its config says 7"):
        check_decoder(model, jnp.float32, "m")


@pytest.mark.parametrize(
    "name",
    [
        "nothing:There",
        "docs.examples.gpt_neox:Missing",
        "docs.examples.gpt_neox:Config",
        "plain",
        "",
    ],
)
def test_a_class_that_is_not_there_is_an_error_with_the_form(name, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded: .* It is module:Class"):
        load_model_class(name, tmp_path, jnp.float32)


def test_a_load_format_has_no_meaning_for_it():
    with pytest.raises(ValueError, match="load_format dummy is for neojax's own models"):
        EngineConfig(model_class=MODEL_CLASS, load_format="dummy")
