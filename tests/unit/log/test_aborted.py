"""What was taken back is never shown, whatever happens to the files while they are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from millstream.broker.share.record_ranges import read_interval
from millstream.errors import CorruptionError, OffsetOutOfRangeError
from millstream.log.batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchHeader,
    EncodedBatch,
    ProducerStamp,
    read_header,
    stamp,
)
from millstream.log.batch_reader import BatchReader, FetchedBatches
from millstream.log.control import ControlDb
from millstream.log.decoding import Block, decode
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedDisk

FOLDER = Path("/log")
NAME = TopicPartition("t", 0)
Reading: TypeAlias = tuple[Path, Any, ControlDb]
KEPT = {b"good": 4, b"committed": 2}  # of each key the last: so many there are at least
SETTINGS = {
    "segment.bytes": "300",
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0",
    "delete.retention.ms": "0",
}


def one_record(key: bytes, value: bytes) -> EncodedBatch:
    return encode_records([SimpleRecord(0, key, value)])


def in_transaction(
    writer: LogWriter, who: ProducerIdentity, first: int, keys: list[bytes], value: bytes
) -> None:
    writer.transactions.begin(who)
    for number, key in enumerate(keys, start=first):
        producer = ProducerStamp(*who, number)
        writer.append("t", 0, [stamp(one_record(key, value), producer, transactional=True)])
    writer.transactions.end(who, commit=value != b"ABORTED", raise_epoch=False)


def fill(writer: LogWriter) -> None:
    """Append transactions of one producer, taken back and committed in turn, over many segments."""
    writer.create_topic("t", settings=SETTINGS)
    for number in range(4):
        writer.append("t", 0, [one_record(b"k%d" % number, b"good")])
    who = writer.transactions.register("x")
    in_transaction(writer, who, 0, [b"k0", b"k1", b"k2", b"k3"], b"ABORTED")
    in_transaction(writer, who, 4, [b"c0"], b"committed")
    in_transaction(writer, who, 5, [b"k0", b"k1", b"k2"], b"ABORTED")
    in_transaction(writer, who, 8, [b"c1"], b"committed")
    for number in range(8):
        writer.append("t", 0, [one_record(b"more", b"%d" % number)])


class Disturbed:
    """Files of another program, which calls ``disturb`` before its ``at``-th operation."""

    def __init__(self, disk: SimulatedDisk, at: int, disturb: Callable[[], None]) -> None:
        self.disk, self.at, self.disturb, self.count = disk, at, disturb, 0

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "pread", "names"):
            self.count += 1
            if self.count == self.at:
                self.disturb()
        return getattr(self.disk, name)


def headers(data: bytes) -> Iterator[tuple[int, BatchHeader]]:
    """Yield place and header of each batch; a filler may take offsets of those before it, too."""
    at = 0
    while at < len(data):
        header = read_header(data, at)
        yield at, header
        at += header.size


def marker_key(data: bytes, at: int) -> bytes:
    """Return the key of a control batch's only record."""

    def behind_varint(place: int) -> int:
        return place + 1 if data[place] < 128 else behind_varint(place + 1)

    attributes = behind_varint(at)  # behind the length
    key_length = behind_varint(behind_varint(attributes + 1))  # behind both deltas
    begin = behind_varint(key_length)
    return data[begin : begin + (data[key_length] >> 1)]


def as_a_client_reads(found: FetchedBatches, start: int) -> list[bytes]:
    """Leave out what Kafka's clients do, by their rule, and return the values of the rest.

    From an aborted transaction's first offset on, they leave out what its producer sends, up to the
    producer's next abort marker.
    """
    aborted = sorted(found.aborted, key=lambda one: one.first_offset)
    out: set[int] = set()
    values: list[bytes] = []
    data = b"".join(found.parts)
    for at, header in headers(data):
        while aborted and aborted[0].first_offset < header.next_offset:
            out.add(aborted.pop(0).producer_id)
        if header.attributes & CONTROL:
            if marker_key(data, at + 61) == b"\0\0\0\0":  # version, then type: 0 is abort
                out.discard(header.producer_id)
        elif not (header.attributes & TRANSACTIONAL and header.producer_id in out):
            block = Block(data[at : at + header.size], [(0, header)], "", 0)
            part = decode(block, start, header.next_offset, ("value",))
            values += part["value"].to_pylist()
    return values


def by_fetching(reading: Reading) -> list[bytes]:
    reader, values, at = BatchReader(reading[0], files=reading[1], control=reading[2]), [], 0
    while True:
        found = reader.fetch("t", 0, at, isolation="read_committed", bytes_max=400)
        if found.next_offset == at:
            return values
        values += as_a_client_reads(found, at)
        at = found.next_offset


def by_fetching_all_at_once(reading: Reading) -> list[bytes]:
    reader, values, at = BatchReader(reading[0], files=reading[1], control=reading[2]), [], 0
    while True:
        found = reader.fetch("t", 0, at, isolation="read_committed", bytes_max=1 << 20)
        if found.next_offset == at:
            return values
        values += as_a_client_reads(found, at)
        at = found.next_offset


def by_columns(reading: Reading) -> list[bytes]:
    reader = LogReader(reading[0], files=reading[1], control=reading[2])
    start, end = reader.offsets("t")[0]
    parts = reader.read("t", 0, start, end, columns=("value",), bytes_max=200)
    return [value for part in parts for value in part["value"].to_pylist()]


def by_a_share_group(reading: Reading) -> list[bytes]:
    reader, values, at = BatchReader(reading[0], files=reading[1], control=reading[2]), [], 0
    while True:
        found = read_interval(
            reader, NAME, at, isolation="read_committed", bytes_max=1 << 20, first_whole=True
        )
        if found.end == at:
            return values
        for batch in found.batches:
            ((_, header),) = headers(batch.data)
            part = decode(
                Block(batch.data, [(0, header)], "", 0), at, header.next_offset, ("value",)
            )
            values += part["value"].to_pylist()
        at = found.end


WAYS = {
    "in small fetches": by_fetching,
    "in one fetch": by_fetching_all_at_once,
    "by columns": by_columns,
    "by a share group": by_a_share_group,
}


def compact(writer: LogWriter) -> None:
    for at_ms in (1_000, 2_000):  # markers go in a pass after the one that emptied them
        writer.run_maintenance(at_ms)


def delete(writer: LogWriter) -> None:
    writer.delete_records(NAME, writer.partition(NAME).log_end_offset - 2)


def new_control() -> ControlDb:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    return ControlDb(connection, write=True)


def opened(disk: SimulatedDisk, control: ControlDb) -> LogWriter:
    return LogWriter(
        FOLDER,
        files=disk,
        control=control,
        clock_ms=lambda: 1_000,
        sync_threads=1,
        background=False,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("disturb", [compact, delete])
def test_nothing_taken_back_is_shown_and_nothing_committed_left_out_whenever_files_change(
    way: str, disturb: Callable[[LogWriter], None]
) -> None:
    at = 0
    while True:
        at += 1
        disk, control = SimulatedDisk(0), new_control()
        writer = opened(disk, control)
        fill(writer)
        files = Disturbed(disk, at, partial(disturb, writer))
        try:
            found = WAYS[way]((FOLDER, files, control))
        except OffsetOutOfRangeError:
            assert disturb is delete
            continue
        assert b"ABORTED" not in found, f"step {at}"
        if disturb is compact:
            assert all(found.count(v) >= n for v, n in KEPT.items()), f"step {at}: {found}"
        if files.count < at:
            break
    assert at > 10


def test_a_damaged_entry_is_an_error_until_the_file_is_made_anew() -> None:
    disk, control = SimulatedDisk(0), new_control()
    writer = opened(disk, control)
    fill(writer)
    (folder,) = [FOLDER / "t" / name / "0" for name in disk.names(FOLDER / "t")]
    path = folder / next(name for name in disk.names(folder) if name.endswith(".aborted"))
    writer.close()
    disk.damage(path, 9, b"\xff")
    for way in WAYS.values():
        with pytest.raises(CorruptionError, match=r"cannot be read: entry 0 does not match"):
            way((FOLDER, disk, control))
    opened(disk, control)
    for way in WAYS.values():
        assert b"ABORTED" not in way((FOLDER, disk, control))


@pytest.mark.parametrize("seed", range(12))
def test_after_a_power_cut_nothing_taken_back_is_shown_though_no_owner_came(seed: int) -> None:
    disk, control = SimulatedDisk(seed), new_control()
    writer = opened(disk, control)
    fill(writer)
    writer._state.flush()  # it may have reached the disk before the power went
    disk.restart(power_lost=True)
    for way in WAYS.values():
        found = way((FOLDER, disk, control))
        assert b"ABORTED" not in found
        assert all(found.count(value) >= count for value, count in KEPT.items())
