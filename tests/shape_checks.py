"""Checks annotations of neojax's array code at run time, in tests only.

jaxtyping's own import hook finds modules on sys.path alone and leaves the names that are imported
under TYPE_CHECKING undefined; this one asks every finder, so that it sees neojax.models where an
editable install puts it, and imports those names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping._import_hook import Typechecker, _JaxtypingLoader

# Where arrays are. Elsewhere there are no shapes to check, only time to lose.
CHECKED = ("neojax.kv", "neojax.models", "neojax.ops", "neojax.runner")


def check(function: Callable) -> Callable:
    """Beartype's decorator, to which an int is a float as it is to type checkers."""
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)


class Loader(_JaxtypingLoader):
    """Imports a module so that its annotations are checked at every call."""

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> Any:
        data = bytes(data).replace(b"\nif TYPE_CHECKING:", b"\nif True:")
        return super().source_to_code(data, path, _optimize=_optimize)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.typechecker = Typechecker(f"{__name__}.check")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(CHECKED):
            return None
        for finder in sys.meta_path:
            if finder is self or not (spec := finder.find_spec(fullname, path, target)):
                continue
            # Whatever loader it names: editable installs wrap the usual one.
            if spec.origin and spec.origin.endswith(".py"):
                spec.loader = Loader(fullname, spec.origin, typechecker=self.typechecker)
            return spec
        return None


def install() -> None:
    """From here on, checked modules are checked when imported."""
    sys.meta_path.insert(0, _Finder())
