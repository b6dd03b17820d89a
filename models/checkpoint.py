"""Fills a Llama's parameters: from a checkpoint, tensor by tensor, or with random values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from neojax.config import LoadFormat
from neojax.models.config import ModelConfig
from neojax.models.dummy import random_parameters
from neojax.models.llama import Llama
from neojax.models.manifest import check_manifest
from neojax.models.orbax_checkpoint import WEIGHTS_DIRECTORY, OrbaxCheckpoint
from neojax.models.parameters import ParamPath, Part, check_tensors
from neojax.models.safetensors_checkpoint import SafetensorsCheckpoint
from neojax.models.staging import Staging

if TYPE_CHECKING:
    from neojax.models.gguf_checkpoint import GgufCheckpoint

Checkpoint: TypeAlias = "SafetensorsCheckpoint | GgufCheckpoint | OrbaxCheckpoint"
"""Tensors by Hugging Face name: `shapes`, and `read` for one."""


def load_model(
    path: Path | None,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Llama:
    """A Llama with its parameters on the default device.

    path: directory or .gguf file; None only with load_format "dummy", which reads no weights.
    dtype: of the parameters; a stored tensor of another type is converted on the way.
    Raises ValueError when the checkpoint does not fill every parameter exactly once.
    """
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, empty = nnx.split(abstract)
    variables = dict(nnx.to_flat_state(empty))
    shapes = {name: variable.shape for name, variable in variables.items()}
    if load_format == "dummy":
        arrays = random_parameters(shapes, dtype=dtype, seed=seed)
    elif path is None:
        raise ValueError(f"load_format {load_format!r} needs a checkpoint; without one use 'dummy'")
    else:
        checkpoint = open_checkpoint(Path(path), config, load_format)
        arrays = _read_parameters(checkpoint, config, shapes, np.dtype(dtype), progress)
    assert arrays.keys() == variables.keys()
    state = nnx.from_flat_state(
        [(name, variable.replace(arrays[name])) for name, variable in variables.items()]
    )
    return nnx.merge(graphdef, state)


def open_checkpoint(
    path: Path, config: ModelConfig, load_format: LoadFormat = "auto"
) -> Checkpoint:
    """The reader for a path. Raises ValueError when it is not what load_format names."""
    if path.suffix == ".gguf":
        kind, what = "gguf", "a GGUF file"
    elif (path / WEIGHTS_DIRECTORY).is_dir():
        kind, what = "orbax", "a directory with an Orbax checkpoint"
    else:
        kind, what = "safetensors", "a directory"
    if load_format not in ("auto", kind):
        raise ValueError(f"load_format {load_format!r} was asked for, but {path} is {what}")
    if kind == "gguf":
        # A machine that serves safetensors need not have the gguf package.
        from neojax.models.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path, config)
    check_manifest(path, config, kind)
    if kind == "orbax":
        return OrbaxCheckpoint(path)
    return SafetensorsCheckpoint(path)


def _read_parameters(
    checkpoint: Checkpoint,
    config: ModelConfig,
    shapes: Mapping[ParamPath, tuple[int, ...]],
    dtype: np.dtype,
    progress: bool,
) -> dict[ParamPath, jax.Array]:
    """Read every tensor once, in file order, and send each parameter off when it is whole.

    Host memory holds the few parameters that are being put together, never the model.
    """
    tensor_shapes = checkpoint.shapes
    parts = check_tensors(tensor_shapes, config, str(checkpoint.path))
    missing_parts: dict[ParamPath, int] = {}
    for part in parts.values():
        missing_parts[part.param] = missing_parts.get(part.param, 0) + 1
    buffers: dict[ParamPath, np.ndarray] = {}
    arrays: dict[ParamPath, jax.Array] = {}
    staging = Staging()
    with tqdm(
        total=config.num_parameters * dtype.itemsize,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for name in tensor_shapes:
            part = parts.get(name)
            if part is None:
                continue
            if part.param not in buffers:
                buffers[part.param] = staging.take(shapes[part.param], dtype)
            _fill(buffers[part.param], part, checkpoint, name)
            missing_parts[part.param] -= 1
            if not missing_parts[part.param]:
                buffer = buffers.pop(part.param)
                arrays[part.param] = staging.send(buffer)
                bar.update(buffer.nbytes)
    staging.wait()
    _refuse_not_finite(arrays, parts, str(checkpoint.path))
    return arrays


def _refuse_not_finite(
    arrays: Mapping[ParamPath, jax.Array], parts: Mapping[str, Part], source: str
) -> None:
    """Raise ValueError naming the tensors of parameters with NaN or infinity: they would turn
    every answer into nonsense. Looked for on the device, which reads its memory fastest."""
    is_finite = jax.jit(lambda array: jnp.isfinite(array).all())
    flags = {path: is_finite(array) for path, array in arrays.items()}
    bad = [name for name, part in parts.items() if not flags[part.param]]
    if bad:
        raise ValueError(
            f"{source} is damaged: NaN or infinite values in {', '.join(bad[:10])}"
            + (f" and {len(bad) - 10} more tensors" if len(bad) > 10 else "")
        )


def _fill(buffer: np.ndarray, part: Part, checkpoint: Checkpoint, name: str) -> None:
    rows = buffer[part.start : part.start + part.shape[0]]
    if isinstance(checkpoint, SafetensorsCheckpoint):
        checkpoint.read_into(name, rows)
        stored = checkpoint.dtype_of(name)
    else:
        values = checkpoint.read(name)
        stored = values.dtype
        with np.errstate(over="ignore"):
            rows[...] = values
    if buffer.dtype == np.float16 and stored != np.float16 and not np.isfinite(rows).all():
        raise ValueError(
            f"{name} holds values that float16 cannot (beyond 65504). Use --dtype bfloat16 or "
            "float32"
        )
