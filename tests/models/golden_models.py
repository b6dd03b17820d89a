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
    return rng.integers(0, _BASE["vocab_size"], NUM_TOKENS, dtype=np.int32)


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


GPT_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""The model of docs/examples/gpt_neox.py, which is none of neojax's own."""


def gpt_neox_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors of GPT_NEOX, in Hugging Face's names and shapes."""
    rng = np.random.default_rng(seed)
    v, d, f = (GPT_NEOX[key] for key in ("vocab_size", "hidden_size", "intermediate_size"))
    prefix = "gpt_neox.layers.{}."
    matrices = {"gpt_neox.embed_in": (v, d), "embed_out": (v, d)}
    norms = ["gpt_neox.final_layer_norm"]
    linears = {}
    for layer in range(GPT_NEOX["num_hidden_layers"]):
        at = prefix.format(layer)
        norms += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
        linears |= {
            f"{at}attention.query_key_value": (3 * d, d),
            f"{at}attention.dense": (d, d),
            f"{at}mlp.dense_h_to_4h": (f, d),
            f"{at}mlp.dense_4h_to_h": (d, f),
        }
    tensors = {
        f"{name}.weight": rng.normal(0.0, shape[1] ** -0.5, shape)
        for name, shape in (matrices | linears).items()
    }
    tensors |= {f"{name}.bias": rng.normal(0.0, 0.2, s[0]) for name, s in linears.items()}
    for name in norms:
        tensors[f"{name}.weight"] = rng.normal(1.0, 0.2, d)
        tensors[f"{name}.bias"] = rng.normal(0.0, 0.2, d)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_gpt_neox(directory: Path) -> Path:
    """GPT_NEOX as a Hugging Face directory."""
    return _write(directory, GPT_NEOX, gpt_neox_weights())


def write_checkpoint(directory: Path, name: str) -> Path:
    """The model as a Hugging Face directory: config.json and model.safetensors."""
    return _write(directory, CONFIGS[name], weights(CONFIGS[name]))


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
