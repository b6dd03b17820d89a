"""Writes safetensors directories, one tensor in memory at a time. No jax."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neojax.models.partial_directory import UNFINISHED
from neojax.models.safetensors_checkpoint import DTYPES, INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 5 * 10**9  # what the Hub's own tools write


def write_safetensors(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    done: Callable[[int], Any] = lambda num_tensors: None,
) -> None:
    """Write all tensors as `dtype`: one file, or shards of at most `max_shard_bytes` and their
    index. Files that are there already stay. `read` gives a tensor by name; `done` is told how
    many tensors each file holds. Raises OSError naming the file."""
    groups = grouped(shapes, dtype, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        path = directory / (file if len(groups) > 1 else SINGLE_FILE)
        if not path.is_file():
            _write_file(path, {name: shapes[name] for name in names}, read, dtype)
        done(len(names))
    if len(groups) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def grouped(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, max_bytes: int
) -> list[list[str]]:
    """Names in their order, in groups of at most `max_bytes` (more only for a tensor that is
    larger itself)."""
    groups: list[list[str]] = [[]]
    room = max_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    return groups


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
    unfinished = file.with_name(file.name + UNFINISHED)
    try:
        with unfinished.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in shapes:
                values = np.ascontiguousarray(read(name), dtype)
                stream.write(values.reshape(-1).view(np.uint8).data)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(unfinished, file)
    except OSError as error:  # of a write, which does not know its file
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        unfinished.unlink(missing_ok=True)
