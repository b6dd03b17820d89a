"""Engines shared by the tests of this folder: compiling them is most of the time they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from neojax.engine.core import EngineCore
from tests.engine.tiny import VARIANTS, tiny_engine, tiny_model


@pytest.fixture(scope="session")
def _engines() -> Iterator[dict[str, EngineCore]]:
    engines: dict[str, EngineCore] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def engine_of(_engines: dict[str, EngineCore]) -> Iterator[Callable[..., EngineCore]]:
    """engine_of(variant, policy, limit): an idle engine of 64 device and 64 host blocks."""

    def get(variant: str = "gqa3", policy: str = "auto", limit: int | None = None) -> EngineCore:
        if variant not in _engines:
            _engines[variant] = tiny_engine(tiny_model(VARIANTS[variant]))
        engine = _engines[variant]
        engine.set_policy(policy)
        engine.set_block_limit(limit)
        return engine

    yield get
    for engine in _engines.values():
        assert not engine.has_work, "a test left requests in its engine"
