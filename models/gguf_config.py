"""Reads a model's config from GGUF metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from neojax.models.config import ModelConfig
from neojax.models.gguf_file import GgufFile, open_gguf
from neojax.models.rope_scaling import LinearRopeScaling, PerFrequencyRopeScaling, RopeScaling


def read_config(path: Path) -> ModelConfig:
    """Config of a GGUF file. Raises ValueError for one that is not a plain Llama."""
    file = open_gguf(path)
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{path}: architecture {architecture!r} is not supported; supported: llama"
        )
    if file.metadata.get("llama.expert_count"):
        raise ValueError(f"{path}: mixture-of-experts models are not supported")
    hidden_size = file.require("llama.embedding_length")
    num_heads = _uniform(file, "llama.attention.head_count")
    head_dim = file.metadata.get("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.metadata.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{path}: {key} {file.metadata[key]} differs from the head dim {head_dim}, which "
                "is not supported"
            )
    vocab_size = file.metadata.get("llama.vocab_size")
    if vocab_size is None:
        vocab_size = len(file.require("tokenizer.ggml.tokens"))
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_uniform(file, "llama.feed_forward_length"),
        num_layers=file.require("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(file, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        # The file holds a float32: 1e-5 must not become 9.999999747e-06.
        rms_norm_eps=float(str(np.float32(file.require("llama.attention.layer_norm_rms_epsilon")))),
        rope_theta=file.metadata.get("llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file),
        max_position_embeddings=file.require("llama.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        name=Path(path).stem,
    )


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """A number that GGUF allows to differ by layer, which Llamas do not."""
    value = file.metadata.get(key, default) if default is not None else file.require(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ValueError(f"{file.path}: {key} differs between layers, which is not supported")
        return value[0]
    return value


def _rope_scaling(file: GgufFile) -> RopeScaling | None:
    if "rope_freqs.weight" in file.tensors:
        return PerFrequencyRopeScaling(tuple(file.read("rope_freqs.weight").tolist()))
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearRopeScaling(float(file.require("llama.rope.scaling.factor")))
    raise ValueError(
        f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, and "
        "llama3 (stored as rope_freqs.weight)"
    )
