"""docs/cases.md and docs/neo-faults.md name tests that exist, and no case twice."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rows_of(page: str, prefix: str) -> list[list[str]]:
    """Rows of the page's tables whose first cell begins so."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [line.split(" | ") for line in lines if line.startswith(f"| {prefix}-")]


ROWS = rows_of("cases.md", "D")
FAULTS = rows_of("neo-faults.md", "N")


def test_every_case_names_tests_that_exist():
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "ffi").rglob("*_test.cc")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    for case, _, tests in ROWS + FAULTS:
        named = re.findall(r"`(\w+)`", tests)
        assert named, case
        missing = [n for n in named if f"def {n}(" not in text and f"{n}(" not in text]
        assert missing == [], case


def test_every_case_of_these_areas_is_there_once():
    cases = [re.findall(r"D-[A-Z]+-\d\d", row[0])[0] for row in ROWS]
    numbers = {"API": range(1, 15), "TOK": range(1, 6), "SMP": range(1, 7), "OPS": range(1, 7)}
    assert cases == [f"D-{area}-{number:02}" for area in numbers for number in numbers[area]]


def test_every_fault_of_the_paper_s_code_is_there_once():
    numbers = [re.findall(r"N-(\d\d)", row[0])[0] for row in FAULTS]
    assert numbers == [f"{number:02}" for number in range(1, 23)]
