"""Reads a Hugging Face config.json. What neojax does not compute is refused by name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from neojax.models.config import ModelConfig
from neojax.models.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

log = logging.getLogger(__name__)

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
}
_ROPE_TYPES = "default, linear, dynamic, yarn, llama3, longrope"


def read_config(directory: Path) -> ModelConfig:
    """Config of a checkpoint directory.

    Raises ValueError for a missing or broken file, or a model that is not a plain Llama.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{directory} has no config.json. A model is a Hugging Face directory (config.json, "
            "*.safetensors, tokenizer.json) or a .gguf file"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}, not an object")
    try:
        return parse_config(raw, name=directory.resolve().name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def parse_config(raw: dict[str, Any], name: str) -> ModelConfig:
    """Config from the contents of config.json."""
    kind = _model_type(raw)
    window, windowed_layers = _sliding_window(raw, kind)
    # Elsewhere null stands for "the default" in configs written by transformers.
    raw = {key: value for key, value in raw.items() if value is not None}
    _refuse_unsupported(raw)
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        if key not in raw:
            raise ValueError(f"{key} is missing")
        if not isinstance(raw[key], int):
            raise ValueError(f"{key} must be a whole number, got {raw[key]!r}")
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    if "head_dim" not in raw and kind != "qwen3" and hidden_size % num_heads:
        raise ValueError(
            f"head_dim is missing and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    theta, scaling = _rope(raw, kind)
    # Qwen's and Phi-3's classes have defaults of their own.
    default_head_dim = 128 if kind == "qwen3" else hidden_size // num_heads
    context = _context(raw, scaling)
    if window is not None and window < context and windowed_layers < raw["num_hidden_layers"]:
        # Within the window every token sees all before it: there, full attention is exact.
        log.warning(
            "%s: context limited to %d of %d tokens: %d of %d layers attend through a sliding "
            "window of that length, and windows that differ by layer are not supported",
            *(name, window, context, windowed_layers, raw["num_hidden_layers"]),
        )
        context, window = window, None
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads", num_heads),
        head_dim=raw.get("head_dim", default_head_dim),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5 if kind == "phi3" else 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=context,
        sliding_window=None if window is None or window >= context else window,
        tie_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        fused_projections=kind == "phi3",
        name=name,
    )


def _model_type(raw: dict[str, Any]) -> str:
    names: list[str] = raw.get("architectures") or [raw.get("model_type", "unknown")]
    for name in names:
        kind = _ARCHITECTURES.get(name, name)
        if kind in _ARCHITECTURES.values():
            return kind
    raise ValueError(
        f"architecture {', '.join(map(str, names))} is not supported; "
        f"supported: {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"{key} true is not supported: projections have no bias here")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"quantization_config {method!r} is not supported; use the unquantised checkpoint "
            "or a GGUF file"
        )


def _sliding_window(raw: dict[str, Any], kind: str) -> tuple[int | None, int]:
    """Tokens that a layer looks back, null meaning all, and how many layers do so."""
    num_layers = raw.get("num_hidden_layers") or 0
    if kind == "mistral":
        return raw.get("sliding_window", 4096), num_layers
    if kind == "phi3":
        return raw.get("sliding_window"), num_layers
    if kind in ("qwen2", "qwen3") and raw.get("use_sliding_window"):
        num_windowed = num_layers - raw.get("max_window_layers", 28)  # the first ones see all
        if num_windowed > 0:
            return raw.get("sliding_window", 4096), num_windowed
    return None, 0


def _context(raw: dict[str, Any], scaling: RopeScaling | None) -> int:
    """Longest context, in tokens: what the scaling stretches it to."""
    context = raw.get("max_position_embeddings", 2048)
    if isinstance(scaling, YarnRopeScaling | DynamicRopeScaling):
        stretched = int(scaling.factor * scaling.original_max_position_embeddings)
        context = max(context, stretched)
    return context


def _rope(raw: dict[str, Any], kind: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from rope_parameters (transformers 5) or the older top-level keys."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if kind == "phi3" and rope_type in ("su", "yarn"):  # what longrope was called at first
        rope_type = "longrope"
    try:
        match rope_type:
            case "default":
                return theta, None
            case "linear":
                return theta, LinearRopeScaling(factor=float(rope["factor"]))
            case "llama3":
                return theta, Llama3RopeScaling(
                    factor=float(rope["factor"]),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                    original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
                )
            case "yarn":
                return theta, _yarn(rope, raw)
            case "dynamic":
                return theta, DynamicRopeScaling(
                    factor=float(rope["factor"]),
                    original_max_position_embeddings=int(raw["max_position_embeddings"]),
                )
            case "longrope":
                return theta, _longrope(rope, raw)
    except KeyError as error:
        raise ValueError(f"rope type {rope_type!r} needs {error.args[0]}") from error
    raise ValueError(f"rope type {rope_type!r} is not supported; supported: {_ROPE_TYPES}")


def _original_context(rope: dict[str, Any], raw: dict[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return int(raw.get(key, rope.get(key, raw.get("max_position_embeddings", 2048))))


def _longrope(rope: dict[str, Any], raw: dict[str, Any]) -> LongRopeScaling:
    original = _original_context(rope, raw)
    attention = rope.get("attention_factor")
    if attention is None:
        factor = float(rope.get("factor", raw["max_position_embeddings"] / original))
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factors=tuple(map(float, rope["short_factor"])),
        long_factors=tuple(map(float, rope["long_factor"])),
        original_max_position_embeddings=original,
        attention_factor=float(attention),
    )


def _yarn(rope: dict[str, Any], raw: dict[str, Any]) -> YarnRopeScaling:
    factor = float(rope["factor"])

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = growth(top) / growth(bottom) if top and bottom else growth(1.0)
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=_original_context(rope, raw),
        attention_factor=float(attention),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=rope.get("truncate", True),
    )
