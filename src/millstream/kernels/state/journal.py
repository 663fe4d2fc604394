"""The journal of an operator in one bucket: what a batch learned from outside, durable before it is told.

A batch is repeated after a crash, and may have been told to some sinks by then. What comes from outside (the
answer of a service) may be another one the second time. So an operator writes it to the journal before it
emits what depends on it, and a repetition of the batch reads it there instead of asking again. State cannot
do this: it is rolled back with the batch.

An entry is written once: of two attempts at a batch, the first whose entry is durable counts for both.
Entries are removed once their batch is committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Journal(Protocol):
    """The entries of one operator in one bucket and batch: files in production, a dict in tests."""

    def read(self, name: str) -> bytes | None:
        """Return the entry of a name, durable; None if there is none."""
        ...

    def write(self, name: str, entry: bytes) -> bytes:
        """Keep an entry unless its name has one; return the one that is kept, durable."""
        ...


@dataclass
class MemoryJournal:
    """A journal in a dict, for tests; ``scope`` tells it from those of other batches and operators."""

    entries: dict[tuple[str, ...], bytes] = field(default_factory=dict)
    scope: tuple[str, ...] = ()

    def read(self, name: str) -> bytes | None:
        return self.entries.get((*self.scope, name))

    def write(self, name: str, entry: bytes) -> bytes:
        return self.entries.setdefault((*self.scope, name), entry)
