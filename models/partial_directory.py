"""A directory in the making: it appears whole or not at all, and an interrupted run goes on where
it stopped. No jax."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

UNFINISHED = ".tmp"
"""Suffix of files and directories that are being written; without it they are whole."""


class PartialDirectory:
    """Collects files in a hidden directory beside the destination, then renames it.

    with PartialDirectory(destination, "manifest.json", text) as directory: ...

    manifest: a file that says what is being written. What an earlier run with the same text
    finished is still there; anything else is cleared first.
    A ValueError inside removes everything; after another error, such as a full disk or Ctrl-C,
    finished files stay for the next run.
    """

    def __init__(self, destination: Path, manifest: str, text: str):
        self.destination = destination
        # Beside the destination, so that the last step is a rename within one file system.
        self.path = destination.parent / f".{destination.name}.partial"
        self._manifest = self.path / manifest
        self._text = text

    def __enter__(self) -> Path:
        if self.destination.exists():
            raise ValueError(f"{self.destination} exists already; name a directory that does not")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ValueError(f"another process is writing {self.destination}") from error
        if not self._manifest.is_file() or self._manifest.read_text() != self._text:
            for entry in self.path.iterdir():
                _remove(entry)
            self._manifest.write_text(self._text)
        # Orbax adds a suffix of its own to a name while it writes.
        for entry in list(self.path.rglob(f"*{UNFINISHED}*")):
            _remove(entry)
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.rename(self.path, self.destination)
            elif isinstance(error, ValueError) or not self.holds_work:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(self._lock)

    @property
    def holds_work(self) -> bool:
        """Whether an interrupted run left finished files behind."""
        return any(
            entry.is_file()
            and entry != self._manifest
            and UNFINISHED not in str(entry.relative_to(self.path))
            for entry in self.path.rglob("*")
        )


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
