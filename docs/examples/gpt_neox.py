"""GPT-NeoX (Pythia) in Flax, served by neojax though neojax knows nothing of it.

    python -m neojax.serve /models/pythia-410m --model-class docs.examples.gpt_neox:GPTNeoX

Its layers have layer norms with biases, attention and MLP side by side, and rotate a part of each
head. docs/bring_your_own_model.md explains what neojax asks of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from neojax.models.safetensors_checkpoint import SafetensorsCheckpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes: those that neojax needs, then those of this model alone."""

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rotary_size: int
    rope_theta: float
    eps: float
    sliding_window: int | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def read(cls, directory: Path) -> Config:
        raw = json.loads((directory / "config.json").read_text())
        return cls(
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            rotary_size=int(raw["rotary_pct"] * raw["hidden_size"] // raw["num_attention_heads"]),
            rope_theta=raw["rotary_emb_base"],
            eps=raw["layer_norm_eps"],
        )


class Layer(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, c: Config, **types: Any):
        self.config = c
        self.attention_norm = nnx.LayerNorm(c.hidden_size, epsilon=c.eps, **types)
        self.mlp_norm = nnx.LayerNorm(c.hidden_size, epsilon=c.eps, **types)
        self.qkv = nnx.Linear(c.hidden_size, 3 * c.hidden_size, **types)
        self.out = nnx.Linear(c.hidden_size, c.hidden_size, **types)
        self.up = nnx.Linear(c.hidden_size, c.intermediate_size, **types)
        self.down = nnx.Linear(c.intermediate_size, c.hidden_size, **types)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
        heads = self.qkv(self.attention_norm(x)).reshape(len(x), self.config.num_heads, 3, -1)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]  # [T, N, H] each
        attended = attend(self.rotate(q, positions), self.rotate(k, positions), v)
        mlp = self.down(nnx.gelu(self.up(self.mlp_norm(x)), approximate=False))
        return x + self.out(attended.reshape(x.shape)) + mlp

    def rotate(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        """Turn the first `rotary_size` dimensions of each head; the others stay."""
        size = self.config.rotary_size
        exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
        frequencies = self.config.rope_theta**-exponents
        angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, size/2]
        first, second, rest = jnp.split(heads.astype(jnp.float32), [size // 2, size], axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


class Ends(nnx.Module):
    """Embedding, last norm and output."""

    def __init__(self, c: Config, **types: Any):
        self.embedding = nnx.Embed(c.vocab_size, c.hidden_size, **types)
        self.norm = nnx.LayerNorm(c.hidden_size, epsilon=c.eps, **types)
        self.output = nnx.Linear(c.hidden_size, c.vocab_size, use_bias=False, **types)

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.embedding(ids)

    def head(self, x: jax.Array) -> jax.Array:
        return self.output(self.norm(x)).astype(jnp.float32)


class GPTNeoX(nnx.Module):
    """The whole model."""

    def __init__(self, config: Config, dtype: Any, rngs: nnx.Rngs):
        types = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.config = config
        self.ends = Ends(config, **types)
        self.layers = nnx.List([Layer(config, **types) for _ in range(config.num_layers)])

    @classmethod
    def from_checkpoint(cls, directory: Path, dtype: Any) -> GPTNeoX:
        """What neojax calls: a model with its parameters on the device."""
        config = Config.read(directory)
        model = nnx.eval_shape(lambda: cls(config, dtype, nnx.Rngs(0)))
        stored = SafetensorsCheckpoint(directory)

        def fill(module: Any, name: str) -> None:
            """Give a module the tensors of that name. Flax's kernels are [in, out]."""
            for part in ("kernel", "scale", "embedding", "bias"):
                if getattr(module, part, None) is not None:
                    tensor = stored.read(f"{name}.{'bias' if part == 'bias' else 'weight'}")
                    array = tensor.T if part == "kernel" else tensor
                    getattr(module, part).set_value(jnp.asarray(array, dtype))

        fill(model.ends.embedding, "gpt_neox.embed_in")
        fill(model.ends.norm, "gpt_neox.final_layer_norm")
        fill(model.ends.output, "embed_out")
        for index, layer in enumerate(model.layers):
            prefix = f"gpt_neox.layers.{index}."
            fill(layer.attention_norm, f"{prefix}input_layernorm")
            fill(layer.mlp_norm, f"{prefix}post_attention_layernorm")
            fill(layer.qkv, f"{prefix}attention.query_key_value")
            fill(layer.out, f"{prefix}attention.dense")
            fill(layer.up, f"{prefix}mlp.dense_h_to_4h")
            fill(layer.down, f"{prefix}mlp.dense_4h_to_h")
        return model
