"""The audit log of an app: who asked for a change of it, when, what, and how it ended.

``<log>/audit/<app>.jsonl``, beside ``apps/``: what a reset removes has the app's folder, and the reset itself is in here. It is
only appended to, each line in one write under a lock, and synced.

=============================  ====================================================================
a crash, or a failure, after   leaves
=============================  ====================================================================
1. the line ``begun``          a change that was begun, and of which it is not known how it ended
2. the change                  the same: what has been done says the app
3. the line ``done``           everything
=============================  ====================================================================

What cannot be recorded is not done. A line that was cut off by a crash is shown as one that cannot be read.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from millstream.access.tokens import Principal
from millstream.errors import ConfigError, MillstreamError

# A token's name and a client's address, for a command that a server runs for them.
ON_BEHALF_OF = "MILLSTREAM_ON_BEHALF_OF"
CLIENT = "MILLSTREAM_ON_BEHALF_OF_CLIENT"
_FOLDER = "audit"
_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True)
class Actor:
    """Who asks for a change: a user of a machine, at a command line; or the holder of a token, at an address."""

    user: str | None = None
    host: str | None = None
    token: str | None = None
    client: str | None = None

    @classmethod
    def of_process(cls) -> Actor:
        """Return who runs this process, and for whom, if a server runs it."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in some containers
            user = str(os.getuid())
        behalf = [os.environ.get(name) or None for name in (ON_BEHALF_OF, CLIENT)]
        return cls(user, socket.gethostname(), *behalf)

    @classmethod
    def of_request(cls, principal: Principal, client: str | None) -> Actor:
        """Return who sends a request."""
        return cls(token=principal.name, client=_address(client))

    def __str__(self) -> str:
        at = None if self.user is None else f"{self.user}@{self.host}"
        names = [at, self.token and f"token {self.token}", self.client and f"from {self.client}"]
        return ", ".join(filter(None, names)) or "unknown"


@dataclass(frozen=True)
class AuditEntry:
    """A change of an app. ``outcome``: ``done``, ``failed``, or ``begun`` where its end is not known; None: unreadable."""

    at: str
    who: Actor
    what: str
    outcome: str | None
    details: Mapping[str, Any]
    reason: str | None = None


class AuditLog:
    """The audit log of one app, or of the copies of a capture, from any process.

    Raises:
        ConfigError: the name is none of these.
    """

    def __init__(self, log: Path, app: str) -> None:
        if not _NAME.fullmatch(app):
            raise ConfigError(
                f"{app[:80]!r} is no name of an app, or of a capture. Use letters, digits, '.', '_' and '-'."
            )
        self.path = log / _FOLDER / f"{app}.jsonl"

    @contextmanager
    def recorded(
        self, who: Actor, what: str, details: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Record that a change begins, and how the block ends; yield what is added to the details at its end.

        Raises:
            MillstreamError: it cannot be recorded; then the block has not begun.
        """
        change = secrets.token_hex(8)
        actor = {name: value for name, value in vars(who).items() if value is not None}
        head = {"change": change, "who": actor, "what": what}
        self._append({**head, "outcome": "begun", "details": dict(details or {})})
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            # The text of an error of ours has no secret in it; of another, only the kind is known to have none.
            reason = str(error) if isinstance(error, MillstreamError) else type(error).__name__
            self._append({**head, "outcome": "failed", "reason": reason, "details": found})
            raise
        self._append({**head, "outcome": "done", "details": found})

    def read(self) -> list[AuditEntry]:
        """Return the changes, in the order in which they were begun."""
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise MillstreamError(
                f"The audit log {self.path} cannot be read ({error.strerror}). Correct its rights."
            ) from error
        found: dict[str, AuditEntry] = {}
        for number, line in enumerate(lines, 1):
            entry = None
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                values = json.loads(line)
                entry = _entry(values, found.get(values["change"]))
                found[values["change"]] = entry
            if entry is None and line.strip():
                found[f"line {number}"] = AuditEntry("", Actor(), f"line {number}", None, {})
        return list(found.values())

    def _append(self, values: Mapping[str, Any]) -> None:
        import fcntl  # noqa: PLC0415 - apps are operated where there is one

        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, **values}, ensure_ascii=True) + "\n"
        try:
            self.path.parent.mkdir(mode=0o750, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(self.path, flags, 0o640)
            with os.fdopen(handle, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = os.fstat(handle).st_size
                cut_off = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                _write_all(handle, b"\n" * cut_off + line.encode())
                os.fsync(handle)
        except OSError as error:
            raise MillstreamError(
                f"The audit log {self.path} cannot be written ({error.strerror}), so nothing was begun that it would record. "
                "Make room, or correct the rights of its folder."
            ) from error


def _address(client: str | None) -> str | None:
    """Return the address of a client; of one that a proxy has passed on, only if it is one."""
    try:
        return None if client is None else str(ip_address(client))
    except ValueError:
        return "unknown"


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _entry(values: Mapping[str, Any], before: AuditEntry | None) -> AuditEntry:
    """Return a change by one of its lines, and by what an earlier one said."""
    who = {name: value for name, value in values["who"].items() if name in Actor.__annotations__}
    return AuditEntry(
        at=values["at"] if before is None else before.at,
        who=Actor(**who),
        what=values["what"],
        outcome=values["outcome"],
        details={**(before.details if before else {}), **values["details"]},
        reason=values.get("reason"),
    )
