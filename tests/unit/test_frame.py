"""What the project says of itself: its public names, the cost of loading it, its house rules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

import millstream
from millstream import errors
from millstream.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROGRAMS = [
    *SOURCES,
    ROOT / "dev.py",
    *(
        path
        for name in ("tools", "tests", "examples", "benchmarks", "docs")
        for path in (ROOT / name).rglob("*.py")
    ),
]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROGRAMS_WITHIN = (  # documents whose snippets are programs
    "README.md",
    "docs/archive.md",
    "docs/cluster.md",
    "docs/connectors.md",
    "docs/edge.md",
    "docs/log.md",
    "docs/results.md",
    "docs/schemas.md",
    "docs/sourcing.md",
    "docs/testing.md",
    "docs/watch.md",
)
HEAVY = {"pyspark", "pyarrow", "polars", "numpy", "pandas"}

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
SAYS_NOTHING = {"util", "utils", "common", "helper", "helpers", "base", "manager", "misc"}
SOMEBODYS_FOLDER = re.compile(r"(?<![\w.])/(?:root|work|workspace)/\w")
BARE_EPOCH = re.compile(
    r"(?i)(?<!leader )(?<!producer )(?<!session )(?<!member )(?<!\.)\bepochs?\b"
)

PUBLIC_NAMES = millstream.__all__


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def loaded_by(statement: str) -> tuple[set[str], float]:
    """Run a statement in a fresh Python; return the top-level modules it loads and its CPU time."""
    program = (
        "import sys, time\n"
        "start = time.process_time()\n"
        f"{statement}\n"
        "print(time.process_time() - start, *{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    cpu_s, *modules = done.stdout.split()
    return set(modules), float(cpu_s)


# The public names, and what loading them costs.


def test_importing_millstream_is_cheap_and_loads_nothing_heavy() -> None:
    modules, cpu_s = loaded_by("import millstream")
    assert not modules & HEAVY
    assert cpu_s < 0.3


def test_the_help_of_the_command_loads_nothing_heavy() -> None:
    modules, _ = loaded_by(
        "from millstream.cli.main import run; sys.stdout = sys.stderr; "
        "run(['--help']); sys.stdout = sys.__stdout__"
    )
    assert not modules & (HEAVY | {"rich"})


def test_the_public_names_are_listed() -> None:
    assert list(PUBLIC_NAMES) == sorted(PUBLIC_NAMES)
    assert set(dir(millstream)) >= set(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_leads_to_something(name: str) -> None:
    assert getattr(millstream, name) is not None


def test_no_public_name_loads_spark() -> None:
    names = ", ".join(f"millstream.{name}" for name in PUBLIC_NAMES)
    modules, _ = loaded_by(f"import millstream; {names}")
    assert not modules & {"pyspark", "py4j"}


def test_the_test_kit_loads_without_spark() -> None:
    modules, _ = loaded_by("import millstream.testing")
    assert not modules & {"pyspark", "py4j"}


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="conect"):
        millstream.conect  # noqa: B018 - the access is what is tested


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert millstream.__version__ == project["version"]


# The errors.


def drawn_tree() -> dict[str, str]:
    """Read the tree in the docstring of errors.py: class name to its parent's."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([ │├└─]+)(\w+(?:Error|Problem))\b", line)
        if match:
            depth = len(match.group(1))
            above = [entry for entry in above if entry[0] < depth]
            if above:
                parents[match.group(2)] = above[-1][1]
            above.append((depth, match.group(2)))
    return parents


def test_the_drawing_of_the_error_tree_is_true() -> None:
    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and value is not errors.MillstreamError
    }
    assert drawn_tree() == real


# The command.


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_command_says_of_itself(name: str) -> None:
    context = click.Context(cli.millstream)
    command = cli.millstream.get_command(context, name)
    assert command is not None
    assert command.get_short_help_str(limit=100) == cli.COMMANDS[name]


@pytest.mark.parametrize(
    ("error", "code"),
    [(errors.ConfigError("too few"), 2), (errors.CorruptionError("torn"), 1)],
)
def test_an_error_of_ours_ends_as_one_sentence_and_an_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def fails() -> None:
        raise error

    module = ModuleType("millstream.cli.fails")
    module.fails = fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fails", "Fail.")
    assert cli.run(["fails"]) == code
    assert capsys.readouterr().err == f"millstream: {error}\n"


def test_a_wrong_option_is_answered_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--folder"]) == 2
    assert "No such option" in capsys.readouterr().err


# The house rules that no linter knows.


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_a_program_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert path.stem not in SAYS_NOTHING, "a module's name says what it is about"
    assert not SOMEBODYS_FOLDER.search(text), "a path of somebody's machine"
    too_long = [
        f"{node.name} has {body_lines(node)} lines"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and body_lines(node) > FUNCTION_LINES_MAX
    ]
    assert not too_long


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_opens_with_its_paragraph_and_is_not_two_rooms(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)) or not text.strip()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    assert not BARE_EPOCH.search(text), (
        "whose? say which: leader_epoch, producer_epoch; or batch_id"
    )


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    doc_lines = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - doc_lines


def test_folders_of_tests_are_not_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


# The lock and the commands.


def test_the_lock_names_public_addresses_only() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://[^/\"]+", text)) == {
        "https://pypi.org",
        "https://files.pythonhosted.org",
    }
    lock = tomllib.loads(text)
    kinds = {next(iter(package["source"].items())) for package in lock["package"]}
    assert kinds == {("registry", "https://pypi.org/simple"), ("editable", ".")}
    assert "exclude-newer" not in lock.get("options", {})


def test_make_has_the_commands_of_dev_and_no_others() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"(?m)^COMMANDS = (.+)$", makefile)
    assert targets is not None
    listing = subprocess.run(
        [sys.executable, "dev.py", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"(?m)^  (\S+)", listing) == targets.group(1).split()


# The documents.


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_document_keeps_the_house_rules(path: Path) -> None:
    text = re.sub(r"(?s)```.*?```", "", path.read_text())
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []
    assert not SOMEBODYS_FOLDER.search(path.read_text())


class Snippet(NamedTuple):
    """A Python snippet of a document; ``name`` is the file that its first line says it is."""

    document: str
    line: int
    name: str
    code: str
    printed: str | None  # the block of text that follows

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def snippets() -> list[Snippet]:
    """Return every Python snippet of the documents."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(
            r"(?ms)^```python\n(?:# (\w+\.py)\n)?(.*?)^```(?:\n\n```text\n(.*?)^```)?", text
        ):
            name, code, printed = match.groups()
            line = text.count("\n", 0, match.start()) + 1
            found.append(Snippet(name_of(path), line, name or "program.py", code, printed))
    return found


SNIPPETS = snippets()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[snippet.place for snippet in SNIPPETS])
def test_a_snippet_compiles_and_names_only_what_is_public(snippet: Snippet) -> None:
    tree = ast.parse(snippet.code, filename=snippet.place)
    named = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ms"
    }
    assert named <= {*PUBLIC_NAMES, "testing", "errors"}


PROGRAMS_OF_DOCUMENTS = [snippet for snippet in SNIPPETS if snippet.document in PROGRAMS_WITHIN]
PYTEST = ["-m", "pytest", "-q", "-p", "millstream.testing.plugin", "--millstream-batchings", "3"]


@pytest.mark.parametrize(
    "snippet", PROGRAMS_OF_DOCUMENTS, ids=[snippet.place for snippet in PROGRAMS_OF_DOCUMENTS]
)
def test_the_programs_in_the_documents_run(snippet: Snippet, tmp_path: Path) -> None:
    """What stands under `if __name__ == "__main__"` needs Spark; the rest is run here, beside the
    files that the document names. Tests are run by pytest.
    """
    for other in (*PROGRAMS_OF_DOCUMENTS, snippet):
        if other.document == snippet.document:
            (tmp_path / other.name).write_text(other.code)  # the last of a name is the one to run
    stem = snippet.name.removesuffix(".py")
    done = subprocess.run(
        [sys.executable, "-W", "error"]
        + ([*PYTEST, snippet.name] if stem.startswith("test_") else ["-c", f"import {stem}"]),
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{snippet.place}: {done.stdout}{done.stderr}"
    assert snippet.printed in (None, done.stdout), snippet.place
