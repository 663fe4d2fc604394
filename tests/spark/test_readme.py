"""Every command of the README runs, in its order, in one folder, and the program prints what is shown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from millstream.testing.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", TEXT)
COMMANDS = [
    line.partition(" # ")[0].strip()
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.splitlines()
]
PAGE = "http://127.0.0.1:8400"  # where another program may be: another port is taken here
WAIT_S = 600
# What is run elsewhere: what `make` hands to dev.py has tests of its own, and dev.py installs from the
# lock what pip would install without it.
ELSEWHERE = {"make demo", "make test", 'pip install ".[spark,ui]"', "millstream dev app.py"}
BEFORE, AFTER = ("millstream run app.py",), ("millstream stop ads",)
SERVED = "millstream ui"
# Servers, and where they are to listen here.
SERVERS = {"millstream broker ./data": "--listen", "millstream edge ./data": "--http"}
NOT_ALONE = {*BEFORE, *AFTER, SERVED, *SERVERS}


def test_nothing_of_the_readme_is_of_a_kind_that_is_not_run():
    assert {kind for kind, _ in BLOCKS} == {"sh", "python", "text"}
    assert {command.split()[0] for command in COMMANDS} == {"make", "pip", "curl", "millstream"}
    assert set(COMMANDS) >= ELSEWHERE | NOT_ALONE


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("name", ["demo", "test"])
def test_what_make_is_asked_for_it_hands_to_the_script(name):
    # A make above this one hands on its arguments, such as ARGS, by the environment.
    env = {key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "ARGS"}}
    said = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", name],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split()[-2:] == ["dev.py", name]


def test_the_extras_that_are_named_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\.\[([\w,]+)\]", TEXT)
    assert named
    assert {extra for extras in named for extra in extras.split(",")} <= set(
        project["optional-dependencies"]
    )


@pytest.fixture(scope="module")
def folder(no_spark, tmp_path_factory):
    """Where a reader would save the program: with `millstream` on the path, and the program run."""
    made = tmp_path_factory.mktemp("readme")
    command = made / "bin" / "millstream"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m millstream "$@"\n')
    command.chmod(0o755)
    (program,) = (block for kind, block in BLOCKS if kind == "python")
    (made / "app.py").write_text(program)
    return made


def environment(folder):
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}


def run(folder, command):
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def running(folder, command, said):
    """Run a command beside the others until the block ends, once it does what ``said`` waits for."""
    with (folder / f"{command.split()[1]}.out").open("w+") as out:
        process = subprocess.Popen(
            shlex.split(command), cwd=folder, env=environment(folder), stdout=out, stderr=out
        )
        try:
            pause, end = threading.Event(), time.monotonic() + WAIT_S
            while not said():
                assert process.poll() is None, Path(out.name).read_text()
                assert time.monotonic() < end, Path(out.name).read_text()
                pause.wait(0.1)
            yield process
        finally:
            process.terminate()
            process.wait()


def answers(url):
    with suppress(OSError), urllib.request.urlopen(url) as answer:
        return bool(answer.status == 200)
    return False


@pytest.mark.timeout(1800)
def test_the_program_prints_what_is_shown_and_every_command_does_what_it_says(folder):
    (shown,) = (block for kind, block in BLOCKS if kind == "text")
    assert run(folder, "python app.py") == shown
    without_java = shutil.copytree(folder, folder / "local", ignore=shutil.ignore_patterns("data"))
    assert run(without_java, "python app.py --engine local") == shown
    others = [command for command in COMMANDS if command not in ELSEWHERE | NOT_ALONE]
    alive = folder / "data" / "apps" / "ads"
    address = f"127.0.0.1:{free_ports(1)[0]}"
    page = f"http://{address}"
    with (
        running(folder, BEFORE[0], lambda: list(alive.glob("running-*.json"))) as app,
        running(folder, f"{SERVED} --listen {address}", lambda: answers(page)),
    ):
        for command in (each.replace(PAGE, page) for each in others if each.startswith("curl")):
            said = follow(folder, command) if "-N" in command else run(folder, command)
            assert '"ad":"7"' in said, command
        run(folder, AFTER[0])
        assert app.wait(WAIT_S) == 0
    for command in others:
        if not command.startswith("curl"):
            assert run(folder, command), command
    for server, option in SERVERS.items():
        ready = folder / f"{server.split()[1]}-is-ready"
        words = f"{server} {option} 127.0.0.1:0 --ready-file {ready}"
        with running(folder, words, ready.exists) as process:
            process.terminate()
            assert process.wait(WAIT_S) == 0


def follow(folder, command):
    """Run a curl that would go on for ever; by its own time limit it ends with 28."""
    done = subprocess.run(
        [*shlex.split(command), "--max-time", "5"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 28, done.stderr
    return done.stdout
