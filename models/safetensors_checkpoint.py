"""Reads and writes safetensors directories, single or sharded. No jax.

Headers are parsed here rather than by the library, whose numpy front end knows neither bfloat16
nor how to tell a truncated file from a foreign one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
_PIECE_BYTES = 2 * 2**20
_NUM_READERS = 4  # a disk answers several requests faster than one; conversion takes cores


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    file: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """The tensors of a directory. With an index only the files that it names are looked at."""

    def __init__(self, directory: Path):
        self.path = directory
        index = directory / INDEX_FILE
        if index.is_file():
            self._tensors = _read_sharded(index)
        elif (directory / SINGLE_FILE).is_file():
            self._tensors = read_header(directory / SINGLE_FILE)
        else:
            found = sorted(file.name for file in directory.glob("*.safetensors"))
            raise ValueError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: the checkpoint is "
                f"incomplete (other weight files there: {', '.join(found) or 'none'})"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes, file by file in the order of the bytes."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor's bytes in the file, in the stored type. For one look: its
        pages are read one after the other, as they are touched."""
        tensor = self._tensors[name]
        if math.prod(tensor.shape) == 0:
            return np.empty(tensor.shape, tensor.dtype)
        return np.memmap(tensor.file, tensor.dtype, "r", tensor.offset, tensor.shape)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Read a tensor into a C-contiguous array of its shape, converting to the array's type.

        Several pieces at a time, so that neither the disk nor the conversion waits for the other.
        """
        tensor = self._tensors[name]
        flat = out.reshape(-1)
        step = _PIECE_BYTES // tensor.dtype.itemsize
        with tensor.file.open("rb", buffering=0) as stream:
            piece = functools.partial(_read_piece, stream.fileno(), tensor, flat, step)
            # Raises what a reader raised.
            for _ in self._readers.map(piece, range(0, flat.size, step)):
                pass

    def dtype_of(self, name: str) -> np.dtype:
        """The stored type of a tensor."""
        return self._tensors[name].dtype

    @functools.cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="read")


def _read_piece(
    descriptor: int, tensor: StoredTensor, flat: np.ndarray, step: int, start: int
) -> None:
    """Elements `start` to `start + step` of a tensor, into the same of a flat array."""
    target = flat[start : start + step]
    stored = target if flat.dtype == tensor.dtype else np.empty(len(target), tensor.dtype)
    view = stored.view(np.uint8).data
    at = tensor.offset + start * tensor.dtype.itemsize
    while view:
        count = os.preadv(descriptor, [view], at)
        if not count:
            raise ValueError(f"{tensor.file} is incomplete: it ended while it was being read")
        view, at = view[count:], at + count
    if stored is not target:
        with np.errstate(over="ignore"):
            target[...] = stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one file in the order of their bytes.

    Raises ValueError when the file is shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file} is incomplete or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_without_duplicates)
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged: its header is no tensors in JSON: {error}"
            ) from error
    header.pop("__metadata__", None)
    tensors = {}
    end = 8 + length
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{file}: {name} has type {entry['dtype']}; supported: {', '.join(DTYPES)}"
            )
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop - start != math.prod(shape) * dtype.itemsize or start != end:
            raise ValueError(f"{file} is damaged: the bytes of {name} do not fit its shape {shape}")
        tensors[name] = StoredTensor(file, start, dtype, shape)
        end = stop
    if end != size:
        raise ValueError(
            f"{file} is incomplete: its header describes {end} bytes, it has {size}. Fetch it again"
        )
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file, whose names must differ: of two tensors the last would win."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice")
    return entries


def _read_sharded(index: Path) -> dict[str, StoredTensor]:
    """Tensors that the index names, each from the file that it names."""
    try:
        weight_map: dict[str, str] = json.loads(
            index.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates
        )["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{index.parent} is incomplete: the index names {', '.join(missing)}, which is not "
            "there. Fetch the model again"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor, stored in read_header(index.parent / name).items():
            if weight_map.get(tensor) != name:
                raise ValueError(
                    f"{stored.file} holds {tensor}, which {index.name} places in "
                    f"{weight_map.get(tensor, 'no file')}: the index is not of these files"
                )
            tensors[tensor] = stored
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise ValueError(
            f"{index} names tensors that its files do not hold: {', '.join(lost[:10])}"
        )
    return tensors
