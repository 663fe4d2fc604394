"""What a state store's statements run on: a connection of SQLite, or of PostgreSQL, within a transaction.

The statements that both stores share are written once, in the SQL that both understand, with ``?`` for a
parameter. What differs (the tables of views, and how a transaction is begun) is each store's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millstream.views.runs.control_files import ResetTarget


class Rows(Protocol):
    """What a statement has returned, and how many rows it changed."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Database(Protocol):
    """Runs statements within one transaction. A ``sqlite3.Connection`` is one."""

    def execute(self, statement: str, parameters: Sequence[Any] = ..., /) -> Rows: ...

    def executemany(self, statement: str, parameters: Iterable[Sequence[Any]], /) -> Rows: ...


@dataclass(frozen=True)
class StoreName:
    """A store in errors: ``shown`` names it, ``place`` is what a reset of the app is told."""

    shown: str
    place: Path | ResetTarget
