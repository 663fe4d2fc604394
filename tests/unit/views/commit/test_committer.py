"""One batch, many sinks: crashed between any two of them, run again, and all hold the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    TopicRecreatedError,
    UnknownViewError,
    UserCodeError,
)
from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.plan import (
    DatasetSinkSpec,
    ForeachSinkSpec,
    JobPlan,
    SinkPlan,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.state_store.sqlite_store import SqliteStateStore

COLUMNS = (("k", pl.String()), ("n", pl.Int64()))
KINDS = ("topics", "dataset", "foreach", "database")


class World:
    """Everything that a job writes to, of some kinds, in one folder and one database."""

    def __init__(self, folder: Path, url: str | None, kinds=KINDS):
        self.folder = folder
        self.url = url
        self.calls: list[tuple[str, list]] = []
        self.kept: dict[str, list] = {}
        ends = {"home": [("home", ViewSinkSpec())]}
        ends["topics"] = [
            ("to(all)", TopicSinkSpec("all", "k", ("k", "n"), 2, "delete")),
            ("to(last)", TopicSinkSpec("last", "k", ("n",), 2, "compact")),
        ]
        ends["dataset"] = [("dataset(rows)", DatasetSinkSpec(str(folder / "rows"), ("k",)))]
        ends["foreach"] = [("foreach(keep)", ForeachSinkSpec(self.keep))]
        ends["database"] = [("base", ViewSinkSpec(url))]
        chosen = ["home", *(kind for kind in kinds if kind != "database" or url)]
        self.sinks = tuple(
            SinkPlan(name, 8 + n, ("k",) if isinstance(end, ViewSinkSpec) else (), COLUMNS, end)
            for n, (name, end) in enumerate(one for kind in chosen for one in ends[kind])
        )
        self.plan = JobPlan("app", (), (), (), self.sinks, Buckets(1))

    def keep(self, rows, context):
        """A function that keeps the key with its effect, and so works once."""
        self.calls.append((context.key, rows.rows()))
        self.kept.setdefault(context.key, rows.rows())

    @contextmanager
    def run(self, steps=None, checkpoint_id="one"):
        with open_committer(self.plan, self.folder / "views.db", self.folder / "log") as committer:
            if steps is not None:
                committer.sinks = [Crashing(target, steps) for target in committer.sinks]
                committer.state_store = Crashing(committer.state_store, steps)
            yield committer, committer.begin_run("main", checkpoint_id)

    def result(self, number: int) -> BatchResult:
        """Batch ``number``: some keys given, one taken back; batch 2 has rows for the state store only."""
        rows = pl.DataFrame(
            {
                "k": ["a", "b", f"k{number}", "gone"],
                "n": [number, 7, number, 0],
                TIME: [number * 1_000_000] * 4,
                DIFF: pl.Series([1, 1, 1, -1 if number % 2 else 1], dtype=pl.Int8),
            }
        )
        names = ["home"] if number == 2 else [sink.name for sink in self.sinks]
        books = {"step": Counter(read=4, emitted=4)}
        position = {"t": {"0": number + 1}}
        return BatchResult(rows=dict.fromkeys(names, rows), step_counts=books, position=position)

    def holds(self) -> dict[str, object]:
        """Everything that can be read of it now."""
        with SqliteStateStore(self.folder / "views.db", readonly=True) as state_store:
            held = {
                "home": (state_store.scan("home").rows(), state_store.changes("home").rows()),
                "position": state_store.position("app"),
                "ledger": state_store.ledger("app"),
            }
        names = {sink.name for sink in self.sinks}
        if "base" in names:
            with ms.view("base", store=self.url) as view:
                held["base"] = (view.scan().rows(), view.changes().rows(), view.position)
        if "to(all)" in names:
            with ms.connect(self.folder / "log") as log:
                for topic in ("all", "last"):
                    for partition in (0, 1):
                        table = log.read(topic, partition, columns=("timestamp", "key", "value"))
                        held[f"{topic}/{partition}"] = table.to_pylist()
        if "dataset(rows)" in names:
            frame = ms.dataset(self.folder / "rows").scan().collect()
            held["rows"] = frame.sort(frame.columns).rows()
        if "foreach(keep)" in names:
            held["kept"] = self.kept
        return held


class Steps:
    """Counts the steps of a run; at one of them, the process is as good as dead."""

    def __init__(self, crash_at: int | None):
        self.names: list[str] = []
        self.crash_at = crash_at

    def step(self, name: str):
        self.names.append(name)
        if len(self.names) == self.crash_at:
            raise SimulatedCrash


class Crashing:
    """A target whose run or commit may be the last thing that happens."""

    def __init__(self, target, steps: Steps):
        self._target = target
        self._steps = steps

    def __getattr__(self, name):
        return getattr(self._target, name)

    def begin_run(self, *args):
        begun = self._target.begin_run(*args)
        self._steps.step("begun")
        return begun

    def commit(self, *args, **kwargs):
        self._steps.step("before")
        done = self._target.commit(*args, **kwargs)
        self._steps.step("after")
        return done


BATCHES = 3


def run_to_the_end(world: World, crash_at: int | None) -> Steps:
    steps = Steps(crash_at)
    while True:
        try:
            with world.run(steps) as (committer, first):
                for number in range(first, BATCHES):
                    committer.commit(number, world.result(number), {"batch": number})
                return steps
        except SimulatedCrash:
            steps.crash_at = None


@pytest.mark.parametrize(
    "kinds",
    [
        ("dataset", "foreach"),
        ("topics", "foreach"),
        pytest.param(KINDS, marks=pytest.mark.thorough),
    ],
    ids=["dataset", "topics", "all"],
)
def test_a_crash_between_any_two_steps_changes_nothing_that_can_be_read(
    tmp_path, postgres_urls, kinds
):
    new_url = postgres_urls if "database" in kinds else lambda: None
    reference = World(tmp_path / "reference", new_url(), kinds)
    count = len(run_to_the_end(reference, None).names)
    wanted = reference.holds()
    wanted_kept = list(wanted.pop("kept").values())
    assert count > 2 * BATCHES * len(kinds)
    for crash_at in range(1, count + 1):
        world = World(tmp_path / str(crash_at), new_url(), kinds)
        run_to_the_end(world, crash_at)
        held = world.holds()
        assert list(held.pop("kept").values()) == wanted_kept, crash_at
        assert held == wanted, crash_at
        assert len(world.calls) <= len(wanted_kept) + 1
        shutil.rmtree(world.folder)


@pytest.fixture
def postgres_urls(request, url):
    """Make a database per call, or None where there is no server."""
    if url is None:
        return lambda: None
    server = request.getfixturevalue("postgres_server")
    numbers = iter(range(1000))
    return lambda: server.url(f"crash{next(numbers)}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_run_is_refused_by_every_target(tmp_path, url, kind):
    if kind == "database" and url is None:
        pytest.skip("there is no PostgreSQL server")
    world = World(tmp_path, url, (kind,))
    with world.run() as (old, first):
        old.commit(first, world.result(0), {})
        before = world.holds()
        with world.run() as (new, next_batch):
            assert next_batch == 1
            for batch_id in (0, 1):
                with pytest.raises(FencedError):
                    old.commit(batch_id, world.result(batch_id), {})
            if kind != "foreach":  # ... which has nothing of its own to refuse with
                part = old_part(old, world, 1)
                with pytest.raises(FencedError):
                    old.sinks[0].commit(*part)
            assert world.holds() == before
            assert len(world.calls) == (kind == "foreach")
            new.commit(1, world.result(1), {})
            assert world.holds() != before


def old_part(committer, world, batch_id):
    from millstream.views.schema import Fence
    from millstream.views.sink import SinkBatch

    result = world.result(batch_id)
    fence = Fence("app", "main", committer.run, batch_id)
    return fence, SinkBatch(result.rows, result.position)


def test_a_batch_is_not_handed_out_again_once_the_home_has_it(tmp_path, url):
    world = World(tmp_path, url)
    with world.run() as (committer, _):
        assert committer.commit(0, world.result(0), {})
        before = world.holds()
        assert not committer.commit(0, world.result(3), {})
        assert world.holds() == before
        assert len(world.calls) == 1


def test_books_that_do_not_balance_stop_a_batch_before_any_target_has_it(tmp_path, url):
    world = World(tmp_path, url)
    with world.run() as (committer, _):
        before = world.holds()
        result = world.result(0)
        result.step_counts["step"]["emitted"] = 3
        with pytest.raises(CorruptionError, match="does not balance"):
            committer.commit(0, result, {})
        assert world.holds() == before
        assert world.calls == []


@pytest.mark.parametrize("kind", ["topics", "dataset", "database"])
def test_a_target_that_comes_later_begins_with_the_batch_at_hand(tmp_path, url, kind):
    if kind == "database" and url is None:
        pytest.skip("there is no PostgreSQL server")
    bare = World(tmp_path, url, ())
    with bare.run() as (committer, _):
        committer.commit(0, bare.result(0), {})
    world = World(tmp_path, url, (kind,))
    with world.run() as (committer, first):
        assert first == 1
        committer.commit(1, world.result(1), {})
    with bare.run() as (committer, first):
        committer.commit(first, bare.result(first), {})
    with world.run() as (committer, first):
        assert first == 3
        committer.commit(3, world.result(3), {})


def test_a_dataset_that_was_replaced_or_is_older_than_the_home_is_refused(tmp_path):
    world = World(tmp_path, None, ("dataset",))
    with world.run() as (committer, _):
        committer.commit(0, world.result(0), {})
    shutil.copytree(tmp_path / "rows", tmp_path / "backup")
    with world.run() as (committer, _):
        committer.commit(1, world.result(1), {})
    shutil.move(tmp_path / "rows", tmp_path / "newest")
    with (
        pytest.raises(ConfigError, match=r"rows.*not the one that held batches up to 1"),
        world.run(),
    ):
        pass
    shutil.rmtree(tmp_path / "rows")
    shutil.move(tmp_path / "backup", tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"holds batches up to 0, and up to 1 were"), world.run():
        pass
    shutil.rmtree(tmp_path / "rows")
    shutil.move(tmp_path / "newest", tmp_path / "rows")
    with world.run() as (_, first):
        assert first == 2


def test_a_home_that_is_older_than_its_targets_is_refused(tmp_path, url):
    world = World(tmp_path, url)
    with world.run() as (committer, _):
        committer.commit(0, world.result(0), {})
    shutil.copy(tmp_path / "views.db", tmp_path / "backup.db")
    with world.run() as (committer, _):
        for number in (1, 2, 3):
            committer.commit(number, world.result(number), {})
    for name in ("views.db", "views.db-wal", "views.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.move(tmp_path / "backup.db", tmp_path / "views.db")
    with pytest.raises((ConfigError, FencedError), match=r"older|replaced"), world.run():
        pass


@pytest.mark.parametrize("kind", ["topics", "dataset", "database"])
def test_what_was_made_with_another_checkpoint_is_refused(tmp_path, url, kind):
    if kind == "database" and url is None:
        pytest.skip("there is no PostgreSQL server")
    world = World(tmp_path, url, (kind,))
    with world.run() as (committer, _):
        committer.commit(0, world.result(0), {})
    for path in tmp_path.glob("views.db*"):
        path.unlink()
    with pytest.raises(ConfigError, match="another checkpoint"), world.run(checkpoint_id="two"):
        pass


def test_one_folder_under_two_names_is_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "rows")
    ends = [DatasetSinkSpec(str(tmp_path / name), ()) for name in ("rows", "same")]
    sinks = tuple(SinkPlan(end.path, 8 + n, (), COLUMNS, end) for n, end in enumerate(ends))
    plan = JobPlan("app", (), (), (), sinks, Buckets(1))
    with (
        pytest.raises(ConfigError, match="are the same"),
        open_committer(plan, tmp_path / "views.db", tmp_path / "log"),
    ):
        pass


def test_a_view_that_is_in_a_database_is_told_where_it_is_looked_for(tmp_path, url):
    if url is None:
        pytest.skip("there is no PostgreSQL server")
    folder = tmp_path / "apps" / "app"
    world = World(folder, url, ("database",))
    with world.run() as (committer, _):
        committer.commit(0, world.result(0), {})
    with pytest.raises(UnknownViewError, match=r"also kept in postgresql://127\.0\.0\.1") as caught:
        ms.view("base", log=tmp_path)
    assert "tester" not in str(caught.value)


# Functions of the user's.


def test_a_failing_function_is_told_with_the_users_file_and_line_and_called_again(tmp_path):
    program = tmp_path / "users.py"
    program.write_text(
        "def inner(rows):\n    return rows['nope']\n\ndef send(rows, context):\n    inner(rows)\n"
    )
    space: dict[str, object] = {}
    exec(compile(program.read_text(), str(program), "exec"), space)
    world = World(tmp_path, None, ("foreach",))
    state_store, foreach = world.sinks
    broken = SinkPlan(foreach.name, foreach.port, (), COLUMNS, ForeachSinkSpec(space["send"]))
    plan = JobPlan("app", (), (), (), (state_store, broken), Buckets(1))
    with open_committer(plan, tmp_path / "views.db", tmp_path / "log") as committer:
        committer.begin_run("main", "one")
        with pytest.raises(
            UserCodeError, match=r"users\.py:2: ColumnNotFoundError.*nope"
        ) as caught:
            committer.commit(0, world.result(0), {})
        assert caught.value.step == "foreach(keep)"
    with world.run() as (committer, first):
        assert first == 0
        assert committer.commit(0, world.result(0), {})
    assert [row[-1] for row in world.calls[0][1]] == [1, 1, 1, 1]


def test_the_key_is_the_same_for_a_repeated_call_and_another_for_every_other(tmp_path):
    world = World(tmp_path, None, ("foreach",))
    run_to_the_end(world, 4)  # after the function, before the state store
    keys = [key for key, _ in world.calls]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1 == BATCHES - 1
    for path in tmp_path.glob("views.db*"):
        path.unlink()
    with world.run(checkpoint_id="two") as (committer, _):
        committer.commit(0, world.result(0), {})
    assert world.calls[-1][0] not in keys


# Topics.


HOLDER = textwrap.dedent(
    """
    import sys
    from millstream.{module} import {name}
    with {name}(sys.argv[1]) as log:
        {owns}
        print("owned", flush=True)
        sys.stdin.read()
    """
)
JOINABLE = HOLDER.format(module="client", name="connect", owns="log.acquire_ownership()")
ALONE = HOLDER.format(module="log.writer", name="LogWriter", owns="pass")


def test_a_folder_that_another_process_owns_is_joined(tmp_path):
    command = [sys.executable, "-c", JOINABLE, str(tmp_path / "log")]
    world = World(tmp_path, None, ("topics",))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"owned\n"
        with world.run() as (committer, first):
            assert first == 0
            assert committer.commit(0, world.result(0), {})
            beside = world.holds()
    assert len(beside["all/0"]) + len(beside["all/1"]) > 0
    with world.run() as (_, first):
        assert first == 1
    assert world.holds() == beside


def test_a_folder_whose_owner_lets_nobody_in_is_refused_with_its_number(tmp_path):
    command = [sys.executable, "-c", ALONE, str(tmp_path / "log")]
    world = World(tmp_path, None, ("topics",))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"owned\n"
        with pytest.raises(ConfigError, match=f"owned by process {holder.pid}.*stop"), world.run():
            pass
        assert not (tmp_path / "views.db").exists()
    with world.run() as (_, first):
        assert first == 0


def test_a_topic_is_made_as_declared_and_one_that_is_otherwise_is_refused(tmp_path):
    with ms.connect(tmp_path / "log") as log:
        log.create_topic("last", partitions=1)
    world = World(tmp_path, None, ("topics",))
    with pytest.raises(ConfigError, match="'last' is not compacted"), world.run():
        pass
    with ms.connect(tmp_path / "log") as log:
        log.delete_topic("last")
    with world.run(), ms.connect(tmp_path / "log") as log:
        assert log.topics()["all"].partitions == 2
        assert log.topic_settings("last")["cleanup.policy"] == "compact"


def test_a_failed_send_leaves_nothing_of_the_batch(tmp_path):
    world = World(tmp_path, None, ("topics",))
    with world.run() as (committer, _):
        result = world.result(0)
        rows = result.rows["to(last)"]
        # A compacted topic takes no record without a key.
        unkeyed = rows.with_columns(k=pl.lit(None, pl.String))
        result.rows["to(last)"] = unkeyed
        with pytest.raises(ms.MillstreamError):
            committer.commit(0, result, {})
        assert all(not held for name, held in world.holds().items() if name.startswith("all/"))
    with world.run() as (committer, first):
        assert committer.commit(first, world.result(0), {})
        records = [r for n, held in world.holds().items() if n.startswith("all/") for r in held]
        assert len(records) == 4
        assert {json.loads(record["value"])["k"] for record in records} == {"a", "b", "k0", "gone"}


def test_a_topic_that_was_made_anew_during_a_run_gets_no_further_batch(tmp_path):
    world = World(tmp_path, None, ("topics",))
    with world.run() as (committer, _):
        committer.commit(0, world.result(0), {})
        with ms.connect(tmp_path / "log") as log:
            log.delete_topic("all")
            log.create_topic("all", partitions=2)
            last = log.offsets("last")
        with pytest.raises(TopicRecreatedError, match="'all'"):
            committer.commit(1, world.result(1), {})
    assert not any(held for name, held in world.holds().items() if name.startswith("all/"))
    with ms.connect(tmp_path / "log") as log:
        batches = [log.read("last", n, start, None) for n, (_, start) in enumerate(last)]
    assert [batch.num_rows for batch in batches] == [0, 0]
