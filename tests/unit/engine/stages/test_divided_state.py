"""A rescale of live state: the same answers as without it, wherever runs are, and after a death at any of its steps."""

import json
import os
import random
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dying_process import DiedError, dying_at
from example_counts import steps_to_die_at

import millstream as ms
from millstream.engine import rescale as rescaling
from millstream.engine.frame_files import FrameFiles
from millstream.engine.job_metadata import JobMetadata, load_job_metadata
from millstream.engine.rescale import divide_state, rescale
from millstream.engine.stages import run_files
from millstream.engine.stages.executor import StageExecutor, _run_names, open_run_store
from millstream.engine.stages.journal_place import JournalPlace
from millstream.engine.stages.run_files import object_name
from millstream.errors import ConfigError, ConflictError, FencedError
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.client import ObjectClient
from millstream.object_store.place import StatePlace
from millstream.testing.inputs import InputRecord
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.sink import RunStart
from millstream.views.state_store import program_tables
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE

pytestmark = pytest.mark.not_in_lane("thresholds", "there every stage is tasks of Spark")

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCHES = 5
COUNTS = (1, 2, 3, 4, 7, 16)
VIEWS = ("minutes", "n", "users")


@dataclass
class Event:
    id: str
    user: int
    at: datetime


def declared():
    app = ms.App("counts", log="unused")
    events = app.topic("events", Event, partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    once = stream.dedup("id", within="1 minute")
    minutes = once.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count())
    minutes.view("minutes")
    minutes.window(ms.tumbling("5 minutes"), by="n").emit("update").agg(users=ms.count()).view("n")
    stream.group_by("user").agg(ids=ms.distinct("id")).view("users", key="user")
    return app


@pytest.fixture(scope="module")
def plans():
    app = declared()
    return {count: app.job().compile(Buckets(count, 5)) for count in COUNTS}


@pytest.fixture(scope="module")
def batches(plans, tmp_path_factory):
    """What the source gives of each batch, by the number of buckets."""
    records = [
        InputRecord(
            i % 2,
            b'{"id":"%d","user":%d,"at":"%s"}'
            % (i % 700, i % 23, (START + timedelta(seconds=i // 2)).isoformat().encode()),
        )
        for i in range(800)
    ]
    made = {}
    for count, plan in plans.items():
        engine = KernelEngine(
            plan, tmp_path_factory.mktemp("unused"), {"events": 2}, random.Random(3)
        )
        made[count] = [engine._read(ends) for ends in engine._ends({"events": records}, BATCHES)]
    return made


@pytest.fixture(params=["folder", "object store"])
def place_of(request, tmp_path, monkeypatch):
    """Give the place of the runs of an app in a folder: None for the folder itself."""
    if request.param == "folder":
        return lambda _folder: None
    url = parse_state_url(request.getfixturevalue("s3_url"))
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    return lambda folder: StatePlace(url, folder.name)


def run(plans, batches, folder, upto, place=None):
    """Run what is not committed yet of the first batches, in as many buckets as are wanted, as a job does."""
    for opened in (run_files._mapped, run_files._copied):  # as in a new process
        for path in list(opened.tables):
            opened.forget(path)
    folder.mkdir(exist_ok=True)
    metadata = load_job_metadata("counts", folder / STATE_STORE_FILE) or JobMetadata(2, 2, 2, 5)
    plan = plans[metadata.bucket_count]
    with ExitStack() as stack:
        committer = stack.enter_context(open_committer(plan, folder / "views.db", folder))
        following = committer.begin_run("main", "checkpoint", partitioning=metadata.partitioning)
        store = committer.state_store
        divide_state(
            store,
            RunStart("counts", "main", committer.run, "checkpoint"),
            plan,
            metadata,
            next_batch_id=following,
            journals=JournalPlace(folder / "runs", place),
        )
        stages = StageExecutor(
            plan,
            folder / "runs",
            committer.run,
            FrameFiles(None),
            partitions=metadata.partitions,
            tasks=None,  # all is so little that it is done here
            manifests=store.state_manifests("counts", "main"),
            place=place,
        )
        for batch_id in range(following, upto):
            rows, state = stages.run(batch_id, batches[metadata.bucket_count][batch_id])
            committer.commit(batch_id, collect_results(plan, rows), {}, state)
            stages.on_commit()
        stages.close()
    return max(0, upto - following)


def outcome(folder):
    with SqliteStateStore(folder / "views.db", readonly=True) as store:
        state = store.state_manifests("counts", "main")
        named = {object_name(name) for manifest in state.values() for name in _run_names(manifest)}
        return [sorted(store.scan(name).rows()) for name in VIEWS], named


def objects(folder, place=None):
    return set(open_run_store(folder / "runs", place).names())


@pytest.fixture(scope="module")
def wanted(plans, batches, tmp_path_factory):
    """The answers without any rescale."""
    folder = tmp_path_factory.mktemp("whole")
    run(plans, batches, folder, BATCHES)
    return outcome(folder)[0]


@pytest.mark.parametrize("counts", [(4, 7, 1, 3), (1, 2, 4, 4), (16, 3, 2, 7)])
def test_answers_are_those_without_a_rescale_and_shared_objects_go_with_their_last_bucket(
    plans, batches, wanted, tmp_path, place_of, counts, monkeypatch
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 200)  # some runs large, some small
    folder = tmp_path / "app"
    place = place_of(folder)
    run(plans, batches, folder, 1, place)
    before = 2
    for number, count in enumerate(counts):
        done = rescale("counts", folder, buckets=count)
        assert (done.buckets_before, done.buckets) == (before, count)
        before = count
        assert run(plans, batches, folder, number + 2, place) == 1
        assert objects(folder, place) == outcome(folder)[1]
    assert outcome(folder)[0] == wanted
    assert load_job_metadata("counts", folder / STATE_STORE_FILE).state_buckets == 0


def test_nothing_is_written_for_a_rescale_but_manifests(plans, batches, tmp_path):
    folder = tmp_path / "app"
    run(plans, batches, folder, 3)
    there, named = objects(folder), outcome(folder)[1]
    rescale("counts", folder, buckets=16)
    run(plans, batches, folder, 3)  # a run without a batch
    assert (objects(folder), outcome(folder)[1]) == (there, named)
    with SqliteStateStore(folder / "views.db", readonly=True) as store:
        buckets = {bucket for _, bucket in store.state_manifests("counts", "main")}
    assert buckets == set(range(16))


STEPS = [
    (StateStore, name)
    for name in ("set_partitioning", "begin_run", "register_program", "replace_state", "commit")
]
FILES = [
    (os, "fsync"),
    (Path, "unlink", lambda path, **_names: path.parent.name == "runs"),
    (Path, "open", lambda _path, mode="r", **_names: mode == "xb"),
]
REQUESTS = [
    *((ObjectClient, name) for name in ("put", "get", "names")),
    (CachedObjectStore, "delete"),
]


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 3)])
def test_a_death_at_any_write_changes_no_answer_and_leaves_no_file_for_good(
    plans, batches, wanted, tmp_path, monkeypatch, first, then
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 200)
    begun = tmp_path / "begun"
    run(plans, batches, begun, 2)
    rescale("counts", begun, buckets=first)
    run(plans, batches, begun, 3)
    for number in steps_to_die_at(slow=True):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        with monkeypatch.context() as patch:
            dying_at(number, patch, *STEPS, *FILES)
            try:
                rescale("counts", folder, buckets=then)
                run(plans, batches, folder, 4)
            except DiedError:
                pass
            else:
                break
        run(plans, batches, folder, BATCHES)
        views, named = outcome(folder)
        assert views == wanted
        assert objects(folder) == named
    assert number > 15


def test_a_death_at_any_request_changes_no_answer_and_leaves_no_object_for_good(
    plans, batches, wanted, tmp_path, monkeypatch, s3_url
):
    monkeypatch.setattr(run_files, "OWN_FILE_BYTES_MIN", 200)
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    url = parse_state_url(s3_url)
    begun = tmp_path / "begun"
    run(plans, batches, begun, 2, StatePlace(url, "begun"))
    for number in steps_to_die_at(slow=True):
        folder, place = tmp_path / str(number), StatePlace(url, str(number))
        shutil.copytree(begun, folder)
        source, target = (ObjectClient(f"{url.text}/{name}/runs") for name in ("begun", number))
        for name in source.names():
            target.put(name, memoryview(source.get(name).to_pybytes()))
        with monkeypatch.context() as patch:
            dying_at(number, patch, *STEPS, *REQUESTS)
            try:
                rescale("counts", folder, buckets=7)
                run(plans, batches, folder, 3, place)
            except DiedError:
                pass
            else:
                break
        run(plans, batches, folder, BATCHES, place)
        # An upload of the dead run may have ended after that sweep: the next one takes it.
        assert run(plans, batches, folder, BATCHES, place) == 0
        views, named = outcome(folder)
        assert views == wanted
        assert objects(folder, place) == named
    assert number > 12


def test_an_old_run_that_wakes_up_divides_nothing(plans, batches, tmp_path):
    folder = tmp_path / "app"
    run(plans, batches, folder, 1)
    rescale("counts", folder, buckets=4)
    metadata = load_job_metadata("counts", folder / STATE_STORE_FILE)
    with SqliteStateStore(folder / "views.db") as store:
        old, _ = store.begin_run("counts", "main", "checkpoint")
        store.begin_run("counts", "main", "checkpoint")
        kept = store.state_manifests("counts", "main")
        with pytest.raises(FencedError, match="was replaced by run"):
            divide_state(
                store,
                RunStart("counts", "main", old, "checkpoint"),
                plans[4],
                metadata,
                next_batch_id=1,
                journals=JournalPlace(folder / "runs"),
            )
        assert store.state_manifests("counts", "main") == kept


def test_a_batch_whose_lookups_were_answered_is_committed_first(plans, batches, tmp_path):
    folder = tmp_path / "app"
    run(plans, batches, folder, 2)
    JournalPlace(folder / "runs").journal(2, "key", 1).write("a", b"answers")
    rescale("counts", folder, buckets=4)
    with pytest.raises(ConfigError, match=r"Batch 2 .*--buckets 2, run the app once"):
        run(plans, batches, folder, 3)
    rescale("counts", folder, buckets=2)
    assert run(plans, batches, folder, 3) == 1
    rescale("counts", folder, buckets=4)
    assert run(plans, batches, folder, 4) == 1


def test_buckets_that_differ_in_time_are_refused(plans, batches, tmp_path):
    folder = tmp_path / "app"
    run(plans, batches, folder, 2)
    rescale("counts", folder, buckets=4)
    with SqliteStateStore(folder / "views.db") as store:
        state = store.state_manifests("counts", "main")
        manifest = json.loads(state[0, 1])
        for part in manifest.values():
            part["watermark"] -= 1
        state[0, 1] = json.dumps(manifest).encode()
        run_number, _ = store.begin_run("counts", "main", "checkpoint")
        start = RunStart("counts", "main", run_number, "checkpoint")
        program = store.program("counts", "main")
        store.replace_state(start, state, program.partitioning, was=program.partitioning)
    with pytest.raises(ms.CorruptionError, match="differ in 'watermark'"):
        run(plans, batches, folder, 3)


def test_state_of_the_format_before_is_read(plans, batches, wanted, tmp_path):
    folder = tmp_path / "app"
    run(plans, batches, folder, 3)
    with SqliteStateStore(folder / "views.db") as store:
        program = store.program("counts", "main")
        names = ("bucket_count", "partitions", "shuffle_partitions", "hash_seed")
        known = {name: program.partitioning[name] for name in names}
        text = replace(program, partitioning=known, format=6).to_json()
        store._write(lambda db: db.execute("UPDATE _programs SET program = ?", (text,)))
    assert run(plans, batches, folder, 4) == 1
    rescale("counts", folder, buckets=7)
    run(plans, batches, folder, BATCHES)
    assert outcome(folder)[0] == wanted


def test_what_another_run_has_divided_is_not_divided_again(
    plans, batches, wanted, tmp_path, monkeypatch
):
    run(plans, batches, tmp_path, 2)
    rescale("counts", tmp_path, buckets=4)
    read = load_job_metadata("counts", tmp_path / STATE_STORE_FILE)
    run(plans, batches, tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "load_job_metadata", lambda *_: read)  # before that run
        with pytest.raises(ConfigError, match="divided by another process since this run"):
            run(plans, batches, tmp_path, 4)
        patch.setattr(program_tables, "_DIVIDING", ())  # it was divided only then
        with pytest.raises(ConflictError, match="Another process has changed how the state"):
            run(plans, batches, tmp_path, 4)
    run(plans, batches, tmp_path, BATCHES)
    assert outcome(tmp_path)[0] == wanted


def test_state_that_was_divided_twice_since_a_run_read_how_is_not_taken_for_its_own(
    plans, batches, wanted, tmp_path, monkeypatch
):
    run(plans, batches, tmp_path, 1)
    read = load_job_metadata("counts", tmp_path / STATE_STORE_FILE)  # 2 buckets
    rescale("counts", tmp_path, buckets=4)
    run(plans, batches, tmp_path, 2)
    rescale("counts", tmp_path, buckets=2)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "load_job_metadata", lambda *_: read)
        with pytest.raises(ConfigError, match="divided by another process since this run"):
            run(plans, batches, tmp_path, 3)
    run(plans, batches, tmp_path, BATCHES)
    assert outcome(tmp_path)[0] == wanted


@pytest.mark.parametrize("numbers", [{"buckets": 16}, {"partitions": 1}])
def test_a_rescale_while_a_run_divides_the_state_is_refused(
    plans, batches, wanted, tmp_path, monkeypatch, numbers
):
    run(plans, batches, tmp_path, 2)
    rescale("counts", tmp_path, buckets=4)
    decide = rescaling._wanted

    def late(*given):
        run(plans, batches, tmp_path, 3)
        return decide(*given)

    with monkeypatch.context() as patch:
        patch.setattr(rescaling, "_wanted", late)
        with pytest.raises(ConflictError, match="Another process has changed how the state"):
            rescale("counts", tmp_path, **numbers)
    run(plans, batches, tmp_path, BATCHES)
    assert outcome(tmp_path)[0] == wanted
