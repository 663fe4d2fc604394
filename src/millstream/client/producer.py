"""Sending records: gathered for a moment, encoded as batches, acknowledged when durable.

``send`` puts a record into the queue of the producer and returns a future; a thread of the producer
takes what is queued and hands it to the group commit. What waits is bounded, and what happens
beyond the bound has a name. A failure reaches the futures, and the next ``flush`` or ``close``, so
that nobody who ignores futures loses records without being told.

This module is the face. Behind it: ``buffer`` (what is on its way, in ``parts``, with their
``futures``), ``sending`` (the thread), ``overload`` (what gives way), ``spilling`` with
``draining`` and ``spill`` (records that wait on disk), ``transaction``, ``partitioning``,
``values`` and ``columns``.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millstream.choices import choose
from millstream.client import overload as policies
from millstream.client.buffer import Buffer
from millstream.client.columns import Table, as_columns
from millstream.client.futures import Outcome, SendFuture, WholeFuture
from millstream.client.overload import OVERLOADS, Overload
from millstream.client.partitioning import Partitioner
from millstream.client.parts import ROW_OVERHEAD, Bulk
from millstream.client.sending import Sender, SendSettings
from millstream.client.spill import Spill
from millstream.client.spilling import SpillingSender
from millstream.client.transaction import Transaction, TransactionSession
from millstream.client.values import GivenHeaders, encode_headers, encode_key, encode_value
from millstream.client.writing import Writer
from millstream.errors import ConfigError, FencedError, MillstreamError, OverloadError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.clocks import wall_clock_ms
from millstream.log.compression import COMPRESSIONS, CompressionName
from millstream.log.encoding import Row, check_record_size, split_columns
from millstream.log.files import DISK, Files
from millstream.log.group_commit import DURABILITIES, Durability
from millstream.log.named_producers import TIMEOUT_MS
from millstream.log.owner import read_format
from millstream.log.topics import check_topic_name
from millstream.record import Place, TopicPartition

__all__ = ["BLOCK_TIMEOUT_S", "BUFFER_BYTES_MAX", "LINGER_MS", "Overload", "Producer"]

LINGER_MS = 2.0
BUFFER_BYTES_MAX = 64 << 20
BLOCK_TIMEOUT_S = 60.0
BULK_ROWS = 100_000  # rows encoded at a time: bounds what send_many holds beside its input
_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


class Producer:
    """Sends records to any topic of one log; see ``EventLog.producer``. Thread-safe.

    Records of one thread for one partition keep their order. Use it in ``with``, or ``close`` it.

    Args:
        linger_ms: How long a record may wait for others to share its batch.
        compression: Of whole batches; see ``log.compression``.
        durability: How much an acknowledgement is worth; see ``log.group_commit``.
        overload: What gives way when there is no room; see ``overload``.
        buffer_bytes: How much may be on its way. A larger record is sent alone.
        block_timeout_s: How long ``send`` waits for room, and how long a record is tried again for
            which the disk has no room, where the overload policy waits at all.
        transactional_id: For :meth:`transaction`; fences an older producer of this id.
        transaction_timeout_ms: A transaction that is open for longer is aborted.
        name: Of the spill; the same name finds the same records again.
        spill_folder: Where records are spilled to; ``spill/<name>`` in the folder of the log.
        files: The file system of the spill; only tests give another one.
        clock_ms: Milliseconds since 1970; only tests give another clock.
        on_close: Called when the producer is closed, and nothing of it is on its way any more.

    Raises:
        ConfigError: a setting is not possible.
        FolderOwnedError: another producer of this name spills now.
        CorruptionError: what waits in the spill is damaged; nothing was changed.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        linger_ms: float = LINGER_MS,
        compression: CompressionName = "none",
        durability: Durability = "synced",
        overload: Overload = "block",
        buffer_bytes: int = BUFFER_BYTES_MAX,
        block_timeout_s: float = BLOCK_TIMEOUT_S,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = TIMEOUT_MS,
        name: str | None = None,
        spill_folder: Path | str | None = None,
        files: Files = DISK,
        clock_ms: Callable[[], int] = wall_clock_ms,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        choose("compression", compression, COMPRESSIONS)
        choose("durability", durability, DURABILITIES)
        choose("overload", overload, OVERLOADS)
        check_least("linger_ms", linger_ms, 0, "0 or more milliseconds")
        check_least("buffer_bytes", buffer_bytes, 1, "1 or more bytes")
        check_least("block_timeout_s", block_timeout_s, 0, "0 or more seconds")
        _check_spill(overload, name, spill_folder, transactional_id)
        self._writer = writer
        self._clock_ms = clock_ms
        self._on_close = on_close
        self._buffer = Buffer(limit_bytes=buffer_bytes, linger_s=linger_ms / 1000)
        self._partitioner = Partitioner(writer)
        self._session: TransactionSession | None = None
        self._spill: Spill | None = None
        self._pid = os.getpid()
        if transactional_id is not None:
            self._session = TransactionSession(
                writer,
                self._buffer,
                transactional_id=transactional_id,
                timeout_ms=transaction_timeout_ms,
            )
        if overload == "spill":
            assert name is not None, "a spill without a name was refused"
            self._spill = _open_spill(writer, name, spill_folder, files)
        patience_s = 0 if overload.startswith("drop") else block_timeout_s
        self._sender = self._make_sender(SendSettings(durability, compression, patience_s))
        self._make_room = self._policy(overload, block_timeout_s)
        _producers.add(self)
        self._sender.start()

    def _make_sender(self, settings: SendSettings) -> Sender:
        turn = self._partitioner.go_on
        if self._spill is not None:
            return SpillingSender(
                self._writer, self._buffer, settings, spill=self._spill, on_taken=turn
            )
        stamp = None if self._session is None else self._session.stamp
        return Sender(self._writer, self._buffer, settings, stamp=stamp, on_taken=turn)

    def _policy(self, overload: Overload, timeout_s: float) -> policies.MakeRoom:
        if isinstance(self._sender, SpillingSender):
            return policies.spill(self._buffer, timeout_s, self._sender.move_to_disk)
        if overload == "drop_newest":
            return policies.drop_newest(self._buffer)
        if overload == "drop_oldest":
            return policies.drop_oldest(self._buffer)
        return policies.block(self._buffer, timeout_s)

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | int | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        headers: GivenHeaders | None = None,
    ) -> Future[Place]:
        """Send one record; the future gives (partition, offset) once it is durable.

        How durable is what the producer was made with; in a transaction, see :meth:`transaction`.
        The future of a record that was spilled waits until the record is in the log.

        Args:
            value: bytes, str, None for a tombstone, or an event: a mapping, a dataclass, a pydantic
                model, with whatever a schema may have: times, dates, durations, Decimals, UUIDs,
                bytes, enums, nested as you like. It is written as JSON, in the forms that topics
                with such a schema read.
            key: bytes, str, or an int (as decimal text). Records with equal keys go to the same
                partition, the one that Kafka's clients choose; without a key, batches take turns.
            timestamp_ms: When it happened; now, if not given.
            headers: Names with bytes, str or None: a mapping, or pairs, in which a name may come
                twice.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition; the value is not
                JSON; the producer is transactional, and no transaction is open.
            RecordTooLargeError: the record is larger than 64 MiB.
            OverloadError: there was no room for it for too long; only of producers that block.
            MillstreamError: the producer has failed before; it names why.
        """
        if self._buffer.refusal is not None:
            self._buffer.check()
        if timestamp_ms is None:
            timestamp_ms = self._clock_ms()
        raw_key = encode_key(key)
        raw = value if type(value) is bytes else encode_value(value)
        pairs = encode_headers(headers) if headers else ()
        size = ROW_OVERHEAD + len(raw_key or b"") + len(raw or b"")
        if pairs:
            size = Row(timestamp_ms, raw_key, raw, pairs).size
        if size > RECORD_BYTES_MAX:
            check_record_size(size)
        number = self._partitioner.choose(topic, raw_key, partition)
        row = ((topic, number), timestamp_ms, raw_key, raw, pairs, size)
        future = self._buffer.add_row(*row)
        if future is not None:
            return future
        since_s = time.monotonic()
        while future is None:
            refused = self._make_room(size, since_s)
            if refused is not None:
                self._buffer.note_failure(refused, dropped=1)
                return _failed(refused)
            future = self._buffer.add_row(*row)
        return future

    def send_many(
        self,
        topic: str,
        table: Table | None = None,
        *,
        rows: Table | None = None,
        key: str | None = None,
        values: Any = None,
        keys: Any = None,
        timestamps_ms: Any = None,
        headers: Any = None,
    ) -> Future[int]:
        """Send many records from columns; the future gives their number once all are durable.

        Much cheaper per record than ``send``: partitions are chosen and batches encoded by column.
        Where there is no room, the overload policy holds for each batch. If the future fails, some
        of the records may have been appended.

        Args:
            table: Of polars, pandas or Arrow, with the columns value and, if wanted, key, timestamp
                and headers, as ``EventLog.read`` returns them; or give ``rows``, or the columns:
            rows: Of polars, pandas or Arrow: each row is sent as a JSON object of its columns, as
                ``send`` writes them.
            key: With ``rows``: the column that is the record's key.
            values: An Arrow array (or a sequence) of bytes or text; null is a tombstone.
            keys: The same for keys; null has none.
            timestamps_ms: Milliseconds as integers, or Arrow timestamps; now, if not given.
            headers: For each record a list of structs with key and value.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic; a column has another type or
                length; the producer is transactional, and no transaction is open.
            RecordTooLargeError: a record is larger than 64 MiB.
            OverloadError: there was no room for too long; some records may have been taken.
            MillstreamError: the producer has failed before; it names why.
        """
        self._buffer.check()
        columns = as_columns(
            table,
            rows=rows,
            key=key,
            values=values,
            keys=keys,
            timestamps_ms=timestamps_ms,
            headers=headers,
            clock_ms=self._clock_ms,
        )
        whole = WholeFuture(len(columns.values))
        if not len(columns.values):
            self._partitioner.choose(topic, None, None)  # the topic is there
            whole.count(0)
        for start in range(0, len(columns.values), BULK_ROWS):
            for number, part in self._partitioner.split(topic, columns.slice(start, BULK_ROWS)):
                for batch in split_columns(*part, bytes_max=self._buffer.part_bytes):
                    self._add(Bulk(TopicPartition(topic, number), batch, whole))
        return whole.future

    def _add(self, part: Bulk) -> None:
        if self._buffer.add_bulk(part):
            return
        since_s = time.monotonic()
        while True:
            refused = self._make_room(part.size, since_s)
            if refused is not None:
                self._buffer.note_failure(refused, dropped=part.count)
                part.failed(refused)
                return
            if self._buffer.add_bulk(part):
                return

    def transaction(self) -> Transaction:
        """Return a block in which what is sent is committed at its end, or not at all.

        Raises:
            ConfigError: the producer has no transactional id.
        """
        if self._session is None:
            raise ConfigError(
                "this producer has no transactional_id; give it one to send in transactions"
            )
        return Transaction(self._session)

    # -- waiting, counting, closing -----------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many records of this producer were given up for want of room.

        Their futures failed. Those that ``send`` refused with an error do not count. Of spilled
        records also those that the log refused for good.
        """
        return self._buffer.dropped

    @property
    def spilled(self) -> int:
        """How many records are on disk now, waiting for room in the log."""
        return 0 if self._spill is None else self._spill.count

    def flush(self) -> None:
        """Return when everything sent so far is as durable as this producer promises.

        With ``overload="spill"`` also when the log has no room and everything sent is safe on disk:
        ``spilled`` says how many records are there.

        Raises:
            MillstreamError: some records sent since the last flush were not appended; their futures
                say which.
        """
        if self._buffer.closing:
            raise FencedError("this producer was closed; make another one")
        self._buffer.flush(self._sender.settled())

    def close(self) -> None:
        """Flush, and stop; an open transaction is aborted. Harmless when called again.

        Raises:
            MillstreamError: as from :meth:`flush`, unless it was raised before.
        """
        buffer = self._buffer
        if buffer.closing or os.getpid() != self._pid:
            return
        closed = FencedError("this producer was closed; make another one")
        try:
            if self._session is not None:
                self._session.abort_open(closed)
            buffer.refuse(closed)
            if not buffer.reported:
                buffer.flush(self._sender.settled())
        finally:
            buffer.close()
            self._sender.join()
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MillstreamError:
            if error is None:
                raise

    def disable_after_fork(self) -> None:
        """Refuse everything in a forked child: the records belong to the parent."""
        self._buffer.disable(
            FencedError("this producer was made before a fork; make one in the parent only")
        )


def _failed(error: OverloadError) -> SendFuture:
    outcome = Outcome()
    outcome.failed(error)
    return SendFuture(outcome, 0)


def _open_spill(writer: Writer, name: str, folder: Path | str | None, files: Files) -> Spill:
    directory_id = read_format(writer.folder, files)
    assert directory_id is not None, "a log that is open has its FORMAT"
    return Spill(
        writer.folder / "spill" / name if folder is None else Path(folder),
        name=name,
        directory_id=directory_id,
        register=writer.transactions.register,
        files=files,
    )


def check_least(what: str, given: float, least: float, allowed: str) -> None:
    """Refuse a number that is too small."""
    if not given >= least:
        raise ConfigError(f"{what} is {given!r}; give {allowed}")


def _check_spill(
    overload: Overload,
    name: str | None,
    folder: Path | str | None,
    transactional_id: str | None,
) -> None:
    if overload != "spill":
        if folder is not None:
            raise ConfigError(
                f"spill_folder is {str(folder)!r}, but overload is {overload!r}; leave it out, or "
                "give overload='spill'"
            )
        return
    if name is None:
        raise ConfigError(
            "overload is 'spill', but the producer has no name; give name=, under which what it "
            "spilled is found again"
        )
    check_topic_name(name)
    if transactional_id is not None:
        raise ConfigError(
            f"overload is 'spill', but the producer {transactional_id!r} is transactional; what "
            "belongs to a transaction cannot outlive it on disk: choose another overload"
        )


def _disable_in_child() -> None:
    for producer in list(_producers):
        producer.disable_after_fork()
    _producers.clear()


os.register_at_fork(after_in_child=_disable_in_child)
