"""A reset removes all that an app has made, wherever it is cut off, and the app starts over."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import closing, contextmanager, suppress
from functools import partialmethod
from pathlib import Path

import polars as pl
import pytest
from s3_server import Fault

import millstream as ms
from millstream.errors import ConfigError, FencedError, RetriableError
from millstream.kernels.plan import (
    DatasetSinkSpec,
    ForeachSinkSpec,
    JobPlan,
    SinkPlan,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.place import DESCRIPTION, new_place
from millstream.object_store.retries import RetryLimits
from millstream.ops import reset as module
from millstream.ops.reset import find_footprint, reset
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.commit.pipeline_graph import pipeline_graph
from millstream.views.runs.control_files import check_no_reset, hold_run_lock, reset_marker
from millstream.views.sink import RunStart
from millstream.views.state_store.sqlite_store import SqliteStateStore

COLUMNS = (("k", pl.String()), ("n", pl.Int64()))


def keep(rows, context):
    """A function that keeps nothing."""


class World:
    """An app that writes to everything that there is, in one folder and perhaps one database."""

    def __init__(self, root: Path, url: str | None = None):
        self.root, self.url = root, url
        self.log = root / "data"
        self.app = self.log / "apps" / "app"
        ends = [
            ("home", ViewSinkSpec()),
            ("to(out)", TopicSinkSpec("out", "k", ("k", "n"), 1, "delete")),
            ("dataset(rows)", DatasetSinkSpec(str(root / "rows"), ("k",))),
            ("foreach(keep)", ForeachSinkSpec(keep)),
            *([("base", ViewSinkSpec(url))] if url else []),
        ]
        sinks = tuple(
            SinkPlan(name, 8 + n, ("k",) if isinstance(end, ViewSinkSpec) else (), COLUMNS, end)
            for n, (name, end) in enumerate(ends)
        )
        self.plan = JobPlan("app", (), (), (), sinks, Buckets(1))
        self.stores = [url] if url else []

    @contextmanager
    def run(self, checkpoint_id):
        self.app.mkdir(parents=True, exist_ok=True)
        with open_committer(self.plan, self.app / "views.db", self.log) as committer:
            yield committer, committer.begin_run("main", checkpoint_id)

    def batches(self, checkpoint_id, count=2):
        """Commit batches after those that there are; give the number of the first."""
        with self.run(checkpoint_id) as (committer, first):
            for number in range(first, first + count):
                committer.commit(number, self.result(number), {})
        (self.app / "job.json").write_text("{}")
        (self.app / "checkpoint" / "offsets").mkdir(parents=True, exist_ok=True)
        (self.app / "checkpoint" / "offsets" / "0").write_text("x" * 100)
        (self.app / "runs").mkdir(exist_ok=True)
        return first

    def result(self, number):
        rows = pl.DataFrame({"k": ["a", f"k{number}"], "n": [number, 1]})
        names = [sink.name for sink in self.plan.sinks]
        books = {"step": Counter(read=2, emitted=2)}
        return BatchResult(
            rows=dict.fromkeys(names, rows), step_counts=books, position={"t": {"0": number + 1}}
        )

    def look(self):
        return find_footprint("app", self.log, self.log, self.stores)

    def records(self):
        with ms.connect(self.log) as log:
            return log.read("out", 0).num_rows


def raised(error):
    raise error


@pytest.fixture
def world(tmp_path, url):
    return World(tmp_path, url)


def test_what_is_found_is_counted_and_named_and_nothing_is_changed(world):
    world.batches("one")
    world.look()  # who reads the home leaves helpers of it
    before = sorted(world.root.rglob("*"))
    found = world.look()
    assert found == world.look()
    assert sorted(world.root.rglob("*")) == before
    assert found.views == {"home": 3, "dead_letters": 0}
    files = [path for path in world.app.rglob("*") if path.is_file()]
    assert (found.files, found.size_bytes) == (len(files), sum(p.stat().st_size for p in files))
    assert (found.fences, found.topics, found.functions) == (
        1,
        {"out": 6},
        ("foreach(keep)",),
    )  # with the ends of transactions
    (dataset,) = found.datasets
    assert (dataset.address, dataset.files, dataset.size_bytes > 0) == (
        str(world.root / "rows"),
        4,
        True,
    )
    assert [kept.views for kept in found.databases.values()] == [("base",)] * len(world.stores)


def test_after_a_reset_every_target_starts_over_with_another_checkpoint(world):
    world.batches("one")
    reset(world.look())
    assert not world.app.exists()
    assert world.batches("two") == 0
    assert world.batches("two") == 2
    assert ms.dataset(world.root / "rows").scan().collect().height == 8
    assert world.records() == 4 + 8  # what was written stays


def test_a_folder_deleted_by_hand_is_refused_by_the_others_and_a_reset_is_what_helps(world):
    world.batches("one")
    shutil.rmtree(world.app)
    with pytest.raises(ConfigError, match=r"another checkpoint.*millstream reset app"):
        world.batches("two")
    shutil.rmtree(world.root / "rows")  # nobody but the home knew of it
    reset(world.look())
    assert world.batches("three") == 0


def test_an_app_whose_first_batch_was_cut_off_before_the_home_had_it_is_reset_everywhere(
    world, monkeypatch
):
    with monkeypatch.context() as patch, world.run("one") as (committer, _):
        patch.setattr(committer.state_store, "commit", lambda *_, **__: raised(SimulatedCrash()))
        with pytest.raises(SimulatedCrash):
            committer.commit(0, world.result(0), {})
    assert world.records() == 2
    found = world.look()
    assert [one.files for one in found.datasets] == [2]
    reset(found)
    assert world.batches("two", count=1) == 0
    assert ms.dataset(world.root / "rows").scan().collect().height == 2


def test_a_dataset_of_another_app_of_the_same_name_is_left_alone(world):
    world.batches("one")
    shutil.rmtree(world.app)
    plan = JobPlan("app", (), (), (), world.plan.sinks[:1], Buckets(1))
    world.app.mkdir()
    with open_committer(plan, world.app / "views.db", world.log) as committer:
        committer.begin_run("main", "two")
        committer.state_store.put_description("app", "graph", pipeline_graph(world.plan))
    reset(world.look())
    assert ms.dataset(world.root / "rows").scan().collect().height == 4


def test_an_app_that_is_not_there_is_an_error_and_makes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="nothing of an app 'app'"):
        find_footprint("app", tmp_path / "data", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    World(tmp_path).batches("one")
    with pytest.raises(ConfigError, match="nothing of an app 'other'"):
        find_footprint("other", tmp_path / "data", tmp_path / "data")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/tmp/x", "A", "x" * 64])
def test_a_name_that_no_app_has_removes_nothing(world, name):
    world.batches("one")
    with pytest.raises(ConfigError, match="The app's name is"):
        find_footprint(name, world.log, world.log, world.stores)


def test_a_reset_that_was_cut_off_stays_marked_where_a_run_seems_alive(world):
    world.batches("one")
    found = world.look()
    reset_marker(world.app).touch()  # an earlier one was cut off
    with hold_run_lock(world.app, 9), pytest.raises(ConfigError, match="is running"):
        reset(found)
    with pytest.raises(ConfigError, match="begun and has not ended"):
        check_no_reset(world.app)


def test_a_folder_that_cannot_be_removed_is_told_and_stays_marked(world, monkeypatch):
    world.batches("one")

    def refused(_path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patches:
        patches.setattr(module.shutil, "rmtree", refused)
        with pytest.raises(RetriableError, match=r"Permission denied.*reset the app again"):
            reset(world.look())
    assert reset_marker(world.app).exists()
    reset(world.look())
    assert not world.app.exists()


def test_other_apps_keep_what_they_have(world):
    world.batches("one")
    with (
        ms.connect(world.log) as log,
        log.producer(transactional_id="app2/main") as producer,
        producer.transaction() as transaction,
    ):
        transaction.fence("app2/main/one", 7)
    reset(world.look())
    with ms.connect(world.log) as log:
        assert log.fences() == {"app2/main/one": 7}


def test_a_running_app_is_refused_and_stays_as_it_is(world):
    world.batches("one")
    found = world.look()
    with hold_run_lock(world.app, 9):
        with pytest.raises(ConfigError, match=r"is running.*millstream stop app"):
            world.look()
        with pytest.raises(ConfigError, match=r"is running.*nothing was removed"):
            reset(found)  # it began after the look
        check_no_reset(world.app)
    assert world.batches("one") == 2


def test_a_run_that_slept_through_a_reset_can_commit_nothing(world, monkeypatch):
    with world.run("one") as (committer, _):
        committer.commit(0, world.result(0), {})
        records = world.records()
        # It wakes when all but the folder is gone.
        monkeypatch.setattr(module, "_empty", lambda _: None)
        with suppress(OSError):
            reset(world.look())
        with pytest.raises(FencedError):
            committer.commit(1, world.result(1), {})
        topics = committer.sinks[0]
        with pytest.raises(FencedError):
            topics.commit(committer._fence(1), world.result(1))
    assert world.records() == records


def test_a_run_that_slept_until_the_app_was_started_over_commits_nothing_beside_the_new_one(world):
    with world.run("one") as (sleeping, _):
        for number in range(3):
            sleeping.commit(number, world.result(number), {})
        reset(world.look())
        with world.run("two") as (new, first):
            assert (first, new.run) == (0, sleeping.run)  # runs are counted from 1 again
            for target in sleeping.sinks:
                if target.has_fence:
                    with pytest.raises(FencedError):
                        target.commit(sleeping._fence(3), world.result(3))
            for number in range(2):
                assert new.commit(number, world.result(number), {})
    rows = ms.dataset(world.root / "rows").scan().collect()
    assert sorted(rows.rows()) == [("a", 0), ("a", 1), ("k0", 1), ("k1", 1)]


@pytest.mark.parametrize("damage", ["damaged", "empty"])
def test_a_home_that_cannot_be_read_is_removed_and_that_is_said(world, damage):
    world.batches("one")
    for path in world.app.glob("views.db-*"):
        path.unlink()
    (world.app / "views.db").write_bytes(b"no database" * 1000 if damage == "damaged" else b"")
    found = world.look()
    assert found.state_store_problem
    reset(found)
    assert not world.app.exists()
    shutil.rmtree(world.root / "rows")
    assert world.batches("two") == 0


def test_a_log_or_a_database_that_was_not_given_is_asked_for(world, tmp_path):
    world.batches("one")
    with ms.connect(tmp_path / "elsewhere") as log:
        log.create_topic("t")
    for log in (tmp_path / "elsewhere", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"writes to topics of the log .*--state"):
            find_footprint("app", world.log, log, world.stores)
    if world.url:
        with pytest.raises(ConfigError, match=r"keeps views in postgresql:.*--store URL"):
            find_footprint("app", world.log, world.log)


class Cut:
    """Lets the process die at the so-many-th thing that is removed or written."""

    def __init__(self, monkeypatch, world, at):
        self.at, self.count = at, 0
        self.places = (str(world.app), str(world.root / "rows"))
        for owner, name in [
            (Path, "unlink"),
            (Path, "rmdir"),
            (os, "rename"),
            (os, "replace"),
            (module, "write_reset_marker"),
            (module, "forget_app"),
            (module, "_refuse_older_runs"),
            (module, "_remove_fences"),
        ]:
            monkeypatch.setattr(owner, name, self._dying(getattr(owner, name)))

    def _dying(self, call):
        def dying(*args, **kwargs):
            if not isinstance(args[0], str | Path) or str(args[0]).startswith(self.places):
                self.count += 1
                if self.count == self.at:
                    raise SimulatedCrash
            return call(*args, **kwargs)

        return dying


def test_cut_off_anywhere_no_run_begins_and_the_next_reset_ends_it(tmp_path):
    at = 0
    while True:
        at += 1
        world = World(tmp_path / str(at))
        world.batches("one", count=1)
        found = world.look()
        with pytest.MonkeyPatch.context() as patches:
            cut = Cut(patches, world, at)
            with suppress(SimulatedCrash):
                reset(found)
        if cut.count < at:
            break  # it was not cut off any more
        whole = (world.app / "views.db").exists() and not reset_marker(world.app).exists()
        if world.app.exists() and list(world.app.iterdir()) and not whole:
            with pytest.raises(ConfigError, match="millstream reset app"):
                check_no_reset(world.app)
        with suppress(ConfigError):  # there may be nothing left
            reset(world.look())
        assert not world.app.exists()
        assert world.batches("two", count=1) == 0
    assert at > 8


def test_a_target_says_what_to_do_where_an_app_is_to_start_over():
    start = RunStart("app", "main", 1, "one")
    assert "`millstream reset app`" in start.reset_advice


@pytest.fixture(params=["file", "s3"])
def state_url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/state"
    return request.getfixturevalue("s3_url")


def test_objects_of_the_state_are_counted_and_removed_and_those_of_others_stay(
    tmp_path, state_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    place, other = (new_place("app", parse_state_url(state_url)) for _ in range(2))
    world = World(tmp_path)
    world.batches("one")
    with closing(SqliteStateStore(world.app / "views.db")) as store:
        store.put_description("app", DESCRIPTION, place.to_message())
    for each in (place, other):
        runs = each.open("runs")
        for name in ("1-a", "1-b"):
            runs.put(name, lambda file: file.write(b"x"))
        runs.sync()
    found = world.look()
    assert (found.objects.place, found.objects.count) == (place, 2)
    reset(found)
    assert list(place.open().names()) == []
    assert len(list(other.open().names())) == 2
    assert not world.app.exists()


def test_a_reset_that_cannot_remove_the_objects_can_be_repeated(tmp_path, s3, s3_url, monkeypatch):
    monkeypatch.setattr(RetryLimits, "__init__", partialmethod(quick, RetryLimits.__init__))
    place = new_place("app", parse_state_url(s3_url))
    world = World(tmp_path)
    world.batches("one")
    with closing(SqliteStateStore(world.app / "views.db")) as store:
        store.put_description("app", DESCRIPTION, place.to_message())
    runs = place.open("runs")
    runs.put("1-a", lambda file: file.write(b"x"))
    runs.sync()
    found = world.look()
    s3.decide = lambda *_: Fault("503")
    with pytest.raises(RetriableError, match="failed"):
        reset(found)
    with pytest.raises(ConfigError, match="was begun and has not ended"):
        check_no_reset(world.app)
    s3.decide = lambda *_: None
    reset(world.look())
    assert list(place.open().names()) == []
    assert not world.app.exists()


def quick(policy, real):
    real(policy, 0.05, 0.01, 0.01)


def test_a_folder_of_state_that_this_machine_lacks_is_not_forgotten(tmp_path):
    root = tmp_path / "mounted"
    place = new_place("app", parse_state_url(f"file://{root}"))
    world = World(tmp_path)
    world.batches("one")
    with closing(SqliteStateStore(world.app / "views.db")) as store:
        store.put_description("app", DESCRIPTION, place.to_message())
    with pytest.raises(ConfigError, match="not on this machine"):
        world.look()
    root.mkdir()
    reset(world.look())
    assert not world.app.exists()


def test_a_place_that_a_run_noted_after_the_look_is_removed_too(tmp_path):
    (tmp_path / "state").mkdir()
    world = World(tmp_path)
    world.batches("one")
    found = world.look()
    assert found.objects is None
    place = new_place("app", parse_state_url(f"file://{tmp_path}/state"))
    with closing(SqliteStateStore(world.app / "views.db")) as store:
        store.put_description("app", DESCRIPTION, place.to_message())
    place.open("runs").put("1-a", lambda file: file.write(b"x"))
    reset(found)
    assert list(place.open().names()) == []
