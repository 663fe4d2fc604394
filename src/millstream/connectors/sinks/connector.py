"""What a sink connector is: it writes batches of a topic's records to something outside.

A batch has a number, and the log has its bounds before it is written. So whatever is killed, the same records come again
under the same number until the log has noted that they were written: nothing is left out, and the connector keeps
nothing of its own, except as its guarantee needs it.

==================  =================================================================================================
guarantee           holds what it promises if
==================  =================================================================================================
"transaction"       the rows of a batch and the note of the batch are one transaction outside; a batch that is noted
                    already writes nothing, and returns the refused records that were noted with it
"key"               a record replaces or deletes what is outside under its key: writing it again changes nothing
"at least once"     nothing more; the batch's id is given to what is outside, which may know it again
==================  =================================================================================================

Source: Apache Kafka, "Connector Developer Guide" (SinkTask); Apache Flink, FLIP-143 (sinks and their committables).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

SinkGuarantee = Literal["transaction", "key", "at least once"]


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """A record of the topic, whose value is a JSON object: ``row``, or None for a tombstone.

    ``key`` and ``value`` are its bytes as they are in the log.
    """

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    row: Mapping[str, Any] | None


class WrittenNumber(float):
    """A number of a row that is no whole one, and ``text``, as the record has it: a float would round longer ones."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that can never be written, and a sentence that says why: it becomes a dead letter."""

    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class SinkOpening:
    """Who opens a connector: a sink by its name, in one of its runs.

    ``token`` tells this run from all others. ``life`` tells this sink from one of the same name in another log.
    """

    name: str
    topic: str
    life: str
    token: str


@dataclass(frozen=True, slots=True)
class RecordsToWrite:
    """A batch: records in the order of each partition, and where the next one is in every partition, ``positions``.

    There may be none in it: all of them were no JSON, or are gone from the log. ``id`` is of this batch for ever.
    """

    id: str
    number: int
    records: Sequence[SinkRecord]
    positions: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The last batch that what is outside has noted: its number, and its ``positions``."""

    number: int
    positions: Mapping[int, int]


class SinkWriter(Protocol):
    """What writes, for one run. It is used by one thread."""

    @property
    def last(self) -> WrittenBatch | None:
        """The last batch that is noted outside; None if none is. Asked once, before the first batch, of "transaction"."""

    def write(self, batch: RecordsToWrite) -> Sequence[RefusedRecord]:
        """Write a batch; on return it is durable outside, but for the records that are returned: those never will be.

        Called with rising numbers; after a crash or an error again with the last one, the same records and the same id.
        A record that is refused must not keep others from being written.

        Raises:
            RetriableError: what is outside does not respond, or has no room. The writer is closed; another one is opened,
                after a while, and gets the batch again; not before the error's ``retry_after_s``.
            FencedError: a later run of the sink has been opened. This one ends.
            ConfigError: what is outside cannot be written to as it was asked for. The sink ends.
        """

    def close(self) -> None:
        """End connections. It may never be called, and must not raise."""


class SinkConnector(Protocol):
    """Something outside that takes records; plain settings, without a connection.

    Attributes:
        kind: A word for it, such as "http"; a sink of the same name with another kind is refused.
        origin: Which one it is, such as its address, without secrets; another one is refused.
        guarantee: What a repeated batch does; see the table above.
        records_max, bytes_max: How large a batch may be: records, and bytes of their values, about.

    It may have ``every_s``, too: how many seconds are between the end of a batch and the beginning of the next one at least.
    """

    @property
    def kind(self) -> str: ...
    @property
    def origin(self) -> str: ...
    @property
    def guarantee(self) -> SinkGuarantee: ...
    @property
    def records_max(self) -> int: ...
    @property
    def bytes_max(self) -> int: ...

    def open(self, opening: SinkOpening) -> SinkWriter:
        """Return what writes. All that were opened before with this name write nothing more, where that can be had.

        Called at the beginning of a run, and after each failure.

        Raises:
            RetriableError: what is outside does not respond.
            ConfigError: it cannot be written to so; the message says why, and what to do.
        """
