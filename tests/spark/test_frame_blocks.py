"""Large frames in Spark's blocks, as on machines that share no disk: the same answers as by files."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from pyspark.sql import functions as F

import millstream as ms
from millstream.engine.source.planner import read_planned
from millstream.engine.stages.executor import BucketInput
from millstream.errors import RetriableError
from millstream.kernels.frames import PORT_LEDGER, FrameRow
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.place import StatePlace
from millstream.spark import frame_blocks, job
from millstream.spark.frame_blocks import FrameBlocks

START = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = 12_000


@dataclass
class Event:
    id: str
    user: int
    at: datetime


@pytest.fixture
def all_named(monkeypatch):
    """Have every frame stay in blocks, however small."""
    monkeypatch.setattr(frame_blocks, "_NAMED_BYTES_MIN", 1)
    monkeypatch.setattr(frame_blocks, "_FETCHED_BYTES_MAX", -1)


def declare(folder):
    app = ms.App("counts", log=folder, buckets=3)
    events = app.topic("events", Event, key="user", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    once = stream.dedup("id", within="1 minute")
    minutes = once.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count())
    minutes.view("minutes")
    minutes.window(ms.tumbling("5 minutes"), by="n").emit("update").agg(users=ms.count()).view("n")
    return app


def send(folder, numbers=range(EVENTS)):
    with ms.connect(folder) as log:
        if numbers[0] == 0:
            log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for i in numbers:
                at = (START + timedelta(seconds=i // 8)).isoformat()
                producer.send(
                    "events", f'{{"id":"{i % 9000}","user":{i % 37},"at":"{at}"}}', key=str(i % 37)
                )


def answer(folder):
    return [ms.view(name, log=folder).scan().sort(pl.all()).rows() for name in ("minutes", "n")]


@pytest.mark.timeout(300)
def test_an_app_gives_the_same_through_blocks_as_through_files(
    spark, tmp_path, all_named, in_workers, monkeypatch
):
    files, blocks = tmp_path / "files", tmp_path / "blocks"
    send(files)
    declare(files).run(until="caught-up", rows_per_batch=7000)
    monkeypatch.setattr(job, "shares_disk", lambda *_: False)
    send(blocks)
    report = declare(blocks).run(until="caught-up", rows_per_batch=7000)
    assert report.batches > 1
    assert answer(files) == answer(blocks)
    assert sum(map(len, answer(blocks))) > 200
    assert not (blocks / "apps/counts/frames").exists()
    assert not spark.sparkContext._jsc.sc().getPersistentRDDs().size()


@pytest.mark.not_in_lane("thresholds", "the driver reads nothing itself there")
@pytest.mark.timeout(300)
def test_small_batches_are_read_by_the_driver_where_executors_are_on_other_machines(
    spark, tmp_path, in_workers, monkeypatch
):
    here, cluster, read = tmp_path / "here", tmp_path / "cluster", []

    def noted(spec, planned, batch_id):
        rows = read_planned(spec, planned, batch_id)
        read.append(rows is not None)
        return rows

    monkeypatch.setattr(job, "read_planned", noted)
    send(here)
    declare(here).run(until="caught-up", rows_per_batch=4000)
    assert not read
    monkeypatch.setattr(job, "shares_disk", lambda *_: False)
    monkeypatch.setattr(job, "is_one_machine", lambda _: False)
    runs = [
        (0, 3000, 1500),
        (3000, 9000, 9000),
        (9000, EVENTS, 1500),
    ]  # the second batch is not small
    for first, end, rows in runs:
        send(cluster, range(first, end))
        declare(cluster).run(until="caught-up", rows_per_batch=rows)
    # Spark reads the first batch, as no plan says where it begins.
    assert read == [False, True, False, True, True]
    assert answer(here) == answer(cluster)
    assert not spark.sparkContext._jsc.sc().getPersistentRDDs().size()


def frames_of(spark, rows):
    return spark.createDataFrame(rows, "port int, bucket int, frame binary").repartition(
        2, "bucket"
    )


ROWS = [
    (9, 0, b"a" * 90_000),
    (9, 1, b"b" * 70_000),
    (10, 0, b"c"),
    (PORT_LEDGER, 0, b"{}" * 40_000),
]


def by_bucket(rows):
    return sorted((row.port, row.bucket, bytes(row.frame)) for row in rows)


def test_a_small_batch_is_fetched_whole_and_of_a_large_one_only_names_and_messages(
    spark, monkeypatch
):
    blocks = FrameBlocks()
    assert by_bucket(blocks.collect(frames_of(spark, ROWS))) == sorted(ROWS)
    monkeypatch.setattr(frame_blocks, "_FETCHED_BYTES_MAX", -1)
    for collected in (1 << 30, 1):
        monkeypatch.setattr(frame_blocks, "_COLLECTED_BYTES_MAX", collected)
        rows = blocks.collect(frames_of(spark, ROWS))
        assert sorted(blocks.size_bytes(row.frame) for row in rows) == [1, 70_000, 80_000, 90_000]
        assert sum(len(row.frame) for row in rows) < 81_000
        assert by_bucket(blocks.get(rows)) == sorted(ROWS)
    blocks.remove_batch()
    assert not spark.sparkContext._jsc.sc().getPersistentRDDs().size()


def test_rows_are_not_kept_after_a_small_batch_and_read_again_if_they_are_large(spark):
    blocks, persisted = FrameBlocks(sources_repeat=True), spark.sparkContext._jsc.sc
    small = [(9, bucket, bytes([65 + bucket]) * 9) for bucket in range(3)]
    kept = []
    for rows in (small, small, ROWS, ROWS, small, small):
        assert by_bucket(blocks.read(frames_of(spark, rows))) == sorted(rows)
        kept.append(persisted().getPersistentRDDs().size())
        blocks.remove_batch()
    assert kept == [1, 0, 1, 1, 1, 0]


def test_sources_with_state_of_sparks_own_are_read_once(spark):
    blocks, calls = FrameBlocks(), spark.sparkContext.accumulator(0)

    def counted(batches):
        for batch in batches:
            calls.add(batch.num_rows)
            yield batch

    rows = [(9, 0, b"small")]
    for number in range(1, 4):
        frames = frames_of(spark, rows)
        assert by_bucket(blocks.read(frames.mapInArrow(counted, frames.schema))) == rows
        blocks.remove_batch()
        assert calls.value == number


def echo(work):
    """Give back the checksum of every frame, and then a row for each bucket."""
    for each in work:
        for row in each.rows:
            yield row._replace(frame=str(zlib.crc32(row.frame)).encode())
        yield FrameRow(frame_blocks.PORT_RESULT, each.bucket, b"end")


def test_tasks_get_the_frames_of_their_buckets_in_the_order_of_the_driver(spark, all_named):
    blocks = FrameBlocks(session=spark)
    rows = [(9, bucket, bytes([65 + n]) * (n + 1)) for n in range(6) for bucket in range(5)]
    named = blocks.collect(frames_of(spark, rows))
    named.append(FrameRow(9, 3, b"from the driver"))
    work = [
        BucketInput(0, bucket, [row for row in named if row.bucket == bucket], None)
        for bucket in range(5)
    ]
    out = blocks.get(blocks.run_tasks(echo, [work[:2], work[2:]], [9]))
    assert [row.bucket for row in out if row.port == frame_blocks.PORT_RESULT] == [0, 1, 2, 3, 4]
    whole = {each.bucket: blocks.get(each.rows) for each in work}
    for bucket in range(5):
        expected = [str(zlib.crc32(row.frame)).encode() for row in whole[bucket]]
        assert [row.frame for row in out if row.bucket == bucket] == [*expected, b"end"]
    blocks.remove_batch()


def test_rows_that_are_made_again_and_differ_fail_the_batch(spark, all_named):
    blocks = FrameBlocks()
    changing = frames_of(spark, ROWS).withColumn(
        "frame", F.concat("frame", F.randn().cast("string").cast("binary"))
    )
    rows = blocks.collect(changing)
    blocks._tables[0].unpersist(blocking=True)
    blocks._tables[0] = blocks._tables[0].withColumn(
        "frame", F.reverse(F.hex("frame")).cast("binary")
    )
    with pytest.raises(RetriableError, match="made again, after an executor was lost"):
        blocks.get(rows)
    blocks.remove_batch()


@pytest.mark.parametrize(
    ("master", "stages", "place", "shares"),
    [
        (None, 1, True, True),
        ("local[2]", 1, True, True),
        ("local-cluster[2,1,1024]", 1, True, False),
        ("spark://host:7077", 1, True, False),
        ("spark://host:7077", 1, False, True),
        ("spark://host:7077", 0, False, False),
    ],
)
def test_one_decision_says_which_way_frames_take(master, stages, place, shares):
    plan = JobPlan("app", (), (), ("stage",) * stages, (), Buckets(1))
    found = StatePlace(parse_state_url("s3://bucket"), "prefix") if place else None
    assert job.shares_disk(master, plan, found) is shares
