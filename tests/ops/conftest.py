"""What the tests of host operations start from."""

from __future__ import annotations

import pytest

from neojax import _cpu_paged_attn as native
from neojax.ops import host_attention


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    host_attention.ensure_registered()


@pytest.fixture
def pool() -> native.WorkerPool:
    return native.WorkerPool(2)
