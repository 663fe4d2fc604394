"""Dead-letter records of a share group: with the archiving, or not at all, whenever the process dies."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from millstream.broker.share.dead_letters import DlqEntry, dead_letter
from millstream.broker.share.partition import SharePartition
from millstream.errors import DiskFullError, UnknownTopicError
from millstream.log.batch_reader import BatchReader
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.reader import LogReader
from millstream.log.share_state import RecordState, ShareKey, SpanRow, put_share, share_state
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
IN = TopicPartition("in", 1)
PERSISTED = [
    SpanRow(1, 2, RecordState.REJECTED, 1),
    SpanRow(2, 3, RecordState.AVAILABLE, 2),
    SpanRow(3, 5, RecordState.EXHAUSTED, 5),
    SpanRow(5, 6, RecordState.ACKNOWLEDGED, 1),
]


class Broker:
    """A log on a simulated disk, with one share partition that has undeliverable records."""

    def __init__(self, seed: int) -> None:
        self.disk = SimulatedDisk(seed)
        self.control = ControlDb(
            sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
            write=True,
            before_commit=self.disk.step,
        )
        self.open()
        self.writer.create_topic("in", partitions=2)
        rows = [SimpleRecord(7, b"k", b"v%d" % number, (("a", b"b"),)) for number in range(6)]
        self.writer.append("in", 1, [encode_records(rows)])
        self.key = ShareKey("g", self.writer.topics()["in"].topic_id, 1)
        with self.control.commit() as connection:
            put_share(connection, self.key, None, SharePartition(0, PERSISTED).persisted())

    def open(self) -> None:
        self.writer = LogWriter(
            FOLDER, files=self.disk, control=self.control, sync_threads=1, background=False
        )

    def dead_letter(self, topic: str = "dead") -> None:
        before = share_state(self.control, self.key)
        partition = SharePartition.of(before)
        entry = DlqEntry(topic, self.key, IN, tuple(partition.undeliverable()))
        partition.archive(entry.spans)
        reader = BatchReader(FOLDER, files=self.disk, control=self.control)
        dead_letter(self.writer, reader, entry, before, partition.persisted())

    def copies(self) -> list[dict]:
        reader = LogReader(
            FOLDER, isolation="read_committed", files=self.disk, control=self.control
        )
        if "dead" not in reader.topics():
            return []
        ((start, end),) = reader.offsets("dead")
        columns = ("offset", "timestamp", "key", "value", "headers")
        return [
            row
            for one in reader.read("dead", 0, start, end, columns=columns)
            for row in one.to_pylist()
        ]

    def states(self) -> dict[int, str]:
        spans = share_state(self.control, self.key).spans
        return {at: one.state for one in spans for at in range(one.first, one.end)}


BEFORE = {1: "rejected", 2: "available", 3: "exhausted", 4: "exhausted", 5: "acknowledged"}
AFTER = {**BEFORE, 1: "archived", 3: "archived", 4: "archived"}


@pytest.mark.parametrize("power_lost", [False, True])
def test_after_a_crash_at_any_step_there_are_both_the_copies_and_the_archived_or_neither(
    power_lost,
) -> None:
    results = []
    for step in range(1, 200):
        broker = Broker(step)
        broker.disk.steps, broker.disk.crash_at = 0, step
        try:
            broker.dead_letter()
            ended = True
        except SimulatedCrash:
            ended = False
        broker.disk.restart(power_lost=power_lost)
        broker.open()
        found, states = [one["value"] for one in broker.copies()], broker.states()
        both = (found, states) == ([b"v1", b"v3", b"v4"], AFTER)
        assert both or (found, states) == ([], BEFORE), f"step {step}: {found} {states}"
        results.append(both)
        if not both:  # what the next owner does
            broker.dead_letter()
            assert ([one["value"] for one in broker.copies()], broker.states()) == (
                [b"v1", b"v3", b"v4"],
                AFTER,
            )
        broker.control.close()
        if ended:
            assert both
            break
    assert ended
    assert results == sorted(results)
    assert set(results) == {False, True}


def test_a_copy_has_all_that_its_record_has_and_says_where_it_came_from_and_why() -> None:
    broker = Broker(1)
    broker.dead_letter()
    first, *_, last = broker.copies()
    assert (first["key"], first["value"], first["timestamp"].timestamp()) == (b"k", b"v1", 0.007)
    headers = {one["key"]: one["value"] for one in first["headers"]}
    assert headers == {
        "a": b"b",
        "__dlq.errors.topic": b"in",
        "__dlq.errors.partition": b"1",
        "__dlq.errors.offset": b"1",
        "__dlq.errors.group": b"g",
        "__dlq.errors.delivery.count": b"1",
        "__dlq.errors.message": b"rejected by a member",
    }
    assert {"key": "__dlq.errors.delivery.count", "value": b"5"} in last["headers"]
    broker.control.close()


def test_what_retention_has_removed_is_archived_without_a_copy() -> None:
    broker = Broker(1)
    broker.writer.delete_records(IN, 4)
    broker.dead_letter()
    assert [one["value"] for one in broker.copies()] == [b"v4"]
    assert broker.states() == AFTER
    broker.control.close()


def test_of_a_record_that_is_too_large_for_the_topic_only_headers_are_written() -> None:
    broker = Broker(1)
    broker.writer.create_topic("dead", settings={"max.message.bytes": "300"})
    large = SimpleRecord(7, b"k", b"v" * 200, (("a", b"b"),))
    broker.writer.append("in", 1, [encode_records([large])])
    with broker.control.commit() as connection:
        before, added = (
            share_state(broker.control, broker.key),
            SpanRow(6, 7, RecordState.REJECTED, 1),
        )
        put_share(
            connection, broker.key, before, SharePartition(0, [*PERSISTED, added]).persisted()
        )
    broker.dead_letter()
    *others, notice = broker.copies()
    assert [one["value"] for one in others] == [b"v1", b"v3", b"v4"]
    headers = {one["key"]: one["value"] for one in notice["headers"]}
    assert (notice["key"], notice["value"], "a" in headers) == (None, None, False)
    assert headers["__dlq.errors.offset"] == b"6"
    assert headers["__dlq.errors.value.omitted"] == b"200 bytes"
    assert broker.states() == {**AFTER, 6: "archived"}
    broker.control.close()


def test_records_are_not_copied_into_the_topic_they_came_from() -> None:
    broker = Broker(1)
    broker.dead_letter("in")
    assert broker.writer.partition(IN).log_end_offset == 6
    assert broker.states() == AFTER
    broker.control.close()


def test_a_full_disk_leaves_the_records_undeliverable_until_there_is_space() -> None:
    broker = Broker(1)
    broker.writer.create_topic("dead")
    broker.disk.capacity_bytes = 0
    with pytest.raises(DiskFullError):
        broker.dead_letter()
    assert broker.states() == BEFORE
    broker.disk.capacity_bytes = None
    broker.dead_letter()
    assert (len(broker.copies()), broker.states()) == (3, AFTER)
    broker.control.close()


def test_nothing_is_copied_for_a_deleted_topic() -> None:
    broker = Broker(1)
    before = share_state(broker.control, broker.key)
    broker.writer.create_topic("dead")
    broker.writer.delete_topic("in")
    entry = DlqEntry("dead", broker.key, TopicPartition("dead", 0), ())
    reader = BatchReader(FOLDER, files=broker.disk, control=broker.control)
    with pytest.raises(UnknownTopicError):
        dead_letter(broker.writer, reader, entry, None, before)
    assert broker.copies() == []
    broker.control.close()
