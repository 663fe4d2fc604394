"""Topics of a cluster of brokers, whose records tasks send in the driver's transaction.

A row's partition is that of its key, by Kafka's own partitioner, as the driver chooses it otherwise: one task gets
the rows of one partition, in the order of the batch, makes their records and sends them
(`client/kafka/shared/`, which says what a crash leaves, and what becomes of attempts that fail, come twice or come
late). Rows without a key go to all partitions in turns, some of each frame, and are in the order of time in each.

A transaction is begun for the first output of a batch that tasks are to stage, or else by the commit. Outputs that tasks
did not stage are sent by the driver, in the same transaction and by the same code. If tasks failed to stage one,
nothing of the transaction counts: it is aborted, and the driver sends the batch in another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from millstream.client.columns import RecordColumns, as_columns
from millstream.client.kafka.extra import kafka_module
from millstream.errors import (
    ConfigError,
    ConflictError,
    MillstreamError,
    RetriableError,
    StagedRowsLostError,
)
from millstream.kernels.frames import TIME
from millstream.kernels.plan import TopicSinkSpec
from millstream.log.clocks import wall_clock_ms
from millstream.log.compression import COMPRESSIONS, CompressionName
from millstream.log.murmur2 import partitions_of
from millstream.views.sink import SinkBatch, check_written
from millstream.views.sinks.topic_records import record_keys, records_in_order
from millstream.views.staging import CannotStageError, PartitionStager, StagedRows

if TYPE_CHECKING:
    from millstream.client.kafka.shared.producer import SharedProducer
    from millstream.client.kafka.shared.sender import SentRecords, SharedTransaction

_TURN_ROWS = 1000  # without a key, so many rows in a row go to one partition


@dataclass(frozen=True)
class TopicTarget:
    """A topic that an output goes to, and how its records are made.

    ``message_bytes_max`` and ``compression`` are settings of the topic.
    """

    spec: TopicSinkSpec
    compacted: bool
    replaces: bool
    message_bytes_max: int
    compression: CompressionName

    @classmethod
    def of(
        cls, spec: TopicSinkSpec, settings: Mapping[str, str], *, compacted: bool, replaces: bool
    ) -> TopicTarget:
        """Return the target of a topic with these settings."""
        name = settings.get("compression.type", "producer")
        compression: CompressionName = next((one for one in COMPRESSIONS if one == name), "none")
        bytes_max = int(settings["max.message.bytes"])
        return cls(spec, compacted, replaces, bytes_max, compression)

    def partitions_of(self, rows: pl.DataFrame, count: int, number: int) -> pl.Series:
        """Return the partition, among ``count``, of each row of a frame with this number."""
        keys = record_keys(rows, self.spec)
        turns = (np.arange(rows.height) // _TURN_ROWS + number) % count
        if keys is None:
            return pl.Series(turns)
        chosen = partitions_of(keys, count)
        return pl.Series(np.where(chosen < 0, turns, chosen))

    def columns(self, rows: pl.DataFrame, now_us: int) -> Iterator[RecordColumns]:
        """Yield the records of rows of one partition; rows without a time get ``now_us``."""
        if TIME not in rows.columns:
            rows = rows.with_columns(pl.lit(now_us).alias(TIME))
        for records in records_in_order(
            rows, self.spec, compacted=self.compacted, replaces=self.replaces
        ):
            yield as_columns(
                None,
                values=records.values,
                keys=records.keys,
                timestamps_ms=records.timestamps_ms,
                headers=records.headers,
                clock_ms=wall_clock_ms,
            )

    def to_options(self) -> dict[str, Any]:
        """Return the settings with which records are sent."""
        return {"message_bytes_max": self.message_bytes_max, "compression": self.compression}


@dataclass(frozen=True)
class TopicStager(PartitionStager):
    """Sends the records of one output in the transaction of a batch."""

    transaction: SharedTransaction
    target: TopicTarget
    count: int
    now_us: int  # one for all attempts: they send the same records

    def partitions_of(self, rows: pl.DataFrame, number: int) -> pl.Series:
        return self.target.partitions_of(rows, self.count, number)

    def stage(self, partition: int, rows: pl.DataFrame) -> Any:
        try:
            return kafka_module("shared.sender").send_partition(
                self.transaction,
                self.target.spec.topic,
                partition,
                self.target.columns(rows, self.now_us),
                **self.target.to_options(),
            )
        except (ConfigError, ConflictError, RetriableError) as error:
            # The driver then finds whether it is this process that cannot, or nobody.
            raise CannotStageError(str(error)) from error


class TopicTasks:
    """The transactions of a run that writes to topics of brokers. Not thread-safe.

    ``targets`` is output → topic.
    """

    def __init__(self, producer: SharedProducer, targets: Mapping[str, TopicTarget]) -> None:
        self._producer = producer
        self._targets = targets
        self._outputs = Counter(target.spec.topic for target in targets.values())
        self._given: set[str] = set()  # outputs that tasks were to stage in the open transaction

    def stager(self, output: str) -> TopicStager | None:
        """Return what stages the rows of an output of the batch that is about to be committed; None if nothing can."""
        target = self._targets.get(output)
        # Two outputs to one topic would number their records alike.
        if target is None or self._outputs[target.spec.topic] > 1:
            return None
        transaction = self._producer.open or self._producer.begin()
        topic = target.spec.topic
        count = self._producer.partition_count(topic)
        self._producer.add_partitions(topic, range(count))
        self._given.add(output)
        return TopicStager(transaction, target, count, time.time_ns() // 1000)

    def abort(self) -> None:
        """Abort the transaction that is open, if one is."""
        self._given.clear()
        self._producer.abort()

    def close(self) -> None:
        """Abort what is open, and close the connections."""
        self._producer.close()

    def commit(
        self, writer: str, batch_id: int, part: SinkBatch, check_topics: Callable[[], None]
    ) -> None:
        """Send what tasks have not sent, and commit all with the fence. ``check_topics`` is called last.

        Raises:
            StagedRowsLostError: tasks have staged an output, and could not stage another one: the driver has to
                send all.
            FencePassedError, MillstreamError: as :meth:`SharedProducer.commit`.
        """
        staged = {name: part.staged[name] for name in self._targets if name in part.staged}
        if self._given != staged.keys():
            self.abort()
            if staged:
                raise StagedRowsLostError(
                    f"the transaction in which tasks sent the rows of {', '.join(sorted(staged))} was aborted, as "
                    "those of another output could not be sent"
                )
        try:
            if self._producer.open is None:
                self._producer.begin()
            sent = [one for name, rows in staged.items() for one in self._check(name, rows)]
            for topic in self._outputs:
                sent += self._send(topic, batch_id, part.rows)
            check_topics()
            self._producer.commit(writer, batch_id, sent)
        except BaseException:
            with suppress(MillstreamError):
                self.abort()
            raise
        self._given.clear()

    def _check(self, output: str, staged: StagedRows) -> Sequence[SentRecords]:
        """Return what tasks have sent of an output, if it is all of it."""
        sent: Sequence[SentRecords] = staged.parts
        assert len({one.partition for one in sent}) == len(sent), "a partition has one task"
        if not self._targets[output].compacted:  # there, a row may retract another one of the batch
            where = f"the topic {self._targets[output].spec.topic!r}"
            check_written(where, staged.rows, sum(one.records for one in sent))
        return sent

    def _send(
        self, topic: str, batch_id: int, rows: Mapping[str, pl.DataFrame]
    ) -> list[SentRecords]:
        """Send the rows of a topic's outputs from here, partition by partition."""
        divided: dict[int, list[tuple[str, pl.DataFrame]]] = {}
        count = self._producer.partition_count(topic)
        for name, target in self._targets.items():
            if target.spec.topic == topic and name in rows and rows[name].height:
                partitions = target.partitions_of(rows[name], count, batch_id).alias("partition")
                numbers = partitions.to_frame().with_row_index("row")
                for (partition,), some in numbers.group_by("partition", maintain_order=True):
                    divided.setdefault(int(partition), []).append((name, rows[name][some["row"]]))
        if not divided:
            return []
        self._producer.add_partitions(topic, sorted(divided))
        written = Counter[str]()
        sent = [
            self._send_partition(topic, partition, parts, written)
            for partition, parts in sorted(divided.items())
        ]
        for name, number in written.items():
            if not self._targets[name].compacted:
                check_written(f"the topic {topic!r}", rows[name].height, number)
        return sent

    def _send_partition(
        self,
        topic: str,
        partition: int,
        parts: Sequence[tuple[str, pl.DataFrame]],
        written: Counter[str],
    ) -> SentRecords:
        sender = self._producer.sender(topic, partition)
        send_columns = kafka_module("shared.sender").send_columns
        now_us = time.time_ns() // 1000
        for name, rows in parts:
            target = self._targets[name]
            columns = target.columns(rows, now_us)
            written[name] += send_columns(sender, columns, **target.to_options())
        return sender.finish()
