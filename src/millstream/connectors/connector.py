"""What a source connector is: it reads something outside from stated positions on, as batches of records.

What is outside has one or many *splits*: files of a folder, streams of a server, or one alone. Each has a position, which
is JSON that only the connector understands. A batch has records and the positions after them. Both are stored in one
transaction of the log, so the log knows how far each split has been read, and a connector keeps nothing itself.

=================================  =====================================================================
a connector whose guarantee is     holds what it promises if
=================================  =====================================================================
"each once"                        what is read from the same positions on is the same again
"at least once"                    what was not reported by ``stored`` is given again by what is outside
=================================  =====================================================================

Source: Apache Kafka, "Connector Developer Guide" (source partitions and offsets), KIP-618.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

Position: TypeAlias = Any
"""How far a split has been read: JSON."""
Guarantee = Literal["each once", "at least once"]
RECORDS_MAX = 10_000  # records of a batch, about: a transaction has a sync, whatever is in it
BYTES_MAX = 4 << 20  # the same, of their values


@dataclass(frozen=True, slots=True)
class DeadInput:
    """A part of what was read that is no record: it goes to the dead-letter topic.

    Attributes:
        value: Its bytes, or the first of them.
        where: Where it is: ``orders.csv, line 7``.
        reason: What is wrong with it, as a sentence.
    """

    value: bytes
    where: str
    reason: str


@dataclass(slots=True)
class SourceBatch:
    """Records that follow one another, and how far has been read after them.

    Attributes:
        values: One for each record: bytes, or None for a tombstone; a list or an Arrow column of them.
        keys, timestamps_ms, headers: None, or one for each record.
        positions: Of the splits that were read, after these records. None forgets a split.
        dead: What between these records is none.
        ready_ms: When the last of it was there to be read, where that is known.
        tag: For the connector alone: what ``stored`` wants to know.
    """

    values: Sequence[bytes | None] | pa.Array = ()
    keys: Sequence[bytes | None] | pa.Array | None = None
    timestamps_ms: Sequence[int] | pa.Array | None = None
    headers: Sequence[Sequence[tuple[str, bytes]]] | None = None
    positions: dict[str, Position] = field(default_factory=dict)
    dead: Sequence[DeadInput] = ()
    ready_ms: int | None = None
    tag: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing but that there will be more, soon."""
        return not (len(self.values) or self.positions or self.dead)


class SourceReader(Protocol):
    """What reads, from the positions that it was opened with. It is used by one thread."""

    @property
    def alarm(self) -> str:
        """What somebody should do something about; else empty. It does not stop the reader."""

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the next batch; None where nothing more was there within ``wait_s``, and the source has been read to its end.

        An empty batch says that there is nothing now, and more is known to come. Called again and again, also after None. A batch that was returned is stored before the next call.

        Raises:
            RetriableError: what is outside does not respond. The reader is closed; another one is opened from the
                stored positions, after a while, and not before the error's ``retry_after_s``.
            ConflictError: what follows the positions is gone, or is not what it was. The source ends.
            ConfigError: what is outside cannot be read as it was asked for. The source ends.
        """

    def stored(self, batch: SourceBatch) -> None:
        """Note that a batch, and all before it, is durable in the log. It may never be called: after a crash.

        Raises:
            RetriableError: what is outside could not be told; see ``read``.
        """

    def close(self) -> None:
        """End connections. It may never be called, and must not raise."""


class SourceConnector(Protocol):
    """Something outside that can be read into a topic; plain settings, without a connection.

    Attributes:
        kind: A word for it, such as "folder"; positions of another kind are refused.
        origin: Which one it is, such as its address, without secrets; positions of another one are refused.
        guarantee: What ``open`` promises; see the table above.
    """

    @property
    def kind(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def guarantee(self) -> Guarantee: ...

    def open(self, positions: Mapping[str, Position]) -> SourceReader:
        """Return what reads on from these positions: those of all splits that were ever stored.

        Called at the beginning of a run, and after each failure.

        Raises:
            RetriableError: what is outside does not respond.
            ConfigError: it cannot be read so; the message says why, and what to do.
            ConflictError: these are not positions in it.
        """
