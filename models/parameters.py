"""Which checkpoint tensor fills which rows of which parameter. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from neojax.models.config import ModelConfig

ParamPath: TypeAlias = tuple[Any, ...]
"""Path of a parameter in the state of `Llama`, such as ("layers", 3, "qkv", "weight")."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Where one checkpoint tensor goes: rows from `start` on of the parameter at `param`."""

    param: ParamPath
    shape: tuple[int, ...]
    start: int = 0


def checkpoint_parts(config: ModelConfig) -> dict[str, Part]:
    """Every tensor a checkpoint must hold, by its Hugging Face name.

    Projections that are multiplied together are fused: q, k, v are rows of one parameter, and so
    are gate and up. Phi-3's checkpoints hold them so already.
    """
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    parts = {
        "model.embed_tokens.weight": Part(("ends", "embedding"), (config.vocab_size, d)),
        "model.norm.weight": Part(("ends", "norm", "weight"), (d,)),
    }
    if not config.tie_embeddings:
        parts["lm_head.weight"] = Part(("ends", "lm_head"), (config.vocab_size, d))
    block = {
        "input_layernorm.weight": (("input_norm", "weight"), (d,), 0),
        "self_attn.o_proj.weight": (("o", "weight"), (d, q), 0),
        "post_attention_layernorm.weight": (("post_norm", "weight"), (d,), 0),
        "mlp.down_proj.weight": (("down", "weight"), (d, f), 0),
    }
    if config.fused_projections:
        block |= {
            "self_attn.qkv_proj.weight": (("qkv", "weight"), (q + 2 * kv, d), 0),
            "mlp.gate_up_proj.weight": (("gate_up", "weight"), (2 * f, d), 0),
        }
    else:
        block |= {
            "self_attn.q_proj.weight": (("qkv", "weight"), (q, d), 0),
            "self_attn.k_proj.weight": (("qkv", "weight"), (kv, d), q),
            "self_attn.v_proj.weight": (("qkv", "weight"), (kv, d), q + kv),
            "mlp.gate_proj.weight": (("gate_up", "weight"), (f, d), 0),
            "mlp.up_proj.weight": (("gate_up", "weight"), (f, d), f),
        }
    if config.qkv_bias:
        block |= {
            "self_attn.q_proj.bias": (("qkv", "bias"), (q,), 0),
            "self_attn.k_proj.bias": (("qkv", "bias"), (kv,), q),
            "self_attn.v_proj.bias": (("qkv", "bias"), (kv,), q + kv),
        }
    if config.qk_norm:
        block |= {
            "self_attn.q_norm.weight": (("q_norm", "weight"), (config.head_dim,), 0),
            "self_attn.k_norm.weight": (("k_norm", "weight"), (config.head_dim,), 0),
        }
    for layer in range(config.num_layers):
        for name, (param, shape, start) in block.items():
            parts[f"model.layers.{layer}.{name}"] = Part(("layers", layer, *param), shape, start)
    return parts


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats what the config says: a tied output, or stored rope tables."""
    tied_output = config.tie_embeddings and name == "lm_head.weight"
    return tied_output or name.endswith("rotary_emb.inv_freq")


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, source: str
) -> dict[str, Part]:
    """The parts, once it is certain that the checkpoint's tensors fill each exactly once.

    Looks at names and shapes only, so it costs nothing. Raises one ValueError naming every
    missing, left-over or wrongly shaped tensor.
    """
    parts = checkpoint_parts(config)
    problems = [
        f"missing: {name} {part.shape}" for name, part in parts.items() if name not in shapes
    ]
    for name, shape in shapes.items():
        if name in parts:
            if shape != parts[name].shape:
                problems.append(f"wrong shape: {name} is {shape}, expected {parts[name].shape}")
        elif not is_redundant(name, config):
            problems.append(f"left over: {name} {shape}")
    if problems:
        raise ValueError(
            f"{source} does not fit its config ({len(problems)} problems):\n  "
            + "\n  ".join(_shortened(problems))
        )
    return parts


def _shortened(lines: list[str], limit: int = 20) -> list[str]:
    if len(lines) <= limit:
        return lines
    return [*lines[:limit], f"... and {len(lines) - limit} more"]
