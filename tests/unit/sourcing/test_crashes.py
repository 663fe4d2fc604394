"""A store that dies at every operation on the disk: each command is there as a whole, once, or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from unit.sourcing.ledger import ACCOUNT, event_types

from millstream.errors import MillstreamError
from millstream.log.control import ControlDb
from millstream.log.encoding import encode_records
from millstream.log.group_commit import PendingAppend
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.sourcing.aggregate import Folding
from millstream.sourcing.command_queue import CommandQueue, PendingCommand
from millstream.sourcing.lane import Lane
from millstream.sourcing.partition_log import COLUMNS, Append, events_of
from millstream.sourcing.stored_event import Metadata, RawEvent
from millstream.sourcing.stream_index import EventRun, StreamIndex
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")


class DiskPartition:
    """A partition whose log is on a simulated disk."""

    exclusive, topic, topic_id, partition = False, "ledger", "id", 0

    def __init__(self, disk: SimulatedDisk, control: ControlDb) -> None:
        self.writer = LogWriter(
            FOLDER, files=disk, control=control, sync_threads=1, background=False
        )
        if "ledger" not in self.writer.topics():
            self.writer.create_topic("ledger", settings={"segment.bytes": "600"})
        self._reader = LogReader(FOLDER, files=disk, control=control)

    def acquire(self) -> bool:
        return False

    def bounds(self) -> tuple[int, int]:
        return self._reader.bounds("ledger", 0)

    def read(self, start: int, end: int, runs: Sequence[EventRun] = ()) -> Iterator[RawEvent]:
        batches = self._reader.read("ledger", 0, start, end, columns=COLUMNS)
        return events_of("ledger", 0, batches, runs)

    def append_all(self, appends: Sequence[Append]) -> list[int | MillstreamError]:
        (one,) = appends
        append = PendingAppend(
            TopicPartition("ledger", 0), encode_records(one.records), expected_end=one.expected_end
        )
        self.writer.commit([append])
        return [append.offset if append.error is None else append.error]

    def close(self) -> None:
        """The process dies."""


def open_lane(disk: SimulatedDisk, control: ControlDb, index: Path) -> Lane:
    log, events = DiskPartition(disk, control), event_types()
    of_streams = StreamIndex(index, "id", 1)
    folding = Folding(log, of_streams, ACCOUNT, events, 2)
    return Lane(
        log,
        of_streams,
        folding,
        ACCOUNT,
        events,
        clock_ms=lambda: 1,
        partition_of=lambda _: 0,
        cache_max=2,
    )


COMMANDS = [(f"c{at}", "ab"[at % 2], [at + 1, 1][: 1 + at % 2]) for at in range(8)]


def send(lane: Lane, command_id: str, stream_id: str, amounts: list[int]) -> PendingCommand:
    pending = PendingCommand(stream_id, amounts, Metadata(command_id))
    assert isinstance(lane.log, DiskPartition)
    CommandQueue(lane.log.append_all).handle(lane, pending)
    if pending.error is not None:
        raise pending.error
    return pending


@pytest.mark.parametrize("power_lost", [False, True])
@pytest.mark.parametrize("flushes", [False, True], ids=["index behind", "index flushed"])
def test_a_crash_at_any_operation_of_the_disk_loses_and_doubles_nothing(
    tmp_path: Path, power_lost: bool, flushes: bool
) -> None:
    died = 0
    for step in range(1, 400):
        disk = SimulatedDisk(step)
        control = ControlDb(
            sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
            write=True,
            before_commit=disk.step,
        )
        index = tmp_path / f"{step}.db"
        lane = open_lane(disk, control, index)
        disk.steps, disk.crash_at = 0, step
        acknowledged = {}
        try:
            for command in COMMANDS:
                done = send(lane, *command)
                acknowledged[command[0]] = done.version
                if flushes:
                    lane.index.flush()
        except (SimulatedCrash, MillstreamError):
            died += 1
        lane.index._db.close()  # the process is gone; what SQLite has is there
        disk.restart(power_lost=power_lost)
        lane = open_lane(disk, control, index)
        repeated = {}
        for command in COMMANDS:
            done = send(lane, *command)
            if done.repeated:
                repeated[command[0]] = done.version
        assert acknowledged.items() <= repeated.items(), f"step {step}"
        assert len(repeated) <= len(acknowledged) + 1, f"step {step}"
        for stream_id in "ab":
            amounts = [n for _, name, given in COMMANDS if name == stream_id for n in given]
            events = list(lane.folding.raw_events(stream_id))
            assert [event.version for event in events] == list(range(1, len(amounts) + 1))
            assert [event.fields["amount"] for event in events] == amounts, f"step {step}"
            assert lane.current(stream_id).state.total == sum(amounts)
        lane.close()
        if len(acknowledged) == len(COMMANDS):
            break
    assert len(acknowledged) == len(COMMANDS), "the last run died nowhere"
    assert died > 20


@pytest.mark.parametrize("fault", ["fail_sync_at", "fail_write_at"])
def test_a_disk_that_fails_once_loses_and_doubles_nothing(tmp_path: Path, fault: str) -> None:
    for step in range(1, 60):
        disk = SimulatedDisk(step)
        control = ControlDb(
            sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False), write=True
        )
        lane = open_lane(disk, control, tmp_path / f"{fault}{step}.db")
        disk.steps = 0
        setattr(disk, fault, step)
        acknowledged = set()
        for command in COMMANDS:
            try:
                send(lane, *command)
                acknowledged.add(command[0])
            except MillstreamError:
                pass
        lane.index._db.close()
        disk.restart(power_lost=True)
        lane = open_lane(disk, control, tmp_path / f"{fault}{step}.db")
        repeated = {command[0] for command in COMMANDS if send(lane, *command).repeated}
        assert acknowledged <= repeated
        assert sum(lane.current(name).state.total for name in "ab") == sum(
            sum(amounts) for _, _, amounts in COMMANDS
        )
        lane.close()
