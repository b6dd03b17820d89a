"""What the engine asks of a model, and a check that one keeps to it. `Llama` does; so may yours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@runtime_checkable
class DecoderConfig(Protocol):
    """The sizes that pools and programs are made from. A frozen dataclass will do."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...


@runtime_checkable
class Ends(Protocol):
    """What stands before and after the layers."""

    def embed(self, ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Hidden states, in the parameters' type."""
        ...

    def head(self, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of the next token."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A Flax nnx model: `ends`, and `layers` of one structure.

    A layer is called as `layer(x [T, D], positions [T], attend)` and returns [T, D]. It calls
    `attend(q [T, N, H], k [T, K, H], v [T, K, H]) -> [T, N, H]` exactly once; the hook keeps k and
    v, and weighs v by softmax(q·k / sqrt(H)) over the tokens of each one's own sequence.
    """

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def ends(self) -> Ends: ...
    @property
    def layers(self) -> Sequence[Callable[..., Any]]: ...


def load_model_class(name: str, checkpoint: Path, dtype: DTypeLike) -> Decoder:
    """A model made by the class at `module:Class`, with `Class.from_checkpoint(checkpoint, dtype)`.

    Raises ValueError when there is no such class, or its model breaks the contract above.
    """
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute).from_checkpoint
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model_class {name!r} cannot be loaded: {error}. It is module:Class, where the module "
            "can be imported here and the class has from_checkpoint(path, dtype)"
        ) from error
    model = make(checkpoint, dtype)
    check_decoder(model, dtype, name)
    return model


def check_decoder(model: Any, dtype: DTypeLike, name: str) -> None:
    """Trace a model on two tokens. Raises ValueError saying what it lacks or returns wrongly."""
    for attribute in ("config", "ends", "layers"):
        if not hasattr(model, attribute):
            raise ValueError(f"{name} has no attribute {attribute!r}")
    c: DecoderConfig = model.config
    sizes = [field for field in vars(DecoderConfig) if not field.startswith("_")]
    if lacking := [field for field in sizes if not hasattr(c, field)]:
        raise ValueError(f"the config of {name} has no {', '.join(lacking)}")
    if len(model.layers) != c.num_layers:
        raise ValueError(f"{name} has {len(model.layers)} layers, its config says {c.num_layers}")
    first = nnx.graphdef(model.layers[0])
    for index, layer in enumerate(model.layers):
        if nnx.graphdef(layer) != first:
            raise ValueError(
                f"layer {index} of {name} differs in structure from layer 0; one program serves "
                "all layers, so only their parameters may differ"
            )
    calls: list[tuple[jax.Array, ...]] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        calls.append((q, k, v))
        return jnp.zeros_like(q)

    ids = jax.ShapeDtypeStruct((2,), jnp.int32)
    x = jax.eval_shape(model.ends.embed, ids)
    _require(x, (2, c.hidden_size), dtype, f"embed of {name}")
    y = jax.eval_shape(lambda x, at: model.layers[0](x, at, attend), x, ids)
    _require(y, x.shape, dtype, f"a layer of {name}")
    if len(calls) != 1:
        raise ValueError(f"a layer of {name} must call attend once, it did {len(calls)} times")
    for letter, array, heads in zip(
        "qkv", calls[0], (c.num_heads, c.num_kv_heads, c.num_kv_heads), strict=True
    ):
        _require(array, (2, heads, c.head_dim), dtype, f"{letter} of {name}")
    _require(jax.eval_shape(model.ends.head, x), (2, c.vocab_size), jnp.float32, f"head of {name}")


def _require(array: Any, shape: tuple[int, ...], dtype: DTypeLike, what: str) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{what}: expected {jnp.dtype(dtype).name} {shape} for two tokens, got "
            f"{array.dtype.name} {array.shape}"
        )
