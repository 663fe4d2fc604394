"""The committed records of one partition, from a place on: the next one can be looked at before it is taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millstream.client.reader import Reader

Parsed = TypeVar("Parsed")
_BYTES = 1 << 20
_WAIT_S = 0.05


@dataclass
class PartitionCursor(Generic[Parsed]):
    """Reads a partition from ``offset`` on. ``parse`` is given offset, key and value of each record.

    Args:
        uncommitted: A reader that sees records before they are committed.
    """

    reader: Reader
    uncommitted: Reader
    topic: str
    partition: int
    offset: int
    parse: Callable[[int, bytes | None, bytes | None], Parsed]
    _records: deque[tuple[int, Parsed]] = field(default_factory=deque)
    _end: int = -1
    _batches: Iterator[None] = field(default_factory=lambda: iter(()))

    @property
    def position(self) -> int:
        """The offset of the next record to take."""
        return self._records[0][0] if self._records else self.offset

    def head(self) -> Parsed | None:
        """Return the next record that is committed, without taking it; None where there is none now."""
        while not self._records:
            try:
                next(self._batches)
            except StopIteration:
                end = self.reader.end_offset(self.topic, self.partition)
                if end <= self.offset:
                    return None
                self._end, self._batches = end, self._read(end)
        return self._records[0][1]

    def take(self) -> Parsed:
        """Take the next record; :meth:`head` has returned it."""
        return self._records.popleft()[1]

    def _read(self, end: int) -> Iterator[None]:
        for rows in self._rows(self.reader, self.offset, end):
            for offset, key, value in rows:
                self._records.append((offset, self.parse(offset, key, value)))
                self.offset = offset + 1
            yield
        self.offset = end  # the last offsets may have no record

    def _rows(
        self, reader: Reader, start: int, end: int
    ) -> Iterator[Iterator[tuple[int, bytes | None, bytes | None]]]:
        """Yield offset, key and value of the records in [start, end), batch by batch."""
        names = ("offset", "key", "value")
        for batch in reader.read(
            self.topic, self.partition, start, end, columns=names, bytes_max=_BYTES
        ):
            yield zip(*(batch.column(name).to_pylist() for name in names), strict=True)

    def wait(self) -> None:
        """Wait a moment for more."""
        ends = [end for _, end in self.reader.offsets(self.topic)]
        self.reader.wait(self.topic, ends, _WAIT_S)

    def next_uncommitted(self, until: Callable[[Parsed], bool]) -> Parsed | None:
        """Return the first record behind the committed ones for which ``until`` is true, if there is one."""
        end = self.uncommitted.end_offset(self.topic, self.partition)
        start = self.reader.end_offset(self.topic, self.partition)
        if end <= start:
            return None
        for rows in self._rows(self.uncommitted, start, end):
            for row in rows:
                parsed = self.parse(*row)
                if until(parsed):
                    return parsed
        return None
