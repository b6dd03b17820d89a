"""docs/cases.md names tests that exist, and no case twice."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| D-")]


def test_every_case_names_tests_that_exist():
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "ffi").rglob("*_test.cc")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    for case, _, tests in ROWS:
        named = re.findall(r"`(\w+)`", tests)
        assert named, case
        missing = [n for n in named if f"def {n}(" not in text and f"{n}(" not in text]
        assert missing == [], case


def test_every_case_of_these_areas_is_there_once():
    cases = [re.findall(r"D-[A-Z]+-\d\d", row[0])[0] for row in ROWS]
    numbers = {"API": range(1, 15), "TOK": range(1, 6), "SMP": range(1, 7), "OPS": range(1, 7)}
    assert cases == [f"D-{area}-{number:02}" for area in numbers for number in numbers[area]]
