"""bfloat16 on a GPU against the float32 run of the same plans."""

from __future__ import annotations

import pytest

from tests.gpu.teacher_forced import TOLERANCE, teacher_forced

pytestmark = pytest.mark.gpu


def test_the_clear_choices_of_bfloat16_are_those_of_float32():
    found = teacher_forced()
    assert found["relative"] < TOLERANCE
    assert found["clear_rows"] > 100
    assert found["clear_rows_that_differ"] == 0
