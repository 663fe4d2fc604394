"""Topics of a log as a target: a batch's records, of all topics, in one transaction with its fence.

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
from millstream.client.event_log import LogProducer
from millstream.client.kafka.address import shown
from millstream.client.reading import open_reader
from millstream.errors import ConfigError, FencePassedError, FolderOwnedError
from millstream.kernels.frames import LANE, TIME
from millstream.kernels.plan import SinkPlan, TopicEnd
from millstream.threads import Threads
from millstream.views.records import Records, records_of
from millstream.views.schema import Fence
from millstream.views.target import BatchPart, RunStart, check_written

_TRANSACTION_TIMEOUT = "15 minutes"  # the most that a log allows; a batch takes what it takes
_ROWS_AT_A_TIME = 50_000


class TopicsTarget:
    """Writes to the topics of one log; see :class:`millstream.views.target.Target`."""

    remembers = True

    def __init__(self, log: Path | str, sinks: Sequence[SinkPlan]) -> None:
        """Reach the log for writing, and create the topics that it lacks.

        Raises:
            ConfigError: another process owns the folder and lets nobody join it, or a topic is not as
                it was declared.
        """
        self.name = f"the log {shown(log)}"
        self._ends = {sink.name: _end(sink) for sink in sinks}
        self._replacing = {sink.name for sink in sinks if sink.replaces}
        self._log = connect(log)
        self._producer: LogProducer | None = None
        self._writer = ""
        try:
            self.identity = self._reach(log)
            self._compacted = {end.topic: self._prepare(end) for end in self._ends.values()}
            reader = open_reader(log)
            self._reader = reader.pinned(
                {topic: reader.topic_id(topic) for topic in self._compacted}
            )
        except BaseException:
            self._log.close()
            raise

    def _reach(self, log: Path | str) -> str:
        """Return what tells the log from others, once it can be written to."""
        try:
            return self._log.identity
        except FolderOwnedError as error:
            raise ConfigError(
                f"The app writes to topics of {shown(log)}, which it cannot now: {error}"
            ) from error

    def _prepare(self, end: TopicEnd) -> bool:
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
                f"{self.name} holds batches up to {others[-1]} of {start.who} that were made with "
                "another checkpoint, and they cannot be taken back. Restore the app's folder. "
                f"{start.how_to_reset} (its topics may then hold records twice), or give the app another "
                "name, and its topics too."
            )
        return fences.get(self._writer)

    def takes(self, part: BatchPart) -> bool:
        return any(name in part.rows for name in self._ends)

    def commit(self, fence: Fence, part: BatchPart) -> bool:
        assert self._producer is not None, "a run begins before it commits"
        reached = self._log.fence(self._writer)
        if reached is not None and reached >= fence.batch_id:
            return False
        try:
            with self._producer.transaction() as transaction:
                for name, end in self._ends.items():
                    for records in one_ahead(self._records(part, name, end)):
                        self._producer.send_many(
                            end.topic,
                            values=records.values,
                            keys=records.keys,
                            timestamps_ms=records.timestamps_ms,
                            headers=records.headers,
                        )
                for topic in self._compacted:
                    self._reader.topic_id(topic)  # refused, where it was made anew
                transaction.fence(self._writer, fence.batch_id)
        except FencePassedError:
            return False
        return True

    def _records(self, part: BatchPart, name: str, end: TopicEnd) -> Iterator[Records]:
        """Make the records of one topic; of many rows, a part at a time."""
        rows = part.rows.get(name)
        if rows is None:
            return
        if LANE not in rows.columns and TIME in rows.columns:
            # From a source, rows are in the log's order; from an operator, they come as buckets do.
            rows = rows.sort(TIME, maintain_order=True)
        compacted = self._compacted[end.topic]  # then rows are looked at all together
        written = 0
        for some in [rows] if compacted else rows.iter_slices(_ROWS_AT_A_TIME):
            for records in records_of(
                some, end, compacted=compacted, replaces=name in self._replacing
            ):
                written += len(records.values)
                yield records
        if not compacted:  # there, a row may take back another of the batch
            check_written(f"the topic {end.topic!r}", rows.height, written)

    def close(self) -> None:
        self._log.close()


def _end(sink: SinkPlan) -> TopicEnd:
    assert isinstance(sink.end, TopicEnd)
    return sink.end


def one_ahead(made: Iterator[Records]) -> Iterator[Records]:
    """Give what is made, in its order; while one is used, another thread makes the next."""
    with Threads(1, "millstream records") as thread:
        coming = thread.submit(next, made, None)
        while (here := coming.result()) is not None:
            coming = thread.submit(next, made, None)
            yield here
