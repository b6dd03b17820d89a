"""Writes a config as Hugging Face's config.json has it. No jax."""

from __future__ import annotations

from typing import Any

from neojax.models.config import ModelConfig
from neojax.models.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The contents of config.json for weights of a type such as "bfloat16".

    Raises ValueError for a rope that config.json cannot express.
    """
    scaling = config.rope_scaling
    context = config.max_position_embeddings
    if isinstance(scaling, DynamicRopeScaling):  # there the key means the original context
        context = scaling.original_max_position_embeddings
    family = _family(config)
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "max_position_embeddings": context,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    }


def _family(config: ModelConfig) -> str:
    if config.qk_norm:
        return "Qwen3"
    if config.qkv_bias:
        return "Qwen2"
    if config.fused_projections:
        return "Phi3"
    return "Mistral" if config.sliding_window else "Llama"


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    match config.rope_scaling:
        case None:
            return None
        case LinearRopeScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YarnRopeScaling(factor, original, attention_factor, fast, slow, truncate):
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }
        case DynamicRopeScaling(factor, _):
            return {"rope_type": "dynamic", "factor": factor}
        case LongRopeScaling(short, long, original, attention_factor):
            return {
                "rope_type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
            }
    raise ValueError(
        f"{config.name} scales each rope frequency by a factor of its own, as GGUF files of Llama "
        "3.1 do; config.json cannot say that. Take the model's Hugging Face directory instead"
    )
