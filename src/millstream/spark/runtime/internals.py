"""Every name that Spark keeps private, or that lives in its JVM.

The rest of this package uses PySpark as it is documented: what may change with the next release of Spark is
here, and tests with a real JVM cover it. Two parts: the life of the JVM, and the text of a failure. The class
that is compiled in the JVM is in ``local_file_system.py``.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import shlex
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from millstream.errors import ConfigError, EnvironmentProblem

ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CHECKPOINT_MANAGER_SETTING = "spark.sql.streaming.checkpointFileManagerClass"
# The default manager starts a process for each file that it touches. This one renames files, which
# is atomic on a local file system and on no other.
LOCAL_CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

_START_WAIT_S = 120.0
# Ending takes a moment, and ten to twenty seconds where a session that did not start has its classes
# archived: see class_archive.py.
_END_WAIT_S = 60.0


# ── the life of the JVM ─────────────────────────────────────────────────────────


def launch_jvm(
    settings: Mapping[str, str], *, env: Mapping[str, str], log: Path, held: Sequence[int] = ()
) -> Any:
    """Start Spark's JVM as a child and return the gateway to it.

    The output of the JVM and its children is appended to ``log``. The child has a session of its own, so
    that a Ctrl-C at the terminal reaches only this process, which decides when to stop. The child ends by
    itself when this process ends, however that happens, because its standard input closes.

    Args:
        settings: Spark's settings; those about the JVM itself only have an effect here.
        env: The whole environment of the JVM and of what it starts.
        log: A file in a folder that exists.
        held: File descriptors that stay open for as long as the JVM lives.

    Raises:
        EnvironmentProblem: the JVM did not start; the message ends with its output.

    """
    command = [str(spark_home(env) / "bin" / "spark-submit")]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += shlex.split(env.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        answer = Path(folder) / "gateway"
        output_start = output.tell()
        process = subprocess.Popen(  # noqa: S603 - the spark-submit of the installed PySpark
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**env, "SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer)},
            start_new_session=True,
            pass_fds=held,
        )
        try:
            port, secret = _await_gateway(process, answer, log, output_start)
            # spark-submit itself points PySpark to a running JVM in this way.
            with environment(PYSPARK_GATEWAY_PORT=str(port), PYSPARK_GATEWAY_SECRET=secret):
                gateway = launch_gateway()  # type: ignore[no-untyped-call]
        except BaseException:
            end_process(process)
            raise
    gateway.proc = process
    return gateway


def make_spark_home(folder: Path) -> Path:
    """Make ``folder`` a Spark home of links to this PySpark, without its zipped Python modules.

    With those, every Python process that Spark starts compiles PySpark from the zip again (0.3 s of
    CPU each, and a query starts half a dozen). Without them they import the PySpark that is installed.
    """
    folder.mkdir()
    for name in ("bin", "jars"):
        (folder / name).symlink_to(spark_home({}) / name)
    return folder


def spark_home(env: Mapping[str, str]) -> Path:
    """Return the Spark to start: the user's, else the one that came with this PySpark."""
    if home := env.get("SPARK_HOME"):
        return Path(home)
    own = Path(pyspark.__file__).parent
    return own if (own / "bin" / "spark-submit").is_file() else Path(_find_spark_home())


def _await_gateway(
    process: subprocess.Popen[bytes], answer: Path, log: Path, output_start: int
) -> tuple[int, str]:
    """Wait until the JVM has written its port and its secret."""
    deadline = time.monotonic() + _START_WAIT_S
    while not answer.is_file():  # the JVM writes it under another name and renames it
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            with log.open("rb") as file:
                file.seek(output_start)
                output = file.read().decode(errors="replace").strip()
            what = "took too long to start" if ended is None else f"ended with code {ended}"
            raise EnvironmentProblem(
                f"Spark's JVM {what} (`millstream doctor` checks what it needs; "
                f"its whole output is in {log}): {output[-600:]}"
            )
        time.sleep(0.02)
    raw = answer.read_bytes()
    (port, length) = struct.unpack(">ii", raw[:8])
    return port, raw[8 : 8 + length].decode()


def end_jvm(gateway: Any) -> None:
    """End the JVM behind a gateway and wait until it is gone; it may be dead already."""
    request_jvm_exit(gateway)
    end_process(gateway.proc)


def request_jvm_exit(gateway: Any) -> None:
    """Ask the JVM behind a gateway to end, without waiting: :func:`end_jvm` waits.

    PySpark forgets it, so that this process can start another.
    """
    with contextlib.suppress(Exception):  # a dead JVM does not answer, and need not
        gateway.shutdown()
    with contextlib.suppress(OSError):
        gateway.proc.stdin.close()
    context: Any = SparkContext._active_spark_context  # noqa: SLF001
    if context is not None:
        context._jsc = None  # noqa: SLF001 - its other half is gone
        context.stop()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
    SparkSession._instantiatedSession = SparkSession._activeSession = None  # noqa: SLF001


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End the JVM: close its standard input, then send SIGTERM, then SIGKILL."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    for harder in (None, signal.SIGTERM, signal.SIGKILL):
        if harder is not None:
            process.send_signal(harder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WAIT_S)
            break


def running_context() -> SparkContext | None:
    """Return the Spark context of this process, whoever started it."""
    return SparkContext._active_spark_context  # noqa: SLF001


def open_session(settings: Mapping[str, str], gateway: Any) -> SparkSession:
    """Return a session on the JVM behind ``gateway``. Ctrl-C keeps its meaning.

    PySpark handles a Ctrl-C by cancelling every running job, which would interrupt a batch that is about to
    commit; the job stops between batches instead.

    Raises:
        ConfigError: Spark refuses a setting, or does not reach the cluster.

    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    try:
        context = SparkContext(conf=conf, gateway=gateway)
    except (PySparkException, Py4JError) as refusal:
        reason = refusal.java_exception.getMessage() if isinstance(refusal, Py4JJavaError) else None
        first_line = (reason or str(refusal)).partition("\n")[0]
        raise ConfigError(f"Spark does not start with these settings: {first_line}") from refusal
    # These print to the terminal what the exception says as well.
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    if main:
        signal.signal(signal.SIGINT, before)
    return SparkSession(context)


def skip_search_for_data_sources(spark: SparkSession) -> None:
    """Tell Spark that no package brings data sources of its own, if that is so.

    It would start two Python processes to find out: a second, before the first query can begin.
    """
    if any(module.name.startswith("pyspark_") for module in pkgutil.iter_modules()):
        return
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001
    manager = _scala_object(jvm.org.apache.spark.sql.execution.datasources, "DataSourceManager")
    none = _scala_object(jvm.scala.collection.immutable, "Map").empty()
    getattr(manager, "dataSourceBuilders_$eq")(jvm.scala.Option.apply(none))


def _scala_object(package: Any, name: str) -> Any:
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def start_workers(spark: SparkSession) -> None:
    """Start the parent of the Python workers in a thread; return at once.

    It imports for a second what they need. Without this, the first task would wait for it, although a core
    is idle while a query is planned.
    """

    def one_task() -> None:
        # The first task reports any failure; most likely the session has ended.
        with contextlib.suppress(Exception):
            spark.sparkContext.parallelize([0], 1).foreach(lambda _: None)

    threading.Thread(target=one_task, name="start of the workers", daemon=True).start()


def delete_with_jvm(spark: SparkSession, folder: Path) -> None:
    """Register a folder that the JVM deletes as it ends, also if it ends because this process died."""
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001
    folder_there = jvm.java.io.File(str(folder))
    jvm.org.apache.spark.util.ShutdownHookManager.registerShutdownDeleteDir(folder_there)


@contextlib.contextmanager
def environment(**names: str) -> Iterator[None]:
    """Set environment variables within a block: PySpark takes some settings only from there."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ── what a failure says ─────────────────────────────────────────────────────────

_TRACEBACK = "Traceback (most recent call last):"
# Between the tracebacks of an exception and of the one that it was raised from.
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# What Spark writes behind the Python part of a message.
_AFTER_TRACEBACK = re.compile(r"\n(?: SQLSTATE: |=== Streaming Query ===|\tat |\nJVM stacktrace:)")
_SPARK_FRAME = re.compile(r'  File "[^"]*[/\\](?:pyspark|pyspark\.zip|py4j|py4j-[^/]*\.zip)[/\\]')


def explain_failure(exception: BaseException) -> str | None:
    """Return the Python traceback that made Spark fail; None if no Python code failed.

    Spark nests it in its own report, several times. This is the innermost one, with its cause, and without
    the frames of Spark. Call it before the session ends: the report is fetched from the JVM.
    """
    report = str(exception)
    starts = [found.start() for found in re.finditer(re.escape(_TRACEBACK), report)]
    if not starts:
        return None
    while len(starts) > 1 and report[: starts[-1]].rstrip().endswith(_CHAINED):
        starts.pop()
    traceback = report[starts[-1] :]
    if after := _AFTER_TRACEBACK.search(traceback):
        traceback = traceback[: after.start()]
    return _without_spark_frames(traceback.rstrip())


def _without_spark_frames(traceback: str) -> str:
    """Leave out the frames of Spark: its worker loop above, its client code below the user's."""
    kept: list[str] = []
    inside = False
    for line in traceback.splitlines():
        if line.startswith('  File "'):
            inside = _SPARK_FRAME.match(line) is not None
        elif not line.startswith("    "):
            inside = False
        if not inside:
            kept.append(line)
    return "\n".join(kept)
