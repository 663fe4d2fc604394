"""The requests of a broker's clients and their results: operations, and their journals.

A client writes a line before an operation, and another with its result; a client that is killed leaves the
first without the second. Lines are written at once, so a journal that ends in the middle of a line has lost
only that line. Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from sys import intern
from typing import Any, Literal, NamedTuple

Kind = Literal["send", "transaction", "poll", "assign", "commit", "committed"]
Outcome = Literal["ok", "fail", "info"]  # done; not done, for certain; nobody knows
Isolation = Literal["committed", "uncommitted"]
NEVER = 1 << 62  # the time of what did not come to an end


class Place(NamedTuple):
    """A partition."""

    topic: str
    partition: int


@dataclass(slots=True)
class Sent:
    """A record that was sent; ``offset`` as it was acknowledged, ``source`` what it was made from."""

    place: Place
    value: str
    offset: int | None = None
    source: str | None = None


class Read(NamedTuple):
    """A record that was read."""

    place: Place
    offset: int
    value: str


@dataclass(slots=True)
class Operation:
    """One thing that one process did.

    Attributes:
        process: One life of one client.
        number: Counts what the process began, in order.
        outcome: Of a transaction, ``fail`` means that it was certainly aborted.
        commit_began: Of a transaction: when its commit was requested; None if it never was.
        offsets: Of ``commit`` and ``transaction`` what is committed for ``group``, of ``committed`` what
            was found, of ``assign`` where reading begins (-1: wherever it happens to).
    """

    process: str
    number: int
    kind: Kind
    outcome: Outcome = "info"
    began: int = 0
    ended: int = NEVER
    commit_began: int | None = None
    sent: list[Sent] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    offsets: dict[Place, int] = field(default_factory=dict)
    group: str = ""
    isolation: Isolation = "committed"


@dataclass
class History:
    """All operations of a run.

    Attributes:
        complete: Whether at the end, when nothing was going on any more, every partition was read from
            its beginning to its end: what nobody saw is not there.
    """

    operations: list[Operation]
    complete: bool = False


# -- journals ---------------------------------------------------------------------------------


class Journal:
    """The journal of one life of a client."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._next = 0

    def begin(self, kind: Kind, **what: Any) -> int:
        """Write that an operation begins; return its number."""
        number, self._next = self._next, self._next + 1
        self._write({"n": number, "k": kind, "b": time.monotonic_ns(), **_packed(what)})
        return number

    def end(self, number: int, outcome: Outcome, **what: Any) -> None:
        """Write its result; a list of records replaces the one written before."""
        self._write({"n": number, "o": outcome, "e": time.monotonic_ns(), **_packed(what)})

    def commit_began(self, number: int) -> None:
        """Write that the commit of a transaction begins."""
        self._write({"n": number, "a": time.monotonic_ns()})

    def note(self, kind: Kind, began: int, **what: Any) -> None:
        """Write an operation with its result."""
        number, self._next = self._next, self._next + 1
        line = {"n": number, "k": kind, "o": "ok", "b": began, "e": time.monotonic_ns()}
        self._write({**line, **_packed(what)})

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._handle, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _packed(what: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(what)
    if "sent" in packed:
        packed["sent"] = [[*one.place, one.value, one.offset, one.source] for one in what["sent"]]
    if "read" in packed:
        packed["read"] = [[*one.place, one.offset, one.value] for one in what["read"]]
    if "offsets" in packed:
        packed["offsets"] = [[*place, offset] for place, offset in what["offsets"].items()]
    return packed


def read_journals(paths: Iterable[Path]) -> list[Operation]:
    """Return the operations in journals; each file is one process, and named by it."""
    return [one for path in paths for one in _read_journal(path)]


@cache
def _place(topic: str, partition: int) -> Place:
    return Place(topic, partition)  # one for all: a long history has millions


def _read_journal(path: Path) -> list[Operation]:
    found: dict[int, Operation] = {}
    for text in path.read_bytes().splitlines(keepends=True):
        if not text.endswith(b"\n"):
            break
        line = json.loads(text)
        number = line["n"]
        if "k" in line:
            found[number] = Operation(path.stem, number, line["k"], began=line["b"])
        one = found[number]
        one.outcome, one.ended = line.get("o", one.outcome), line.get("e", one.ended)
        one.commit_began = line.get("a", one.commit_began)
        one.group, one.isolation = (
            line.get("group", one.group),
            line.get("isolation", one.isolation),
        )
        if "sent" in line:
            one.sent = [
                Sent(_place(t, p), intern(value), at, source)
                for t, p, value, at, source in line["sent"]
            ]
        if "read" in line:
            one.read = [Read(_place(t, p), at, intern(value)) for t, p, at, value in line["read"]]
        if "offsets" in line:
            one.offsets = {_place(t, p): at for t, p, at in line["offsets"]}
    return list(found.values())
