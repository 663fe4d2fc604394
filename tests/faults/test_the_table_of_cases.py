"""docs/fault-cases.md and the tests name the same cases."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent.parent / "docs" / "fault-cases.md"


def test_every_case_has_its_tests_or_says_where_they_will_stand() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    named = {where.strip("`") for _, where in rows if where.startswith("`")}
    assert all(where.startswith(("`", "with the ")) for _, where in rows)
    assert all(where == f"`case_{int(number):02}`" for number, where in rows if "`" in where)
    programs = "".join(path.read_text("utf-8") for path in FOLDER.glob("test_*.py"))
    assert set(re.findall(r"def test_(case_\d\d)_", programs)) == named


def test_the_docstring_of_a_case_begins_with_its_number() -> None:
    for path in FOLDER.glob("test_fault_cases*.py"):
        text = path.read_text("utf-8")
        cases = re.findall(r'def test_case_(\d\d)_.*?"""case (\d\d): ', text, re.DOTALL)
        assert len(cases) == text.count("def test_case_")
        assert all(name == expected for name, expected in cases)
