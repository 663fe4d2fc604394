"""A planner that is forked is to Spark what one is that it starts: streams, environment, folder, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.spark.runtime import fork_client
from millstream.spark.runtime.fork_server import (
    PLANNER_MODULE,
    PROCESS_NAME,
    SOCKET_VARIABLE,
    python_script,
)

WAIT_S = 10.0
PARENT = """
import sys
from millstream.spark.runtime import fork_server
fork_server.PLANNER_MODULE = "planned"
fork_server.start_fork_server()
print("started", flush=True)
sys.stdin.read()
"""
PLANNED = """
import os, sys
where = "forked" if sys.orig_argv[1] == "-c" else "started"
print(where, __name__, os.getcwd(), os.environ.get("MARK"), sys.stdin.read(), os.getpid())
print("an error", file=sys.stderr)
if "FAIL" in os.environ:
    raise ValueError("no plan")
if "WAIT" in os.environ:
    sys.stdout.flush()
    import time
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "planned.py").write_text(PLANNED)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    found = {
        **os.environ,
        "PYTHONPATH": str(folder),
        SOCKET_VARIABLE: str(folder / "socket"),
        "PYTHONUNBUFFERED": "YES",
    }
    return {**found, **more}


def wait_until(holds) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def server(folder: Path):
    """A process that has forked a server."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(folder),
    ) as parent:
        assert parent.stdout.readline() == b"started\n"
        wait_until((folder / "socket").exists)
        yield parent
        parent.stdin.close()
        parent.wait()


def client(folder: Path, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", fork_client.__file__]
    return subprocess.Popen(
        [*command, str(folder / "socket"), "-m", "planned"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(folder, **more),
        cwd=folder,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, errors = process.communicate("input", timeout=WAIT_S)
    return out.split(), errors


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_planner_has_the_streams_environment_and_folder_of_its_client(folder):
    with server(folder):
        for mark in ("one", "two"):
            (where, name, at, said, given, _), errors = answer(client(folder, MARK=mark))
            assert (where, name, at) == ("forked", "__main__", str(folder))
            assert (said, given, errors) == (mark, "input", "an error\n")
        (*_, said, _, _), _ = answer(client(folder))
        assert said == "None"  # nothing is left of the one before


def test_a_planner_that_fails_says_why(folder):
    with server(folder):
        _, errors = answer(client(folder, FAIL="yes"))
        assert errors.splitlines()[-1] == "ValueError: no plan"
        (where, *_), _ = answer(client(folder))
        assert where == "forked"


def test_a_planner_ends_with_its_client(folder):
    with server(folder):
        process = client(folder, WAIT="yes")
        process.stdin.close()
        pid = int(process.stdout.readline().split()[-1])
        assert Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME
        process.kill()
        wait_until(lambda: not is_alive(pid))
        process.stdout.close()
        process.stderr.close()
        process.wait()


def test_the_server_ends_with_its_parent_and_planners_go_on(folder):
    with server(folder) as parent:
        process = client(folder, WAIT="yes")
        process.stdin.close()
        pid = int(process.stdout.readline().split()[-1])
        serving = parent_of(pid)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(serving))
        assert is_alive(pid)
        process.kill()
        wait_until(lambda: not is_alive(pid))
        process.stdout.close()
        process.stderr.close()
        process.wait()


def test_a_server_takes_the_place_of_an_earlier_one(folder):
    with server(folder):
        first = (folder / "socket").stat().st_ino
        with server(folder):
            wait_until(lambda: (folder / "socket").stat().st_ino != first)
            (where, *_), _ = answer(client(folder))
            assert where == "forked"


@pytest.mark.parametrize("missing", ["server", "modules"])
def test_without_a_server_that_fits_python_is_started(folder, missing):
    other = folder / "other"
    other.mkdir()
    (other / "planned.py").write_text(PLANNED)
    if missing == "server":
        (where, *_), errors = answer(client(folder))
    else:
        with server(folder):
            (where, *_), errors = answer(client(folder, PYTHONPATH=str(other)))
    assert (where, errors) == ("started", "an error\n")


def test_a_process_without_an_address_forks_no_server(folder):
    found = environment(folder)
    del found[SOCKET_VARIABLE]
    done = subprocess.run(
        [sys.executable, "-c", PARENT], env=found, input=b"", capture_output=True, check=True
    )
    assert (done.stdout, list(folder.glob("socket*"))) == (b"started\n", [])


def test_the_script_is_python_for_all_but_planners(folder):
    script = folder / "python"
    script.write_text(python_script(sys.executable))
    script.chmod(0o700)

    def run(*command: str) -> str:
        done = subprocess.run(
            [script, *command], env=environment(folder), capture_output=True, check=True, text=True
        )
        return done.stdout

    program = "import sys; print(sys.argv[1:], sys.executable)"
    assert run("-c", program, "a b", "$c") == f"['a b', '$c'] {sys.executable}\n"
    (folder / "pyspark" / "sql" / "streaming").mkdir(parents=True)
    for at in ("pyspark", "pyspark/sql", "pyspark/sql/streaming"):
        (folder / at / "__init__.py").touch()
    (folder / (PLANNER_MODULE.replace(".", "/") + ".py")).write_text("print('planned')")
    assert run("-m", PLANNER_MODULE) == "planned\n"
