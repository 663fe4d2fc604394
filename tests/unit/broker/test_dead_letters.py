"""Copies of records that are given up: with the archiving, or not at all, whenever the process dies."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from millstream.broker.dead_letters import Grave, bury
from millstream.broker.share_partition import Kept, SharePartition, State
from millstream.broker.shares import partition_of, state_of
from millstream.errors import DiskFullError, UnknownTopicError
from millstream.log.batches import BatchReader
from millstream.log.control import ControlDb
from millstream.log.encoding import Row, encode_rows
from millstream.log.reader import LogReader
from millstream.log.shares import ShareKey, put_share, share_state
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
IN = TopicPartition("in", 1)
KEPT = [
    Kept(1, 2, State.REJECTED, 1),
    Kept(2, 3, State.AVAILABLE, 2),
    Kept(3, 5, State.EXHAUSTED, 5),
    Kept(5, 6, State.ACKNOWLEDGED, 1),
]


class House:
    """A log on a simulated disk, with one share partition of which some records are doomed."""

    def __init__(self, seed: int) -> None:
        self.disk = SimulatedDisk(seed)
        self.control = ControlDb(
            sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
            write=True,
            before_commit=self.disk.step,
        )
        self.open()
        self.writer.create_topic("in", partitions=2)
        rows = [Row(7, b"k", b"v%d" % number, (("a", b"b"),)) for number in range(6)]
        self.writer.append("in", 1, [encode_rows(rows)])
        self.key = ShareKey("g", self.writer.topics()["in"].topic_id, 1)
        with self.control.commit() as connection:
            put_share(connection, self.key, None, state_of(SharePartition(0, KEPT)))

    def open(self) -> None:
        self.writer = LogWriter(
            FOLDER, files=self.disk, control=self.control, sync_threads=1, background=False
        )

    def bury(self, topic: str = "dead") -> None:
        before = share_state(self.control, self.key)
        partition = partition_of(before)
        grave = Grave(topic, self.key, IN, tuple(partition.doomed()))
        partition.bury(grave.spans)
        reader = BatchReader(FOLDER, files=self.disk, control=self.control)
        bury(self.writer, reader, grave, before, state_of(partition))

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
    outcomes = []
    for step in range(1, 200):
        house = House(step)
        house.disk.steps, house.disk.crash_at = 0, step
        try:
            house.bury()
            ended = True
        except SimulatedCrash:
            ended = False
        house.disk.restart(power_lost=power_lost)
        house.open()
        found, states = [one["value"] for one in house.copies()], house.states()
        both = (found, states) == ([b"v1", b"v3", b"v4"], AFTER)
        assert both or (found, states) == ([], BEFORE), f"step {step}: {found} {states}"
        outcomes.append(both)
        if not both:  # what the next owner does
            house.bury()
            assert ([one["value"] for one in house.copies()], house.states()) == (
                [b"v1", b"v3", b"v4"],
                AFTER,
            )
        house.control.close()
        if ended:
            assert both
            break
    assert ended
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_copy_has_all_that_its_record_has_and_says_where_it_came_from_and_why() -> None:
    house = House(1)
    house.bury()
    first, *_, last = house.copies()
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
    house.control.close()


def test_what_retention_has_removed_is_archived_without_a_copy() -> None:
    house = House(1)
    house.writer.delete_records(IN, 4)
    house.bury()
    assert [one["value"] for one in house.copies()] == [b"v4"]
    assert house.states() == AFTER
    house.control.close()


def test_of_a_record_that_the_topic_has_no_room_for_there_is_a_notice() -> None:
    house = House(1)
    house.writer.create_topic("dead", settings={"max.message.bytes": "300"})
    large = Row(7, b"k", b"v" * 200, (("a", b"b"),))
    house.writer.append("in", 1, [encode_rows([large])])
    with house.control.commit() as connection:
        before, kept = share_state(house.control, house.key), Kept(6, 7, State.REJECTED, 1)
        put_share(connection, house.key, before, state_of(SharePartition(0, [*KEPT, kept])))
    house.bury()
    *others, notice = house.copies()
    assert [one["value"] for one in others] == [b"v1", b"v3", b"v4"]
    headers = {one["key"]: one["value"] for one in notice["headers"]}
    assert (notice["key"], notice["value"], "a" in headers) == (None, None, False)
    assert headers["__dlq.errors.offset"] == b"6"
    assert headers["__dlq.errors.value.left.out"] == b"200 bytes"
    assert house.states() == {**AFTER, 6: "archived"}
    house.control.close()


def test_copies_do_not_go_where_the_records_came_from() -> None:
    house = House(1)
    house.bury("in")
    assert house.writer.partition(IN).log_end_offset == 6
    assert house.states() == AFTER
    house.control.close()


def test_a_full_disk_leaves_the_records_as_they_were_and_later_there_is_room() -> None:
    house = House(1)
    house.writer.create_topic("dead")
    house.disk.capacity_bytes = 0
    with pytest.raises(DiskFullError):
        house.bury()
    assert house.states() == BEFORE
    house.disk.capacity_bytes = None
    house.bury()
    assert (len(house.copies()), house.states()) == (3, AFTER)
    house.control.close()


def test_nothing_is_copied_for_a_topic_that_is_gone() -> None:
    house = House(1)
    before = share_state(house.control, house.key)
    house.writer.create_topic("dead")
    house.writer.delete_topic("in")
    grave = Grave("dead", house.key, TopicPartition("dead", 0), ())
    reader = BatchReader(FOLDER, files=house.disk, control=house.control)
    with pytest.raises(UnknownTopicError):
        bury(house.writer, reader, grave, None, before)
    assert house.copies() == []
    house.control.close()
