"""The weights of a GGUF file, under Hugging Face names and in their row order. No jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from neojax.models.config import ModelConfig
from neojax.models.gguf_config import LONGROPE_FACTORS
from neojax.models.gguf_file import open_gguf

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}  # Phi-3's
# Part of the config (gguf_config.py), not a weight.
_CONFIG_TENSORS = {"rope_freqs.weight", *LONGROPE_FACTORS}


class GgufCheckpoint:
    """The tensors of a GGUF file, dequantised to float32 one by one as they are read."""

    def __init__(self, path: Path, config: ModelConfig):
        self.path = path
        self._file = open_gguf(path)
        # Of the architectures here only llama's are stored in pairs.
        is_paired = self._file.require("general.architecture") == "llama"
        self._paired_heads = (
            {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
            if is_paired
            else {}
        )
        self._stored_names = {
            hugging_face_name(name, is_fused=config.fused_projections): name
            for name in self._file.tensors
            if name not in _CONFIG_TENSORS
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes in file order."""
        return {
            name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, float32."""
        values = self._file.read(self._stored_names[name])
        num_heads = self._paired_heads.get(".".join(name.split(".")[-2:]))
        return values if num_heads is None else half_split_rows(values, num_heads)


def hugging_face_name(name: str, *, is_fused: bool = False) -> str:
    """Name of a GGUF tensor in a Hugging Face Llama; unknown names come back as they are."""
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    inner = _INNER | _FUSED if is_fused else _INNER
    if match and match[2] in inner:
        return f"model.layers.{match[1]}.{inner[match[2]]}.{match[3]}"
    return name


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [N*H, D] of a query or key projection with rope pairs (i, i + H/2).

    GGUF puts the two rows of a pair next to each other, (2i, 2i + 1).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
