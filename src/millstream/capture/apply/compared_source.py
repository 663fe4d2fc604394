"""What a reconciliation asks of a source: all rows of its tables, at one known position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from millstream.capture.apply.applied_table import AppliedTable, Row
from millstream.capture.apply.change_stream import SourceTransaction
from millstream.capture.units import Progress


class ComparedSource(Protocol):
    """A snapshot of a source; for one thread. Close it."""

    shown: str
    """Its address, without secrets."""
    position: str
    """The position of the snapshot in the source."""
    wait_s: float
    """How long capture may take to come to the snapshot."""

    def tables(self, progress: Progress) -> dict[tuple[str, str], bool]:
        """Return the tables of a capture with this progress, and of each whether it was read to its end.

        By their databases and names. Of one that was not, the log may lack deletions.
        """

    def refuse_other(self, progress: Progress) -> None:
        """Return if the source is the one that a capture with this progress reads, and has what that had read before.

        Raises:
            ConfigError: it is another one, or has gone back.
        """

    def has(self, position: str) -> bool:
        """Say whether what was captured at a position is in the snapshot."""

    def columns(self, table: AppliedTable) -> tuple[str, ...]:
        """Return the columns that a table has in the snapshot: none, if it is not there, or may not be seen."""

    def rows(self, table: AppliedTable) -> Iterator[Row]:
        """Yield all rows of a table that has columns, in captured values."""

    def is_covered(self, progress: Progress) -> bool:
        """Say whether a capture with this progress has everything up to the snapshot in the log."""

    def is_after(self, transaction: SourceTransaction) -> bool:
        """Say whether a transaction is not in the snapshot."""

    def is_at(self, position: str) -> bool:
        """Say whether nothing is between the transaction at that position, the last in the snapshot, and it."""

    def close(self) -> None:
        """Let go of the snapshot."""


TakeSnapshot: TypeAlias = Callable[[Sequence[tuple[str, str]]], ComparedSource]
"""Takes a snapshot of a source, in which at least these tables are at its position: their databases and names."""
