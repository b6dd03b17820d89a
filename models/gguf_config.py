"""Reads a model's config from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from neojax.models.config import ModelConfig
from neojax.models.gguf_file import GgufFile, open_gguf
from neojax.models.rope_scaling import (
    LinearRopeScaling,
    LongRopeScaling,
    PerFrequencyRopeScaling,
    RopeScaling,
)

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")  # Mistral's files say llama
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def read_config(path: Path) -> ModelConfig:
    """Config of a GGUF file. Raises ValueError for a model that is not of the Llama family."""
    file = open_gguf(path)
    architecture = file.require("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    model = _ModelMetadata(file, architecture)
    if model.get("expert_count"):
        raise ValueError(f"{path}: mixture-of-experts models are not supported")
    hidden_size = model.require("embedding_length")
    num_heads = model.require("attention.head_count")
    head_dim = model.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if model.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{path}: {key} {model.get(key)} differs from the head dim {head_dim}, which is "
                "not supported"
            )
    vocab_size = model.get("vocab_size")
    if vocab_size is None:
        vocab_size = len(file.require("tokenizer.ggml.tokens"))
    context, window = model.require("context_length"), model.get("attention.sliding_window")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=model.require("feed_forward_length"),
        num_layers=model.require("block_count"),
        num_heads=num_heads,
        num_kv_heads=model.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        # The file holds a float32: 1e-5 must not become 9.999999747e-06.
        rms_norm_eps=float(str(np.float32(model.require("attention.layer_norm_rms_epsilon")))),
        rope_theta=model.get("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(model),
        max_position_embeddings=context,
        # 0 stands for none.
        sliding_window=window if window and window < context else None,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        fused_projections=architecture == "phi3",
        name=Path(path).stem,
    )


class _ModelMetadata:
    """The metadata keys that begin with the architecture's name."""

    def __init__(self, file: GgufFile, architecture: str):
        self.file = file
        self._prefix = f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self._same_in_all_layers(key, self.file.metadata.get(self._prefix + key, default))

    def require(self, key: str) -> Any:
        return self._same_in_all_layers(key, self.file.require(self._prefix + key))

    def _same_in_all_layers(self, key: str, value: Any) -> Any:
        """The one number of a list: the format allows values that differ by layer."""
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ValueError(
                f"{self.file.path}: {key} differs between layers, which is not supported"
            )
        return value[0]


def _rope_scaling(model: _ModelMetadata) -> RopeScaling | None:
    if "rope_freqs.weight" in model.file.tensors:
        return PerFrequencyRopeScaling(tuple(model.file.read("rope_freqs.weight").tolist()))
    if all(name in model.file.tensors for name in LONGROPE_FACTORS):
        short, long = (tuple(model.file.read(name).tolist()) for name in LONGROPE_FACTORS)
        return LongRopeScaling(
            short_factors=short,
            long_factors=long,
            original_max_position_embeddings=model.require("rope.scaling.original_context_length"),
            attention_factor=model.get("rope.scaling.attn_factor", 1.0),
        )
    kind = model.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearRopeScaling(float(model.require("rope.scaling.factor")))
    raise ValueError(
        f"{model.file.path}: rope scaling {kind!r} is not supported; supported: none, linear, "
        "llama3 (stored as rope_freqs.weight) and longrope (as rope_factors)"
    )
