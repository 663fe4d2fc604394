"""Datasets under a URL: exactly the committed rows, whatever fails, dies or wakes up, and nothing left for good."""

from __future__ import annotations

import random
from dataclasses import replace

import polars as pl
import pytest
from example_counts import steps_to_die_at
from s3_server import SECRET, Fault

import millstream as ms
from millstream.errors import ConfigError, CorruptionError, FencedError, RetriableError
from millstream.kernels.frames import DIFF
from millstream.kernels.plan import DatasetSinkSpec, SinkPlan
from millstream.object_store.client import ObjectClient
from millstream.views.schema import Fence
from millstream.views.sink import RunStart, SinkBatch
from millstream.views.sinks.dataset import DatasetSink, dataset_files, delete_dataset
from millstream.views.sinks.dataset_place import ManifestReplacedError
from millstream.views.sinks.dataset_url import UrlPlace
from millstream.views.staging import StagedRows

NUMBERS = {"n": pl.Int64(), "k": pl.String()}
KEYS = ["x=y/..", "", None, "ä%", ".", "a b"]


@pytest.fixture(
    params=[
        "s3",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("google", "azure", "hdfs")),
    ]
)
def any_url(request):
    return request.getfixturevalue(f"{request.param}_url")


class DiedError(BaseException):
    """The process died."""


class Job:
    """A run that commits batch after batch to one dataset."""

    def __init__(self, url, run=1, partition_by=(), clock_ms=lambda: 0, checkpoint="one"):
        plan = SinkPlan("out", 8, (), tuple(NUMBERS.items()), DatasetSinkSpec(url, partition_by))
        self.sink = DatasetSink(plan, clock_ms=clock_ms)
        self.run = run
        last = self.sink.begin_run(RunStart("app", "main", run, checkpoint))
        self.batch_id = 0 if last is None else last + 1

    @property
    def fence(self):
        return Fence("app", "main", self.run, self.batch_id)

    def commit(self, frame):
        done = self.sink.commit(self.fence, SinkBatch({"out": frame}))
        self.batch_id += 1
        return done

    def stage(self, frame):
        """Write rows as a task does."""
        part = self.sink.stager(self.fence, "out").stage(frame)
        return SinkBatch(staged={"out": StagedRows(frame.height, (part,))})


def numbers(*values):
    rows = [(value, KEYS[value % len(KEYS)]) for value in values]
    return pl.DataFrame(rows, schema=NUMBERS, orient="row")


def held(url):
    return sorted(ms.dataset(url).scan().collect()["n"].to_list())


def objects(url):
    return set(ObjectClient(url).names())


def named(url):
    manifest = UrlPlace(url).read()
    return {file.path for file in (*manifest.files, *manifest.replaced)}


def data(url):
    return {name for name in objects(url) if not name.startswith("_manifests/")}


def test_rows_come_back_by_partition_once_and_what_is_not_asked_for_is_left_out(any_url):
    job = Job(any_url, partition_by=("k",))
    assert held(any_url) == []
    frame = numbers(*range(20))
    assert job.commit(frame)
    job.batch_id = 0
    assert not job.commit(frame)
    opened = ms.dataset(any_url)
    assert opened.batch_id == 0
    assert set(opened.scan().collect().rows()) == set(frame.rows())
    assert len(opened.files) == len(KEYS)
    assert all(str(file).startswith(f"{any_url}/k=") for file in opened.files)
    few = opened.scan().filter(pl.col("n") > 15).select("k")
    assert sorted(few.collect().rows(), key=repr) == sorted(
        frame.filter(pl.col("n") > 15).select("k").rows(), key=repr
    )
    assert opened.scan().head(7).collect().height == 7
    assert opened.scan().select(pl.len()).collect().item() == 20
    with pytest.raises(ConfigError, match="another partition_by"):
        Job(any_url)


QUERIES = {
    "head, then filter": lambda rows: rows.head(3).filter(pl.col("n") > 1),
    "head over two files, then filter": lambda rows: rows.head(12).filter(pl.col("n") > 9),
    "filter, then head": lambda rows: rows.filter(pl.col("n") > 5).head(7),
    "head of columns, then filter": lambda rows: rows.select("n").head(11).filter(pl.col("n") > 8),
    "nothing": lambda rows: rows.head(0).filter(pl.col("n") > 1),
    "slice, then filter": lambda rows: rows.slice(8, 5).filter(pl.col("n") > 9),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_of_a_scan_gives_what_it_gives_of_the_rows(s3_url, query):
    job = Job(s3_url)
    for number in range(3):
        job.commit(numbers(*range(10 * number, 10 * number + 10)))
    scanned = ms.dataset(s3_url).scan()
    assert query(scanned).collect().equals(query(scanned.collect().lazy()).collect())


def test_retractions_and_small_files_that_are_merged(any_url):
    now = [0]
    job = Job(any_url, clock_ms=lambda: now[0])
    for number in range(7):
        job.commit(numbers(number))
    signed = numbers(7, 8).with_columns(pl.Series(DIFF, [1, -1], pl.Int8()))
    job.commit(signed)
    rows = ms.dataset(any_url).scan().collect()
    assert sorted(rows.select("n", "_diff").rows()) == [*((n, 1) for n in range(8)), (8, -1)]
    assert len(ms.dataset(any_url).files) == 1
    assert len(data(any_url)) == 9  # what was merged is still there for readers
    now[0] = 11 * 60_000
    job.commit(numbers(9))
    assert len(data(any_url)) == 2
    for number in range(30):
        job.commit(numbers(number))
    assert len(objects(any_url) - data(any_url)) <= 1 + 8  # manifests


def dying_at(number, monkeypatch):
    """Have the process die at the ``number``-th request, before it or after it."""
    passed = 0
    for name in ("put", "get", "delete", "size", "objects"):
        real = getattr(ObjectClient, name)

        def dying(self, *args, real=real, listing=name == "objects"):
            nonlocal passed
            passed += 1
            if passed == number:
                raise DiedError
            result = list(real(self, *args)) if listing else real(self, *args)
            passed += 1
            if passed == number:
                raise DiedError
            return iter(result) if listing else result

        monkeypatch.setattr(ObjectClient, name, dying)


def test_a_death_at_any_request_leaves_each_batch_whole_or_absent(any_url, monkeypatch):
    for number in steps_to_die_at():
        url = f"{any_url}/{number}"
        first = Job(url, run=1)
        for batch in range(7):
            first.commit(numbers(batch))
        with monkeypatch.context() as patch:
            dying_at(number, patch)
            try:
                second = Job(url, run=2)
                second.sink.commit(second.fence, second.stage(numbers(70, 71)))  # merges, too
            except DiedError:
                pass
            else:
                break
        third = Job(url, run=3)
        if third.batch_id == 7:
            assert held(url) == list(range(7))
            third.commit(numbers(70, 71))
        assert held(url) == [*range(7), 70, 71]
        assert data(url) == named(url)
    assert number > 15


@pytest.mark.parametrize("kind", ["503", "cut upload", "lost answer", "cut download"])
def test_requests_that_fail_now_and_then_change_nothing(s3, s3_url, kind):
    dice = random.Random(kind)
    s3.decide = lambda _method, _path: Fault(kind, 0.05) if dice.random() < 0.15 else None
    job, count = Job(s3_url), 0
    for _ in range(12):
        job.commit(numbers(*range(count, count + 3)))
        count += 3
    s3.decide = lambda _method, _path: None
    assert held(s3_url) == list(range(count))
    Job(s3_url, run=2)
    assert data(s3_url) == named(s3_url)


@pytest.mark.parametrize("batches", [0, 1, 20])
def test_an_old_run_that_wakes_up_is_refused_and_leaves_nothing_for_good(any_url, batches):
    old = Job(any_url, run=1)
    old.commit(numbers(1))
    held_back = old.stage(numbers(5))  # with its manifest's number, which is removed after a while
    new = Job(any_url, run=2)
    for number in range(batches):
        new.commit(numbers(10 + number))
    with pytest.raises(FencedError, match="was replaced"):
        old.sink.commit(old.fence, held_back)
    stale = UrlPlace(any_url)
    manifest = stale.read()
    stale._number = 2  # it had read that one before it fell asleep, and puts the next only now
    with pytest.raises(ManifestReplacedError):
        stale.write(manifest)
    wanted = [1, *(10 + number for number in range(batches))]
    assert held(any_url) == wanted
    new.commit(numbers(99))
    assert held(any_url) == [*wanted, 99]
    assert len(objects(any_url) - data(any_url)) <= 1 + 8
    Job(any_url, run=3)
    assert data(any_url) == named(any_url)


def test_an_old_run_removes_nothing_that_a_newer_one_has_staged(any_url):
    old = Job(any_url, run=1)
    left = old.stage(numbers(1))
    new = Job(any_url, run=3)
    staged = new.stage(numbers(2))
    manifest = UrlPlace(any_url).read()
    old.sink._remove_leftovers(
        manifest, replace(manifest.fence, run=2)
    )  # it had begun, and listed only now
    assert new.sink.commit(new.fence, staged)
    assert held(any_url) == [2]
    assert left.staged["out"].parts[0].files[0].path not in objects(any_url)


def test_a_dataset_that_was_deleted_can_begin_again_and_an_old_run_cannot_bring_it_back(any_url):
    old = Job(any_url, run=4)
    for number in range(3):
        old.commit(numbers(number))
    identity = old.sink.identity
    assert len(dataset_files(any_url, identity)) == 3
    delete_dataset(any_url, "dataset:another")
    delete_dataset(any_url, identity)
    delete_dataset(any_url, identity)
    assert len(objects(any_url)) == 1
    with pytest.raises(ConfigError, match=f"There is no dataset in {any_url}"):
        ms.dataset(any_url)
    with pytest.raises(FencedError, match="was deleted while a run was writing"):
        old.commit(numbers(4))
    again = Job(any_url, run=1, checkpoint="two")
    again.commit(numbers(7))
    with pytest.raises(FencedError, match="was replaced"):
        old.commit(numbers(4))
    assert held(any_url) == [7]


def test_what_tasks_put_after_their_dataset_was_deleted_is_removed_by_runs_of_the_next(s3_url):
    job, late = Job(s3_url, run=7), []
    below = Job(
        f"{s3_url}/below"
    )  # another dataset: its files are in every listing of the one above
    below.commit(numbers(1))
    for checkpoint in ("two", "three"):
        late.append(job.sink.stager(job.fence, "out"))
        delete_dataset(s3_url, job.sink.identity)
        staged = [file.path for stager in late for file in stager.stage(numbers(1, 2)).files]
        assert objects(s3_url) > {*staged}
        job = Job(s3_url, run=1, checkpoint=checkpoint)
        job.commit(numbers(3))
        assert not objects(s3_url) & {*staged}
    staged = [file.path for stager in late for file in stager.stage(numbers(1, 2)).files]
    assert objects(s3_url) > {*staged}
    Job(s3_url, run=2, checkpoint="three")
    assert not objects(s3_url) & {*staged}
    assert (held(s3_url), held(f"{s3_url}/below")) == ([3], [1])


def test_a_copy_below_its_own_url_is_not_swept_and_not_deleted(s3_url):
    job, client = Job(s3_url), ObjectClient(s3_url)
    job.commit(numbers(1, 2))
    for name in objects(s3_url):
        client.put(f"copy/{name}", memoryview(client.get(name).to_pybytes()))
    Job(s3_url, run=2)
    assert held(f"{s3_url}/copy") == [1, 2]
    delete_dataset(s3_url, job.sink.identity)
    Job(s3_url, checkpoint="two")
    assert held(f"{s3_url}/copy") == [1, 2]


def test_a_run_that_sleeps_before_its_sweep_removes_nothing_of_one_that_starts_over(
    s3_url, monkeypatch
):
    files = UrlPlace.files

    def late(place, manifest, before_run=None):
        monkeypatch.setattr(UrlPlace, "files", files)
        Job(s3_url, run=1, checkpoint="two").commit(numbers(3))
        return files(place, manifest, before_run)

    monkeypatch.setattr(UrlPlace, "files", late)
    Job(s3_url, run=7)
    assert held(s3_url) == [3]


def test_a_run_that_begins_while_its_dataset_is_deleted_keeps_what_it_commits(s3_url, monkeypatch):
    job, write = Job(s3_url), UrlPlace.write
    job.commit(numbers(1))

    def then_a_run(place, manifest):
        monkeypatch.setattr(UrlPlace, "write", write)
        write(place, manifest)
        Job(s3_url, run=2, checkpoint="two").commit(numbers(5))

    monkeypatch.setattr(UrlPlace, "write", then_a_run)
    with pytest.raises(RetriableError, match="written to by a run"):
        delete_dataset(s3_url, job.sink.identity)
    assert held(s3_url) == [5]


def test_a_url_whose_dataset_an_earlier_version_deleted_can_be_used_again(s3_url):
    manifest = "_manifests/00000000000000000009.json"
    ObjectClient(s3_url).put(manifest, memoryview(b'{"deleted": true}'))
    Job(s3_url).commit(numbers(3))
    assert held(s3_url) == [3]


def test_what_cannot_be_is_refused_and_no_credentials_are_shown(s3_url, monkeypatch):
    ObjectClient(s3_url).put("notes.txt", memoryview(b"mine"))
    with pytest.raises(ConfigError, match=r"holds 'notes.txt' and is no dataset"):
        Job(s3_url)
    with pytest.raises(ConfigError, match=r"The dataset's URL .*environment") as failed:
        ms.dataset("s3://key:secret@bucket/x")
    assert "secret" not in str(failed.value)
    job = Job(f"{s3_url}/sub")
    job.commit(numbers(1))
    (name,) = data(f"{s3_url}/sub")
    ObjectClient(f"{s3_url}/sub").delete([name])
    with pytest.raises((CorruptionError, pl.exceptions.ComputeError), match="is not there"):
        held(f"{s3_url}/sub")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ms.MillstreamError) as refused:
        UrlPlace(f"{s3_url}/other-place").read()
    assert SECRET not in str(refused.value)


def test_executors_that_lack_the_credentials_say_so_and_the_driver_writes(s3_url, monkeypatch):
    job = Job(s3_url)
    stager = job.sink.stager(job.fence, "out")
    assert stager.is_reachable()
    monkeypatch.setattr(UrlPlace, "read", lambda _: None)  # another bucket of that name
    assert not stager.is_reachable()


def test_a_large_frame_becomes_several_files(s3_url, monkeypatch):
    monkeypatch.setattr("millstream.views.sinks.dataset_files._FILE_BYTES_MAX", 100)
    job = Job(s3_url)
    job.commit(numbers(*range(40)))
    assert len(ms.dataset(s3_url).files) > 3
    assert held(s3_url) == list(range(40))
