"""docs/compatibility.md tells of the tests with clients that there are, and of no others."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "broker"


@pytest.fixture(scope="module")
def compatibility():
    path = ROOT / "docs" / "compatibility.py"
    spec = importlib.util.spec_from_file_location("compatibility", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def client_in(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the client that a mark names: ``pytest.mark.client("kcat")``, or a name for that."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return names[part.id]
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "pytest.mark.client":
            return ast.literal_eval(part.args[0])
    return None


def marked_tests() -> Iterator[tuple[str, str]]:
    """Return client and name of each test that has one, from the sources."""
    for path in sorted(TESTS.glob("test_*.py")):
        names: dict[str, str] = {}
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found = client_in(node.value, names)
                if found is not None:
                    names[node.targets[0].id] = found
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [client_in(one, names) for one in node.decorator_list]
                client = next(filter(None, marks), None) or names.get("pytestmark")
                if client is not None:
                    yield client, node.name


def test_the_document_tells_of_every_test_with_a_client_and_of_no_other(compatibility) -> None:
    """If not: python docs/compatibility.py."""
    told = compatibility.read_back(compatibility.DOCUMENT.read_text())
    assert sorted((case.client, case.what) for case in told) == sorted(
        (client, compatibility.sentence(name)) for client, name in marked_tests()
    )


def test_the_document_is_as_the_program_writes_it(compatibility) -> None:
    text = compatibility.DOCUMENT.read_text()
    assert compatibility.written(compatibility.read_back(text)) == text


def test_what_was_reported_is_told(compatibility, tmp_path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase name="test_a_b[1]"><properties><property name="client" value="kcat"/>
            <property name="version" value="1.7"/></properties></testcase>
        <testcase name="test_a_b[2]"><properties><property name="client" value="kcat"/></properties>
            <failure message="no">no</failure></testcase>
        <testcase name="test_c"><properties><property name="client" value="kcat"/></properties>
            <skipped message="not here"/></testcase>
        <testcase name="test_d"><properties><property name="client" value="node"/></properties>
            <error message="no"/></testcase>
        <testcase name="test_e"/>
        </testsuite></testsuites>"""
    )
    cases = compatibility.cases_of(report)
    assert [tuple(case) for case in cases] == [
        ("kcat", "1.7", "a b", "1 failed, 1 passed"),
        ("kcat", "1.7", "c", "skipped"),
        ("node", "not told", "d", "failed"),
    ]
    text = compatibility.written(cases)
    assert "| kcat | 1.7 | 2 | 2 not passed |" in text
    assert compatibility.read_back(text) == cases
