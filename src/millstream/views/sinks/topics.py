"""Topics of a log as a sink: a batch's records, of all topics, in one transaction with its fence.

The driver writes them through the log's transactional producer. Where the log is a folder, it owns
that, or joins the process that does; the job's own source reads it without either, as ever.

What a crash leaves is the log's business (`log/transactions.py`, `client/kafka/transaction.py`): the
records of a transaction are seen together with its fence, or never. The fence's writer is named after
app, job and checkpoint. A stale run, in this process or another, is fenced by the name of its producer.

A run writes to the topics that there are when it begins; of one that is deleted meanwhile and created
again, it is told at its next batch. Whether they are those of the runs before, the job asks.

A run takes the producer's name before it looks where the fence stands: from then on it stands still,
as what the run before it left open has been ended, one way or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from millstream.client import connect
from millstream.client.address import shown
from millstream.client.open import open_reader
from millstream.client.producer import Producer
from millstream.errors import ConfigError, FencePassedError, FolderOwnedError
from millstream.kernels.frames import SPLIT, TIME
from millstream.kernels.plan import SinkPlan, TopicSinkSpec
from millstream.threads import Threads
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch, check_written
from millstream.views.sinks.topic_records import TopicRecords, to_records

_TRANSACTION_TIMEOUT = "15 minutes"  # the most that a log allows; a batch takes what it takes
_SLICE_ROWS = 50_000


class TopicsSink:
    """Writes to the topics of one log; see :class:`millstream.views.sink.Sink`."""

    has_fence = True

    def __init__(self, log: Path | str, sinks: Sequence[SinkPlan]) -> None:
        """Reach the log for writing, and create the topics that it lacks.

        Raises:
            ConfigError: another process owns the folder and lets nobody join it, or a topic is not as
                it was declared.
        """
        self.name = f"the log {shown(log)}"
        self._specs = {sink.name: _spec(sink) for sink in sinks}
        self._replacing = {sink.name for sink in sinks if sink.replaces}
        self._log = connect(log)
        self._producer: Producer | None = None
        self._writer = ""
        try:
            self.identity = self._connect(log)
            self._compacted = {end.topic: self._create_topic(end) for end in self._specs.values()}
            reader = open_reader(log)
            self._reader = reader.pinned(
                {topic: reader.topic_id(topic) for topic in self._compacted}
            )
        except BaseException:
            self._log.close()
            raise

    def _connect(self, log: Path | str) -> str:
        """Return what tells the log from others, once it can be written to."""
        try:
            return self._log.identity
        except FolderOwnedError as error:
            raise ConfigError(
                f"The app writes to topics of {shown(log)}, which it cannot now: {error}"
            ) from error

    def _create_topic(self, end: TopicSinkSpec) -> bool:
        """Create the topic if it is missing; say whether it is compacted."""
        if end.topic not in self._log.topics():
            self._log.create_topic(end.topic, partitions=end.partitions, cleanup=end.cleanup)
        compacted = "compact" in self._log.topic_settings(end.topic)["cleanup.policy"]
        if compacted != ("compact" in end.cleanup):
            there = "compacted" if compacted else "not compacted"
            raise ConfigError(
                f"The topic {end.topic!r} is {there}, and the app declares it with cleanup="
                f"{end.cleanup!r}. Declare it as it is, or change its setting cleanup.policy."
            )
        return compacted

    def begin_run(self, start: RunStart) -> int | None:
        prefix = f"{start.app}/{start.job}/"
        self._writer = prefix + start.checkpoint_id
        self._producer = self._log.producer(
            transactional_id=f"{start.app}/{start.job}", transaction_timeout=_TRANSACTION_TIMEOUT
        )
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

    def participates(self, part: SinkBatch) -> bool:
        return any(name in part.rows for name in self._specs)

    def commit(self, fence: Fence, part: SinkBatch) -> bool:
        assert self._producer is not None, "a run begins before it commits"
        reached = self._log.fence(self._writer)
        if reached is not None and reached >= fence.batch_id:
            return False
        try:
            with self._producer.transaction() as transaction:
                for name, end in self._specs.items():
                    for records in prefetch(self._records(part, name, end)):
                        self._producer.send_many(
                            end.topic,
                            values=records.values,
                            keys=records.keys,
                            timestamps_ms=records.timestamps_ms,
                            headers=records.headers,
                        )
                for topic in self._compacted:
                    self._reader.topic_id(topic)  # refused, where it was created again
                transaction.fence(self._writer, fence.batch_id)
        except FencePassedError:
            return False
        return True

    def _records(self, part: SinkBatch, name: str, end: TopicSinkSpec) -> Iterator[TopicRecords]:
        """Make the records of one topic; of many rows, a part at a time."""
        rows = part.rows.get(name)
        if rows is None:
            return
        if SPLIT not in rows.columns and TIME in rows.columns:
            # From a source, rows are in the log's order; from an operator, they come as buckets do.
            rows = rows.sort(TIME, maintain_order=True)
        compacted = self._compacted[end.topic]  # then rows are looked at all together
        written = 0
        for some in [rows] if compacted else rows.iter_slices(_SLICE_ROWS):
            for records in to_records(
                some, end, compacted=compacted, replaces=name in self._replacing
            ):
                written += len(records.values)
                yield records
        if not compacted:  # there, a row may take back another of the batch
            check_written(f"the topic {end.topic!r}", rows.height, written)

    def close(self) -> None:
        self._log.close()


def _spec(sink: SinkPlan) -> TopicSinkSpec:
    assert isinstance(sink.spec, TopicSinkSpec)
    return sink.spec


def prefetch(made: Iterator[TopicRecords]) -> Iterator[TopicRecords]:
    """Give what is made, in its order; while one is used, another thread makes the next."""
    with Threads(1, "millstream records") as thread:
        coming = thread.submit(next, made, None)
        while (here := coming.result()) is not None:
            coming = thread.submit(next, made, None)
            yield here
