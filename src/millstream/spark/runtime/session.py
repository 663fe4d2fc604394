"""One Spark session per process, set up for small triggers, durable state and a quiet terminal.

The session runs a pipeline without further settings, on this machine or on a cluster, and nothing is left
running when its last user is done. A comment gives the reason for each setting; figures were measured on
triggers of 1,000 rows through one Python source stage and one stateful Python stage. Private names are in
``internals.py``, the choice of a Java in ``java.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.engine.machine import cores_available, memory_mib
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.spark.runtime.fork_server import SOCKET_VARIABLE, python_script
from millstream.spark.runtime.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.runtime.class_archive import ClassArchive

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_JVM_OPTIONS = "spark.driver.extraJavaOptions"
_DRIVER_MEMORY_MIB_MIN = 768  # Spark refuses less than 450 MiB, and a trigger needs some on top
_DRIVER_MEMORY_MIB_MAX = 4096
_LOG_BYTES_MAX = 16 * _MIB
_CLUSTER_PARTITIONS = 8
# A Unix-domain socket's whole path must fit in 104 bytes (macOS) or 108 (Linux); Spark's names for
# them are 42 long.
_SOCKET_FOLDER_CHARS_MAX = 60

# Every Spark task has a core and a Python worker of its own: a worker that starts a thread per core
# only makes the workers wait for each other.
_WORKER_THREADS = {
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",  # numpy's BLAS, and Arrow's computing threads
    "ARROW_IO_THREADS": "2",
}
# A worker allocates and frees blocks of megabytes all the time. By default glibc maps each of them, and the
# kernel fills it with zeros, page by page: a fifth of the time of reading and decoding. The numbers are the
# largest block that glibc takes from its heap, and the free memory that it keeps. Polars and Arrow have allocators of
# their own, jemalloc and mimalloc, which would return memory that was unused for half a second, or a tenth: all of
# it, between two batches.
_WORKER_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * _MIB),
    "MALLOC_TRIM_THRESHOLD_": str(256 * _MIB),
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:10000,muzzy_decay_ms:-1",
    "MIMALLOC_PURGE_DELAY": "10000",
}


@dataclass(frozen=True)
class _SessionRequest:
    """The settings that the session of this process was started with; they cannot change while it runs."""

    cores: int | None
    master: str | None
    settings: Mapping[str, str]


@dataclass
class _RunningSession:
    """The session of this process, and what ends with it."""

    spark: SparkSession
    gateway: Any
    request: _SessionRequest
    scratch: _Scratch | None
    users: int = 1

    def is_alive(self) -> bool:
        """Return whether it can still be used: its JVM may have died, a user may have stopped it."""
        from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

        return self.gateway.proc.poll() is None and internals.running_context() is not None

    def end(self) -> bool:
        """Stop Spark, end the JVM, and leave no file behind but the log.

        If the JVM writes an archive of its classes, this does not wait for it: the JVM goes on by itself,
        and deletes its files.

        Returns:
            Whether the JVM goes on.
        """
        from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

        archive = None if self.scratch is None else self.scratch.archive
        try:
            if self.is_alive():
                self.spark.stop()
        finally:
            internals.request_jvm_exit(self.gateway)
            writes = archive is not None and archive.new is not None
            if writes and self.gateway.proc.poll() is None:
                self._detach_jvm()
                later = True
            else:
                self._remove_files()
                later = False
        return later

    def _detach_jvm(self) -> None:
        assert self.scratch is not None
        assert self.scratch.archive is not None
        jvm = self.gateway.proc
        keeper = self.scratch.archive.start_installer(jvm.pid)
        self.scratch.release()

        def reap() -> None:  # so that no zombie stays in a process that goes on
            jvm.wait()
            keeper.wait()

        threading.Thread(target=reap, name="millstream-class-archive", daemon=True).start()

    def _remove_files(self) -> None:
        from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

        internals.end_process(self.gateway.proc)
        if self.scratch is not None:
            self.scratch.delete()
            if self.scratch.archive is not None:
                self.scratch.archive.discard()


_running: _RunningSession | None = None
_lock = threading.Lock()


def start_session(
    name: str,
    *,
    folder: Path,
    cores: int | None = None,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    on_phase: Callable[[str], None] = _log.info,
) -> SparkSession:
    """Return the Spark session of this process; the first call starts it.

    Every call needs a `stop_session` of its own; the last one ends Spark. Spark itself, its workers
    and Java write to ``<folder>/spark.log``, nothing to the terminal. The environment of this
    process is left as it is.

    Args:
        name: The name that Spark shows.
        folder: Where the log goes, and the scratch files of a session on this machine.
        cores: Cores to use on this machine, by default all that this process may use; on a
            cluster, the number of Spark partitions of state. An existing checkpoint keeps its own.
        master: Address of a cluster; by default Spark runs on this machine.
        settings: Spark settings that win over those made here.
        on_phase: Called with what is being started.

    Raises:
        EnvironmentProblem: PySpark or Java is missing or does not start; the message says which.
        ConfigError: the process has a session with other settings already, or Spark refuses one.

    Guarantees: thread-safe. The JVM and the workers end with this process, however it ends, and do
    not hear its Ctrl-C.

    """
    global _running  # noqa: PLW0603 - Spark allows one session per process, so does this module
    request = _SessionRequest(cores, master, dict(settings or {}))
    with _lock:
        if _running is not None and not _running.is_alive():
            _running.end()
            _running = None
        if _running is None:
            _running = _start(name, folder, request, on_phase)
        else:
            _check_same(_running.request, request)
            _running.users += 1
        return _running.spark


def stop_session(spark: SparkSession) -> bool:
    """Release the session for one user; after the last, Spark has ended.

    Nothing happens for a session that has ended already.

    Returns:
        Whether the JVM still writes the archive of its classes, once on a machine: it goes on by itself,
        also after this process's end.
    """
    global _running
    with _lock:
        if _running is None or _running.spark is not spark:
            return False
        _running.users -= 1
        if _running.users > 0:
            return False
        ending, _running = _running, None
        return ending.end()


def _check_same(running: _SessionRequest, request: _SessionRequest) -> None:
    """Refuse settings that the running session does not have; settings that are not given fit any."""
    for what, has, wants in (
        ("cores", running.cores, request.cores),
        ("master", running.master, request.master),
        ("settings", running.settings, request.settings),
    ):
        if wants and wants != has:
            raise ConfigError(
                f"Spark runs in this process already with {what}={has!r}, which cannot become "
                f"{wants!r}: use the same {what} for all that runs in one process"
            )


def _start(
    name: str, folder: Path, request: _SessionRequest, on_phase: Callable[[str], None]
) -> _RunningSession:
    """Start the JVM and a session in it; on any failure leave nothing behind."""
    internals = _pyspark_internals()
    from millstream.spark.runtime import local_file_system  # noqa: PLC0415 - see the module
    from millstream.spark.runtime.class_archive import class_archive  # noqa: PLC0415 - imports pyspark

    if internals.running_context() is not None:
        raise ConfigError(
            "a Spark session that Millstream did not start runs in this process; call its stop() "
            "first: the settings that a pipeline needs can only be made at the start"
        )
    folder.mkdir(parents=True, exist_ok=True)
    scratch = _Scratch(folder / "spark-scratch") if request.master is None else None
    gateway = None
    try:
        java = find_java(os.environ)
        if scratch is not None:
            scratch.archive = class_archive(os.environ, java, pid=os.getpid())
        settings = _settings(name, request, scratch)
        on_phase(f"starting Java {java.version}")
        gateway = internals.launch_jvm(
            settings,
            env=_environment(os.environ, scratch, java),
            log=_open_log(folder),
            held=() if scratch is None else (scratch.lock,),
        )
        on_phase("starting Spark")
        with internals.environment(PYSPARK_PYTHON=_worker_python(scratch)):
            spark = internals.open_session(settings, gateway)
        local_file_system.install_local_files(spark)
        if scratch is not None:
            internals.start_workers(spark)
            internals.skip_search_for_data_sources(spark)
            internals.delete_with_jvm(spark, scratch.path)
            internals.delete_with_jvm(spark, scratch.sockets)
    except BaseException:
        if gateway is not None:
            internals.end_jvm(gateway)
        if scratch is not None:
            scratch.delete()
            if scratch.archive is not None:
                scratch.archive.discard()
        raise
    return _RunningSession(spark, gateway, request, scratch)


def _pyspark_internals() -> Any:
    """Import what needs PySpark, with a remedy where it is missing."""
    try:
        from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark
    except ModuleNotFoundError as missing:
        raise EnvironmentProblem(
            f'no module named {missing.name!r}: pipelines need pip install "millstream[spark]"'
        ) from missing
    return internals


# ── settings ────────────────────────────────────────────────────────────────────


def _settings(name: str, request: _SessionRequest, scratch: _Scratch | None) -> dict[str, str]:
    """Return every setting of a session, as strings."""
    if scratch is None:
        assert request.master is not None
        made = _common_settings(request.cores or _CLUSTER_PARTITIONS)
        made["spark.master"] = request.master
        # Large frames are rows there (`frame_blocks.py`), and 10,000 of them no batch of Arrow's.
        made["spark.sql.execution.arrow.maxBytesPerBatch"] = str(64 * _MIB)
        # Java's serializer holds what it has written until it is reset, by default after 100 objects. An object is a few
        # of those rows, as Spark stores blocks: 100 of them are larger than the heap of a small executor.
        made["spark.serializer.objectStreamReset"] = "1"
    else:
        cores = request.cores or cores_available()
        made = _common_settings(cores) | _local_settings(cores, scratch)
    options = " ".join(
        each[_JVM_OPTIONS] for each in (made, request.settings) if _JVM_OPTIONS in each
    )
    return {**made, **request.settings, _JVM_OPTIONS: options, "spark.app.name": name}


def _common_settings(partitions: int) -> dict[str, str]:
    """Return the settings that are right on this machine and on a cluster."""
    from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

    streaming = "spark.sql.streaming"
    rocksdb = f"{streaming}.stateStore.rocksdb"
    return {
        # Spark's 200 partitions cost 3 s per trigger on two cores, and are frozen by the first
        # start of a checkpoint.
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.session.timeZone": "UTC",
        # State of native steps and of the user's own queries; a job's own lies in files.
        # The only provider that Python's stateful operators accept, writing what a batch
        # changed and not the whole, within a bound on memory that all stores of a process share.
        f"{streaming}.stateStore.providerClass": internals.ROCKSDB_PROVIDER,
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        f"{rocksdb}.boundedMemoryUsage": "true",
        f"{rocksdb}.maxMemoryUsageMB": "256",
        f"{rocksdb}.trackTotalNumberOfRows": "false",  # saves a read before every write
        f"{streaming}.checkpoint.fileChecksum.enabled": "true",
        # A restart needs the last batch and the one before it. Ten leave room for a damaged
        # snapshot, whose repair starts from an older one; Spark's 100 keep ten times the disk.
        f"{streaming}.minBatchesToRetain": "10",
        # stop() waits for the batch in hand; Spark's default would wait for a hung one forever.
        f"{streaming}.stopTimeout": "60000",
        f"{streaming}.numRecentProgressUpdates": "256",
        # Workers come ready from their parent: see that module. Sources and stages get workers from
        # the same parent only if their environments agree; this is what they would differ in.
        "spark.python.daemon.module": "millstream.spark.runtime.worker_daemon",
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **{
            f"spark.executorEnv.{name}": value
            for name, value in (_WORKER_THREADS | _WORKER_MEMORY).items()
        },
    }


def _local_settings(cores: int, scratch: _Scratch) -> dict[str, str]:
    """Return the settings for a session whose driver and executor are one JVM, here."""
    from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

    settings = {
        "spark.master": f"local[{cores},4]",  # 4: a task that fails is tried again, as on a cluster
        "spark.driver.memory": f"{driver_memory_mib(memory_mib())}m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # The JVM moves frames and computes little: the quick compiler alone takes a third of the
        # CPU off a start, and nothing is slower once warm. Java's first heap is a 64th of the machine's memory, of
        # which an idle app would keep what its start has touched; a small one grows when there is something to hold.
        _JVM_OPTIONS: f"-Djava.io.tmpdir={scratch.path} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms64m"
        + ("" if scratch.archive is None else f" {scratch.archive.option}"),
        "spark.local.dir": str(scratch.path),
        "spark.ui.enabled": "false",
        # The history that the UI would show is kept on the heap even without it.
        "spark.ui.retainedJobs": "50",
        "spark.ui.retainedStages": "50",
        "spark.ui.retainedTasks": "1000",
        "spark.sql.ui.retainedExecutions": "50",
        # Checkpoints are on this machine's disk, where a rename is atomic: three times as fast.
        internals.CHECKPOINT_MANAGER_SETTING: internals.LOCAL_CHECKPOINT_MANAGER,
    }
    if len(str(scratch.sockets)) <= _SOCKET_FOLDER_CHARS_MAX:
        # 80 ms less per trigger than over TCP. Spark asks for no password on these sockets, so
        # they stand in a folder that only this user can enter.
        settings["spark.python.unix.domain.socket.enabled"] = "true"
        settings["spark.python.unix.domain.socket.dir"] = str(scratch.sockets)
    return settings


def _environment(env: Mapping[str, str], scratch: _Scratch | None, java: Java) -> dict[str, str]:
    """Return the environment of the JVM, which its Python workers inherit on this machine."""
    from millstream.spark.runtime import internals  # noqa: PLC0415 - imports pyspark

    made = {
        **env,
        "JAVA_HOME": str(java.home),
        "PYSPARK_PYTHON": _worker_python(scratch),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if scratch is not None:
        made |= _WORKER_THREADS
        made[SOCKET_VARIABLE] = str(scratch.sockets / "fork-server")
        made["SPARK_LOCAL_IP"] = "127.0.0.1"  # works without a network and a resolvable host name
        # Workers must find the modules that this program was started with, wherever it lies.
        made["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        # Not the user's: a Spark of another version would not understand this PySpark.
        archive = scratch.archive
        home = (
            internals.make_spark_home(scratch.path / "spark-home")
            if archive is None
            else archive.home
        )
        made["SPARK_HOME"] = str(home)
    return made


def _worker_python(scratch: _Scratch | None) -> str:
    """Return the workers' Python: this one here; on a cluster what the user says, if anything."""
    if scratch is None:
        return os.environ.get("PYSPARK_PYTHON", sys.executable)
    return scratch.python


# ── the machine ─────────────────────────────────────────────────────────────────


def driver_memory_mib(memory: int) -> int:
    """Return the JVM's share of that memory: a quarter, up to 4 GiB.

    The rest is for the Python workers, and for the page cache, where log and state are read from.
    """
    return max(min(memory // 4, _DRIVER_MEMORY_MIB_MAX), _DRIVER_MEMORY_MIB_MIN)


# ── files ───────────────────────────────────────────────────────────────────────


def _open_log(folder: Path) -> Path:
    """Return the file for all that Spark says; a large one is rotated, and one generation is kept."""
    log = folder / "spark.log"
    if log.exists() and log.stat().st_size > _LOG_BYTES_MAX:
        log.replace(folder / "spark.log.1")
    return log


class _Scratch:
    """The folders of one session on this machine: its files, and its sockets.

    Working copies of state are here, which may be many gigabytes, so they belong on the disk of the log and
    not in a temporary folder that may be memory. A session that dies with its JVM leaves them behind; the
    next one deletes them. A lock on the folder shows that a session is alive. The JVM holds it too, so the
    lock outlives a driver that was killed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for left in folder.iterdir():
            with contextlib.suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(dir=folder)).absolute()
        self.sockets = Path(tempfile.mkdtemp(prefix="ms-"))
        self.archive: ClassArchive | None = None
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    @cached_property
    def python(self) -> str:
        """The Python that Spark starts: a script, which has planners forked; see ``fork_server.py``."""
        script = self.sockets / "python"
        script.write_text(python_script(sys.executable))
        script.chmod(0o700)
        # Nothing can be run from a file system that is mounted so.
        return str(script) if os.access(script, os.X_OK) else sys.executable

    def release(self) -> None:
        """Leave the folders to the JVM, which has the lock too and deletes them when it ends."""
        os.close(self.lock)

    def delete(self) -> None:
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a scratch folder. Raises BlockingIOError if its session lives."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
