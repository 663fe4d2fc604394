"""SourceWriter: batches of a source into a topic, each once, with the positions after them.

Records, dead letters and positions of a batch are one transaction of the log. The log, and not what is outside, knows how
far each split has been read.

====================================  ===================================================================
stopped                               the next run
====================================  ===================================================================
before the commit                     reads the batch again, from the positions before it
after the commit                      goes on after it
an older source of the name wakes up  is fenced off, and stops: ProducerFencedError
====================================  ===================================================================

Positions are in the topic ``<name>.positions``, which is compacted: a record for each split, one for the source (what it
is, and its counts), and one that each run begins with, by which it fences an older one off.

Source: Apache Kafka, KIP-98 (transactions), as KIP-618 uses them for source connectors.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from millstream.client.log import EventLog
from millstream.client.producer import Producer
from millstream.connectors.connector import DeadInput, Position, SourceBatch, SourceConnector
from millstream.errors import ConfigError, ConflictError, CorruptionError, ProducerFencedError

POSITIONS_VERSION = 1
_TRANSACTION_TIMEOUT = "15 minutes"  # as long as Kafka's brokers allow
_READ_OFFSETS = 50_000  # of positions, at once
_SEGMENT_BYTES = (
    16 << 20
)  # positions are read whole when a run begins: closed segments are compacted
TOPIC_LOOK_S = 5.0  # how often it is looked whether the topic was made anew while the source runs
_DEAD_BYTES_MAX = 1 << 20  # of a dead letter's value


@dataclass(frozen=True)
class SourceCounts:
    """How many records and dead letters a source has written, in all runs."""

    records: int = 0
    dead: int = 0


@dataclass
class SourceWriter:
    """Writes batches, and knows the positions in the log. For one thread; use it in ``with``.

    Args:
        token: What tells this run from others of the name.
        again: This run has written before; if a later one has begun since, this one ends.

    Raises:
        ProducerFencedError: a later source of this name has begun.
        ConflictError: the positions are of another source, or by a later version; the topic is not the one that was
            written to.
    """

    log: EventLog
    name: str
    topic: str
    connector: SourceConnector
    partitions: int
    moved: bool = False
    token: str = ""
    again: bool = False
    positions: dict[str, Position] = field(default_factory=dict)
    counts: SourceCounts = SourceCounts()
    _topic_id: str = ""
    _has_dead_topic: bool = False
    _look_s: float = -math.inf
    _begun: str = ""

    @property
    def positions_topic(self) -> str:
        """The topic of the positions."""
        return f"{self.name}.positions"

    @property
    def dead_topic(self) -> str:
        """The topic of dead letters."""
        return f"{self.name}.dead"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            settings = {"segment.bytes": str(_SEGMENT_BYTES)}
            self.log.create_topic(
                self.positions_topic, cleanup="compact", settings=settings, exist_ok=True
            )
            self._producer: Producer = stack.enter_context(
                self.log.producer(
                    transactional_id=f"source.{self.name}",
                    transaction_timeout=_TRANSACTION_TIMEOUT,
                    linger_ms=0,
                    compression="lz4",
                )
            )
            if self.again:
                self._read_positions()
                self._refuse_if_later()
            self._fence_older()
            written = self._read_positions()
            made = self.log.create_topic(self.topic, partitions=self.partitions, exist_ok=True)
            self._topic_id = made.topic_id
            if written is not None:
                self._check(written)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def write(self, batch: SourceBatch) -> None:
        """Write a batch in one transaction; when this returns, it is durable.

        Raises:
            ProducerFencedError: a later source of this name has begun.
            RetriableError: the log has no room, or its broker does not respond.
        """
        counts = SourceCounts(
            self.counts.records + len(batch.values), self.counts.dead + len(batch.dead)
        )
        if batch.dead and not self._has_dead_topic:
            self.log.create_topic(self.dead_topic, exist_ok=True)
            self._has_dead_topic = True
        self._refuse_if_made_anew()
        with self._producer.transaction():
            waiting: list[Future[Any]] = []
            if len(batch.values):
                waiting.append(
                    self._producer.send_many(
                        self.topic,
                        values=batch.values,
                        keys=batch.keys,
                        timestamps_ms=batch.timestamps_ms,
                        headers=_header_rows(batch),
                    )
                )
            waiting += [self._send_dead(dead) for dead in batch.dead]
            for split, position in batch.positions.items():
                text = None if position is None else _position_json(split, position)
                waiting.append(self._send_position({"split": split}, text))
            said = self._source_json(counts, self._splits_after(batch))
            waiting.append(self._send_position({"source": self.name}, said))
            self._producer.flush()
            for sent in waiting:
                sent.result()
        self.counts = counts
        for split, position in batch.positions.items():
            if position is None:
                self.positions.pop(split, None)
            else:
                self.positions[split] = position

    def _splits_after(self, batch: SourceBatch) -> int:
        """Return how many splits have a position after a batch: the next run looks whether it finds as many."""
        known = self.positions
        changes = (
            (place is not None) - (split in known) for split, place in batch.positions.items()
        )
        return len(known) + sum(changes)

    def _refuse_if_made_anew(self) -> None:
        """Look now and then whether the topic is still the one that has the records from before."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + TOPIC_LOOK_S
        found = self.log.topics().get(self.topic)
        if found is None or found.topic_id != self._topic_id:
            raise self._made_anew(self.counts.records)

    def _made_anew(self, records: int) -> ConflictError:
        return ConflictError(
            f"{self.topic!r} is not the topic that the source {self.name!r} wrote to: it was deleted, and lacks the "
            f"{records:,} records from before. Give the source another name: it reads all again."
        )

    def _send_dead(self, dead: DeadInput) -> Future[Any]:
        headers = {"reason": _text(dead.reason), "where": _text(dead.where)}
        if len(dead.value) > _DEAD_BYTES_MAX:
            headers["truncated"] = f"{len(dead.value)} bytes, of which these are the first"
        return self._producer.send(
            self.dead_topic, dead.value[:_DEAD_BYTES_MAX], headers=headers, partition=0
        )

    # ── positions ───────────────────────────────────────────────────────────────────────────

    def _send_position(self, key: dict[str, str], value: bytes | None) -> Future[Any]:
        return self._producer.send(self.positions_topic, value, key=_to_json(key), partition=0)

    def _source_json(self, counts: SourceCounts, splits: int) -> bytes:
        return _to_json(
            {
                "version": POSITIONS_VERSION,
                "kind": self.connector.kind,
                "origin": self.connector.origin,
                "topic": self.topic,
                "topic_id": self._topic_id,
                "records": counts.records,
                "dead": counts.dead,
                "splits": splits,
            }
        )

    def _refuse_if_later(self) -> None:
        if self._begun != self.token:
            raise ProducerFencedError(
                f"another source {self.name!r} has begun. This one ends; run one of a name at a time."
            )

    def _fence_older(self) -> None:
        """Commit a transaction: what an older source has open is aborted, and nothing of it follows."""
        with self._producer.transaction():
            self._send_position({"begun": self.name}, _to_json({"token": self.token}))
            self._producer.flush()

    def _read_positions(self) -> dict[str, Any] | None:
        """Read all positions, in the order in which they were written; return what is said of the source."""
        said: dict[str, Any] | None = None
        self.positions.clear()
        start, end = self.log.offsets(self.positions_topic)[0]
        for first in range(start, end, _READ_OFFSETS):
            last = min(end, first + _READ_OFFSETS)
            table = self.log.read(self.positions_topic, 0, first, last, columns=("key", "value"))
            for key, value in zip(*(column.to_pylist() for column in table.columns), strict=True):
                try:
                    named, found = json.loads(key), None if value is None else json.loads(value)
                except (TypeError, ValueError) as error:
                    raise CorruptionError(
                        f"{self.positions_topic!r} has a record that is no position of a source: {error}. Another program "
                        "wrote into it. Give the source another name."
                    ) from error
                if "source" in named:
                    said = found
                elif "begun" in named and found is not None:
                    self._begun = found["token"]
                elif "split" in named and found is None:
                    self.positions.pop(named["split"], None)
                elif "split" in named:
                    self.positions[named["split"]] = found
        return said

    def _check(self, written: dict[str, Any]) -> None:
        topic, given = self.positions_topic, self.connector
        if written.get("version") != POSITIONS_VERSION:
            raise ConflictError(
                f"{topic!r} was written by another version of Millstream (format {written.get('version')}, here "
                f"{POSITIONS_VERSION}). Use that version, or give the source another name."
            )
        if (written["kind"], written["topic"]) != (given.kind, self.topic):
            raise ConflictError(
                f"the source {self.name!r} reads from {written['kind']} into the topic {written['topic']!r}, and now "
                f"{given.kind} is to be read into {self.topic!r}. Give this one another name."
            )
        if written["origin"] != given.origin and not self.moved:
            raise ConflictError(
                f"the source {self.name!r} reads {written['origin']}, and now {given.origin} is given. If the same data "
                "is there now, say so once: moved=True, --moved. Else give this source another name."
            )
        if written["topic_id"] != self._topic_id:
            raise self._made_anew(written["records"])
        if written.get("splits", len(self.positions)) != len(self.positions):
            raise ConflictError(
                f"{topic!r} has lost positions: of {written['splits']:,} there are {len(self.positions):,}. It must be kept "
                "whole (cleanup.policy=compact, and no other program that deletes from it); what they were of would be read "
                "again. Give the source another name: it reads all again, into another topic."
            )
        self.counts = replace(self.counts, records=written["records"], dead=written["dead"])


def _header_rows(batch: SourceBatch) -> list[list[dict[str, Any]]] | None:
    if batch.headers is None:
        return None
    return [[{"key": name, "value": value} for name, value in row] for row in batch.headers]


def _position_json(split: str, position: Position) -> bytes:
    try:
        return _to_json(position)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the connector gave the position {position!r:.200} of {split!r}, which is no JSON: {error}. Its author "
            "should give numbers, text, lists and objects."
        ) from error


def _to_json(value: object) -> bytes:
    try:
        return json.dumps(
            value, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except UnicodeEncodeError:  # the name of a file may be bytes that are no text
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _text(text: str) -> str:
    """Return text that can be a header: what is no Unicode in it is written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
