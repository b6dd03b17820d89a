"""Reads and writes Orbax checkpoints: one array per tensor, under its Hugging Face name.

A model's arrays lie in parts, each a checkpoint of its own, so that host memory need never hold
more than one. They are restored to host memory and sharded by whoever loads them, so nothing
depends on the devices that the checkpoint was written with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neojax.models.partial_directory import UNFINISHED
from neojax.models.safetensors_writer import grouped

WEIGHTS_DIRECTORY = "orbax"  # inside the model's directory, beside config.json and the tokenizer
MAX_PART_BYTES = 10**9


class OrbaxCheckpoint:
    """The tensors of a model's directory whose weights are Orbax checkpoints: parts, or one."""

    def __init__(self, directory: Path):
        # Here and below: slow to import, and only these checkpoints need it.
        import orbax.checkpoint as ocp

        self.path = directory
        weights = (directory / WEIGHTS_DIRECTORY).resolve()
        self._checkpointer = ocp.PyTreeCheckpointer()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, Path] = {}
        for part in _parts(weights):
            with _reading(part):
                tree: Any = self._checkpointer.metadata(part).item_metadata
                shapes = {name: tuple(entry.shape) for name, entry in dict(tree).items()}
            if twice := sorted(shapes.keys() & self._shapes.keys()):
                raise ValueError(f"{part} holds {twice[0]}, which {self._parts[twice[0]]} has too")
            self._shapes |= shapes
            self._parts |= dict.fromkeys(shapes, part)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes, part by part."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, in the stored type."""
        import orbax.checkpoint as ocp

        part = self._parts[name]
        names = [other for other, its_part in self._parts.items() if its_part == part]
        wanted = {other: ocp.PLACEHOLDER for other in names} | {name: 0}
        how = {other: ocp.RestoreArgs(restore_type=np.ndarray) for other in names}
        with _reading(part):
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=how)
            return self._checkpointer.restore(part, args=args)[name]


def write_orbax(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    *,
    max_part_bytes: int = MAX_PART_BYTES,
    done: Callable[[int], Any] = lambda num_tensors: None,
) -> None:
    """Write all tensors; host memory holds one part of at most `max_part_bytes` (more only for a
    tensor that is larger itself). Parts that are there already stay; `done` is told how many
    tensors each holds. Raises OSError naming the part."""
    import orbax.checkpoint as ocp

    weights = (directory / WEIGHTS_DIRECTORY).resolve()
    groups = grouped(shapes, dtype, max_part_bytes)
    with ocp.PyTreeCheckpointer() as checkpointer:
        for number, names in enumerate(groups, start=1):
            part = weights / f"part-{number:05}-of-{len(groups):05}"
            if not part.is_dir():
                tensors = {name: np.ascontiguousarray(read(name), dtype) for name in names}
                unfinished = part.with_name(part.name + UNFINISHED)
                try:
                    checkpointer.save(unfinished, tensors)
                except (ValueError, OSError) as error:  # of the library below Orbax
                    raise OSError(f"{part} cannot be written: {error}") from error
                os.rename(unfinished, part)
            done(len(names))


def _parts(weights: Path) -> list[Path]:
    """The checkpoints in a directory, or the directory where it is one itself.

    Raises ValueError when one is missing.
    """
    parts = sorted(weights.glob("part-*-of-*"))
    if not parts:
        return [weights]
    expected = [f"part-{i:05}-of-{len(parts):05}" for i in range(1, len(parts) + 1)]
    if [part.name for part in parts] != expected:
        raise ValueError(
            f"{weights} is not a readable Orbax checkpoint, or incomplete: it holds "
            f"{', '.join(part.name for part in parts)}"
        )
    return parts


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Turns what Orbax raises for a damaged directory into a ValueError that names it."""
    try:
        yield
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{directory} is not a readable Orbax checkpoint, or incomplete: {error}"
        ) from error
