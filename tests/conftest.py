"""What every test runs under: checked shapes, strict promotion, and the shared fixtures."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import shape_checks
from tests.tiny_checkpoint import write_tiny_checkpoint

# By environment rather than jax.config: the tests of pure Python import no jax, and the engine
# processes that tests start inherit it.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

shape_checks.install()

# No deadline, and no complaint of slow examples: a shared machine stalls now and then, which is no
# fault of the code under test. No explanations: they trace every line, and take minutes where a
# test calls jax.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
settings.register_profile(
    "neojax", deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("neojax")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--slow runs the tests that take minutes."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def has_gpu() -> bool:
    """Whether the NVIDIA driver of this machine shows a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine or this run is not for, saying what would run it."""
    skip_slow = pytest.mark.skip(reason="takes minutes; run with --slow")
    skip_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    without_gpu = not has_gpu()
    # By marker: keywords hold the names of folders too, that of a clone among them.
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if item.get_closest_marker("gpu") and without_gpu:
            item.add_marker(skip_gpu)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers without weights, for load_format="dummy"; byte-level tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def default_checkpoint() -> Path:
    """The default model's file, fetched when it is not in the user's cache yet."""
    from neojax.config import DEFAULT_MODEL
    from neojax.hub import resolve_checkpoint

    return resolve_checkpoint(DEFAULT_MODEL)
