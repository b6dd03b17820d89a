"""An engine with everything compiled, shared by the tests of this folder that need one."""

from __future__ import annotations

import pytest

from tests.engine.tiny import tiny_engine, tiny_model


@pytest.fixture(scope="session")
def warmed_up():
    """The engine, and what `compile` gave."""
    compiled = []
    engine = tiny_engine(
        tiny_model(),
        num_device_blocks=40,
        num_host_blocks=64,
        compiles=lambda runner: compiled.extend(runner.compile(progress=False)),
    )
    engine.runner.warm_up()
    yield engine, compiled
    engine.close()
