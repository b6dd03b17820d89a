"""Scripts without a .py at their end, as modules."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def as_module(name: str) -> ModuleType:
    """The script of that name, imported; what it adds to sys.path is taken away again."""
    before = sys.path[:]
    spec = spec_from_loader(name, SourceFileLoader(name, str(SCRIPTS / name)))
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look for their module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    sys.path[:] = before
    return module
