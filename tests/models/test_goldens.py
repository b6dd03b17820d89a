"""Logits against Hugging Face transformers, in float32, from stored files.

Errors are relative to the largest logit of a position: max |ours - theirs| / max |theirs| < 1e-4,
and as vectors: ||ours - theirs|| / ||theirs|| < 1e-4.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.llama import Llama
from neojax.text.tokenizer import Tokenizer
from tests.models import golden_models
from tests.models.attention import logits_of

TOLERANCE = 1e-4
PHI3 = ("phi3", "phi3_longrope")


def load(path: Path) -> Llama:
    config = ModelConfig.from_checkpoint(path)
    return load_model(path, config, dtype=jnp.float32, progress=False)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    error = np.abs(ours - theirs).max(-1) / np.abs(theirs).max(-1)
    assert error.max() < TOLERANCE
    assert (np.linalg.norm(ours - theirs, axis=-1) < TOLERANCE * np.linalg.norm(theirs)).all()


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(golden_models.GOLDENS / f"{name}.npz"))


def gguf_checkpoint(path: Path, name: str) -> Path:
    """The same tiny model as llama.cpp's converter writes it: q and k rows paired for its rope."""
    config = golden_models.CONFIGS[name]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if scaling := config.get("rope_scaling"):
        for kind in ("short", "long"):
            factors = np.asarray(scaling[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors((1 + np.log(stretch) / np.log(original)) ** 0.5)
    if architecture == "phi3" and "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    for hf_name, tensor in golden_models.weights(config).items():
        for kind, count in heads.items():
            if f"{kind}_proj.weight" in hf_name and architecture == "llama":
                rows, columns = tensor.shape
                halves = tensor.reshape(count, 2, rows // count // 2, columns)
                tensor = halves.swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names.get_name(hf_name, (".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", golden_models.CONFIGS)
def test_logits_of_tiny_models_equal_transformers(tmp_path, name):
    model = load(golden_models.write_checkpoint(tmp_path, name))
    ours = logits_of(model, golden_models.prompt_ids(name))
    assert_close(ours[golden_models.LOGIT_POSITIONS], golden(name)["logits"])


def test_a_prompt_within_the_original_context_equals_transformers_where_the_context_is_that(
    tmp_path,
):
    """transformers changes longrope's factors with the length of a prompt, neojax with the longest
    that is served."""
    path = golden_models.write_checkpoint(tmp_path, golden_models.LONGROPE)
    original = golden_models.CONFIGS[golden_models.LONGROPE]["original_max_position_embeddings"]
    config = ModelConfig.from_checkpoint(path).limited_to(original)
    model = load_model(path, config, dtype=jnp.float32, progress=False)
    ours = logits_of(model, golden_models.prompt_ids(golden_models.LONGROPE)[:original])
    assert_close(ours[-2:], golden(golden_models.LONGROPE)["short_logits"])


@pytest.mark.parametrize("name", ["mha_h64", "gqa3_h64", "gqa4_h128", "qwen2", "qwen3", *PHI3])
def test_logits_of_tiny_gguf_models_equal_transformers(tmp_path, name):
    model = load(gguf_checkpoint(tmp_path / "tiny.gguf", name))
    ours = logits_of(model, golden_models.prompt_ids(name))
    assert_close(ours[golden_models.LOGIT_POSITIONS], golden(name)["logits"])


@pytest.fixture(scope="module")
def smollm2(default_checkpoint: Path) -> Llama:
    """The default model in float32."""
    return load(default_checkpoint)


@pytest.mark.parametrize("number", range(4))
def test_logits_of_the_default_model_equal_transformers(smollm2, number):
    expected = golden(f"smollm2_prompt{number}")
    assert_close(logits_of(smollm2, expected["ids"])[-2:], expected["logits"])


def test_greedy_text_of_the_default_model_equals_transformers_where_the_margin_is_wide(smollm2):
    expected = golden("smollm2_greedy")
    prompt, continuation = expected["prompt"], expected["continuation"]
    assert expected["margins"].min() > 0.05
    logits = logits_of(smollm2, np.concatenate([prompt, continuation]))
    np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), continuation)


def test_perplexity_of_the_default_model_equals_transformers(smollm2, default_checkpoint):
    expected = golden("smollm2_passage")
    ids = expected["ids"]
    text = (golden_models.GOLDENS / "passage.txt").read_text(encoding="utf-8")
    assert Tokenizer.from_checkpoint(default_checkpoint).encode(text) == ids.tolist()
    logprobs = np.asarray(jax.nn.log_softmax(logits_of(smollm2, ids)))
    ours = np.take_along_axis(logprobs[:-1], ids[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(ours, expected["logprobs"], atol=1e-3)
    perplexity, theirs = (float(np.exp(-x.mean())) for x in (ours, expected["logprobs"]))
    assert perplexity == pytest.approx(theirs, rel=1e-5)
    assert 10 < perplexity < 40
