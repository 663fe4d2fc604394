"""An archive of the classes that Spark's JVM loads: with it, a start takes half the CPU.

As it ends, Java can write its loaded classes into a file, and map that file into memory in later starts
(application class data sharing, JEP 350). An archive is for one Java and one PySpark. The first session on
a machine that ends in the usual way makes it: once, the JVM goes on for some ten seconds after the program's
end, and `archive_installer.py` then installs the file. It has some 150 MB, and may be deleted at any time. Before
one is made, those of environments that are gone are removed.
Java checks that an archive fits, and ignores one that does not. A Spark home is kept beside it, as Java uses
archived classes only if their files have the same paths.
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

_ABANDONED_S = 3600.0  # the age at which no JVM writes a file any more


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
        """The options for Java."""
        if self.new is None:
            return f"-XX:SharedArchiveFile={self.path} -Xshare:auto -Xlog:cds=off"
        return f"-XX:ArchiveClassesAtExit={self.new} -Xlog:cds=off"

    def discard(self) -> None:
        """Remove the file of a JVM that was killed, or whose session did not start."""
        if self.new is not None:
            with contextlib.suppress(OSError):
                self.new.unlink(missing_ok=True)

    def start_installer(self, pid: int) -> subprocess.Popen[bytes]:
        """Start the process that installs the archive when the JVM ``pid`` has ended.

        It outlives this process. Each JVM writes a file of its own: Java does not notice when two have
        written into one.
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
    """Return the archive for this Java and this PySpark; None if there is no place to keep it.

    None, too, if there is no archive yet and this process is the first of a container: its end ends all
    others.
    """
    made_for = (
        f"{java.executable.resolve()} {java.version} {pyspark.__version__} {pyspark.__file__}"
    )
    folder = _cache(env) / hashlib.sha256(made_for.encode()).hexdigest()[:16]
    if any(mark in str(folder) for mark in " \t\"'"):
        return None  # Spark takes Java's options apart at such
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "classes.jsa"
        if not path.exists():
            _remove_orphans(folder.parent)
        _remove_abandoned(folder)
        if pid == 1 and not path.exists():
            return None
        new = None if path.exists() else folder / f"{uuid.uuid4().hex}.new"
        return ClassArchive(_spark_home(folder), path, new)
    except OSError:
        return None


def _spark_home(folder: Path) -> Path:
    """Return the Spark home; create it if it is missing."""
    home = folder / "spark-home"
    if not home.exists():
        ours = internals.make_spark_home(folder / f"{uuid.uuid4().hex}.home")
        try:
            ours.rename(home)
        except OSError:  # another process was first
            shutil.rmtree(ours)
    return home


def _remove_orphans(cache: Path) -> None:
    """Remove the archives of a PySpark that is no longer where its Spark home says, as after its environment was removed."""
    for home in cache.glob("*/spark-home"):
        if (home / "jars").is_symlink() and not (home / "jars").exists():
            shutil.rmtree(home.parent, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob("*.new"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _cache(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"
