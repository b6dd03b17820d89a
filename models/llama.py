"""The Llama decoder and its kin (Mistral, Qwen2, Qwen3, Phi-3).

Where keys and values live is the business of the `attend` hook alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from neojax.models.config import ModelConfig
from neojax.models.layers import Linear, RMSNorm, project, random_weight
from neojax.models.rope import angles, rotate

Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [T, N, H], k [T, K, H], v [T, K, H]) -> [T, N, H]. k is already rotated."""


class LlamaBlock(nnx.Module):
    """One decoder layer. Pure: the hook is called exactly once, and nothing is stored."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.config = config
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype)
        self.qkv = Linear(
            hidden,
            config.q_size + 2 * config.kv_size,
            use_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.o = Linear(config.q_size, hidden, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype)
        self.gate_up = Linear(hidden, 2 * ffn, dtype=dtype, rngs=rngs)
        self.down = Linear(ffn, hidden, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T D"], positions: Int[Array, "T"], attend: Attend
    ) -> Float[Array, "T D"]:
        with jax.named_scope("pre_projection"):
            q, k, v = self.rotated_qkv(self.input_norm(x), positions)
        with jax.named_scope("attention"):
            attended = attend(q, k, v)  # [T, N, H]
        with jax.named_scope("post_projection"):
            x = x + self.o(attended.reshape(len(x), -1))
        with jax.named_scope("mlp"):
            gate, up = jnp.split(self.gate_up(self.post_norm(x)), 2, axis=-1)  # [T, F] each
            return x + self.down(jax.nn.silu(gate) * up)

    def rotated_qkv(
        self, x: Float[Array, "T D"], positions: Int[Array, "T"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Query, key and value heads; query and key turned to their positions."""
        c = self.config
        heads = self.qkv(x).reshape(len(x), -1, c.head_dim)  # [T, N+2K, H]
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        turns = angles(positions, c)  # [T, H/2]
        return rotate(q, turns, c), rotate(k, turns, c), v


class LlamaEnds(nnx.Module):
    """What stands before and after the layers; both may share one array [V, D]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(random_weight(shape, dtype, rngs))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(random_weight(shape, dtype, rngs))
        self.tie_embeddings = config.tie_embeddings

    @jax.named_scope("embed")
    def embed(self, ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        return jnp.take(self.embedding[...], ids, axis=0, mode="clip")

    @jax.named_scope("head")
    def head(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        weight = self.embedding if self.tie_embeddings else self.lm_head
        return project(self.norm(x), weight[...], jnp.float32)


class Llama(nnx.Module):
    """A whole decoder: `ends` and `layers`, whose states can be split and passed one by one."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.ends = LlamaEnds(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [LlamaBlock(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )

    def embed(self, ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Hidden states of tokens, in the parameters' type. Ids outside the vocabulary clip."""
        return self.ends.embed(ids)

    def head(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of the next token."""
        return self.ends.head(x)

    def __call__(
        self,
        ids: Int[Array, "T"],
        positions: Int[Array, "T"],
        attend: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> Float[Array, "T V"]:
        """Logits of every token; `attend(layer, q, k, v)` also gets the layer's index."""
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, lambda q, k, v, index=index: attend(index, q, k, v))
        return self.head(x)
