"""Tiny random models whose logits by transformers are stored in tests/goldens.

Shared by the tests and by scripts/make_goldens, which runs where torch is and jax is not: weights
come from numpy's generator, so that only logits need to be stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parents[1] / "goldens"

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _config(hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return _BASE | sizes | more


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# 16 frequencies of a head dim of 32.
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
}

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _kin(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return _config(*sizes, **(names | more))


CONFIGS: dict[str, dict[str, Any]] = {
    "mha_h64": _config(128, 2, 2, tie_word_embeddings=False),
    "gqa3_h64": _config(144, 9, 3, head_dim=64, tie_word_embeddings=True),
    "gqa4_h128": _config(128, 4, 1, head_dim=128, tie_word_embeddings=False),
    "gqa8_h64": _config(64, 8, 1, head_dim=64, tie_word_embeddings=True),
    "explicit_head_dim": _config(120, 5, 1, head_dim=32, tie_word_embeddings=False),
    "rope_llama3": _config(128, 4, 2, rope_theta=500000.0, rope_scaling=_LLAMA3),
    "rope_linear": _config(128, 4, 2, rope_scaling={"type": "linear", "factor": 4.0}),
    "rope_yarn": _config(128, 4, 2, head_dim=64, rope_scaling=_YARN),
    "rope_yarn_mscale": _config(
        128,
        4,
        2,
        rope_theta=500000.0,
        rope_scaling=_YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16},
    ),
    "mistral": _kin("Mistral", 128, 4, 2, head_dim=64, sliding_window=None),
    "qwen2": _kin("Qwen2", 128, 4, 2, use_sliding_window=False, sliding_window=32),
    "qwen3": _kin("Qwen3", 128, 4, 2, head_dim=64, tie_word_embeddings=True),
    "rope_dynamic": _config(
        128,
        4,
        2,
        max_position_embeddings=64,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    ),
    "mistral_window": _kin("Mistral", 128, 4, 2, sliding_window=40),
    "phi3": _kin("Phi3", 128, 4, 2, pad_token_id=0, sliding_window=50),
    "phi3_longrope": _kin(
        "Phi3",
        128,
        4,
        2,
        pad_token_id=0,
        rope_scaling=_LONGROPE,
        original_max_position_embeddings=64,
    ),
}

LONGROPE = "phi3_longrope"  # has logits of a prompt within the original context too

# Past the 64 positions that the scaled ropes were made for.
NUM_TOKENS = 160
LOGIT_POSITIONS = [0, 1, 23, 63, 64, 100, NUM_TOKENS - 1]


def prompt_ids(name: str) -> np.ndarray:
    """int32 [NUM_TOKENS] of any tokens."""
    rng = np.random.default_rng([len(name), 7])
    return rng.integers(0, CONFIGS[name]["vocab_size"], NUM_TOKENS, dtype=np.int32)


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors of a Hugging Face checkpoint, in its names and shapes."""
    rng = np.random.default_rng(seed)
    d, f, v = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or d // heads

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm(size: int = d) -> np.ndarray:
        return rng.normal(1.0, 0.2, size).astype(np.float32)

    is_fused = config["model_type"] == "phi3"
    heads_of = (
        {"qkv": heads + 2 * kv_heads} if is_fused else {"q": heads, "k": kv_heads, "v": kv_heads}
    )
    rows_of = {"gate_up": 2 * f} if is_fused else {"gate": f, "up": f}
    tensors = {"model.embed_tokens.weight": matrix(v, d)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        tensors[f"{prefix}input_layernorm.weight"] = norm()
        for name, count in heads_of.items():
            tensors[f"{attention}{name}_proj.weight"] = matrix(count * head_dim, d)
        tensors[f"{attention}o_proj.weight"] = matrix(d, heads * head_dim)
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm()
        for name, rows in rows_of.items():
            tensors[f"{mlp}{name}_proj.weight"] = matrix(rows, d)
        tensors[f"{mlp}down_proj.weight"] = matrix(d, f)
        if config["model_type"] == "qwen2":
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                bias = rng.normal(0.0, 0.5, count * head_dim).astype(np.float32)
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = bias
        if config["model_type"] == "qwen3":
            tensors[f"{prefix}self_attn.q_norm.weight"] = norm(head_dim)
            tensors[f"{prefix}self_attn.k_norm.weight"] = norm(head_dim)
    tensors["model.norm.weight"] = norm()
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(v, d)
    return tensors


def write_checkpoint(directory: Path, name: str) -> Path:
    """The model as a Hugging Face directory: config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights(config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
