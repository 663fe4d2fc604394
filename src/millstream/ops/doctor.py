"""Checks that this machine has what Millstream needs, and says what to do where it does not.

It changes nothing: no file stays behind, and no session is started. What is missing is reported and never
raised, PySpark included. It checks what ``spark/runtime/session.py`` and the log will use.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from millstream.engine import machine
from millstream.errors import EnvironmentProblem, MillstreamError

_GIB = 1 << 30
_DISK_FREE_MIN = 1 * _GIB
# Every acknowledged write waits for one of these, if nothing else is written at the same time.
_SYNC_MS_MAX = 100.0
_WORKER_MIB = 150  # a Python worker that has imported pyarrow and pandas
_IMPORT_WAIT_S = 120.0

# Locks, renames and fdatasync do not hold there what the log promises.
_NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "cifs", "drvfs", "fuse.s3fs", "fuse.sshfs", "nfs", "nfs4", "smb3", "vboxsf"}
)
_MEMORY_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})

# name: (the extra that brings it, lowest version allowed, first version not allowed). As in
# pyproject.toml; a test holds the two together.
PACKAGES = {
    "numpy": ("", "1.26", "3"),
    "pyarrow": ("", "18", "27"),
    "polars": ("", "1.30", "3"),
    "pyspark": ("[spark]", "4.2", "4.4"),
    "pandas": ("[spark]", "2.2", "3"),
    "protobuf": ("[spark]", "5.29", "8"),
    "cloudpickle": ("[spark]", "3", "4"),
}

# What a worker imports before it handles its first row, and what it prints here.
_WORKER_PROGRAM = """
import json, sys
import google.protobuf, pandas, polars, pyarrow, pyspark.worker
import millstream
print(json.dumps([sys.version.split()[0], pyspark.__version__]))
"""


@dataclass(frozen=True)
class DoctorCheck:
    """One check. ``seen`` is what was found; ``advice`` is what to do, empty when ``ok``."""

    name: str
    ok: bool
    seen: str
    advice: str = ""


def diagnose(folder: Path | str | None = None, store: str | None = None) -> list[DoctorCheck]:
    """Check this machine; return the checks in a fixed order.

    Takes a few seconds: Java and a Python worker are started once, and one page is written to the disk.

    Args:
        folder: The folder of the log, which need not exist yet; by default the current folder.
        store: The URL of a database in which apps have, or will have, their state. Nothing is written there.

    """
    log_folder = Path.cwd() if folder is None else Path(folder).absolute()
    return [
        *(_package(name, *wanted) for name, wanted in PACKAGES.items()),
        _java(),
        _worker(),
        _file_system(log_folder),
        _free_space(log_folder),
        _sync(log_folder),
        _ports(),
        _memory(),
        *([] if store is None else [_store(store)]),
    ]


# ── programs ────────────────────────────────────────────────────────────────────


def _package(name: str, extra: str, lowest: str, below: str) -> DoctorCheck:
    """Check a package's version, without importing it."""
    allowed = f'pip install "millstream{extra}" "{name}>={lowest},<{below}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return DoctorCheck(name, ok=False, seen="not installed", advice=allowed)
    fits = _release(lowest) <= _release(version) < _release(below)
    return DoctorCheck(name, ok=fits, seen=version, advice="" if fits else allowed)


def _release(version: str) -> tuple[int, ...]:
    """Read the numbers of a version up to the first that is not one: (4, 3) for ``4.3.0rc1``.

    Trailing zeros fall away, so that 4.4.0 is 4.4.
    """
    numbers: list[int] = []
    for part in version.split("."):
        found = re.match(r"\d+", part)
        if found is None:
            break
        numbers.append(int(found.group()))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _java() -> DoctorCheck:
    from millstream.spark.runtime.java import find_java  # noqa: PLC0415 - the engine is an extra

    try:
        java = find_java(os.environ)
    except EnvironmentProblem as problem:
        return DoctorCheck("java", ok=False, seen="none that fits", advice=str(problem))
    return DoctorCheck(
        "java", ok=True, seen=f"{java.version} from {java.source}: {java.executable}"
    )


def _worker() -> DoctorCheck:
    """Start the Python that Spark's workers run on and have it import what they need."""
    try:
        ended = subprocess.run(  # noqa: S603 - this very Python
            [sys.executable, "-c", _WORKER_PROGRAM],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_IMPORT_WAIT_S,
            check=False,
        )
        output = ended.stderr if ended.returncode else ended.stdout
    except (OSError, subprocess.SubprocessError) as problem:
        return DoctorCheck("workers", ok=False, seen=str(problem), advice="run from a whole Python")
    last = output.strip().splitlines()[-1] if output.strip() else f"exit code {ended.returncode}"
    if ended.returncode:
        advice = f"make this work: {sys.executable} -c 'import pyspark.worker, pyarrow, pandas'"
        return DoctorCheck("workers", ok=False, seen=last, advice=advice)
    python, pyspark = json.loads(last)
    return DoctorCheck("workers", ok=True, seen=f"Python {python}, pyspark {pyspark}")


def _store(url: str) -> DoctorCheck:
    """Connect to the database of state stores; say which apps it has and how far away it is."""
    from millstream.views.address import split_store_url  # noqa: PLC0415 - few ask for it
    from millstream.views.store_location import state_stores_of  # noqa: PLC0415 - as above

    try:
        shown = split_store_url(url)[0].shown
        state_stores_of(url)
        started = time.perf_counter()
        apps = [one.app for one in state_stores_of(url)]
        took_ms = (time.perf_counter() - started) * 1e3
    except MillstreamError as problem:
        return DoctorCheck("store", ok=False, seen="cannot be used", advice=str(problem))
    seen = f"{shown}: {took_ms:.0f} ms to connect and look; state of: {', '.join(apps) or 'no app yet'}"
    return DoctorCheck("store", ok=True, seen=seen)


# ── the disk ────────────────────────────────────────────────────────────────────


def _existing(folder: Path) -> Path:
    """Return the folder itself or the nearest one above it that exists: on the same disk."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _file_system(folder: Path) -> DoctorCheck:
    place = _existing(folder)
    kind = file_system_of(place)
    seen = f"{kind} at {place}"
    if kind in _NETWORK_FILE_SYSTEMS:
        advice = (
            "keep the log on a disk of this machine: locks and syncs do not hold over a network"
        )
        return DoctorCheck("file system", ok=False, seen=seen, advice=advice)
    if kind in _MEMORY_FILE_SYSTEMS:
        advice = "keep the log on a disk: this is memory, and a restart of the machine empties it"
        return DoctorCheck("file system", ok=False, seen=seen, advice=advice)
    return DoctorCheck("file system", ok=True, seen=seen)


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that holds a folder, or ``unknown`` if no mount has it.

    Of several mounted over each other the last is the one that is seen.
    """
    found, depth = "unknown", -1
    place = folder.resolve()
    for point, kind in _mounts(mounts):
        if place.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kind, len(point.parts)
    return found


def _mounts(mounts: Path) -> Iterator[tuple[Path, str]]:
    """Read the mount table: where, and of which type. Blanks are written there in octal."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        yield Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)), kind


def _free_space(folder: Path) -> DoctorCheck:
    free = shutil.disk_usage(_existing(folder)).free
    ok = free >= _DISK_FREE_MIN
    advice = "" if ok else f"make room: at least {_DISK_FREE_MIN / _GIB:.0f} GiB"
    return DoctorCheck("free space", ok=ok, seen=f"{free / _GIB:.1f} GiB", advice=advice)


def _sync(folder: Path) -> DoctorCheck:
    """Write one page durably, and measure how long that takes."""
    place = _existing(folder)
    sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
            started = time.perf_counter()
            sync(file.fileno())
            took_ms = (time.perf_counter() - started) * 1e3
    except OSError as problem:
        seen = f"cannot write in {place}: {problem.strerror}"
        return DoctorCheck(
            "sync", ok=False, seen=seen, advice="choose a folder that you may write in"
        )
    ok = took_ms <= _SYNC_MS_MAX
    advice = "" if ok else "use a faster disk: every acknowledged write waits for it"
    return DoctorCheck("sync", ok=ok, seen=f"{took_ms:.1f} ms", advice=advice)


# ── the machine ─────────────────────────────────────────────────────────────────


def _ports() -> DoctorCheck:
    """Open a port on the loopback address and reach it, as driver and workers do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return DoctorCheck("ports", ok=True, seen="127.0.0.1 can be reached")
    except OSError as problem:
        advice = "allow connections to 127.0.0.1: Spark's parts talk over it"
        return DoctorCheck("ports", ok=False, seen=f"127.0.0.1: {problem}", advice=advice)


def _memory() -> DoctorCheck:
    """Compare the memory with what a session on all cores takes, workers included."""
    from millstream.spark.runtime import session  # noqa: PLC0415 - the engine is an extra

    cores, memory = machine.cores_available(), machine.memory_mib()
    driver = session.driver_memory_mib(memory)
    needed = driver + _WORKER_MIB * (cores + 2)
    seen = f"{memory / 1024:.1f} GiB, {cores} cores; Spark takes {driver} MiB of heap"
    if memory >= needed:
        return DoctorCheck("memory", ok=True, seen=seen)
    advice = f"{cores} cores need {needed} MiB: use fewer cores, or a machine with more memory"
    return DoctorCheck("memory", ok=False, seen=seen, advice=advice)
