"""Blocks as the arena holds them, packed and unpacked on the device: the host then copies bytes.

The arena keeps, for each block and kv head, tiles of 16 tokens, K then V, each in the order that
the kernels read (ffi/cpu_paged_attn/arena.h):

    bfloat16            K [H/2, 16, 2]   V [8, H, 2]
    float32, float16    K [H, 16]        V [16, H]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TILE_TOKENS = 16


def block_elements(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """E: elements of one layer's block, K and V."""
    return 2 * block_size * num_kv_heads * head_dim


def pack(k: Float[Array, "C p K H"], v: Float[Array, "C p K H"]) -> Float[Array, "C E"]:
    """Blocks of a device pool in the arena's order."""
    num_blocks, block_size, num_kv_heads, head_dim = k.shape
    tiles = block_size // TILE_TOKENS
    if k.dtype == jnp.bfloat16:
        k = k.reshape(num_blocks, tiles, TILE_TOKENS, num_kv_heads, head_dim // 2, 2)
        k = k.transpose(0, 3, 1, 4, 2, 5)
        v = v.reshape(num_blocks, tiles, TILE_TOKENS // 2, 2, num_kv_heads, head_dim)
        v = v.transpose(0, 4, 1, 2, 5, 3)
    else:
        k = k.reshape(num_blocks, tiles, TILE_TOKENS, num_kv_heads, head_dim)
        k = k.transpose(0, 3, 1, 4, 2)
        v = v.reshape(num_blocks, tiles, TILE_TOKENS, num_kv_heads, head_dim)
        v = v.transpose(0, 3, 1, 2, 4)
    flat = (num_blocks, num_kv_heads, tiles, 1, TILE_TOKENS * head_dim)
    return jnp.concatenate([k.reshape(flat), v.reshape(flat)], axis=3).reshape(num_blocks, -1)


def unpack(
    blocks: Float[Array, "C E"], block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """k, v [C, p, K, H] of blocks in the arena's order."""
    num_blocks = len(blocks)
    tiles = block_size // TILE_TOKENS
    both = blocks.reshape(num_blocks, num_kv_heads, tiles, 2, TILE_TOKENS * head_dim)
    k, v = both[:, :, :, 0], both[:, :, :, 1]
    if blocks.dtype == jnp.bfloat16:
        k = k.reshape(num_blocks, num_kv_heads, tiles, head_dim // 2, TILE_TOKENS, 2)
        k = k.transpose(0, 2, 4, 1, 3, 5)
        v = v.reshape(num_blocks, num_kv_heads, tiles, TILE_TOKENS // 2, head_dim, 2)
        v = v.transpose(0, 2, 3, 5, 1, 4)
    else:
        k = k.reshape(num_blocks, num_kv_heads, tiles, head_dim, TILE_TOKENS)
        k = k.transpose(0, 2, 4, 1, 3)
        v = v.reshape(num_blocks, num_kv_heads, tiles, TILE_TOKENS, head_dim)
        v = v.transpose(0, 2, 3, 1, 4)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return k.reshape(shape), v.reshape(shape)
