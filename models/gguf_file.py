"""Opens GGUF files: metadata and dequantised tensors. No jax; the tokenizer reads metadata too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np


class GgufFile:
    """One open GGUF file. `metadata` maps keys to Python values, `tensors` names to records."""

    def __init__(self, path: Path):
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise ValueError(
                f"{path} is not a readable GGUF file, or incomplete: {error}"
            ) from error
        self.path = path
        self.metadata: dict[str, Any] = {k: f.contents() for k, f in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def require(self, key: str) -> Any:
        """The metadata value under `key`. Raises ValueError when the file has none."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: metadata key {key} is missing")
        return self.metadata[key]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost first (GGUF stores it the other way round)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, float32 in its shape, in memory of its own."""
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: {name} has type {tensor.tensor_type.name}, which the gguf library "
                "cannot dequantise. Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or a K-quant"
            ) from error
        return np.array(values, np.float32).reshape(self.shape(name))


def open_gguf(path: Path) -> GgufFile:
    """Open a file; the last one is kept, since parsing the vocabulary takes two seconds."""
    path = Path(path).resolve()
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: Path, mtime_ns: int, size: int) -> GgufFile:
    return GgufFile(path)
