"""The host lane on a GPU: every check of lane_checks, as tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neojax import _cpu_paged_attn as native
from tests.gpu import lane_checks
from tests.native.reference import DTYPES
from tests.ops.test_exchange import test_what_is_joined_is_the_oldest_start as check_exchange

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    lane_checks.set_up()


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=name.replace(" ", "_")) for name, check in lane_checks.checks()],
)
def test_the_device_gets_what_numpy_computes(check: Callable[[], str]):
    check()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_an_exchange_joins_the_oldest_start(dtype: str):
    check_exchange(dtype, native.WorkerPool(2))
