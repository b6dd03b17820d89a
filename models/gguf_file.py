"""Opens GGUF files: metadata and dequantised tensors. No jax; the tokenizer reads metadata too.

The gguf library dequantises. Its reader is not used: it takes two seconds for a vocabulary that
this one reads in a tenth of a second, and takes a truncated file for a whole one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Value types of the format, by their number.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor's bytes lie. shape: outermost first, though the file has it reversed."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows along the innermost dimension, which is what is quantised."""
        return math.prod(self.shape[:-1])

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.num_rows * self.row_bytes


class GgufFile:
    """One open GGUF file. `metadata` maps keys to Python values, `tensors` names to places."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _read_header(data)
        except (struct.error, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} is incomplete or not a GGUF file: {error}") from error
        self._bytes = np.frombuffer(data, np.uint8)
        end = max((tensor.end for tensor in self.tensors.values()), default=0)
        if end > len(self._bytes):
            raise ValueError(
                f"{path} is incomplete: its header describes {end} bytes, it has "
                f"{len(self._bytes)}. Fetch it again"
            )

    def require(self, key: str) -> Any:
        """The metadata value under `key`. Raises ValueError when the file has none."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: metadata key {key} is missing")
        return self.metadata[key]

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, float32 in its shape. Raises ValueError for types not supported."""
        tensor = self.tensors[name]
        stored = self._bytes[tensor.offset : tensor.end].reshape(-1, tensor.row_bytes)
        try:
            values = gguf.dequantize(stored, tensor.type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} has type {tensor.type.name}, which the gguf library cannot "
                "dequantise. Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or a K-quant"
            ) from error
        return values.astype(np.float32, copy=False).reshape(tensor.shape)


def open_gguf(path: Path) -> GgufFile:
    """Open a file; the last one is kept, since config, tokenizer and weights all ask for it."""
    path = Path(path).resolve()
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: Path, mtime_ns: int, size: int) -> GgufFile:
    return GgufFile(path)


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = 0

    def scalar(self, layout: str) -> Any:
        return self.array(layout, 1)[0]

    def array(self, layout: str, count: int) -> list[Any]:
        values = np.frombuffer(self.data, layout, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.position)
        start = self.position + 8
        self.position = start + length
        if self.position > len(self.data):
            raise ValueError(f"a string of {length} bytes goes beyond its end")
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.scalar("<u4"), self.scalar("<u8")
            if of in _SCALARS:
                return self.array(_SCALARS[of], count)
            return [self.value(of) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(data)
    cursor.position = 4
    version = cursor.scalar("<u4")
    if version not in _SUPPORTED_VERSIONS:
        raise ValueError(f"version {version} is not supported; supported: {_SUPPORTED_VERSIONS}")
    num_tensors, num_entries = cursor.array("<u8", 2)
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<u4"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(reversed(cursor.array("<u8", cursor.scalar("<u4"))))
        infos.append((name, shape, cursor.scalar("<u4"), cursor.scalar("<u8")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    base = math.ceil(cursor.position / alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        type_ = gguf.GGMLQuantizationType(kind)
        (row_bytes,) = gguf.quants.quant_shape_to_byte_shape(shape[-1:], type_)
        tensors[name] = GgufTensor(shape, type_, base + offset, row_bytes)
    return metadata, tensors
