"""The sink for topics: a batch's records, of all topics of a log, in one transaction with its fence.

The driver writes them with the log's transactional producer. Where the log is a folder, the driver owns
it, or connects to its owner; the job's source only reads, and needs neither. On a cluster, tasks send the records
of large outputs to brokers, in a transaction of the driver's (`topic_tasks.py`).

The log decides what a crash leaves (`log/transactions.py`, `client/kafka/transaction.py`): the records of
a transaction are visible together with its fence, or never. The fence's writer is named after app, job
and checkpoint. A stale run, in this process or another, is fenced by its transactional id.

A run writes to the topics that exist when it begins. If one of them is deleted and created again, the
next batch fails. Whether they are the topics of the runs before is checked by the job
(`engine/topic_ids.py`).

A run takes the transactional id before it reads the fence: that ends an open transaction of the run
before, so the fence does not change after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from millstream.client import connect
from millstream.client.address import is_kafka, shown
from millstream.client.open import open_reader
from millstream.client.producer import Producer
from millstream.errors import ConfigError, FencePassedError, FolderOwnedError
from millstream.kernels.plan import SinkPlan, TopicSinkSpec
from millstream.threads import Threads
from millstream.views.coverage import OutputSink, topic_label
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch, check_written
from millstream.views.sinks.topic_records import TopicRecords, records_in_order
from millstream.views.sinks.topic_tasks import TopicStager, TopicTarget, TopicTasks

if TYPE_CHECKING:
    from millstream.client.kafka.log import KafkaLog

_TRANSACTION_TIMEOUT = "15 minutes"  # the most that a log allows; a batch takes what it takes
_RECORD_OVERHEAD_BYTES = (
    128  # what a record has beside key and value, with the batch that it is in: 100 at most
)
_log = logging.getLogger(__name__)


class TopicsSink:
    """Writes to the topics of one log; see :class:`millstream.views.sink.Sink`."""

    has_fence = True

    def __init__(
        self,
        log: Path | str,
        sinks: Sequence[SinkPlan],
        *,
        tasks_write: bool = False,
        on_notice: Callable[[str], None] = _log.warning,
    ) -> None:
        """Reach the log for writing, and create the topics that it lacks.

        ``tasks_write``: there are tasks that can write large outputs. ``on_notice`` is called with one line where
        these topics are the driver's nevertheless.

        Raises:
            ConfigError: another process owns the folder and accepts no connections, or a topic is not
                as it was declared.
        """
        self.name = f"the log {shown(log)}"
        self._specs = {sink.name: _spec(sink) for sink in sinks}
        self._replacing = {sink.name for sink in sinks if sink.replaces}
        self._log = connect(log)
        self._producer: Producer | None = None
        self._tasks_write = tasks_write and is_kafka(log)
        self._on_notice = on_notice
        self._tasks: TopicTasks | None = None
        self._writer = ""
        try:
            self.identity = self._connect(log)
            self._compacted = {
                spec.topic: self._create_topic(spec) for spec in self._specs.values()
            }
            reader = open_reader(log)
            self._reader = reader.pinned(
                {topic: reader.topic_id(topic) for topic in self._compacted}
            )
        except BaseException:
            self._log.close()
            raise

    def _connect(self, log: Path | str) -> str:
        """Return the log's identity, once it can be written to."""
        try:
            return self._log.identity
        except FolderOwnedError as error:
            raise ConfigError(
                f"The app writes to topics of {shown(log)}, which it cannot now: {error}"
            ) from error

    def _create_topic(self, spec: TopicSinkSpec) -> bool:
        """Create the topic if it is missing; return whether it is compacted."""
        if spec.topic not in self._log.topics():
            self._log.create_topic(spec.topic, partitions=spec.partitions, cleanup=spec.cleanup)
        compacted = "compact" in self._log.topic_settings(spec.topic)["cleanup.policy"]
        if compacted != ("compact" in spec.cleanup):
            there = "compacted" if compacted else "not compacted"
            raise ConfigError(
                f"The topic {spec.topic!r} is {there}, and the app declares it with cleanup="
                f"{spec.cleanup!r}. Declare it as it is, or change its setting cleanup.policy."
            )
        return compacted

    def begin_run(self, start: RunStart) -> int | None:
        prefix = f"{start.app}/{start.job}/"
        self._writer = prefix + start.checkpoint_id
        self._take_id(f"{start.app}/{start.job}")
        fences = self._log.fences(prefix)
        others = sorted(batch_id for name, batch_id in fences.items() if name != self._writer)
        if others:
            raise ConfigError(
                f"{self.name} holds batches up to {others[-1]} of {start.job_label} that were made with "
                "another checkpoint, and they cannot be taken back. Restore the app's folder. "
                f"{start.reset_advice} (its topics may then hold records twice), or give the app another "
                "name, and its topics too."
            )
        return fences.get(self._writer)

    def _take_id(self, transactional_id: str) -> None:
        """Fence older runs by the transactional id. One kind of producer has it for the whole run."""
        if self._tasks_write:
            log = cast("KafkaLog", self._log)
            reason = log.why_not_shared()
            if reason is None:
                producer = log.shared_producer(transactional_id, _TRANSACTION_TIMEOUT)
                self._tasks = TopicTasks(producer, self._targets())
                return
            self._on_notice(
                f"Executors don't write to topics of {self.name}: {reason}. The driver writes them, so large outputs "
                "are bounded by one process."
            )
        self._producer = self._log.producer(
            transactional_id=transactional_id, transaction_timeout=_TRANSACTION_TIMEOUT
        )

    def _targets(self) -> dict[str, TopicTarget]:
        return {
            name: TopicTarget.of(
                spec,
                self._log.topic_settings(spec.topic),
                compacted=self._compacted[spec.topic],
                replaces=name in self._replacing,
            )
            for name, spec in self._specs.items()
        }

    def record_bytes_max(self, output: str) -> int | None:
        spec = self._specs.get(output)
        if spec is None:
            return None
        setting = int(self._log.topic_settings(spec.topic)["max.message.bytes"])
        return max(setting - _RECORD_OVERHEAD_BYTES, 1)

    def end_offsets(self) -> Mapping[OutputSink, Sequence[int]]:
        return {
            (name, topic_label(spec.topic)): [end for _, end in self._reader.offsets(spec.topic)]
            for name, spec in self._specs.items()
        }

    def participates(self, part: SinkBatch) -> bool:
        return any(map(part.has, self._specs))

    def stager(self, fence: Fence, output: str) -> TopicStager | None:
        if self._tasks is None or output not in self._specs or self._is_committed(fence):
            return None
        return self._tasks.stager(output)

    def _is_committed(self, fence: Fence) -> bool:
        last = self._log.fence(self._writer)
        return last is not None and last >= fence.batch_id

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        if self._is_committed(fence):
            return False
        try:
            if self._tasks is not None:
                self._tasks.commit(self._writer, fence.batch_id, part, self._check_topics)
            else:
                self._commit_here(fence, part)
        except FencePassedError:
            return False
        return True

    def _commit_here(self, fence: Fence, part: SinkBatch) -> None:
        assert self._producer is not None, "a run begins before it commits"
        with self._producer.transaction() as transaction:
            for name, spec in self._specs.items():
                for records in prefetch(self._records(part, name, spec)):
                    self._producer.send_many(
                        spec.topic,
                        values=records.values,
                        keys=records.keys,
                        timestamps_ms=records.timestamps_ms,
                        headers=records.headers,
                    )
            self._check_topics()
            transaction.fence(self._writer, fence.batch_id)

    def _check_topics(self) -> None:
        """Refuse to commit where a topic was created again: what was sent to it may be in the one before."""
        for topic in self._compacted:
            self._reader.topic_id(topic)

    def _records(self, part: SinkBatch, name: str, spec: TopicSinkSpec) -> Iterator[TopicRecords]:
        """Yield the records of one topic; of many rows, a slice at a time."""
        rows = part.rows.get(name)
        if rows is None:
            return
        compacted = self._compacted[spec.topic]
        written = 0
        for records in records_in_order(
            rows, spec, compacted=compacted, replaces=name in self._replacing
        ):
            written += len(records.values)
            yield records
        if not compacted:  # there, a row may retract another one of the batch
            check_written(f"the topic {spec.topic!r}", rows.height, written)

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()
        self._log.close()


def _spec(sink: SinkPlan) -> TopicSinkSpec:
    assert isinstance(sink.spec, TopicSinkSpec)
    return sink.spec


def prefetch(items: Iterator[TopicRecords]) -> Iterator[TopicRecords]:
    """Yield the items of an iterator; while one is used, another thread makes the next."""
    with Threads(1, "millstream records") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
