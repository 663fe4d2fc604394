"""The commands that the page for operators runs on the programs of apps: ``plan``, ``compare``, ``deploy``, ``rollback``, ``why match``.

Each is the command itself, in a process of its own: a program is the user's code, which the server does not run. What
the first four print is shown as it is. One of them runs at a time, and one ``why match``; they end with the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from millstream.access.audit_log import CLIENT, ON_BEHALF_OF, Actor
from millstream.errors import ConfigError, ConflictError, RetriableError
from millstream.views.reader import apps_with_state, state_store_location
from millstream.views.server.version_commands import VersionAction
from millstream.views.store_location import open_state_store

_SHOWN_BYTES = 20_000  # the end of what a command has printed
_END_S = 30.0
_LOOK_S = 300.0  # for partial matches: state is read, and a program loaded
_LOOK_BYTES = 16 << 20


def parse_programs(texts: Sequence[str]) -> dict[str, str]:
    """Return the files of programs by app, of ``APP=FILE`` each.

    Raises:
        ConfigError: one is not of this form, an app is named twice, or a file is not there.
    """
    found: dict[str, str] = {}
    for text in texts:
        app, equals, file = text.partition("=")
        if not app or not equals or not file:
            raise ConfigError(f"--program is {text!r}. Give APP=FILE, such as ads=app.py.")
        if app in found:
            raise ConfigError(f"--program names the app {app!r} twice. Give one file for it.")
        if not Path(file).is_file() and not Path(file.rpartition(":")[0]).is_file():
            raise ConfigError(f"--program names {file!r}, which is no file. Correct the path.")
        found[app] = file
    return found


@dataclass(frozen=True)
class _Run:
    app: str
    action: VersionAction
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def to_dict(self) -> dict[str, Any]:
        code = self.process.poll()
        size = os.fstat(self.output.fileno()).st_size
        begin = max(0, size - _SHOWN_BYTES)
        text = os.pread(self.output.fileno(), _SHOWN_BYTES, begin).decode(errors="replace")
        return {
            "action": self.action,
            "running": code is None,
            "exit_code": code,
            "output": f"… {text}" if begin else text,
        }


class VersionRuns:
    """Runs commands on programs; ``programs`` is app → FILE or FILE:APP. Close it."""

    def __init__(self, log: Path, programs: Mapping[str, str]) -> None:
        self._log = log
        self._programs = programs
        self._last: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._look: subprocess.Popen[bytes] | None = None

    def start(self, app: str, action: VersionAction, who: Actor, *, stop: bool) -> None:
        """Begin a command on the program of an app. See :class:`VersionCommands`."""
        self._require_program(app)
        with self._lock:
            for run in self._last.values():
                if run.process.poll() is None:
                    raise ConflictError(
                        f"millstream {run.action} runs for {run.app}. Wait until it has ended."
                    )
            before = self._last.pop(app, None)
            if before is not None:
                before.output.close()
            self._last[app] = self._begin(app, action, who, stop=stop)

    def _begin(self, app: str, action: VersionAction, who: Actor, *, stop: bool) -> _Run:
        command = self._command(app, action)
        if stop and action in ("deploy", "rollback"):
            command.append("--stop")
        command += ["--", self._programs[app]]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the run
        # What it prints goes to a file: nobody may be there to read a pipe.
        process = subprocess.Popen(  # noqa: S603 - our own command, on a file that whoever started us has named
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, ON_BEHALF_OF: who.token or "", CLIENT: who.client or ""},
        )
        return _Run(app, action, process, output)

    def _command(self, app: str, *words: str) -> list[str]:
        """Return the beginning of a command on the program of an app: what follows are options, ``--``, and the file."""
        command = [sys.executable, "-m", "millstream", *words, "--named", app]
        if self._brokers(app) is None:
            command += ["--log", str(self._log)]  # else the program names its log
        return command

    def _require_program(self, app: str) -> None:
        if app not in self._programs:
            raise ConfigError(
                f"It is not known which file has the program of {app!r}. Start the page with --program {app}=FILE."
            )

    def partial_matches(self, app: str, step: str | None, key: Sequence[str]) -> Mapping[str, Any]:
        """Return the partial matches of an app. See :class:`VersionCommands`."""
        self._require_program(app)
        command = [*self._command(app, "why", "match"), "--json"]
        if step is not None:
            command.append(f"--step={step}")
        command += ["--", self._programs[app], *key]
        if not self._looking.acquire(blocking=False):
            raise ConflictError("Partial matches are being looked for. Wait until that has ended.")
        try:
            return self._looked(command)
        finally:
            self._looking.release()

    def _looked(self, command: Sequence[str]) -> Mapping[str, Any]:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            with self._lock:
                self._look = process = subprocess.Popen(  # noqa: S603 - as above
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
                )
            try:
                code = process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise RetriableError(
                    f"The partial matches were not found within {_LOOK_S:g} s. Name a whole key, or ask again."
                ) from None
            if code:
                raise ConfigError(_end_of(errors) or f"millstream why match has ended with {code}.")
            if os.fstat(output.fileno()).st_size > _LOOK_BYTES:
                raise ConfigError(
                    f"The partial matches are more than {_LOOK_BYTES >> 20} MiB. Name a step and a key, or use millstream why match."
                )
            output.seek(0)
            try:
                found: Mapping[str, Any] = json.loads(output.read())
            except ValueError:
                raise ConfigError(
                    "The program prints text of its own when it is loaded, so that what millstream why match says cannot be read. "
                    "Let it print to standard error."
                ) from None
            return found

    def _brokers(self, app: str) -> str | None:
        """Return the address of the brokers of the log that an app has read, without options; None: it is the folder."""
        if app not in apps_with_state(self._log):
            return None
        with open_state_store(state_store_location(self._log, app), readonly=True) as store:
            return store.log_brokers(app)

    def read(self, app: str) -> Mapping[str, Any] | None:
        """Return the file of an app and its last command. See :class:`VersionCommands`."""
        file = self._programs.get(app)
        if file is None:
            return None
        with self._lock:
            run = self._last.get(app)
            last = dict.fromkeys(("action", "running", "exit_code", "output"))
            return {"file": file, **(last if run is None else run.to_dict())}

    def close(self) -> None:
        """End what runs: a deployment that is stopped resumes when it is called again."""
        with self._lock:
            if self._look is not None:
                self._look.kill()  # it changes nothing
            for run in self._last.values():
                run.process.terminate()
            for run in self._last.values():
                try:
                    run.process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    run.process.kill()
                    run.process.wait()
                run.output.close()
            self._last = {}


def _end_of(file: IO[bytes]) -> str:
    """Return the end of what a command has printed."""
    size = os.fstat(file.fileno()).st_size
    return (
        os.pread(file.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
        .decode(errors="replace")
        .strip()
    )
