"""Swaps on a GPU: every check of swap_checks, as tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import lane_checks, swap_checks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    lane_checks.set_up()


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=name.replace(" ", "_")) for name, check in swap_checks.checks()],
)
def test_what_moves_is_what_arrives(check: Callable[[], None]):
    check()
