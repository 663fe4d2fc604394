"""Datasets: exactly the committed rows, whatever a crash leaves, and few small files."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import shutil
from decimal import Decimal

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    RetriableError,
    SyncFailedError,
)
from millstream.kernels.frames import DIFF
from millstream.kernels.plan import DatasetSinkSpec, SinkPlan
from millstream.log.files import DiskFiles
from millstream.testing.disk import SimulatedCrash
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch
from millstream.views.sinks.dataset import (
    REPLACED_FILES_RETENTION_MS,
    DatasetSink,
    delete_dataset,
)
from millstream.views.sinks.dataset_manifest import FILE, DataFile, read_manifest
from millstream.views.sinks.dataset_merge import TIERS, files_to_merge


def sink(folder, columns, partition_by=()):
    return SinkPlan(
        "out", 8, (), tuple(columns.items()), DatasetSinkSpec(str(folder), partition_by)
    )


class Job:
    """A run that commits batch after batch to one dataset."""

    def __init__(self, folder, columns, partition_by=(), *, run=1, **options):
        self.target = DatasetSink(sink(folder, columns, partition_by), **options)
        last = self.target.begin_run(RunStart("app", "main", run, "one"))
        self.run = run
        self.batch_id = 0 if last is None else last + 1

    def commit(self, frame):
        fence = Fence("app", "main", self.run, self.batch_id)
        done = self.target.commit(fence, SinkBatch({"out": frame}))
        self.batch_id += 1
        return done


def rows(folder):
    frame = ms.dataset(folder).scan().collect()
    return sorted(frame.rows(), key=repr)


def parquet(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet")}


NUMBERS = {"n": pl.Int64()}


def numbers(*values):
    return pl.DataFrame({"n": list(values)}, schema=NUMBERS)


def test_rows_come_back_in_their_types_and_only_once(tmp_path):
    frame = pl.DataFrame(
        {
            "i": pl.Series([1, None], dtype=pl.Int32),
            "f": [float("nan"), 0.1],
            "": ["a\0", None],
            "^.*$": [b"\0", b""],
            "d": pl.Series([Decimal("1.50"), None], dtype=pl.Decimal(20, 2)),
            "at": pl.Series([dt.datetime(1, 1, 1), None], dtype=pl.Datetime("us", "UTC")),  # noqa: DTZ001
            "day": [dt.date(9999, 12, 31), None],
            "du": [dt.timedelta(microseconds=-1), None],
            "l": [[1, None], None],
            "s": [{"x": [True]}, None],
        }
    )
    job = Job(tmp_path / "out", dict(frame.schema))
    assert ms.dataset(tmp_path / "out").scan().collect_schema() == frame.schema
    assert job.commit(frame)
    job.batch_id = 0
    assert not job.commit(frame)
    found = ms.dataset(tmp_path / "out").scan().collect()
    assert found.equals(frame)
    assert found.schema == frame.schema
    assert ms.dataset(tmp_path / "out").batch_id == 0


def test_partitions_are_folders_and_their_columns_stay_in_the_files(tmp_path):
    columns = {"a/b": pl.String(), "day": pl.Date(), "n": pl.Int64()}
    keys = ["x=y/..", "", None, "ä%", "."]
    frame = pl.DataFrame(
        {"a/b": keys, "day": [dt.date(2026, 1, 31)] * 5, "n": range(5)}, schema=columns
    )
    Job(tmp_path / "out", columns, ("a/b", "day")).commit(frame)
    assert rows(tmp_path / "out") == sorted(frame.rows(), key=repr)
    folders = {path.rpartition("/")[0] for path in parquet(tmp_path / "out")}
    assert folders == {
        "a%2Fb=x%3Dy%2F../day=2026-01-31",
        "a%2Fb=/day=2026-01-31",
        "a%2Fb=__HIVE_DEFAULT_PARTITION__/day=2026-01-31",
        "a%2Fb=%C3%A4%25/day=2026-01-31",
        "a%2Fb=./day=2026-01-31",
    }


def test_rows_taken_back_are_shown_beside_those_that_were_there_before(tmp_path):
    job = Job(tmp_path / "out", NUMBERS)
    for n in range(7):
        job.commit(numbers(n))
    signs = pl.Series([1, -1], dtype=pl.Int8)
    job.commit(numbers(7, 3).with_columns(signs.alias(DIFF)))
    found = ms.dataset(tmp_path / "out").scan().collect()
    assert sorted(found.rows()) == sorted([*((n, 1) for n in range(8)), (3, -1)])
    job.commit(numbers(9))
    assert (9, 1) in ms.dataset(tmp_path / "out").scan().collect().rows()


class DyingFiles(DiskFiles):
    """The real file system, on which the process dies at one operation."""

    def __init__(self, dies_at=None, *, fails=False):
        self.steps, self.dies_at, self.fails = 0, dies_at, fails

    def step(self):
        self.steps += 1
        if self.steps == self.dies_at:
            if self.fails:
                raise OSError(28, "No space left on device")
            raise SimulatedCrash

    def pwrite(self, handle, data, position):
        self.step()
        return super().pwrite(handle, data, position)

    def sync(self, handle):
        self.step()
        super().sync(handle)

    def sync_folder(self, path):
        self.step()
        super().sync_folder(path)

    def rename(self, source, target):
        self.step()
        super().rename(source, target)


@pytest.mark.parametrize("fails", [False, True], ids=["crash", "full disk"])
def test_whatever_a_crash_leaves_is_read_as_before_or_after_and_removed_by_the_next_run(
    tmp_path, fails
):
    columns = {"k": pl.String(), "n": pl.Int64()}
    frame = pl.DataFrame({"k": ["a", "b"], "n": [100, 200]})
    for dies_at in itertools.count(1):
        folder = tmp_path / str(dies_at)
        job = Job(folder, columns, ("k",))
        for n in range(7):  # the next batch merges
            job.commit(pl.DataFrame({"k": ["a", "b"], "n": [n, n]}))
        before = rows(folder)
        files = DyingFiles(dies_at, fails=fails)
        job = Job(folder, columns, ("k",), run=2)
        job.target.place.disk = files
        try:
            job.commit(frame)
        except (SimulatedCrash, RetriableError, SyncFailedError):
            assert rows(folder) in (before, sorted([*before, *frame.rows()], key=repr))
        again = Job(folder, columns, ("k",), run=3)
        manifest = read_manifest(folder)
        named = {file.path for file in (*manifest.files, *manifest.replaced)}
        assert parquet(folder) == named
        if again.batch_id == 7:
            assert again.commit(frame)
        assert rows(folder) == sorted([*before, *frame.rows()], key=repr)
        if files.steps < dies_at:
            break
    assert dies_at > 10


class QuickFiles(DiskFiles):
    """The real file system, without waiting for the disk."""

    def sync(self, handle):
        pass


def test_small_files_are_merged_and_the_bound_holds(tmp_path):
    job = Job(tmp_path / "out", NUMBERS, files=QuickFiles())
    for n in range(8 * 8 * 8 - 1):
        job.commit(numbers(n))
        assert len(ms.dataset(tmp_path / "out").files) <= 7 * 3
    assert len(ms.dataset(tmp_path / "out").files) == 21
    job.commit(numbers(511))
    assert len(ms.dataset(tmp_path / "out").files) == 1
    assert rows(tmp_path / "out") == sorted([(n,) for n in range(512)], key=repr)


def test_files_that_were_merged_stay_for_readers_for_ten_minutes(tmp_path):
    now = [1_000_000]
    job = Job(tmp_path / "out", NUMBERS, clock_ms=lambda: now[0])
    for n in range(7):
        job.commit(numbers(n))
    slow = ms.dataset(tmp_path / "out").scan()
    job.commit(numbers(7))
    now[0] += REPLACED_FILES_RETENTION_MS
    job.commit(numbers(8))
    assert slow.collect().height == 7
    Job(tmp_path / "out", NUMBERS, run=2)
    assert slow.collect().height == 7
    now[0] += 1
    job = Job(tmp_path / "out", NUMBERS, run=3, clock_ms=lambda: now[0])
    job.commit(numbers(9))
    assert len(parquet(tmp_path / "out")) == len(ms.dataset(tmp_path / "out").files) == 3


@settings(max_examples=some(60), deadline=None)
@given(
    heights=st.lists(st.integers(1, 8**TIERS * 2), max_size=80),
    parts=st.integers(1, 3),
    row_bytes=st.sampled_from([0, 8, 1_000, 100_000]),
)
def test_merging_ends_keeps_every_row_and_leaves_few_small_files(heights, parts, row_bytes):
    """The rule alone, on files that are only counted; each row's rewrites are counted too."""
    files, rewrites = [], {}
    for number, height in enumerate(heights):
        file = DataFile(f"f{number}", height, f"p{number % parts}", height * row_bytes)
        rewrites[file.path] = 0
        files.append(file)
        while group := files_to_merge(files):
            assert len({one.partition for one in group}) == 1
            rows = sum(one.rows for one in group)
            assert rows < 8 ** (TIERS + 1)
            assert rows * row_bytes < 8 * (32 << 20)
            merged = DataFile("+".join(one.path for one in group), rows, group[0].partition, rows * row_bytes)  # fmt: skip
            rewrites[merged.path] = 1 + max(rewrites[one.path] for one in group)
            files = [one for one in files if one not in group] + [merged]
    assert sum(file.rows for file in files) == sum(heights)
    assert max(rewrites.values(), default=0) <= TIERS
    for partition in range(parts):
        small = [
            file
            for file in files
            if file.rows < 8**TIERS
            and file.rows * row_bytes < 32 << 20
            and file.partition == f"p{partition}"
        ]
        assert len(small) <= 7 * TIERS


def test_a_stale_run_is_refused_and_its_files_are_not_counted(tmp_path):
    old = Job(tmp_path / "out", NUMBERS)
    old.commit(numbers(1))
    new = Job(tmp_path / "out", NUMBERS, run=2)
    with pytest.raises(FencedError, match="run 2"):
        old.commit(numbers(2))
    with pytest.raises(FencedError, match="replaced by run 2"):
        Job(tmp_path / "out", NUMBERS, run=1)
    new.commit(numbers(3))
    assert rows(tmp_path / "out") == [(1,), (3,)]


def test_files_of_other_people_in_the_folder_are_left_alone_and_not_read(tmp_path):
    Job(tmp_path / "out", NUMBERS).commit(numbers(1))
    numbers(99).write_parquet(tmp_path / "out" / "mine.parquet")
    numbers(98).write_parquet(tmp_path / "out" / f"{7:012}-{'a' * 12}.parquet")
    Job(tmp_path / "out", NUMBERS, run=2)
    assert rows(tmp_path / "out") == [(1,)]
    names = {path.name for path in (tmp_path / "out").glob("*.parquet")}
    assert "mine.parquet" in names
    assert len(names) == 2


def test_long_values_and_such_as_read_like_null_have_folders_of_their_own(tmp_path):
    words = [
        "é" * 9_000,
        "é" * 9_000 + "1",
        "x" * 120,
        "x" * 121,
        None,
        "__HIVE_DEFAULT_PARTITION__",
    ]
    columns = {"a" * 300: pl.String(), "n": pl.Int64()}
    job = Job(tmp_path / "out", columns, ("a" * 300,))
    frame = pl.DataFrame({"a" * 300: words, "n": range(len(words))}, schema=columns)
    job.commit(frame)
    job.commit(frame)
    found = ms.dataset(tmp_path / "out").scan().collect().sort("n")
    assert found.equals(pl.concat([frame, frame]).sort("n"))
    folders = {path.rpartition("/")[0] for path in parquet(tmp_path / "out")}
    assert len(folders) == len(words)
    assert all(len(folder.encode()) <= 255 for folder in folders)


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
def test_the_two_zeros_share_a_folder(tmp_path, dtype):
    job = Job(tmp_path / "out", {"f": dtype()}, ("f",))
    job.commit(pl.DataFrame({"f": [0.0, -0.0, float("nan"), -float("nan")]}, schema={"f": dtype}))
    assert len(parquet(tmp_path / "out")) == 2


def test_what_is_no_dataset_or_anothers_or_declared_otherwise_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.png").touch()
    with pytest.raises(ConfigError, match=r"'holiday.png' and is no dataset"):
        Job(tmp_path / "photos", NUMBERS)
    Job(tmp_path / "out", NUMBERS).commit(numbers(1))
    with pytest.raises(ConfigError, match=r"what differs: m\."):
        Job(tmp_path / "out", {**NUMBERS, "m": pl.String()}, run=2)
    with pytest.raises(ConfigError, match="partition_by"):
        Job(tmp_path / "out", NUMBERS, ("n",), run=2)
    other = DatasetSink(sink(tmp_path / "out", NUMBERS))
    with pytest.raises(ConfigError, match="belongs to the job 'main' of the app 'app'"):
        other.begin_run(RunStart("other", "main", 1, "two"))
    with pytest.raises(ConfigError, match=r"no dataset in .*nowhere"):
        ms.dataset(tmp_path / "nowhere")


@pytest.mark.parametrize("partition_by", [(), ("n",)])
def test_a_dataset_or_a_copy_inside_the_folder_is_not_swept_and_not_deleted(tmp_path, partition_by):
    out = tmp_path / "out"
    job = Job(out, NUMBERS, partition_by)
    job.commit(numbers(1, 2))
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy").rename(out / "copy")
    Job(out / "inner", NUMBERS).commit(numbers(3))
    Job(out / "inner" / "deep", NUMBERS, ("n",)).commit(numbers(4))
    Job(out, NUMBERS, partition_by, run=2)
    assert rows(out) == [(1,), (2,)]
    delete_dataset(str(out), job.target.identity)
    assert [rows(out / name) for name in ("copy", "inner", "inner/deep")] == [
        [(1,), (2,)],
        [(3,)],
        [(4,)],
    ]


def test_a_manifest_of_the_version_before_is_read_and_its_files_are_merged(tmp_path):
    job = Job(tmp_path / "out", NUMBERS)
    for n in range(7):
        job.commit(numbers(n))
    manifest = json.loads((tmp_path / "out" / FILE).read_text())
    assert manifest.pop("deleted") == []
    assert all(file.pop("memory_bytes") > 0 for file in manifest["files"])
    (tmp_path / "out" / FILE).write_text(json.dumps({**manifest, "format": 3}))
    job.commit(numbers(7))
    assert rows(tmp_path / "out") == [(n,) for n in range(8)]
    assert len(ms.dataset(tmp_path / "out").files) == 1


def test_damage_is_told_and_nothing_is_thrown_away(tmp_path):
    job = Job(tmp_path / "out", NUMBERS)
    for n in range(7):
        job.commit(numbers(n))
    path = ms.dataset(tmp_path / "out").files[3]
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(CorruptionError, match=path.name):
        job.commit(numbers(7))
    path.write_bytes(content)
    manifest = (tmp_path / "out" / FILE).read_text()
    (tmp_path / "out" / FILE).write_text(manifest[:-30])
    with pytest.raises(CorruptionError, match="damaged"):
        ms.dataset(tmp_path / "out")
    (tmp_path / "out" / FILE).write_text(json.dumps({**json.loads(manifest), "format": 9}))
    with pytest.raises(ConfigError, match=r"format 9.*Upgrade"):
        ms.dataset(tmp_path / "out")
    (tmp_path / "out" / FILE).write_text(json.dumps({**json.loads(manifest), "format": 2}))
    with pytest.raises(ConfigError, match=r"format 2, of an earlier version.*another folder"):
        ms.dataset(tmp_path / "out")
    (tmp_path / "out" / FILE).unlink()
    with pytest.raises(FencedError, match="was deleted"):
        job.commit(numbers(7))
