"""An archive of the classes that Spark's JVM loads: with it, a start takes half the CPU.

Java can write what it made of the classes that it loaded into a file, as it ends, and map that file
into memory in later starts (application class data sharing, JEP 350). It is made for one Java and one
PySpark by the first session on a machine that ends in the usual way. The JVM goes on for some ten
seconds behind the program's end, once; `archive_installer.py` then puts the file in its place. It has
some 150 MB, and may be deleted at any time. Java itself checks that an archive fits, and goes on
without one that does not. Spark's home stands beside it, as classes are taken from an archive only
where their files have the same paths again.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyspark

from millstream.spark.runtime import archive_installer, internals
from millstream.spark.runtime.java import Java

_ABANDONED_S = 3600.0  # a file that no JVM has finished by then, none will


@dataclass(frozen=True)
class ClassArchive:
    """Where the archive is or is to be, and the Spark home that it is made with.

    ``new`` is where this session's JVM writes one as it ends; None if there is one already.
    """

    home: Path
    path: Path
    new: Path | None

    @property
    def option(self) -> str:
        """What Java is to be told."""
        if self.new is None:
            return f"-XX:SharedArchiveFile={self.path} -Xshare:auto -Xlog:cds=off"
        return f"-XX:ArchiveClassesAtExit={self.new} -Xlog:cds=off"

    def discard(self) -> None:
        """Remove what a JVM may have written that was killed, or whose session did not start."""
        if self.new is not None:
            with contextlib.suppress(OSError):
                self.new.unlink(missing_ok=True)

    def start_installer(self, pid: int) -> subprocess.Popen[bytes]:
        """Start what takes over the new archive when the JVM ``pid`` has ended; it outlives this process.

        Each JVM writes a file of its own: Java does not notice when two have written into one.
        """
        assert self.new is not None
        command = [sys.executable, "-I", archive_installer.__file__, pid, self.new, self.path]
        return subprocess.Popen(  # noqa: S603 - this Python, and a file of this package
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )


def class_archive(env: Mapping[str, str], java: Java, *, pid: int) -> ClassArchive | None:
    """Give the archive for this Java and this PySpark; None if there is no place to keep it.

    Nor is one made where this process is the first of a container: with it, all others end.
    """
    made_for = (
        f"{java.executable.resolve()} {java.version} {pyspark.__version__} {pyspark.__file__}"
    )
    folder = _cache(env) / hashlib.sha256(made_for.encode()).hexdigest()[:16]
    if any(mark in str(folder) for mark in " \t\"'"):
        return None  # Spark takes Java's options apart at such
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        path = folder / "classes.jsa"
        if pid == 1 and not path.exists():
            return None
        new = None if path.exists() else folder / f"{uuid.uuid4().hex}.new"
        return ClassArchive(_spark_home(folder), path, new)
    except OSError:
        return None


def _spark_home(folder: Path) -> Path:
    """Give the Spark home, made where there is none."""
    home = folder / "spark-home"
    if not home.exists():
        ours = internals.make_spark_home(folder / f"{uuid.uuid4().hex}.home")
        try:
            ours.rename(home)
        except OSError:  # another process was first
            shutil.rmtree(ours)
    return home


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob("*.new"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _cache(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"
