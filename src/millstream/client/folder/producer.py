"""Sending records to a log in a folder: gathered in batches, acknowledged when durable.

``send`` puts a record into the queue of the producer and returns a future; a thread of the producer takes the
queued records and hands them to the group commit. The queue is bounded; ``overload`` handles records beyond
the bound.

This module has the API. Behind it: ``buffer`` (what is in flight, in ``producer_batch``, with their
``futures``), ``sender`` (the thread), ``overload`` (what happens when the buffer is full),
``spilling_sender`` with ``spill_drain`` and ``spill`` (records that wait on disk), ``transaction``,
``client/partitioner.py``, ``serializers`` and ``columns``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from millstream.client.columns import RecordColumns
from millstream.client.folder import overload as policies
from millstream.client.folder.buffer import ProducerBuffer
from millstream.client.folder.producer_batch import BulkBatch
from millstream.client.folder.sender import Sender, SendSettings
from millstream.client.folder.spill import SpillQueue
from millstream.client.folder.spilling_sender import SpillingSender
from millstream.client.folder.transaction import FolderTransactionManager
from millstream.client.folder.writer import ProducerWriter
from millstream.client.futures import BulkFuture, SendFuture, SendResult
from millstream.client.partitioner import Partitioner
from millstream.client.producer import Producer, ProducerSettings
from millstream.client.serializers import HeadersInput, encode_record
from millstream.errors import ConfigError, FencedError, OverloadError
from millstream.log.clocks import wall_clock_ms
from millstream.log.encoding import split_columns
from millstream.log.files import DISK, Files
from millstream.log.fork_guard import guard
from millstream.log.owner import read_format
from millstream.log.topics import check_topic_name
from millstream.record import RecordMetadata, TopicPartition


class FolderProducer(Producer):
    """Sends records to a log in a folder.

    Args:
        spill_folder: Where records are spilled to; ``spill/<name>`` in the folder of the log.
        files: The file system of the spill; only tests give another one.
        clock_ms: Milliseconds since 1970; only tests give another clock.
        on_close: Called when the producer is closed, and nothing of it is in flight any more.

    Raises:
        ConfigError: a setting is not possible.
        FolderOwnedError: another producer of this name spills now.
        CorruptionError: the spill is damaged; nothing was changed.
    """

    def __init__(
        self,
        writer: ProducerWriter,
        settings: ProducerSettings,
        *,
        spill_folder: Path | str | None = None,
        files: Files = DISK,
        clock_ms: Callable[[], int] = wall_clock_ms,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        _check_spill(settings, spill_folder)
        self._writer = writer
        self._clock_ms = clock_ms
        self._on_close = on_close
        self._buffer = ProducerBuffer(
            limit_bytes=settings.buffer_bytes, linger_s=settings.linger_ms / 1000
        )
        self._partitioner = Partitioner(writer)
        self._manager: FolderTransactionManager | None = None
        self._spill: SpillQueue | None = None
        self._pid = os.getpid()
        if settings.transactional_id is not None:
            self._transactions = self._manager = FolderTransactionManager(
                writer,
                self._buffer,
                transactional_id=settings.transactional_id,
                timeout_ms=settings.transaction_timeout_ms,
            )
        if settings.overload == "spill":
            assert settings.name is not None, "a spill without a name was refused"
            self._spill = _open_spill_queue(writer, settings.name, spill_folder, files)
        self._sender = self._make_sender(settings)
        self._make_room = self._policy(settings)
        guard(self)
        self._sender.start()

    def _make_sender(self, settings: ProducerSettings) -> Sender:
        retry_s = 0 if settings.overload.startswith("drop") else settings.block_timeout_s
        sending = SendSettings(settings.durability, settings.compression, retry_s)
        on_taken = self._partitioner.switch_partition
        if self._spill is not None:
            return SpillingSender(
                self._writer, self._buffer, sending, spill=self._spill, on_taken=on_taken
            )
        stamp = None if self._manager is None else self._manager.stamp
        return Sender(self._writer, self._buffer, sending, stamp=stamp, on_taken=on_taken)

    def _policy(self, settings: ProducerSettings) -> policies.OverloadPolicy:
        if isinstance(self._sender, SpillingSender):
            return policies.spill(self._buffer, settings.block_timeout_s, self._sender.move_to_disk)
        if settings.overload == "drop_newest":
            return policies.drop_newest(self._buffer)
        if settings.overload == "drop_oldest":
            return policies.drop_oldest(self._buffer)
        return policies.block(self._buffer, settings.block_timeout_s)

    # -- sending ------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: bytes | str | int | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        headers: HeadersInput | None = None,
    ) -> Future[RecordMetadata]:
        if self._buffer.refusal is not None:
            self._buffer.check()
        if timestamp_ms is None:
            timestamp_ms = self._clock_ms()
        raw_key, raw, pairs, size = encode_record(key, value, headers)
        number = self._partitioner.choose(topic, raw_key, partition)
        row = ((topic, number), timestamp_ms, raw_key, raw, pairs, size)
        future = self._buffer.add_record(*row)
        if future is not None:
            return future
        since_s = time.monotonic()
        while future is None:
            refused = self._make_room(size, since_s)
            if refused is not None:
                self._buffer.record_failure(refused, dropped=1)
                return _failed(refused)
            future = self._buffer.add_record(*row)
        return future

    def _check(self) -> None:
        self._buffer.check()

    def _send_columns(self, topic: str, columns: RecordColumns, bulk: BulkFuture) -> None:
        if not len(columns.values):
            self._partitioner.choose(topic, None, None)
        for number, part in self._partitioner.split(topic, columns):
            for batch in split_columns(*part, bytes_max=self._buffer.batch_bytes):
                self._add(BulkBatch(TopicPartition(topic, number), batch, bulk))

    def _add(self, part: BulkBatch) -> None:
        if self._buffer.add_batch(part):
            return
        since_s = time.monotonic()
        while True:
            refused = self._make_room(part.size, since_s)
            if refused is not None:
                self._buffer.record_failure(refused, dropped=part.count)
                part.failed(refused)
                return
            if self._buffer.add_batch(part):
                return

    # -- waiting, counting, closing -----------------------------------------------------------

    @property
    def dropped(self) -> int:
        return self._buffer.dropped

    @property
    def spilled(self) -> int:
        return 0 if self._spill is None else self._spill.count

    def flush(self) -> None:
        if self._buffer.closing:
            raise FencedError("this producer was closed; make another one")
        self._buffer.flush(self._sender.settled())

    def close(self) -> None:
        buffer = self._buffer
        if buffer.closing or os.getpid() != self._pid:
            return
        closed = FencedError("this producer was closed; make another one")
        try:
            if self._manager is not None:
                self._manager.abort_open(closed)
            buffer.refuse(closed)
            if not buffer.reported:
                buffer.flush(self._sender.settled())
        finally:
            buffer.close()
            self._sender.join()
            self._on_close()

    def disable_after_fork(self) -> None:
        """Refuse everything in a forked child: the records belong to the parent."""
        self._buffer.disable(
            FencedError("this producer was made before a fork; make one in the parent only")
        )


def _failed(error: OverloadError) -> SendFuture:
    send_result = SendResult()
    send_result.set_failed(error)
    return SendFuture(send_result, 0)


def _open_spill_queue(
    writer: ProducerWriter, name: str, folder: Path | str | None, files: Files
) -> SpillQueue:
    directory_id = read_format(writer.folder, files)
    assert directory_id is not None, "a log that is open has its FORMAT"
    return SpillQueue(
        writer.folder / "spill" / name if folder is None else Path(folder),
        name=name,
        directory_id=directory_id,
        register=writer.transactions.register,
        files=files,
    )


def _check_spill(settings: ProducerSettings, folder: Path | str | None) -> None:
    if settings.overload != "spill":
        if folder is not None:
            raise ConfigError(
                f"spill_folder is {str(folder)!r}, but overload is {settings.overload!r}; leave it "
                "out, or give overload='spill'"
            )
        return
    if settings.name is None:
        raise ConfigError(
            "overload is 'spill', but the producer has no name; give name=, under which what it "
            "spilled is found again"
        )
    check_topic_name(settings.name)
    if settings.transactional_id is not None:
        raise ConfigError(
            f"overload is 'spill', but the producer {settings.transactional_id!r} is transactional; "
            "what belongs to a transaction cannot outlive it on disk: choose another overload"
        )
