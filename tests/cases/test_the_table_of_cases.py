"""docs/semantics-cases.md and the tests name the same cases, and say the same of Spark."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from cases import joins, panes, tables
from cases.on_spark import ON_SPARK, WITHOUT_RUNNING_TIME

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "semantics-cases.md"
COUNTS = {"A": 7, "B": 4, "C": 6, "D": 6, "E": 15, "F": 4, "G": 6, "H": 7}
JOINS = ("I1", "I2", "I3", "J1", "J2", "J3", "J4", "J5", "J6", "K1", "K2", "K3", "K4")
TRENDS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7")
FUNCTIONS = ("Q1", "Q2")
SEQUENCES = ("S1", "S2", "S3", "S4", "S5")
OF_TABLES = {case.id for case in tables.CASES} - {"I"}
OF_JOINS = {case.id for case in joins.CASES} - {"I"}  # modes of join, which are no case
DECLARED = {case.id for case in (*WITHOUT_RUNNING_TIME, *panes.BOOK)} | OF_TABLES | OF_JOINS


def table() -> dict[str, tuple[str, str]]:
    """Read, for each case, the tests and what is said of Spark."""
    text = TABLE.read_text("utf-8")
    rows = re.findall(r"^\| ([A-KPQS]\d+) \|[^|]*\| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    assert len(rows) == len({case for case, *_ in rows})
    return {case: (tests, spark) for case, tests, spark in rows}


def test_every_case_is_in_the_table() -> None:
    wanted = [f"{letter}{n + 1}" for letter, count in COUNTS.items() for n in range(count)]
    assert [*table()] == [*wanted, *JOINS, *TRENDS, *SEQUENCES, *FUNCTIONS]
    assert {*wanted, *JOINS} >= OF_TABLES | OF_JOINS


def test_every_test_that_is_named_exists() -> None:
    for case, (tests, _) in table().items():
        named = re.findall(r"`([^`]+)`", tests)
        assert named, case
        assert ("cases" in named) == (case in DECLARED), case
        for name in named:
            if name != "cases":
                path, _, function = name.partition("::")
                tree = ast.parse((ROOT / path).read_text("utf-8"))
                assert function in {
                    node.name for node in tree.body if isinstance(node, ast.FunctionDef)
                }, name


def test_what_is_said_of_spark_is_so() -> None:
    once = {case.id for case in WITHOUT_RUNNING_TIME} - {*ON_SPARK}
    ticking = {case.id for case in panes.BOOK}
    for case, (_, spark) in table().items():
        assert (spark == "21 batchings") == (case in ON_SPARK), case
        assert (spark == "once") == (case in once), case
        assert spark == "running time" or case not in ticking, case
        assert (spark == "2 batchings") == (case in OF_JOINS), case
        assert (spark == "one batching") == (case in TRENDS), case
        assert (spark == "after each step") == (case in OF_TABLES), case
    assert len(ON_SPARK) * 3 >= sum(COUNTS.values()) - COUNTS["H"]
