"""Writes safetensors directories, one tensor in memory at a time. No jax."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from neojax.models.safetensors_checkpoint import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
)

MAX_SHARD_BYTES = 5 * 10**9  # what the Hub's own tools write


def write_safetensors(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all tensors as `dtype`: one file, or shards of at most `max_shard_bytes` (more only
    for a tensor that is larger itself) and their index. `read` gives a tensor by name."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        _write_file(directory / SINGLE_FILE, shapes, read, dtype)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(directory / file, {name: shapes[name] for name in names}, read, dtype)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
) -> None:
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data, as the format asks
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            np.ascontiguousarray(read(name), dtype).view(np.uint8).tofile(stream)
