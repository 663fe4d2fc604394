"""A MariaDB server for tests: a real one, in a temporary folder, on a free port of this machine.

It uses the programs that the system's package has installed, which need no running service and no
configuration; nothing of the system's own server is touched. The binary log is on, as capture needs it.
"""

from __future__ import annotations

import getpass
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from millstream.errors import EnvironmentProblem
from millstream.testing.free_ports import free_ports

_START_S = 60.0
_PLACES = ("/usr/sbin", "/usr/local/sbin")  # where packages put servers, and many PATHs do not look
MARIADB_PASSWORD = "a secret: p@ss/word"  # noqa: S105 - of a server that lives for a test, on loopback

CAPTURE_SETTINGS = {
    "log_bin": "binlog",
    "server_id": "1",
    "binlog_format": "ROW",
    "binlog_row_metadata": "FULL",
}


def _program(*names: str) -> str | None:
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=":".join(_PLACES))
        if found:
            return found
    return None


class MariaDbServer:
    """A server of its own; use it in ``with``.

    ``settings`` are options of ``mariadbd`` in place of, or beside, those that capture needs. ``kill`` ends it as a
    crash does, ``start`` starts it again with what it had.

    Raises:
        EnvironmentProblem: MariaDB is not installed, or does not start; the message has its output.
    """

    title = "MariaDB"
    user = "tester"
    password = MARIADB_PASSWORD

    def __init__(self, **settings: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.settings = self.capture_settings() | settings
        self.folder = Path(tempfile.mkdtemp(prefix=f"millstream-{self.title.lower()}-"))
        self.port = 0
        try:
            self._server = self._install()
            self.start()
        except BaseException:
            self.close()
            raise

    @classmethod
    def capture_settings(cls) -> dict[str, str]:
        """Return the options that capture needs."""
        return CAPTURE_SETTINGS

    def _install(self) -> str:
        """Make an empty database; return the server's program."""
        server, install = _program("mariadbd"), _program("mariadb-install-db")
        if server is None or install is None:
            raise EnvironmentProblem(
                "MariaDB is not installed. Install it: on Debian and Ubuntu, apt-get install mariadb-server."
            )
        done = subprocess.run(  # noqa: S603 - the system's own program
            [
                install,
                "--no-defaults",
                f"--datadir={self.folder / 'data'}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--user={account()}",
            ],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentProblem(
                f"mariadb-install-db failed: {done.stderr.decode(errors='replace')[-2000:]}"
            )
        self._write_users()
        return server

    def _write_users(self) -> None:
        escaped = self.password.replace("'", "''")
        (self.folder / "users.sql").write_text(
            f"CREATE USER IF NOT EXISTS {self.user}@'%' IDENTIFIED BY '{escaped}';\n"
            f"GRANT ALL ON *.* TO {self.user}@'%' WITH GRANT OPTION;\n"
        )

    def start(self) -> None:
        """Start the server, on the port that it had before if it ran already.

        Raises:
            EnvironmentProblem: it does not start; the message has its output.
        """
        for _ in range(3):  # another program may take the port between the look and the start
            self.port = self.port or free_ports(1)[0]
            options = [
                f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()
            ]
            with (self.folder / "server.log").open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the system's own program
                    [self._server, "--no-defaults", *self._places(), *options],
                    stdout=log,
                    stderr=log,
                )
            if self._is_listening(self._process):
                return
            self.port = 0
        output = (self.folder / "server.log").read_text(errors="replace")
        raise EnvironmentProblem(f"The {self.title} server did not start: {output[-2000:]}")

    def _places(self) -> list[str]:
        return [
            *self._common_places(),
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
        ]

    def _common_places(self) -> list[str]:
        return [
            f"--datadir={self.folder / 'data'}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--init-file={self.folder / 'users.sql'}",
            f"--user={account()}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
        ]

    def _is_listening(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server takes sessions; False if it ended before."""
        import pymysql  # noqa: PLC0415 - an extra, which only these tests need

        end = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < end:
            try:
                self.connect().close()
            except pymysql.err.OperationalError:
                time.sleep(0.05)
            else:
                return True
        return False

    def connect(self, database: str | None = None, **options: Any) -> Any:
        """Return a session of PyMySQL, which commits each statement unless told otherwise."""
        import pymysql  # noqa: PLC0415 - as above

        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            password=self.password,
            database=database,
            **{"autocommit": True, **options},
        )

    def run(self, *statements: str, database: str | None = None) -> Any:
        """Run statements in a session of their own; return the rows of the last one."""
        with self.connect(database) as session, session.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall()

    def kill(self) -> None:
        """End the server at once, as a crash does: nothing is flushed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop the server at once and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def account() -> str:
    """Return whom a server is run as: these refuse to run as root unless told to."""
    name = getpass.getuser()
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        return "root"
