"""Random parameters made on the device, for benchmarks and tests."""

from __future__ import annotations

import jax
from flax import nnx
from jax.typing import DTypeLike

from neojax.models.config import ModelConfig
from neojax.models.llama import LlamaBlock, LlamaEnds
from neojax.models.parameters import ParamPath


def random_state(config: ModelConfig, *, dtype: DTypeLike, seed: int) -> dict[ParamPath, jax.Array]:
    """Every parameter of a Llama, by path; the same for the same seed.

    Two programs, one for a layer and one for the rest: compiling one of all layers would take
    longer than running it.
    """

    @jax.jit
    def layer(key: jax.Array):
        return nnx.state(LlamaBlock(config, dtype=dtype, rngs=nnx.Rngs(key)))

    @jax.jit
    def ends(key: jax.Array):
        return nnx.state(LlamaEnds(config, dtype=dtype, rngs=nnx.Rngs(key)))

    keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    states = {("ends",): ends(keys[0])}
    states |= {("layers", index): layer(key) for index, key in enumerate(keys[1:])}
    return {
        (*prefix, *path): variable[...]
        for prefix, state in states.items()
        for path, variable in nnx.to_flat_state(state)
    }
