"""The interface of producers, and their settings, for a folder and for brokers.

``EventLog.producer`` makes one. ``folder.producer`` sends to a log in a folder, ``kafka.producer`` to
brokers. A failure reaches the futures, and the next ``flush`` or ``close``, so that a program that
ignores futures still learns of records that were lost.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, get_args

from millstream.choices import choose
from millstream.client.columns import RecordColumns, TableInput, as_columns
from millstream.client.futures import BulkFuture
from millstream.client.serializers import HeadersInput
from millstream.client.transaction import Transaction, TransactionManager
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, MillstreamError
from millstream.log.compression import COMPRESSIONS, CompressionName
from millstream.log.group_commit import DURABILITIES, Durability
from millstream.record import RecordMetadata

Overload = Literal["block", "drop_newest", "drop_oldest", "spill"]
OVERLOADS: tuple[str, ...] = get_args(Overload)

_Settings = ParamSpec("_Settings")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """How a producer sends. These are the keyword arguments of ``EventLog.producer``.

    Args:
        linger_ms: How long a record may wait for others to share its batch.
        compression: "none", "gzip", "snappy", "lz4" or "zstd", for whole batches.
        durability: When a record is acknowledged. "synced": it is on stable storage. "written":
            it survives the process, not the loss of power. "periodic": the same, with fewer
            syncs. Readers see records only when they are synced.
        overload: What happens when more than ``buffer_bytes`` are in flight. "block": ``send`` waits,
            up to ``block_timeout``. "drop_newest", "drop_oldest": records are dropped, counted,
            and their futures fail. "spill": records wait on disk, in order; needs ``name``.
        buffer_bytes: How much may be in flight. A larger record is sent alone.
        block_timeout: How long ``send`` waits for room, and how long a record is retried for which
            the disk has no room, where the overload policy waits at all.
        transactional_id: For ``producer.transaction()``. An older producer with the same id is
            fenced off.
        transaction_timeout: A transaction that is open for longer is aborted.
        name: Under which records that were spilled are found again after a restart.

    Raises:
        ConfigError: a setting is not possible.
    """

    linger_ms: float = 2.0
    compression: CompressionName = "none"
    durability: Durability = "synced"
    overload: Overload = "block"
    buffer_bytes: int = 64 << 20
    block_timeout: Duration = "1 minute"
    transactional_id: str | None = None
    transaction_timeout: Duration = "1 minute"
    name: str | None = None

    def __post_init__(self) -> None:
        choose("compression", self.compression, COMPRESSIONS)
        choose("durability", self.durability, DURABILITIES)
        choose("overload", self.overload, OVERLOADS)
        _check_minimum("linger_ms", self.linger_ms, 0, "0 or more milliseconds")
        _check_minimum("buffer_bytes", self.buffer_bytes, 1, "1 or more bytes")
        to_us(self.block_timeout, what="block_timeout")
        to_us(self.transaction_timeout, what="transaction_timeout")

    @property
    def block_timeout_s(self) -> float:
        """``block_timeout`` in seconds."""
        return to_us(self.block_timeout, what="block_timeout") / 1e6

    @property
    def transaction_timeout_ms(self) -> int:
        """``transaction_timeout`` in milliseconds."""
        return to_us(self.transaction_timeout, what="transaction_timeout") // 1000


def takes_settings(
    settings: Callable[_Settings, object],
) -> Callable[[Callable[..., _Result]], Callable[Concatenate[Any, _Settings], _Result]]:
    """Give a method the keyword arguments of ``settings``, for type checkers and for ``help``.

    So a producer has each setting in one place, :class:`ProducerSettings`.
    """

    def decorate(
        method: Callable[..., _Result],
    ) -> Callable[Concatenate[Any, _Settings], _Result]:
        shown = inspect.signature(settings)
        self_only = next(iter(inspect.signature(method).parameters.values()))
        method.__signature__ = shown.replace(  # type: ignore[attr-defined]
            parameters=[self_only, *shown.parameters.values()],
            return_annotation=inspect.signature(method).return_annotation,
        )
        return method

    return decorate


class Producer(ABC):
    """Sends records to any topic of one log; see ``EventLog.producer``. Thread-safe.

    Records of one thread for one partition keep their order. Use it in ``with``, or ``close`` it.
    """

    _clock_ms: Callable[[], int]
    _transactions: TransactionManager | None = None

    # -- sending ------------------------------------------------------------------------------

    @abstractmethod
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
        """Send one record; the future gives (partition, offset) once it is acknowledged.

        ``durability`` says when that is; in a transaction, see :meth:`transaction`. The future of a
        record that was spilled waits until the record is in the log.

        Args:
            value: bytes, str, None for a tombstone, or an event: a mapping, a dataclass, a pydantic
                model, with whatever a schema may have: times, dates, durations, Decimals, UUIDs,
                bytes, enums, nested as you like. It is written as JSON, in the forms that topics
                with such a schema read.
            key: bytes, str, or an int (as decimal text). Records with equal keys go to the same
                partition, the one that Kafka's clients choose; without a key, they are chosen round-robin.
            timestamp_ms: When it happened; now, if not given.
            headers: Names with bytes, str or None: a mapping, or pairs, in which a name may occur
                twice.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition; the value is not
                JSON; the producer is transactional, and no transaction is open.
            RecordTooLargeError: the record is larger than 64 MiB.
            OverloadError: there was no room for it for too long; only of producers that block.
            MillstreamError: the producer has failed before; the error says why.
        """

    def send_many(
        self,
        topic: str,
        table: TableInput | None = None,
        *,
        rows: TableInput | None = None,
        key: str | None = None,
        values: Any = None,
        keys: Any = None,
        timestamps_ms: Any = None,
        headers: Any = None,
    ) -> Future[int]:
        """Send many records from columns; the future gives their number once all are acknowledged.

        Much cheaper per record than ``send`` for a log in a folder: partitions are chosen and batches
        encoded by column. Where there is no room, the overload policy holds for each batch. If the
        future fails, some of the records may have been appended.

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
            OverloadError: there was no room for too long; some records may have been accepted.
            MillstreamError: the producer has failed before; the error says why.
        """
        self._check()
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
        bulk = BulkFuture(len(columns.values))
        self._send_columns(topic, columns, bulk)
        if not len(columns.values):
            bulk.add_appended(0)
        return bulk.future

    @abstractmethod
    def _check(self) -> None:
        """Raise the error if nothing is accepted now."""

    @abstractmethod
    def _send_columns(self, topic: str, columns: RecordColumns, bulk: BulkFuture) -> None:
        """Send the records of ``send_many``; without any, only make sure that the topic exists."""

    def transaction(self) -> Transaction:
        """Return a block in which what is sent is committed at its end, or not at all.

        Raises:
            ConfigError: the producer has no transactional id.
        """
        if self._transactions is None:
            raise ConfigError(
                "this producer has no transactional_id; give it one to send in transactions"
            )
        return Transaction(self._transactions)

    # -- waiting, counting, closing -----------------------------------------------------------

    @property
    @abstractmethod
    def dropped(self) -> int:
        """How many records of this producer were dropped for want of room.

        Their futures failed. Those that ``send`` refused with an error do not count. Of spilled
        records also those that the log refused for good.
        """

    @property
    @abstractmethod
    def spilled(self) -> int:
        """How many records are on disk now, waiting for room in the log."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything sent so far is as durable as this producer promises.

        With ``overload="spill"`` also when the log has no room and everything sent is safe on disk:
        ``spilled`` says how many records are there.

        Raises:
            MillstreamError: some records sent since the last flush were not appended; their futures
                say which.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush, and stop; an open transaction is aborted. Calling it again does nothing.

        Raises:
            MillstreamError: as from :meth:`flush`, unless it was raised before.
        """

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


def _check_minimum(what: str, given: float, least: float, allowed: str) -> None:
    if not given >= least:
        raise ConfigError(f"{what} is {given!r}; give {allowed}")
