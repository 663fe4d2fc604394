"""A mistake in the file of an app is one error: what was raised, and the lines of the user's own files that led there."""

import sys

import pytest

LIBRARY = """
import json
import helper

def weights():
    return helper.load("{not json")

app = weights()
"""
HELPER = """
import json

def load(text):
    return json.loads(text)
"""
CAUSED = """
def read():
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("no key") from error

read()
"""
DECLARED = """
import millstream as ms

app = ms.App("ads", log="unused")
clicks = app.topic("clicks", {"ad": str}, key="add")
"""


def without_carets(said):
    """Return the lines, but for those with which newer versions of Python point at a part of the line above."""
    return [line for line in said.splitlines() if line.strip(" ^~")]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)  # that of another test
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path / "app.py"


@pytest.mark.parametrize("command", ["plan", "deploy", "run", "compare", "rollback", "sql"])
def test_each_command_says_where_the_mistake_is_and_nothing_of_its_own(file, call, command):
    file.write_text(LIBRARY)
    answer = call(command, "app.py", *(["SELECT 1"] if command == "sql" else []))
    assert answer.code == 2
    said = without_carets(answer.err)
    assert said[0] == "millstream: app.py cannot be loaded:"
    assert said[1:7] == [
        '  File "app.py", line 8, in <module>',
        "    app = weights()",
        '  File "app.py", line 6, in weights',
        '    return helper.load("{not json")',
        f'  File "{file.parent}/helper.py", line 5, in load',
        "    return json.loads(text)",
    ]
    assert said[7].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert len(said) == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("app = (\n", ['  File "app.py", line 1', "SyntaxError: '(' was never closed"]),
        ("import absent_module\n", ["    import absent_module", "ModuleNotFoundError: No module named 'absent_module'"]),
        ("raise SystemExit('no')\n", ["    raise SystemExit('no')", "SystemExit: no"]),
        (CAUSED, ['    {}["key"]', "KeyError: 'key'", "which led to:", "RuntimeError: no key"]),
        ("raise ExceptionGroup('all', [ValueError('one')])\n", ["ExceptionGroup: all (1 sub-exception)", "ValueError: one"]),
    ],
)  # fmt: skip
def test_what_was_raised_is_said_whatever_it_is(file, call, text, said):
    file.write_text(text)
    lines = call("plan", "app.py").err.splitlines()
    places = [lines.index(line) for line in said]
    assert places == sorted(places)
    assert not [line for line in lines if "millstream/" in line or "runpy" in line]


def test_an_error_of_ours_says_which_line_of_the_program_led_to_it(file, call):
    file.write_text(DECLARED)
    answer = call("plan", "app.py")
    assert answer.code == 2
    first, *place = without_carets(answer.err)
    assert first.startswith("millstream: ")
    assert "'add'" in first
    assert place == [
        '  File "app.py", line 5, in <module>',
        '    clicks = app.topic("clicks", {"ad": str}, key="add")',
    ]


def test_the_whole_traceback_is_shown_if_it_is_asked_for(file, call):
    file.write_text(LIBRARY)
    said = call("--debug", "plan", "app.py").err
    assert said.startswith("Traceback")
    assert "runpy" in said
    assert "millstream: app.py cannot be loaded:" in said
    file.write_text("")
    assert "declares no app" in call("--debug", "plan", "app.py").err


@pytest.mark.parametrize("work", ["plan", "run"])
def test_a_store_whose_driver_is_not_installed_is_one_line(file, call, monkeypatch, work):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    file.write_text(
        'import millstream as ms\napp = ms.App("ads", log="log", store="postgresql://localhost/db")\n'
        'app.topic("clicks", {"ad": str}).stream().view("clicks")\n'
    )
    answer = call(work, "app.py")
    assert answer.code == 2
    assert 'pip install "millstream[postgres]"' in answer.err.splitlines()[0]
