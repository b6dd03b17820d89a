"""Models by name, where only their sizes matter; any checkpoint's config otherwise."""

from __future__ import annotations

import dataclasses

from neojax.hub import resolve_checkpoint
from neojax.models.config import ModelConfig

_LLAMA_7B = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    name="llama-2-7b",
)
_LLAMA_8B = dataclasses.replace(
    _LLAMA_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_kv_heads=8,
    max_position_embeddings=131072,
    name="llama-3.1-8b",
)
_LLAMA_70B = dataclasses.replace(
    _LLAMA_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    name="llama-3.1-70b",
)
MODELS = {model.name: model for model in (_LLAMA_7B, _LLAMA_8B, _LLAMA_70B)}


def resolve_model(name: str) -> ModelConfig:
    """One of MODELS, or the config of a checkpoint: a path, or an id on the Hub.

    Raises ValueError saying what would work.
    """
    if name in MODELS:
        return MODELS[name]
    try:
        return ModelConfig.from_checkpoint(resolve_checkpoint(name))
    except ValueError as error:
        raise ValueError(f"{error}. Known by name are {', '.join(MODELS)}") from error
