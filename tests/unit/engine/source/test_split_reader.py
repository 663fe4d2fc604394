"""What comes from archives is what comes from segments: same rows, same dead records, same answers."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import random
import sqlite3
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import polars as pl
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

import millstream as ms
from millstream import testing
from millstream.engine.source.offsets import Split
from millstream.engine.source.planner import _ByteLimit
from millstream.engine.source.planner import _split_input as lane_of
from millstream.engine.source.split_reader import SplitReader
from millstream.errors import CorruptionError, OffsetOutOfRangeError
from millstream.kernels.decode.archive_columns import ArchiveColumns, ArchivedRecords
from millstream.kernels.decode.records import RecordDecoder
from millstream.kernels.ingest import Ingest
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.time.watermarks import SourceTime
from millstream.log import reader as reader_of_log
from millstream.log.archive import RECORD_SCHEMA
from millstream.log.archiver import archive_partitions
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.compression import compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DISK, Files
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedDisk
from millstream.testing.inputs import InputRecord
from millstream.testing.kernel_engine import KernelEngine

START = datetime(2026, 1, 1, tzinfo=UTC)
T = "t"


@dataclass
class Place:
    city: str
    since: date | None = None
    zip: int = 7


@dataclass
class Everything:
    whole: int
    number: float | None
    yes: bool | None
    text: str | None
    at: datetime | None
    day: date | None
    clock: time | None
    span: timedelta | None
    exact: Decimal | None
    raw: bytes | None
    id: UUID | None
    kind: Literal["a", "b"] | None
    tags: list[int] | None
    place: Place | None
    places: list[Place | None] | None
    known: dict[str, int] | None
    offset: int | None
    timestamp: str = "none"
    level: int = 3


GOOD = {
    "whole": st.integers(-5, 5) | st.sampled_from([2**63 - 1, -(2**63)]),
    "number": st.sampled_from([0, 1, -0.0, 1.5, 1e300, -2.25]),
    "yes": st.booleans(),
    "text": st.sampled_from(["", "x", "ß\n\0", "é" * 40]),
    "at": st.sampled_from(["2026-01-01T00:00:01Z", "2026-01-01", "1969-12-31T23:59:59.999999Z"]),
    "day": st.sampled_from(["2026-01-31", "1900-01-01"]),
    "clock": st.sampled_from(["12:00:00", "23:59:59.5"]),
    "span": st.sampled_from(["PT90S", 1.5, "-P1D"]),
    "exact": st.sampled_from([1, "1.5", "-0.000000001", "12345678901234567890.5"]),
    "raw": st.sampled_from(["", base64.b64encode(b"\0\xff").decode()]),
    "id": st.sampled_from(["550e8400-e29b-41d4-a716-446655440000"]),
    "kind": st.sampled_from(["a", "b"]),
    "tags": st.lists(st.integers(0, 3), max_size=3),
    "place": st.sampled_from([{"city": "Ulm"}, {"city": "Rom", "since": "2020-01-01", "zip": 1}]),
    "places": st.sampled_from([[], [None], [{"city": "Ulm"}, None]]),
    "known": st.dictionaries(st.sampled_from(["", "a"]), st.integers(0, 3)),
    "offset": st.integers(0, 5),
    "timestamp": st.sampled_from(["", "later"]),
    "level": st.integers(0, 9),
}
ODD = st.sampled_from([None, True, -1, 1.5, "x", "", [], [None], {}, {"city": 5}, 2**70, "\ud800"])
NAMES = [one.name for one in dataclasses.fields(Everything)]


@st.composite
def values(draw: Any) -> bytes | None:
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return None
    if kind == 1:
        return draw(
            st.sampled_from([b"", b"{", b"[]", b"null", b'{"whole":1}{}', b"\xff", b" {} "])
        )
    names = [name for name in NAMES if name == "whole" or draw(st.integers(0, 3))]
    if kind > 8:
        names = NAMES
    row = {name: draw(GOOD[name]) for name in names}
    if kind in (2, 3):
        row[draw(st.sampled_from(NAMES))] = draw(ODD)
    if kind == 4:
        row["unknown"] = draw(ODD)
    text = json.dumps(row)
    if kind == 5:
        text = text[:-1] + ', "whole": 1}'  # given twice
    return text.encode()


@dataclass
class Stored:
    """A topic in a folder: batches as they were appended, of which some are aborted."""

    folder: Any
    dice: random.Random
    segment_bytes: int = 1_500
    files: Files = DISK
    control: ControlDb | None = None

    def writer(self) -> LogWriter:
        return LogWriter(
            self.folder,
            segment_bytes=self.segment_bytes,
            files=self.files,
            control=self.control,
            sync_threads=1,
            background=False,
        )

    def write(self, writer: LogWriter, records: list[SimpleRecord]) -> None:
        left = list(records)
        writer.create_topic(T)
        identity = writer.transactions.register("p")
        while left:
            count = self.dice.randint(1, 9)
            batch = compress(encode_records(left[:count]), self.dice.choice(["none", "zstd"]))
            left = left[count:]
            if self.dice.random() < 0.8:
                writer.append(T, 0, [batch])
                continue
            writer.transactions.begin(identity)
            writer.append(T, 0, [stamp(batch, ProducerStamp(*identity, 0), transactional=True)])
            identity = writer.transactions.end(identity, commit=self.dice.random() < 0.6)

    def reader(self) -> LogReader:
        return LogReader(self.folder, files=self.files, control=self.control)

    @property
    def archives(self) -> list[Any]:
        return sorted(self.folder.glob("t/*/*/*.parquet"))

    def bounds(self) -> tuple[int, int]:
        ((start, end),) = self.reader().offsets(T)
        return start, end


def source_of(topic: Any, columns: list[str]) -> Any:
    app = topic.app
    app.outputs.clear()
    topic.stream().select(*columns).foreach(print, name=f"{app.names.unique('out')}")
    (source,) = app.plan().sources
    return source


def taken(source: Any, batches: Any) -> tuple[pl.DataFrame, dict[int, str], int]:
    """Decode batches; give the rows with their offsets and times, the dead, and how many came ready."""
    decoder = RecordDecoder(source.values, source.fields)
    frames, dead, ready = [], {}, 0
    for batch in batches:
        records = batch.records if isinstance(batch, ArchivedRecords) else batch
        decoded = decoder.decode(batch, 0)
        assert decoded.table.schema.equals(pa.schema([(f.name, f.type) for f in source.fields]))
        offsets = records.column("offset").to_numpy()
        stamps = pl.Series("__stamp", records.column("timestamp"))[decoded.good.tolist()]
        frame = pl.from_arrow(decoded.table)
        frames.append(frame.hstack([pl.Series("__offset", offsets[decoded.good]), stamps]))
        dead |= {int(offsets[at]): reason for at, reason in decoded.errors}
        ready += isinstance(batch, ArchivedRecords) and records.num_rows
    return (pl.concat(frames) if frames else pl.DataFrame()), dead, ready


def from_segments(source: Any, reader: LogReader, start: int, end: int) -> Any:
    columns = ("offset", "timestamp", "value", "key", "headers")
    return reader.read(T, 0, start, end, columns=columns, bytes_max=900)


@settings(max_examples=some(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(values(), min_size=1, max_size=40),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
    st.sets(st.sampled_from(["key", "partition", "headers"])),
    st.integers(0, 1 << 30),
)
def test_any_records_come_the_same_from_archives_as_from_segments(texts, columns, metadata, seed):
    dice = random.Random(seed)
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    control = ControlDb(connection, write=True)
    stored = Stored(Path("/log"), dice, files=SimulatedDisk(seed), control=control)
    rows = [
        SimpleRecord(1_000 * n, dice.choice([None, b"", b"k"]), text, (("h", b"v"),) * (n % 2))
        for n, text in enumerate(texts)
    ]
    topic = ms.App("a", log="none").topic(T, Everything, metadata=tuple(sorted(metadata)))
    with stored.writer() as writer:
        stored.write(writer, rows)
        partition = writer.partition(TopicPartition(T, 0))
        every = ArchiveColumns(topic.values, topic.fields, RECORD_SCHEMA.names)
        archive_partitions(writer, [partition], every, close_active=dice.random() < 0.8)
        for name in stored.files.names(partition.folder):
            if name.endswith(".parquet") and dice.random() < 0.2:
                stored.files.remove(partition.folder / name)
    source = source_of(topic, [*columns, *sorted(metadata)])
    reader = stored.reader()
    low, high = stored.bounds()
    start, end = sorted((dice.randint(low, high), dice.randint(low, high)))
    if dice.random() < 0.4:
        start, end = low, high
    expected, expected_dead, _ = taken(source, from_segments(source, reader, start, end))
    found, dead, ready = taken(source, SplitReader(reader, source).read(0, start, end))
    assert dead == expected_dead
    assert found.equals(expected)
    if (start, end) == (low, high):
        # Those may be few: of an archived segment every record may have been aborted.
        assert ready == sum(one.note.rows for one in reader.archives(T, 0, low, high))


def filled(folder, count=300, segment_bytes=4_000, seed=1):
    stored = Stored(folder, random.Random(seed), segment_bytes)
    values = [
        json.dumps({"n": n, "at": (START + timedelta(seconds=n)).isoformat()}).encode()
        if n % 17
        else (b"bad" if n % 2 else None)
        for n in range(count)
    ]
    with stored.writer() as writer:
        stored.write(
            writer, [SimpleRecord(n, b"k%d" % (n % 5), value) for n, value in enumerate(values)]
        )
    return stored


@dataclass
class Event:
    n: int
    at: datetime


@pytest.mark.not_in_lane("thresholds", "it counts reads, which are several there")
def test_a_whole_archive_is_read_and_nothing_of_its_segment_but_what_does_not_fit(
    tmp_path, monkeypatch
):
    stored = filled(tmp_path)
    topic = ms.App("a", log=tmp_path).topic(T, Event)
    topic.archive(close_active=True)
    source = source_of(topic, ["n"])
    reader = LogReader(tmp_path)
    low, high = stored.bounds()
    expected = taken(source, from_segments(source, reader, low, high))
    asked = []
    read = LogReader.read

    def noted(self, topic, partition, start, end, **options):
        asked.append((start, end))
        return read(self, topic, partition, start, end, **options)

    monkeypatch.setattr(LogReader, "read", noted)
    found = taken(source, SplitReader(reader, source).read(0, low, high))
    assert found[0].equals(expected[0])
    assert found[1] == expected[1]
    assert found[2] == found[0].height + len(found[1])
    # What does not fit lies close together here, so it is read in one go per row group at most.
    assert 0 < len(asked) <= len(stored.archives)
    asked.clear()
    source = dataclasses.replace(source, fields=())
    nothing = taken(source, SplitReader(reader, source).read(0, low, high))
    assert nothing[1] == taken(source, from_segments(source, reader, low, high))[1]


def test_an_archive_of_another_schema_is_not_read(tmp_path):
    stored = filled(tmp_path)

    @dataclass
    class Narrower:
        n: Annotated[int, "same"]

    @dataclass
    class Wider:
        n: int
        more: str | None

    @dataclass
    class Defaulted:
        n: int = 5

    low, high = stored.bounds()
    reader = LogReader(tmp_path)

    def ready(schema, columns, **options):
        topic = ms.App("a", log=tmp_path).topic(T, schema, **options)
        source = source_of(topic, columns)
        expected = taken(source, from_segments(source, reader, low, high))
        found = taken(source, SplitReader(reader, source).read(0, low, high))
        assert found[0].equals(expected[0])
        assert found[1] == expected[1]
        return found[2]

    ms.App("a", log=tmp_path).topic(T, Event).archive(close_active=True)
    assert ready(Event, ["n"])
    assert ready(Event, ["at", "n"])
    assert ready(Narrower, ["n"])  # of the same field it is the same column
    assert ready(Wider, ["n"])
    assert not ready(Wider, ["more"])
    assert not ready(Defaulted, ["n"])
    assert not ready(None, ["value"], format="bytes")
    ms.App("a", log=tmp_path).topic(T, format="bytes").archive()
    assert ready(None, ["value"], format="bytes")
    assert not ready(Event, ["n"])


def test_an_archive_of_a_model_with_validators_is_for_others(tmp_path):
    class Checked(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def doubled(cls, value: int) -> int:
            return value * 2

    stored = filled(tmp_path)
    topic = ms.App("a", log=tmp_path).topic(T, Checked)
    topic.archive(close_active=True)
    rows = pl.read_parquet(stored.archives)
    assert rows.filter(pl.col("n").is_not_null())["n"].to_list()[:2] == [2, 4]
    source = source_of(topic, ["n"])
    low, high = stored.bounds()
    found = taken(source, SplitReader(LogReader(tmp_path), source).read(0, low, high))
    assert found[2] == 0
    assert found[0].height > 100


def test_a_damaged_archive_is_told_of_and_the_records_come_from_the_segment(tmp_path, caplog):
    stored = filled(tmp_path, segment_bytes=9_000)
    topic = ms.App("a", log=tmp_path).topic(T, Event)
    topic.archive(close_active=True)
    source = source_of(topic, ["n"])
    reader = LogReader(tmp_path)
    low, high = stored.bounds()
    expected = taken(source, from_segments(source, reader, low, high))
    *_, path = stored.archives[:2]
    whole = path.read_bytes()
    warned = 0
    for at in range(0, len(whole), max(61, len(whole) // 150)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        caplog.clear()
        found = taken(source, SplitReader(reader, source).read(0, low, high))
        assert found[0].equals(expected[0])
        assert found[1] == expected[1]
        warned += "archive again" in caplog.text
    for content in (b"", whole[:100], whole[: len(whole) // 2], whole[10:]):
        path.write_bytes(content)
        assert taken(source, SplitReader(reader, source).read(0, low, high))[0].equals(expected[0])
        warned += "archive again" in caplog.text
    assert warned > 20


CHANGES = {
    "lost": lambda batches: [*batches][1:],
    "doubled": lambda batches: [*batches][:1] * 2 + [*batches][1:],
    "cut": lambda batches: [batch[1:] for batch in batches],
}


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("how", [None, *CHANGES])
def test_records_lost_or_doubled_between_the_log_and_the_ledger_are_found(
    tmp_path, monkeypatch, how, archived
):
    stored = filled(tmp_path)
    topic = ms.App("a", log=tmp_path).topic(T, Event)
    if archived:
        topic.archive(close_active=True)
    source = source_of(topic, ["n"])
    low, high = stored.bounds()
    split = lane_of(
        SplitReader(LogReader(tmp_path), source), Split(0, 0, 0, low, high), _ByteLimit(None)
    )
    if how is not None and archived:
        split = dataclasses.replace(split, batches=[*split.batches][1:])
    elif how is not None:
        decode = reader_of_log.decode_parts
        cut = lambda *given: CHANGES[how](decode(*given))  # noqa: E731
        monkeypatch.setattr(reader_of_log, "decode_parts", cut)
    run = Ingest(source, Buckets(1)).run([split], SourceTime((), 1, frozenset()))
    if how is None:
        assert list(run)
        return
    with pytest.raises(CorruptionError, match="by the log there are"):
        list(run)


def test_ranges_that_are_gone_are_refused_as_ever(tmp_path):
    stored = filled(tmp_path)
    topic = ms.App("a", log=tmp_path).topic(T, Event)
    topic.archive(close_active=True)
    source = source_of(topic, ["n"])
    _, high = stored.bounds()
    splits = SplitReader(LogReader(tmp_path), source)
    with pytest.raises(OffsetOutOfRangeError):
        list(splits.read(0, 0, high + 1))
    with ms.connect(tmp_path) as log:
        log.delete_records(T, 0, 50)
    with pytest.raises(OffsetOutOfRangeError):
        list(splits.read(0, 49, high))
    (first, *_) = splits.read(0, 50, high)
    assert first.records.column("offset")[0].as_py() >= 50


# -- whole pipelines ------------------------------------------------------------------------------


class OverALog(KernelEngine):
    """The engine of the test kit, but its records lie in a log, partly archived."""

    topic: Any = None
    folder: Any = None
    archived: bool = True
    ready = 0
    written = False

    def _splits(self, partition, number, start):
        if not self.written:
            type(self).written = True
            self.write()
        splits = super()._splits(partition, number, start)
        details = ("offset", "key", "headers", "value")
        read = partial(LogReader(self.folder).read, T, number, columns=details)
        return [dataclasses.replace(split, details=read) for split in splits]

    def write(self) -> None:
        with LogWriter(self.folder, segment_bytes=2_000, background=False) as writer:
            writer.create_topic(T, partitions=len(self.logs[T]))
            for number, partition in enumerate(self.logs[T]):
                for stamp_ms, item in zip(partition.stamps_ms, partition.items, strict=True):
                    assert isinstance(item, InputRecord)
                    batch = encode_records(
                        [SimpleRecord(stamp_ms, item.key, item.value, item.headers)]
                    )
                    writer.append(T, number, [batch])
        if self.archived:
            self.topic.archive(close_active=True)
            for path in sorted(self.folder.glob("t/*/*/*.parquet")):
                if self.dice.random() < 0.3:
                    path.unlink()

    def _cut_batches(self, partition, start, end):
        number = next(n for n, one in enumerate(self.logs[T]) if one is partition)
        (source,) = self.plan.sources
        middle = self.dice.randint(start, end)
        splits = SplitReader(LogReader(self.folder), source)
        found = [*splits.read(number, start, middle), *splits.read(number, middle, end)]
        type(self).ready += sum(isinstance(one, ArchivedRecords) for one in found)
        return found


def pipeline(folder):
    app = ms.App("a", log=folder)
    topic = app.topic(T, Event, metadata=("key",))
    events = topic.stream(time="at", watermark=ms.watermark("5 seconds"), lateness="2 seconds")
    kept = events.filter(pl.col("n") % 7 != 3)
    kept.window(ms.tumbling("10 seconds"), by="key").agg(n=ms.count(), s=ms.sum("n")).view(
        "counted"
    )
    failing = kept.with_columns(text=pl.col("n").cast(pl.String).replace("40", "x"))
    failing.with_columns(back=pl.col("text").str.to_integer()).view("latest", key="key")
    return app, topic


def inputs(seed: int) -> list[testing.Row]:
    dice = random.Random(seed)
    rows = []
    for n in range(200):
        at = START + timedelta(seconds=n - dice.choice([0, 0, 0, 3, 12]))
        value: Any = {"n": n, "at": at.isoformat()}
        if dice.random() < 0.1:
            value = dice.choice(
                [b"bad", b"{}", b'{"n": "x"}', json.dumps({"n": n, "at": None}).encode()]
            )
        rows.append(
            testing.Row(
                value,
                at=START + timedelta(seconds=n),
                key=f"k{n % 3}",
                headers={"h": b"\xff"} if n % 2 else {},
            )
        )
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline_gives_the_same_over_archives(tmp_path, monkeypatch, caplog, seed):
    caplog.set_level(logging.ERROR, logger="millstream")  # until the test ends
    outcomes = []
    for archived in (False, True):
        app, topic = pipeline(tmp_path / f"log-{archived}")
        engine = type(
            "Engine", (OverALog,), {"topic": topic, "folder": app.log, "archived": archived}
        )
        monkeypatch.setattr(sys.modules["millstream.testing.run"], "KernelEngine", engine)
        out = testing.run(app, {T: inputs(seed)}, batches=4, partitions=2, seed=seed)
        assert (engine.ready > 0) == archived
        outcomes.append(out)
    plain, over = outcomes
    monkeypatch.undo()
    app, _ = pipeline(tmp_path / "none")
    kit = testing.run(app, {T: inputs(seed)}, batches=4, partitions=2, seed=seed)
    for other in (over, kit):
        assert other["counted"].equals(plain["counted"])
        assert other["latest"].equals(plain["latest"])
        # What is in memory alone has no log from which keys and headers could be read.
        unknown = ("key", "headers") if other is kit else ()
        assert other.dead.drop(unknown).equals(plain.dead.drop(unknown))
        assert other.late == plain.late
        totals = [
            one.ledger.drop("batch_id").group_by("step").sum().sort("step")
            for one in (plain, other)
        ]
        assert totals[0].equals(totals[1])
    assert plain.dead["value"].null_count() == 0
    assert {"t", "with_columns(back)"} <= set(plain.dead["step"])
