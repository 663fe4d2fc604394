"""What a target promises: the data and how far they go are one.

A batch is whole transactions of the source. ``begin``, then any of ``define``, ``truncate``, ``write`` and ``rows``,
then ``commit`` with the state after the batch, which ``acquire`` returns to the next run. State is JSON, which the
target keeps and does not read. A target that cannot commit several tables at once keeps the state of each with its
rows, and passes over what a table has already.

Only the last one to ``acquire`` a name may commit: every commit checks the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from millstream.capture.apply.applied_table import AppliedTable, Row, RowBatch

PASSWORD_VARIABLE = "MILLSTREAM_APPLY_PASSWORD"  # noqa: S105 - its name


class ApplyTarget(Protocol):
    """A store that changes are applied to; for one thread.

    Raises:
        RetriableError: it does not respond: open it again, and apply the batch again.
        FencedError: another one applies to it.
        ConfigError: a value or a table does not fit, or what is there is not ours. Nothing of the batch remains.
    """

    shown: str
    """Its address, without secrets."""
    batch_s: float
    """How long a batch is to gather changes, while there are no more than a few."""

    def acquire(self, name: str, token: str, *, again: bool) -> str | None:
        """Become the one that applies the changes of ``name``; return the state after the last batch.

        ``again``: this token had it before, and may take it only if nobody else did since.
        """

    def begin(self) -> None:
        """Begin a batch. What an earlier one left uncommitted is gone."""

    def define(self, table: AppliedTable, before: AppliedTable | None) -> None:
        """Make a table as it is defined. Without ``before`` it is new, and must not be there with rows.

        Raises:
            ConfigError: the change cannot be followed; the message has the statements that do it.
        """

    def truncate(self, table: AppliedTable) -> None:
        """Remove all rows of a table."""

    def write(self, batch: RowBatch) -> None:
        """Write the last state of some keys."""

    def rows(self, table: AppliedTable, keys: Sequence[Row]) -> Iterator[Row]:
        """Yield the rows of some keys, as they are in this batch, in captured values."""

    def scan(self, table: AppliedTable) -> Iterator[Row]:
        """Yield all rows of a table, as they are in this batch."""

    def commit(self, state: str) -> None:
        """Make the batch and the state after it durable, both or neither."""

    def rollback(self) -> None:
        """Leave out what was done since ``begin``."""

    def close(self) -> None:
        """Close the connection; a batch that was not committed is gone."""
