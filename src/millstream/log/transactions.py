"""The transaction coordinator: records of several partitions, group offsets and a fence, committed together.

A producer registers and gets an identity: a producer id and a producer epoch. Registering the same
transactional id again raises the producer epoch; a producer that still uses the older one is fenced. A
transaction is ended in these steps:

1. Appends of the producer are rejected from now on; everything that it wrote is synced. A crash leaves an
   open transaction without a decision: it is aborted.
2. One commit of control.db: the decision with the first offset of the transaction in each partition,
   the offsets of groups, the fence, the next producer epoch. *From this moment on it is committed.* A crash
   leaves a decision without markers: the next owner appends them.
3. A marker is appended to each partition, and the last stable offset moves past it. A crash leaves
   some partitions with a marker and some without: the next owner appends the rest. A decision identifies its
   transaction by the first offset, so an old decision never ends a new one.

The partitions know their open transactions, so to begin one, or to add a partition, writes nothing.
Every end raises the producer epoch, so a delayed append cannot get into the next transaction.

At an opening, each transaction that is open in some partition is

======================================================  ======================================
case                                                    done
======================================================  ======================================
a decision names this partition and this first offset   ended as it was decided
its producer is unknown, or has a newer producer epoch  aborted
its producer lived in the owner's process               aborted: it died with the owner
any other                                               left open, until its timeout
======================================================  ======================================

Source: Kafka KIP-98 and KIP-890; Jepsen's analysis of Bufstream 0.1.0 for why the
producer epoch must rise.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping

from millstream.errors import (
    ConfigError,
    DiskFullError,
    FencePassedError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.log.batch import CONTROL, TRANSACTIONAL, EncodedBatch
from millstream.log.control import ControlDb
from millstream.log.coordinator_log import CoordinatorLog, OpenPartition
from millstream.log.groups import Offsets, advance_fence, check_offsets, put_offsets
from millstream.log.markers import encode_marker
from millstream.log.producer_identity import (
    NOBODY,
    PRODUCER_EPOCH_MAX,
    TIMEOUT_MS,
    ProducerIdentity,
    TransactionDescription,
    TransactionMetadata,
    check_not_replaced,
    check_registration,
    identity_or_none,
    next_producer_id,
)
from millstream.log.remote_transactions import (
    delete_producers,
    put_end,
    put_in_process,
    put_open,
    put_pending,
    remote_transactions,
)
from millstream.record import TopicPartition

_log = logging.getLogger(__name__)


class TransactionCoordinator:
    """The transaction coordinator of one folder. Thread-safe."""

    def __init__(
        self,
        control: ControlDb,
        log: CoordinatorLog,
        *,
        clock_ms: Callable[[], int],
        running_ms: Callable[[], int],
    ) -> None:
        self._running_ms = running_ms
        self._control = control
        self._log = log
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._unmarked: list[tuple[TopicPartition, EncodedBatch]] = []
        self._producers = {
            row[0]: TransactionMetadata(
                row[0], row[1], row[2], row[3], bool(row[4]), identity_or_none(row[5], row[6])
            )
            for row in control.rows(
                "SELECT producer_id, transactional_id, producer_epoch, timeout_ms, in_process, "
                "previous_id, previous_epoch FROM producers"
            )
        }
        self._by_name = {
            producer.transactional_id: producer
            for producer in self._producers.values()
            if producer.transactional_id is not None
        }

    # -- producers ----------------------------------------------------------------------------

    def register(
        self,
        transactional_id: str | None = None,
        *,
        timeout_ms: int = TIMEOUT_MS,
        in_process: bool = True,
        resumes: ProducerIdentity | None = None,
    ) -> ProducerIdentity:
        """Return an identity that no other producer has; an older one of this name is fenced.

        A transaction that the older one left open is aborted.

        Args:
            in_process: Whether the producer dies with this process.
            resumes: The identity that the producer had, if it was the last one of this name; so one that was
                replaced meanwhile does not fence the newer. A retry, after a response was lost,
                gets the identity that it was given the first time.

        Raises:
            ConfigError: the name or the timeout is not possible.
            ProducerFencedError: ``resumes`` is not the last identity of this name.
            DiskFullError: its next producer epoch has begun, but what the last left open is not yet aborted in
                all partitions; retry with the same ``resumes``.
        """
        check_registration(transactional_id, timeout_ms)
        with self._lock:
            if transactional_id is None and not in_process:
                return self._number()
            known = self._by_name.get(transactional_id) if transactional_id else None
            if resumes is not None:
                check_not_replaced(known, resumes)
            if known is not None and known.has_followed(resumes):
                self._write_unmarked()  # the first response waited for this
                return known.identity
            if known is None or known.following_epoch >= PRODUCER_EPOCH_MAX:
                return self._insert(
                    known, transactional_id, timeout_ms, in_process=in_process, previous=resumes
                )
            self._raise_epoch(known, timeout_ms=timeout_ms, in_process=in_process, previous=resumes)
            self._abort_open(known)
            return known.identity

    def _number(self) -> ProducerIdentity:
        """Return an identity that is not stored: its producer begins no transaction."""
        with self._control.commit() as connection:
            return ProducerIdentity(next_producer_id(connection), 0)

    def _insert(
        self,
        before: TransactionMetadata | None,
        transactional_id: str | None,
        timeout_ms: int,
        *,
        in_process: bool,
        previous: ProducerIdentity | None = None,
    ) -> ProducerIdentity:
        """Create a producer with a new id; it takes the name over from ``before``."""
        if before is not None:
            before.producer_epoch = PRODUCER_EPOCH_MAX
            self._abort_open(before)
        with self._control.commit() as connection:
            if before is not None:
                put_end(connection, before.producer_id, commit=False, now_ms=self._clock_ms())
                connection.execute(
                    "UPDATE producers SET transactional_id = NULL, producer_epoch = ? "
                    "WHERE producer_id = ?",
                    (PRODUCER_EPOCH_MAX, before.producer_id),
                )
            producer_id = next_producer_id(connection)
            connection.execute(
                "INSERT INTO producers VALUES (?, ?, 0, ?, ?, ?, ?, ?)",
                (
                    producer_id,
                    transactional_id,
                    timeout_ms,
                    in_process,
                    self._clock_ms(),
                    *(previous or NOBODY),
                ),
            )
        producer = TransactionMetadata(
            producer_id, transactional_id, 0, timeout_ms, in_process, previous
        )
        self._producers[producer_id] = producer
        if transactional_id is not None:
            self._by_name[transactional_id] = producer
        return ProducerIdentity(producer_id, 0)

    def _raise_epoch(
        self,
        producer: TransactionMetadata,
        *,
        timeout_ms: int,
        in_process: bool,
        previous: ProducerIdentity | None,
    ) -> None:
        """Begin the next producer epoch."""
        following, now_ms = producer.following_epoch, self._clock_ms()
        with self._control.commit() as connection:
            put_end(connection, producer.producer_id, commit=False, now_ms=now_ms)
            connection.execute(
                "UPDATE producers SET producer_epoch = ?, timeout_ms = ?, in_process = ?, "
                "used_ms = ?, previous_id = ?, previous_epoch = ? WHERE producer_id = ?",
                (
                    following,
                    timeout_ms,
                    in_process,
                    now_ms,
                    *(previous or NOBODY),
                    producer.producer_id,
                ),
            )
        producer.producer_epoch, producer.previous = following, previous
        producer.timeout_ms, producer.in_process = timeout_ms, in_process
        producer.begin_pending = False

    # -- one transaction ----------------------------------------------------------------------

    def begin(
        self,
        identity: ProducerIdentity,
        *,
        again: bool = False,
        in_process: bool | None = None,
    ) -> None:
        """Open a transaction.

        Args:
            again: An open one continues; the next owner knows of it, and how it ends, too.
            in_process: Whether the producer dies with this process; as it was if not given.

        Raises:
            ProducerFencedError: a newer producer of this name has taken over.
            ConfigError: one is open already.
            DiskFullError: the markers of the one before are still to be written.
        """
        with self._lock:
            producer = self._checked(identity)
            producer.begin_pending = producer.state == "idle"  # until it is open
            self._write_unmarked()
            if producer.state == "open" and again:
                return
            if producer.state != "idle":
                raise ConfigError(
                    "a transaction of this producer is open already; commit or abort it first"
                )
            moved = in_process is not None and in_process != producer.in_process
            if again or moved:
                with self._control.commit() as connection:
                    if again:
                        put_open(connection, *identity)
                    if moved:
                        put_in_process(
                            connection, identity.producer_id, in_process=bool(in_process)
                        )
            if moved:
                producer.in_process = bool(in_process)
            self._note_open(producer)

    def add_offsets(self, identity: ProducerIdentity, group: str, offsets: Offsets) -> None:
        """Note offsets that are committed when the open transaction is; durable on return.

        Raises:
            ProducerFencedError, TransactionAbortedError: as for :meth:`end`.
            ConfigError: an offset is not possible, or of an unknown topic.
        """
        with self._lock:
            producer = self._checked(identity)
            if producer.state != "open":
                raise TransactionAbortedError(
                    "no transaction of this producer is open; begin one before you add offsets to it"
                )
            check_offsets(group, offsets)
            topic_ids = self._log.topic_ids(sorted({name.topic for name in offsets}))
            with self._control.commit() as connection:
                put_pending(connection, producer.producer_id, group, offsets, topic_ids=topic_ids)

    def admit(self, batch: EncodedBatch) -> None:
        """Reject a batch that belongs to no open transaction. Called while no append runs.

        Raises:
            ProducerFencedError, TransactionAbortedError: as the text says.
        """
        if not batch.attributes & TRANSACTIONAL or batch.attributes & CONTROL:
            return
        stamp = batch.producer
        producer = self._checked(ProducerIdentity(stamp.producer_id, stamp.producer_epoch))
        if producer.state != "open":
            raise TransactionAbortedError(
                "no transaction of this producer is open; begin one before you send"
            )

    def end(
        self,
        identity: ProducerIdentity,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        fence: tuple[str, int] | None = None,
        also: Callable[[sqlite3.Connection], None] | None = None,
        raise_epoch: bool = True,
    ) -> ProducerIdentity:
        """Commit or abort the open transaction; return the identity for the next one.

        Args:
            raise_epoch: False only for clients whose protocol has no field for a new producer epoch.
            offsets: By group, what it has read; committed together with the transaction.
            fence: A writer's name and the id of the batch that this transaction is. It remains until
                a higher one is committed.
            also: Writes what else is committed together with the decision.

        Raises:
            ProducerFencedError: a newer producer of this name has taken over.
            TransactionAbortedError: it was aborted by its timeout, or none is open.
            FencePassedError: a batch with this id or a higher one is committed; this one is aborted.
            ConfigError: an offset is not possible, or of an unknown topic; it is still open.
        """
        with self._lock:
            producer = self._checked(identity)
            if producer.state == "idle" and producer.begin_pending and not commit:
                return identity  # the client does not know that it was never begun
            if producer.state != "open":
                raise TransactionAbortedError(
                    "no transaction of this producer is open; begin one before you end it"
                )
            given = dict(offsets or {}) if commit else {}
            for group, of_group in given.items():
                check_offsets(group, of_group)
            names = sorted({name.topic for of_group in given.values() for name in of_group})
            topic_ids = self._log.topic_ids(names)
            self._block_appends(producer)
            try:
                self._log.sync()
                self._decide(
                    producer,
                    commit=commit,
                    offsets=given,
                    topic_ids=topic_ids,
                    fence=fence if commit else None,
                    also=also if commit else None,
                    raise_epoch=raise_epoch,
                )
            except FencePassedError:
                producer.state = "open"
                self.end(identity, commit=False)
                raise
            except BaseException:
                producer.state = "open"
                raise
            self._write_unmarked_or_warn()
            if raise_epoch and producer.producer_epoch >= PRODUCER_EPOCH_MAX - 1:
                return self._insert(
                    producer,
                    producer.transactional_id,
                    producer.timeout_ms,
                    in_process=producer.in_process,
                )
            return producer.identity

    def _note_open(self, producer: TransactionMetadata) -> None:
        producer.state, producer.begin_pending = "open", False
        producer.started_ms, producer.began_ms = self._clock_ms(), self._running_ms()

    def expire(self) -> int:
        """Abort transactions that are open longer than their timeout; return how many.

        By monotonic time: a clock that jumps ends none.
        """
        expired, running_ms = 0, self._running_ms()
        with self._lock:
            self._write_unmarked_or_warn()
            for producer in list(self._producers.values()):
                too_long = running_ms - producer.began_ms > producer.timeout_ms
                if producer.state == "open" and too_long:
                    _log.warning(
                        "the transaction of producer %s was open for more than %d ms: aborted",
                        producer.transactional_id or producer.producer_id,
                        producer.timeout_ms,
                    )
                    self._abort_expired(producer)
                    expired += 1
        return expired

    def abort_orphaned(self, identity: ProducerIdentity) -> None:
        """Abort the open transaction of a producer that has ended, if this is its last producer epoch."""
        with self._lock:
            producer = self._producers.get(identity.producer_id)
            here = producer is not None and producer.producer_epoch == identity.producer_epoch
            if producer is not None and here and producer.state == "open":
                self._abort_expired(producer)

    def _abort_expired(self, producer: TransactionMetadata) -> None:
        """Abort a transaction whose timeout has passed; it remains open where that cannot be stored."""
        self._block_appends(producer)
        before = producer.identity
        try:
            self._decide(producer, commit=False, previous=before)
        except BaseException:
            producer.state = "open"
            raise
        producer.timed_out_epoch = before.producer_epoch
        self._write_unmarked_or_warn()

    def forget_idle(self, before_ms: int) -> int:
        """Delete producers unused since ``before_ms``; return how many. Open ones remain."""
        with self._lock:
            with self._control.commit() as connection:
                rows = connection.execute(
                    "SELECT producer_id FROM producers WHERE used_ms < ?", (before_ms,)
                ).fetchall()
                idle = [
                    producer_id
                    for (producer_id,) in rows
                    if self._producers[producer_id].state == "idle"
                ]
                connection.executemany(
                    "DELETE FROM producers WHERE producer_id = ?", [(one,) for one in idle]
                )
                delete_producers(connection, idle)
            for producer_id in idle:
                producer = self._producers.pop(producer_id)
                if producer.transactional_id is not None:
                    self._by_name.pop(producer.transactional_id, None)
        return len(idle)

    def identity_of(self, transactional_id: str) -> ProducerIdentity | None:
        """Return the producer of this name; None if there is none."""
        with self._lock:
            known = self._by_name.get(transactional_id)
            return None if known is None else known.identity

    def transactional_producers(self) -> list[TransactionDescription]:
        """Return the producers that have names, by name."""
        with self._lock:
            return [one.describe(name) for name, one in sorted(self._by_name.items())]

    def transactional_count(self) -> int:
        """Return how many producers have names."""
        with self._lock:
            return len(self._by_name)

    def open_in_process(self) -> int:
        """Return how many transactions of producers in this process are open."""
        with self._lock:
            return sum(one.state != "idle" and one.in_process for one in self._producers.values())

    def open_count(self) -> int:
        """Return how many transactions are open."""
        with self._lock:
            return sum(producer.state != "idle" for producer in self._producers.values())

    def recover(self) -> None:
        """End the transactions that the last owner left open, by the table in the module."""
        with self._lock:
            decisions = {
                (row[0], row[1], row[2], row[3]): bool(row[4])
                for row in self._control.rows(
                    "SELECT producer_id, topic_id, partition, first_offset, committed "
                    "FROM decisions"
                )
            }
            for producer_id, remote in remote_transactions(self._control).items():
                producer = self._producers.get(producer_id)
                here = producer is not None and producer.producer_epoch == remote.producer_epoch
                if producer is None or producer.in_process:
                    continue  # it died with the owner, wherever it began
                if here and remote.state == "open":
                    self._note_open(producer)
            for producer_id, places in self._log.open_partitions().items():
                producer = self._producers.get(producer_id)
                for place in places:
                    key = (producer_id, place.topic_id, place.name.partition, place.first_offset)
                    commit = decisions.get(key)
                    newer = producer is None or producer.producer_epoch > place.producer_epoch
                    if commit is None and not newer and producer and not producer.in_process:
                        self._note_open(producer)
                        continue
                    self._append_marker(producer_id, place, commit=bool(commit))
            self._write_unmarked()

    # -- steps --------------------------------------------------------------------------------

    def _checked(self, identity: ProducerIdentity) -> TransactionMetadata:
        producer = self._producers.get(identity.producer_id)
        if producer is None:
            raise ProducerFencedError(
                f"producer {identity.producer_id} is not known to this log; make a new one"
            )
        if identity.producer_epoch == producer.timed_out_epoch:
            raise TransactionAbortedError(
                f"the transaction was open for more than its timeout of {producer.timeout_ms} ms "
                "and was aborted; begin another one and send its records again",
                timed_out=True,
            )
        if identity.producer_epoch != producer.producer_epoch:
            raise ProducerFencedError(
                f"the producer {producer.transactional_id or producer.producer_id!r} has been "
                f"replaced by a newer one (producer epoch {identity.producer_epoch}, now "
                f"{producer.producer_epoch}); close this one"
            )
        return producer

    def _block_appends(self, producer: TransactionMetadata) -> None:
        def close() -> None:
            producer.state = "ending"

        self._log.exclusively(close)

    def _decide(
        self,
        producer: TransactionMetadata,
        *,
        commit: bool,
        offsets: Mapping[str, Offsets] | None = None,
        topic_ids: Mapping[str, str] | None = None,
        fence: tuple[str, int] | None = None,
        also: Callable[[sqlite3.Connection], None] | None = None,
        raise_epoch: bool = True,
        previous: ProducerIdentity | None = None,
    ) -> None:
        """Step 2: store the decision, and note the markers that are due."""
        if not raise_epoch:
            previous = producer.previous
        places = self._log.open_partitions().get(producer.producer_id, [])
        next_epoch, now_ms = producer.producer_epoch + int(raise_epoch), self._clock_ms()
        with self._control.commit() as connection:
            if fence is not None:
                advance_fence(connection, *fence)
            if also is not None:
                also(connection)
            connection.execute(
                "DELETE FROM decisions WHERE producer_id = ?", (producer.producer_id,)
            )
            connection.executemany(
                "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (
                        producer.producer_id,
                        place.topic_id,
                        place.name.partition,
                        place.first_offset,
                        producer.producer_epoch,
                        commit,
                    )
                    for place in places
                ],
            )
            for group, of_group in (offsets or {}).items():
                put_offsets(connection, group, of_group, topic_ids=topic_ids or {}, now_ms=now_ms)
            put_end(connection, producer.producer_id, commit=commit, now_ms=now_ms)
            connection.execute(
                "UPDATE producers SET producer_epoch = ?, used_ms = ?, previous_id = ?, "
                "previous_epoch = ? WHERE producer_id = ?",
                (next_epoch, now_ms, *(previous or NOBODY), producer.producer_id),
            )
        for place in places:
            self._append_marker(producer.producer_id, place, commit=commit)
        producer.producer_epoch, producer.previous = next_epoch, previous
        producer.state = "idle"

    def _abort_open(self, producer: TransactionMetadata) -> None:
        """Abort the transaction of an older producer epoch, which was raised before."""
        self._block_appends(producer)
        for place in self._log.open_partitions().get(producer.producer_id, []):
            self._append_marker(producer.producer_id, place, commit=False)
        producer.state = "idle"
        self._write_unmarked()

    def _append_marker(self, producer_id: int, place: OpenPartition, *, commit: bool) -> None:
        marker = encode_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=place.producer_epoch,
            leader_epoch=self._log.leader_epoch,
            timestamp_ms=self._clock_ms(),
        )
        self._unmarked.append((place.name, marker))

    def _write_unmarked(self) -> None:
        """Step 3: append the markers that are due. Those that fail remain due."""
        if self._unmarked:
            self._log.append_markers(self._unmarked)
            self._unmarked = []

    def _write_unmarked_or_warn(self) -> None:
        try:
            self._write_unmarked()
        except DiskFullError as error:  # decided, and durable: its records are not visible yet
            _log.warning("markers of ended transactions wait for room on the disk: %s", error)
