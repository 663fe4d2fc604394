"""Behind damage nothing is shown that was not written as a record, whatever values look like."""

from __future__ import annotations

import copy
import sqlite3
import struct
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import CorruptBatchError
from millstream.log import index
from millstream.log.batch import EncodedBatch, walk
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import read_whole
from millstream.log.reader import LogReader
from millstream.log.repair.repair import repair
from millstream.log.segment import segment_name
from millstream.log.writer import LogWriter
from millstream.testing.disk import SimulatedDisk

FOLDER = Path("/log")
EVIL = b"never sent to this topic"


def as_it_lies(batch: EncodedBatch, offset: int) -> bytes:
    return batch.prefix(offset, 1) + batch.tail


def forged(offset: int, count: int = 1) -> bytes:
    """Return what a batch of this topic would look like on disk."""
    return as_it_lies(encode_records([SimpleRecord(0, b"evil", EVIL)] * count), offset)


class Log:
    """A log whose owner has died, on a disk in memory."""

    def __init__(self, batches: list[list[SimpleRecord]]) -> None:
        self.disk = SimulatedDisk(0)
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.control = ControlDb(connection, write=True)
        writer = self.writer()
        writer.create_topic("t")
        for rows in batches:
            writer.append("t", 0, [encode_records(rows)])
        writer.partitions()[0].close()  # the rest of the index is written; there is no seal
        self.sent = dict(enumerate(row.value for rows in batches for row in rows))
        (topic,) = self.disk.names(FOLDER / "t")
        self.path = FOLDER / "t" / topic / "0" / segment_name(0)
        self.data = read_whole(self.disk, self.path)
        self.shows_its_bounds = True

    def writer(self) -> LogWriter:
        return LogWriter(
            FOLDER, files=self.disk, control=self.control, sync_threads=1, background=False
        )

    def harmed(self, data: bytes, lost: str | None = None, *, power_lost: bool = False) -> Log:
        """Return a copy in which the segment is ``data``, and a file is gone."""
        harmed = copy.copy(self)
        harmed.shows_its_bounds = lost != "state.mm" and not power_lost
        harmed.disk = copy.deepcopy(self.disk)
        harmed.disk.restart(power_lost=power_lost)
        handle = harmed.disk.open(self.path, write=True)
        harmed.disk.truncate(handle, 0)
        harmed.disk.pwrite(handle, data, 0)
        harmed.disk.sync(handle)
        if lost is not None:
            harmed.disk.remove(FOLDER / lost if lost == "state.mm" else self.path.with_suffix(lost))
        return harmed

    def shown(self) -> dict[int, bytes | None]:
        """Return the values that a reader is given who goes on behind each damage."""
        reader = LogReader(FOLDER, files=self.disk, control=self.control)
        found: dict[int, bytes | None] = {}
        at, end = reader.offsets("t")[0]
        while at < end:
            try:
                for part in reader.read("t", 0, at, end):
                    values = part["value"].to_pylist()
                    found |= dict(zip(part["offset"].to_pylist(), values, strict=True))
                return found
            except CorruptBatchError as error:
                assert at <= error.start < error.end <= end
                at = error.end
        return found

    def check(self, whole: set[int]) -> None:
        """Make sure that nothing else is ever shown: now, after an opening, after a repair."""
        steps = ["as it is"] if self.shows_its_bounds else []
        for step in (*steps, "opened", "repaired"):
            if step == "opened":
                with self.writer() as writer:
                    (offset,) = writer.append(
                        "t", 0, [encode_records([SimpleRecord(0, b"k", b"next")])]
                    )
                    self.sent = {**self.sent, offset: b"next"}
            if step == "repaired":
                repair(FOLDER, files=self.disk, control=self.control)
            found = self.shown()
            wrong = {at: value for at, value in found.items() if self.sent.get(at, b"?") != value}
            assert not wrong, f"{step}: {wrong}"
            end = LogReader(FOLDER, files=self.disk, control=self.control).offsets("t")[0][1]
            assert set(found) >= {at for at in whole if at < end}, f"{step}: {set(found)}"


def rows_with(inner: bytes, where: str) -> list[SimpleRecord]:
    """Return three records, one with ``inner`` in it; in the last header it ends where they end."""
    plain = SimpleRecord(0, b"k", b"v")
    if where == "header":
        return [plain, plain, SimpleRecord(0, b"k", b"v", (("h", inner[:-1]), ("h", inner)))]
    return [plain, SimpleRecord(0, b"k", inner), plain]


# Three batches of two records, one of three at offset 6 with what was forged, three of two more.
BEFORE = [[SimpleRecord(0, b"k", b"a%d" % n), SimpleRecord(0, b"k", b"b")] for n in range(3)]
AFTER = [[SimpleRecord(0, b"k", b"y%d" % n), SimpleRecord(0, b"k", b"z")] for n in range(3)]


def harmed_in_turn(data: bytes, at: int, size: int, inner: int) -> dict[str, bytes]:
    """Return what each kind of damage makes of the batch at ``at``, in which ``inner`` lies."""

    def with_bytes(place: int, content: bytes) -> bytes:
        return data[:place] + content + data[place + len(content) :]

    to_inner = struct.pack(">i", inner - at - 12)
    return {
        "a bit of a record": with_bytes(at + 62, bytes([data[at + 62] ^ 1])),
        "the base offset": with_bytes(at + 2, b"\1"),
        "the length, which leads to the forged batch": with_bytes(at + 8, to_inner),
        "the length, which leads nowhere": with_bytes(at + 8, b"\1"),
        "length and a record": with_bytes(at + 62, b"??")[: at + 8]
        + to_inner
        + with_bytes(at + 62, b"??")[at + 12 :],
        "the magic byte": with_bytes(at + 16, b"\7"),
        "the CRC": with_bytes(at + 17, b"\7\7\7\7"),
        "the last offset delta": with_bytes(at + 23, struct.pack(">i", 1)),
        "the record count": with_bytes(at + 57, struct.pack(">i", 9)),
        "the header is zeros": with_bytes(at, bytes(61)),
        "the rest is zeros": with_bytes(inner + 30, bytes(at + size - inner - 30)),
        "cut behind what was forged": data[: at + size],
        "cut within what follows it": data[: at + size + 20],
    }


def kinds_of_harm(log: Log, inner: bytes) -> dict[str, bytes]:
    *_, (at, header) = [one for one in walk(log.data, 0) if one[1].base_offset <= 6]
    return harmed_in_turn(log.data, at, header.size, log.data.index(inner))


@pytest.mark.parametrize("where", ["value", "header"])
@pytest.mark.parametrize("batches_behind", [0, 3])
@pytest.mark.parametrize("forged_at", [6, 9, 10])
@pytest.mark.parametrize("entries", [True, False])
def test_a_value_that_is_a_batch_is_never_shown_as_one(
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    batches_behind: int,
    forged_at: int,
    entries: bool,
) -> None:
    monkeypatch.setattr(index, "INDEX_BYTES", 100 if entries else 8192)
    inner = forged(forged_at, 2)
    log = Log([*BEFORE, rows_with(inner, where), *AFTER[:batches_behind]])
    for harmed in kinds_of_harm(log, inner).values():
        log.harmed(harmed).check(set(range(6)))
        log.harmed(harmed, power_lost=True).check(set(range(6)))
        log.harmed(harmed, ".idx" if entries else "state.mm").check(set(range(6)))


@pytest.mark.parametrize("entries", [True, False])
def test_what_is_whole_behind_one_damaged_batch_is_read(
    monkeypatch: pytest.MonkeyPatch, entries: bool
) -> None:
    monkeypatch.setattr(index, "INDEX_BYTES", 100 if entries else 8192)
    inner = forged(9, 2)
    log = Log([*BEFORE, rows_with(inner, "value"), *AFTER])
    unproved = {"the last offset delta", "length and a record", "the header is zeros"}
    for kind, harmed in kinds_of_harm(log, inner).items():
        if not kind.startswith("cut"):
            behind = range(9, 15) if entries or kind not in unproved else ()
            log.harmed(harmed).check({*range(6), *behind})


harms = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=90)), max_size=3)
forgeries = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 3), st.sampled_from(["value", "header"])),
    min_size=1,
    max_size=4,
)


@given(
    forgeries=forgeries,
    harms=harms,
    cut=st.none() | st.floats(0, 1),
    entries=st.booleans(),
    power_lost=st.booleans(),
)
@settings(max_examples=some(40))
def test_whatever_is_overwritten_or_cut_nothing_forged_is_shown(
    forgeries: list[tuple[int, int, str]],
    harms: list[tuple[float, bytes]],
    cut: float | None,
    entries: bool,
    power_lost: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "INDEX_BYTES", 100 if entries else 8192)
        log = Log([rows_with(forged(at, count), where) for at, count, where in forgeries])
        data = bytearray(log.data)
        for place, content in harms:
            at = int(place * (len(data) - len(content)))
            data[at : at + len(content)] = content
        stop = None if cut is None else int(cut * len(data))
        log.harmed(bytes(data[:stop]), power_lost=power_lost).check(set())
