"""The stages of a job between its batches: state moves with the commit of the state store, and only with it."""

import itertools
import json
import os
import random
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from dying_process import DiedError, dying_at
from example_counts import steps_to_die_at
from s3_server import Fault

import millstream as ms
from millstream.engine.frame_files import FrameFiles
from millstream.engine.stages import run_files
from millstream.engine.stages.executor import StageExecutor, _run_names, open_run_store
from millstream.engine.stages.run_files import object_name
from millstream.errors import CorruptionError
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.client import ObjectClient
from millstream.object_store.place import StatePlace
from millstream.testing.inputs import InputRecord
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore

pytestmark = pytest.mark.not_in_lane("thresholds", "there every stage is tasks of Spark")

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCHES = 5


@dataclass
class Event:
    id: str
    user: int
    at: datetime


@pytest.fixture(scope="module")
def plan():
    app = ms.App("counts", log="unused")
    events = app.topic("events", Event, partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    once = stream.dedup("id", within="1 minute")
    minutes = once.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count())
    minutes.view("minutes")
    minutes.window(ms.tumbling("5 minutes"), by="n").emit("update").agg(users=ms.count()).view("n")
    return app.job().compile(Buckets(3))


@pytest.fixture(scope="module")
def batches(plan, tmp_path_factory):
    """What the source gives of each batch."""
    dice = random.Random(3)
    records = [
        InputRecord(
            i % 2,
            b'{"id":"%d","user":%d,"at":"%s"}'
            % (i % 700, i % 7, (START + timedelta(seconds=i // 2)).isoformat().encode()),
        )
        for i in range(800)
    ]
    engine = KernelEngine(plan, tmp_path_factory.mktemp("unused"), {"events": 2}, dice)
    return [engine._read(ends) for ends in engine._ends({"events": records}, BATCHES)]


@pytest.fixture(params=["folder", "object store"])
def place_of(request, tmp_path, monkeypatch):
    """Give the place of the runs of an app in a folder: None for the folder itself."""
    if request.param == "folder":
        return lambda _folder: None
    url = parse_state_url(request.getfixturevalue("s3_url"))
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    return lambda folder: StatePlace(url, folder.name)


def run(plan, batches, folder, place=None):
    """Run what is not committed yet; give how many batches that was."""
    for opened in (run_files._mapped, run_files._copied):  # as in a new process
        for path in list(opened.tables):
            opened.forget(path)
    with ExitStack() as stack:
        committer = stack.enter_context(open_committer(plan, folder / "views.db", folder))
        following = committer.begin_run("main", "checkpoint")
        stages = StageExecutor(
            plan,
            folder / "runs",
            committer.run,
            FrameFiles(None),
            partitions=2,
            tasks=None,  # all is so little that it is done here
            manifests=committer.state_store.state_manifests("counts", "main"),
            place=place,
        )
        for batch_id in range(following, len(batches)):
            rows, state = stages.run(batch_id, batches[batch_id])
            committer.commit(batch_id, collect_results(plan, rows), {}, state)
            stages.on_commit()
        stages.close()
    return len(batches) - following


def outcome(folder):
    with SqliteStateStore(folder / "views.db", readonly=True) as store:
        state = store.state_manifests("counts", "main")
        named = {object_name(name) for manifest in state.values() for name in _run_names(manifest)}
        views = [store.scan(name).rows() for name in ("minutes", "n")]
        return views, named


def objects(folder, place=None):
    return set(open_run_store(folder / "runs", place).names())


def test_state_goes_on_in_the_next_run_and_objects_that_nothing_names_are_gone(
    plan, batches, tmp_path, place_of
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(plan, batches, whole, place_of(whole)) == BATCHES
    for count in range(1, BATCHES + 1):
        assert run(plan, batches[:count], parts, place_of(parts)) == 1
    assert outcome(whole)[0] == outcome(parts)[0]
    assert sum(map(len, outcome(whole)[0])) > 40
    for folder in (whole, parts):
        assert objects(folder, place_of(folder)) == outcome(folder)[1]


def contents(rows):
    """Return the frames of rows; of reports without for how long steps have worked."""
    frames = [bytes(row.frame) for row in rows]
    reports = [json.loads(frame) if frame.startswith(b"{") else frame for frame in frames]
    return [
        {name: value for name, value in one.items() if name != "worked_ms"}
        if isinstance(one, dict)
        else one
        for one in reports
    ]


def test_what_was_not_committed_is_as_if_it_had_not_been(plan, batches, tmp_path):
    stages = StageExecutor(plan, tmp_path, 1, FrameFiles(None), 2, None, {})
    first = stages.run(0, batches[0])
    again = stages.run(0, batches[0])
    assert contents(first[0]) == contents(again[0])
    assert first[1].keys() == again[1].keys()
    assert stages.manifests == {}


WRITES = [
    (os, "fsync"),
    (StateStore, "commit"),
    (Path, "unlink", lambda path, **_names: path.parent.name == "runs"),
    (Path, "open", lambda _path, mode="r", **_names: mode == "xb"),
]
REQUESTS = [
    *((ObjectClient, name) for name in ("put", "get", "names")),
    (CachedObjectStore, "delete"),
    (StateStore, "commit"),
]


def test_a_death_at_any_write_changes_no_answer_and_leaves_no_file_for_good(
    plan, batches, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 200)  # some runs large, some small
    batches = batches[:3]
    run(plan, batches[:1], tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    run(plan, batches, tmp_path / "whole")
    wanted, _ = outcome(tmp_path / "whole")
    assert {"@" in name for name in all_names(tmp_path / "whole")} == {True, False}
    for number in steps_to_die_at():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        with monkeypatch.context() as patch:
            dying_at(number, patch, *WRITES)
            try:
                run(plan, batches[:2], folder)
            except DiedError:
                pass
            else:
                break
        run(plan, batches, folder)
        views, named = outcome(folder)
        assert views == wanted
        assert objects(folder) == named
    assert number > 20


def copied(source, target, url):
    """Copy an app with its objects, as if it had come that far there."""
    shutil.copytree(source, target)
    before, after = (ObjectClient(f"{url.text}/{each.name}/runs") for each in (source, target))
    for name in before.names():
        after.put(name, memoryview(before.get(name).to_pybytes()))


@pytest.mark.parametrize("cached", [True, False])
def test_a_death_at_any_request_changes_no_answer_and_leaves_no_object_for_good(
    plan, batches, tmp_path, monkeypatch, s3_url, cached
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 200)
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    if not cached:
        monkeypatch.setenv("MILLSTREAM_CACHE_BYTES", "0")
    url, batches = parse_state_url(s3_url), batches[:3]
    run(plan, batches[:1], tmp_path / "first", StatePlace(url, "first"))
    run(plan, batches, tmp_path / "whole", StatePlace(url, "whole"))
    wanted, _ = outcome(tmp_path / "whole")
    for number in steps_to_die_at() if cached else itertools.count(9, step=9):
        folder, place = tmp_path / str(number), StatePlace(url, str(number))
        copied(tmp_path / "first", folder, url)
        with monkeypatch.context() as patch:
            dying_at(number, patch, *REQUESTS)
            try:
                run(plan, batches[:2], folder, place)
            except DiedError:
                pass
            else:
                break
        run(plan, batches, folder, place)
        # An upload of the dead run may have ended after that sweep: the next one takes it.
        assert run(plan, batches, folder, place) == 0
        views, named = outcome(folder)
        assert views == wanted
        assert objects(folder, place) == named
    assert number > 15


def test_a_small_batch_costs_one_request_and_none_to_read_what_this_machine_wrote(
    plan, batches, tmp_path, s3, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    place = StatePlace(parse_state_url(s3_url), "app")
    stages = StageExecutor(plan, tmp_path, 1, FrameFiles(None), 2, None, {}, place)
    for batch_id, batch in enumerate(batches):
        s3.requests.clear()
        s3.decide = lambda method, _path: Fault("slow", 0.1) if method == "PUT" else None
        stages.run(batch_id, batch)
        assert stages.requests.wait_us >= 90_000  # some of it may go on beside the work
        left = [] if batch_id else ["GET"]  # what earlier runs left of journals is listed once
        assert [method for method, _ in s3.requests] == [*left, "PUT"]
        assert (stages.requests.puts, stages.requests.gets) == (1, 0)
        assert stages.requests.bytes_up > 1000
        stages.on_commit()
        stages.close()
        assert s3.count("POST") <= 1  # what is no longer named goes in one request


def test_an_old_run_that_wakes_up_removes_nothing_that_a_newer_one_names(
    plan, batches, tmp_path, s3_url, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    place = StatePlace(parse_state_url(s3_url), "app")
    old = StageExecutor(plan, tmp_path, 1, FrameFiles(None), 2, None, {}, place)
    old.run(0, batches[0])
    old.on_commit()
    kept = dict(old.manifests)
    old.run(1, batches[1])  # ... and it falls asleep before its commit
    new = StageExecutor(plan, tmp_path, 2, FrameFiles(None), 2, None, kept, place)
    new.run(1, batches[1])
    new.on_commit()
    with suppress(
        CorruptionError
    ):  # it goes on; what it reads may be gone, and its commit is refused
        old.run(1, batches[1])
    new.run(2, batches[2])
    new.on_commit()
    new.close()
    named = {object_name(n) for manifest in new.manifests.values() for n in _run_names(manifest)}
    assert named <= set(place.open("runs").names())
    last = StageExecutor(plan, tmp_path, 3, FrameFiles(None), 2, None, new.manifests, place)
    last.close()
    assert set(place.open("runs").names()) == named


def all_names(folder):
    with SqliteStateStore(folder / "views.db", readonly=True) as store:
        state = store.state_manifests("counts", "main")
        return {name for manifest in state.values() for name in _run_names(manifest)}


def test_state_that_was_divided_by_another_seed_is_refused(plan, batches, tmp_path):
    stages = StageExecutor(plan, tmp_path, 1, FrameFiles(None), 2, None, {})
    stages.run(0, batches[0])
    stages.on_commit()
    other = replace(plan, buckets=replace(plan.buckets, seed=9))
    again = StageExecutor(other, tmp_path, 2, FrameFiles(None), 2, None, stages.manifests)
    with pytest.raises(CorruptionError, match="was partitioned with another hash seed"):
        again.run(1, batches[1])


def test_a_repeated_batch_reads_the_answers_that_an_earlier_run_was_given(tmp_path):
    calls = []

    def ask(keys):
        calls.append(keys)
        return keys.with_columns(c=pl.lit(len(calls), pl.Int64))

    app = ms.App("asks", log="unused")
    stream = app.topic("events", Event, partitions=1).stream(time="at")
    stream.enrich(ask, on="user", schema={"c": pl.Int64}).view("seen", key="id")
    plan = app.job().compile(Buckets(2))
    records = [
        InputRecord(0, b'{"id":"%d","user":%d,"at":"%s"}' % (i, i, START.isoformat().encode()))
        for i in range(9)
    ]
    engine = KernelEngine(plan, tmp_path / "unused", {"events": 1}, random.Random(0))
    rows = [engine._read(ends) for ends in engine._ends({"events": records}, 2)]

    def frames(number, batch_id, batch):
        stages = StageExecutor(plan, tmp_path, number, FrameFiles(None), 2, None, {})
        return stages, [row.frame for row in stages.run(batch_id, batch)[0] if row.port >= 8]

    _, first = frames(1, 5, rows[0])
    asked = len(calls)
    stages, again = frames(2, 5, rows[0])
    assert first
    assert again == first
    assert len(calls) == asked
    assert {path.name[0] for path in (tmp_path / "journal").iterdir()} == {"5"}
    stages.on_commit()
    assert not list((tmp_path / "journal").iterdir())
    frames(3, 5, rows[0])
    assert len(calls) == 2 * asked
