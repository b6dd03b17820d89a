"""The host lane on a GPU: every check of lane_checks, as tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import lane_checks

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
