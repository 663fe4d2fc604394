"""The programs in `tools`: two at once, what apt cannot install, the files and folders they name."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module(request.param)


@pytest.mark.parametrize("tool", ["processes"], indirect=True)
def test_things_done_together_are_shown_one_after_another_and_fail_as_one(
    tool: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import sys, time; print(1); time.sleep(.3); print(2, flush=True); sys.exit(%d)"

    def ends(code: int, output: object = None) -> int:
        return tool.run([sys.executable, "-c", program % code], output=output)

    assert tool.together(lambda: ends(0), lambda output: ends(4, output)) == 4
    assert tool.together(lambda: ends(3), lambda output: ends(4, output)) == 3
    assert capfd.readouterr().out == "1\n2\n" * 4


@pytest.mark.parametrize("tool", ["services"], indirect=True)
def test_what_is_missing_is_told_with_its_reason(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = False
    monkeypatch.setattr(tool, "S3_SERVER", Path(__file__))
    monkeypatch.setattr(tool, "why_no_mysql", lambda: "")
    monkeypatch.setattr(tool, "WANTED", {"kcat": ("the tests with kcat", lambda: there)})
    monkeypatch.setattr(tool.os, "geteuid", lambda: 1000)
    assert "only root can install it" in tool.install()[0]
    monkeypatch.setattr(tool.os, "geteuid", lambda: 0)
    monkeypatch.setattr(tool.shutil, "which", lambda _: None)
    assert "no apt-get" in tool.install()[0]
    asked = []
    monkeypatch.setattr(tool.shutil, "which", lambda _: "/usr/bin/apt-get")
    monkeypatch.setattr(
        tool, "apt_get", lambda *words: (asked.append(words[0]), "E: no network\n")[1]
    )
    assert tool.install() == [
        "the tests with kcat: apt-get could not install it and said: E: no network"
    ]
    assert asked == ["install", "update", "install"]
    there = True
    assert tool.install() == []


@pytest.mark.parametrize("tool", ["services"], indirect=True)
def test_why_there_is_no_mysql_is_told(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tool.platform, "system", lambda: "Linux")
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tool.shutil, "which", lambda _: None)
    assert "apt-get install maven" in tool.why_no_mysql()
    (tmp_path / "millstream" / tool.MYSQL_FOLDER).mkdir(parents=True)
    assert tool.why_no_mysql() == ""
    monkeypatch.setattr(tool.platform, "machine", lambda: "aarch64")
    assert "x86-64" in tool.why_no_mysql()


@pytest.mark.parametrize("tool", ["services"], indirect=True)
def test_the_s3_server_is_built_once_where_go_is(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built, ends = tmp_path / "cache/versitygw", [1, 0]
    monkeypatch.delenv("MILLSTREAM_VERSITYGW", raising=False)
    monkeypatch.setattr(tool, "S3_SERVER", built)
    monkeypatch.setattr(tool.shutil, "which", lambda _: None)
    assert "no Go here" in tool.why_no_s3()

    def build(_command: list[str], *, env: dict[str, str], **_: object) -> object:
        code = ends.pop(0)
        if code == 0:
            (Path(env["GOBIN"]) / "versitygw").touch()
        return subprocess.CompletedProcess([], code, "go: no network\n")

    monkeypatch.setattr(tool.shutil, "which", lambda name: name if name == "go" else None)
    monkeypatch.setattr(tool.subprocess, "run", build)
    assert tool.why_no_s3() == "go could not build versitygw and said: go: no network"
    assert tool.why_no_s3() == ""
    assert [path.name for path in built.parent.iterdir()] == ["versitygw"]
    assert tool.why_no_s3() == "", "it is there: nothing is built"


@pytest.mark.parametrize("tool", ["services"], indirect=True)
def test_the_server_of_azures_protocol_is_installed_once_where_npm_is(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed, ends = tmp_path / "cache/azurite", [1, 0]
    monkeypatch.delenv("MILLSTREAM_AZURITE", raising=False)
    monkeypatch.setattr(tool, "AZURE_SERVER", installed)
    monkeypatch.setattr(tool.shutil, "which", lambda _: None)
    assert "no npm here" in tool.why_no_azure()

    def install(command: list[str], **_: object) -> object:
        made = Path(command[command.index("--prefix") + 1])
        made.mkdir()
        (made / "half").touch()
        return subprocess.CompletedProcess([], ends.pop(0), "npm error: no network\n")

    monkeypatch.setattr(tool.shutil, "which", lambda name: name if name == "npm" else None)
    monkeypatch.setattr(tool.subprocess, "run", install)
    assert tool.why_no_azure() == "npm could not install azurite and said: npm error: no network"
    assert not installed.exists()
    assert tool.why_no_azure() == ""
    assert [path.name for path in installed.parent.iterdir()] == ["azurite"]
    assert tool.why_no_azure() == "", "it is there: nothing is installed"


def test_every_file_of_tests_that_is_named_is_there() -> None:
    programs = [*(ROOT / "tools").glob("*.py"), ROOT / "tests" / "conftest.py"]
    named = {
        node.value
        for program in programs
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.Constant) and str(node.value).startswith("tests/")
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("tool", ["run_tests"], indirect=True)
def test_all_the_tests_are_those_of_the_quick_run_and_the_rest(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(tool, "pytest", lambda *arguments, **_: ran.append(arguments) or 1)
    monkeypatch.setattr(tool.smoke, "run", lambda *_: ran.append(("smoke",)) or 0)
    monkeypatch.setattr(tool.services, "install", list)
    monkeypatch.setattr(tool.services, "install_platforms", list)

    def runs(name: str, *arguments: str) -> list[tuple[str, ...]]:
        ran.clear()
        assert tool.RUNS[name](list(arguments)) == 1
        return sorted(ran)  # two at a time have no order

    assert runs("test-all") == sorted([*runs("test"), *runs("test-all", "--rest")])
    assert runs("test", "tests/unit", "-x") == [("tests/unit", "-x")]
    lanes = sorted(lane.stem for lane in (ROOT / "tests" / "lanes").glob("*.py"))
    every = runs("test-long")
    long = ("tests", "-m", "long", "--ignore", "tests/spark/test_machines.py")
    assert sorted(run[-5] for run in every if "--lane" in run) == lanes
    assert long in every
    # What is long, killed captures, histories of joins, random patterns, every batching, machines that are cut off.
    assert len(every) == len(lanes) + 6
    assert long not in runs("test-long", "tests/unit")
    marked = [run[run.index("-m") + 1] for run in runs("test-all") if "-m" in run]
    assert "not quick and not long" in marked, "what only test-long runs"
