"""Reads and writes Orbax checkpoints: one array per tensor, under its Hugging Face name.

Arrays are restored to host memory and sharded by whoever loads them, so nothing depends on the
devices that the checkpoint was written with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS_DIRECTORY = "orbax"  # inside the model's directory, beside config.json and the tokenizer


class OrbaxCheckpoint:
    """The tensors of a model's directory whose weights are an Orbax checkpoint."""

    def __init__(self, directory: Path):
        # Here and below: slow to import, and only these checkpoints need it.
        import orbax.checkpoint as ocp

        self.path = directory
        self._weights = (directory / WEIGHTS_DIRECTORY).resolve()
        self._checkpointer = ocp.PyTreeCheckpointer()
        with _reading(self._weights):
            tree: Any = self._checkpointer.metadata(self._weights).item_metadata
            self._shapes = {name: tuple(entry.shape) for name, entry in dict(tree).items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes."""
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        """A tensor's values, in the stored type."""
        import orbax.checkpoint as ocp

        wanted = {other: ocp.PLACEHOLDER for other in self._shapes} | {name: 0}
        how = {other: ocp.RestoreArgs(restore_type=np.ndarray) for other in self._shapes}
        with _reading(self._weights):
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=how)
            return self._checkpointer.restore(self._weights, args=args)[name]


def write_orbax(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> None:
    """Write all tensors; the whole model is in host memory while it does."""
    import orbax.checkpoint as ocp

    tensors = {name: np.ascontiguousarray(read(name)) for name in shapes}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / WEIGHTS_DIRECTORY).resolve(), tensors)


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Turns what Orbax raises for a damaged directory into a ValueError that names it."""
    try:
        yield
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{directory} is not a readable Orbax checkpoint, or incomplete: {error}"
        ) from error
