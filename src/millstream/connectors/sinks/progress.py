"""SinkProgress: how far a sink has written a topic, in the log.

The topic ``<name>.positions`` is compacted, and has one record for the sink, and one that each run begins with, by which it
fences an older one off. Dead letters are in the transaction that notes their batch.

========================================  =========================================================================
stopped                                   the next run
========================================  =========================================================================
before a batch's bounds are noted         reads the records again, perhaps with others; nothing of them was written
after that, before the batch is noted as  reads the same records again, and writes them as the same batch
written
after that                                goes on after it
an older run wakes up                     is fenced off when it notes something: ProducerFencedError
========================================  =========================================================================

What is outside may have been replaced, or restored from a copy. A connector that notes batches outside is asked for the last:

========================================  =========================================================================
the last one outside is                   then
========================================  =========================================================================
the last one that was noted here          go on
the one whose bounds are noted            write it again: the connector returns what it noted then
an earlier one, or none                   go on after that one, with an alarm: what followed is missing there
a later one                               ConflictError: the log was restored, or it is another sink's
========================================  =========================================================================

Source: Apache Kafka, KIP-98 (transactions).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from millstream.client.log import EventLog
from millstream.client.producer import Producer
from millstream.connectors.sinks.connector import RefusedRecord, SinkConnector, WrittenBatch
from millstream.connectors.sinks.record_batches import ReadRecords
from millstream.errors import ConflictError, CorruptionError, ProducerFencedError

SINK_POSITIONS_VERSION = 1
_TRANSACTION_TIMEOUT = "15 minutes"  # as long as Kafka's brokers allow
_SEGMENT_BYTES = 4 << 20  # it is read whole when a run begins: closed segments are compacted
_DEAD_BYTES_MAX = 1 << 20  # of a dead letter's value


@dataclass(frozen=True)
class SinkPosition:
    """What the log says of a sink. The batch ``number`` is the next; if ``ends`` are given, its bounds are noted.

    ``first`` is where it began, of partitions that were not to be written from their beginning.
    """

    life: str
    first: Mapping[int, int] = field(default_factory=dict)
    number: int = 0
    positions: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, int] | None = None
    records: int = 0
    dead: int = 0


@dataclass
class SinkProgress:
    """Notes batches. For one thread; use it in ``with``.

    Args:
        token: What tells this run from others of the name.
        again: This run has written before; if a later one has begun since, this one ends.

    Raises:
        ProducerFencedError: a later run of this sink has begun.
        ConflictError: the positions are of something else, or by a later version.
    """

    log: EventLog
    name: str
    topic: str
    topic_id: str
    connector: SinkConnector
    token: str
    first: Callable[[], Mapping[int, int]]
    again: bool = False
    state: SinkPosition = field(default_factory=lambda: SinkPosition(secrets.token_hex(4)))
    _begun: str = ""
    _has_dead_topic: bool = False

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
            self.log.create_topic(
                self.positions_topic,
                cleanup="compact",
                settings={"segment.bytes": str(_SEGMENT_BYTES)},
                exist_ok=True,
            )
            self._producer: Producer = stack.enter_context(
                self.log.producer(
                    transactional_id=f"sink.{self.name}",
                    transaction_timeout=_TRANSACTION_TIMEOUT,
                    linger_ms=0,
                )
            )
            if self.again:
                self._read()
                if self._begun != self.token:
                    raise ProducerFencedError(
                        f"another sink {self.name!r} has begun. This one ends; run one of a name at a time."
                    )
            with self._producer.transaction():
                self._send({"begun": self.name}, {"token": self.token})
                self._producer.flush()
            said = self._read()
            if said is None or self._was_mistaken(said):
                first = self.first()
                self.state = replace(self.state, first=first, positions=first)
                self._note(self.state)
            else:
                self._check(said)
                self.state = _state(said)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def reconcile(self, last: WrittenBatch | None) -> str:
        """Compare with what is outside; see the second table. Return an alarm, or nothing.

        Raises:
            ConflictError: what is outside is ahead of the log.
        """
        at = self.state.number
        number = -1 if last is None else last.number
        if number == at - 1 or (number == at and self.state.ends is not None):
            return ""
        where = f"{self.connector.origin} has batches of the sink {self.name!r} up to {number}"
        if number >= at:
            raise ConflictError(
                f"{where}, and the log has written them up to {at - 1}: the log was restored from an older copy, or another "
                "log has a sink of this name. Give the sink another name."
            )
        first = self.state.first
        positions = first if last is None else {**first, **last.positions}
        self.state = replace(self.state, number=number + 1, positions=positions, ends=None)
        self._note(self.state)
        return (
            f"{where}, and the log has written them up to {at - 1}: it was replaced, or restored from an older copy. What "
            "followed is written again."
        )

    def add_partitions(self, starts: Mapping[int, int]) -> None:
        """Note where the first record of more partitions is. No batch may be begun."""
        self._note(replace(self.state, positions={**starts, **self.state.positions}))

    def begin(self, read: ReadRecords) -> None:
        """Note the bounds of the next batch; when this returns, they are durable."""
        positions = {**self.state.positions, **read.starts}
        self._note(replace(self.state, positions=positions, ends=dict(read.ends)))

    def after(self, read: ReadRecords) -> dict[int, int]:
        """Return where the next record of every partition is after a batch."""
        return {**self.state.positions, **read.ends}

    def pending(self) -> tuple[dict[int, int], Mapping[int, int]] | None:
        """Return the bounds of the batch that was begun, and is not noted as written; None if there is none."""
        ends = self.state.ends
        if ends is None:
            return None
        return {partition: self.state.positions[partition] for partition in ends}, ends

    def finish(
        self, read: ReadRecords, refused: Sequence[RefusedRecord], following: ReadRecords | None
    ) -> None:
        """Note that a batch was written, its dead letters, and the bounds of the batch that follows, if there is one.

        Raises:
            ProducerFencedError: a later run of this sink has begun.
            RetriableError: the log has no room, or its broker does not respond.
        """
        state = self.state
        done = replace(
            state,
            number=state.number + 1,
            positions=self.after(read) | ({} if following is None else following.starts),
            ends=None if following is None else dict(following.ends),
            records=state.records + read.count - len(refused),
            dead=state.dead + len(refused),
        )
        if refused and not self._has_dead_topic:
            self.log.create_topic(self.dead_topic, exist_ok=True)
            self._has_dead_topic = True
        self._note(done, [(one, read.raw[one.partition, one.offset]) for one in refused])

    def _note(
        self,
        state: SinkPosition,
        dead: Sequence[tuple[RefusedRecord, tuple[bytes | None, bytes | None, int]]] = (),
    ) -> None:
        with self._producer.transaction():
            waiting = [self._send_dead(one, *raw) for one, raw in dead]
            waiting.append(self._send({"sink": self.name}, self._said(state)))
            self._producer.flush()
            for sent in waiting:
                sent.result()
        self.state = state

    def _send(self, key: dict[str, str], value: dict[str, Any]) -> Any:
        return self._producer.send(
            self.positions_topic,
            json.dumps(value).encode(),
            key=json.dumps(key).encode(),
            partition=0,
        )

    def _send_dead(
        self, one: RefusedRecord, key: bytes | None, value: bytes | None, timestamp_ms: int
    ) -> Any:
        headers = {
            "topic": self.topic,
            "partition": str(one.partition),
            "offset": str(one.offset),
            "step": self.name,
            "reason": one.reason.encode("utf-8", "backslashreplace").decode(),
        }
        if value is not None and len(value) > _DEAD_BYTES_MAX:
            headers["truncated"] = f"{len(value)} bytes, of which these are the first"
            value = value[:_DEAD_BYTES_MAX]
        return self._producer.send(
            self.dead_topic,
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            partition=0,
        )

    # ── what the log says ───────────────────────────────────────────────────────────────────

    def _said(self, state: SinkPosition) -> dict[str, Any]:
        return {
            "version": SINK_POSITIONS_VERSION,
            "kind": self.connector.kind,
            "origin": self.connector.origin,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "life": state.life,
            "first": _to_text_keys(state.first),
            "number": state.number,
            "positions": _to_text_keys(state.positions),
            "ends": None if state.ends is None else _to_text_keys(state.ends),
            "records": state.records,
            "dead": state.dead,
        }

    def _read(self) -> dict[str, Any] | None:
        said: dict[str, Any] | None = None
        table = self.log.read(self.positions_topic, 0, columns=("key", "value"))
        for key, value in zip(*(column.to_pylist() for column in table.columns), strict=True):
            try:
                named, found = json.loads(key), json.loads(value)
                if "sink" in named:
                    said = found
                elif "begun" in named:
                    self._begun = found["token"]
            except (TypeError, ValueError, KeyError) as error:
                raise CorruptionError(
                    f"{self.positions_topic!r} has a record that is no position of a sink: {error}. Another program wrote into "
                    "it. Give the sink another name."
                ) from error
            if "source" in named or "split" in named:
                raise ConflictError(
                    f"{self.positions_topic!r} has the positions of a source. Give the sink another name."
                )
        return said

    def _was_mistaken(self, said: Mapping[str, Any]) -> bool:
        """Return whether the sink was of something else, such as a mistyped address, and never began a batch."""
        if said.get("version") != SINK_POSITIONS_VERSION:
            return False
        was = (said["topic"], said["kind"], said["origin"])
        return said["number"] == 0 and said["ends"] is None and was != self._given

    @property
    def _given(self) -> tuple[str, str, str]:
        return self.topic, self.connector.kind, self.connector.origin

    def _check(self, said: dict[str, Any]) -> None:
        if said.get("version") != SINK_POSITIONS_VERSION:
            raise ConflictError(
                f"{self.positions_topic!r} was written by another version of Millstream (format {said.get('version')}, here "
                f"{SINK_POSITIONS_VERSION}). Use that version, or give the sink another name."
            )
        was = (said["topic"], said["kind"], said["origin"])
        given = self._given
        if was != given:
            raise ConflictError(
                f"the sink {self.name!r} writes the topic {was[0]!r} to {was[2]} ({was[1]}), and now {given[0]!r} is to be written to "
                f"{given[2]} ({given[1]}). Give this one another name: it begins anew."
            )
        if said["topic_id"] != self.topic_id:
            raise ConflictError(
                f"{self.topic!r} is not the topic that the sink {self.name!r} has written: it was deleted and made anew. Give the "
                "sink another name: it begins anew."
            )


def _state(said: Mapping[str, Any]) -> SinkPosition:
    ends = None if said["ends"] is None else to_number_keys(said["ends"])
    return SinkPosition(
        said["life"],
        to_number_keys(said["first"]),
        said["number"],
        to_number_keys(said["positions"]),
        ends,
        said["records"],
        said["dead"],
    )


def _to_text_keys(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in sorted(offsets.items())}


def to_number_keys(offsets: Mapping[str, int]) -> dict[int, int]:
    """Return offsets by partition of what JSON made text keys of."""
    return {int(partition): offset for partition, offset in offsets.items()}
