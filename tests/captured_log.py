"""A log that a capture has written, as inputs of a run in process."""

from datetime import UTC, datetime, timedelta

from millstream.testing import Row


def inputs_of(log, *topics):
    """Return the records of topics, each with its key, partition and time, in the order of each partition."""
    return {
        topic: [row for n in range(_partitions(log, topic)) for row in _rows(log, topic, n)]
        for topic in topics
    }


def _partitions(log, topic):
    return len(log.end_offsets(topic))


def _rows(log, topic, partition):
    found = log.read(topic, partition, columns=("key", "value", "timestamp"))
    for key, value, at in zip(
        *(found.column(n).to_pylist() for n in ("key", "value", "timestamp")), strict=True
    ):
        ms = at if isinstance(at, int) else at.replace(tzinfo=UTC).timestamp() * 1000
        yield Row(
            value, key=key, partition=partition, at=_EPOCH + timedelta(milliseconds=round(ms))
        )


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
