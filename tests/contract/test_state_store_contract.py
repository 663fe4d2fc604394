"""What every state store of an app promises, tried on each: a SQLite file, and a schema of PostgreSQL."""

from __future__ import annotations

import datetime as dt
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest

from millstream.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    FencedError,
    OffsetOutOfRangeError,
)
from millstream.views.coverage import BatchBoundary, CoverageSpan, OutputCoverage
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_switch import (
    ComparedProgram,
    FilledView,
    ProgramSwitch,
    RebuiltView,
)
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.store_location import open_state_store, parse_state_store

COUNTS = ViewSchema("counts", (("word", "str"), ("n", "int")), ("word",))


class Place:
    """Where a store is; opened as a driver does to write, and as a reader does to read."""

    def __init__(self, location, text):
        self.location = location
        self.text = text  # what another process is given
        self._open = ExitStack()

    def open(self, *, readonly=False):
        return self._open.enter_context(open_state_store(self.location, readonly=readonly))

    def close(self):
        self._open.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        opened = Place(tmp_path / "views.db", str(tmp_path / "views.db"))
    else:
        url = request.getfixturevalue("database")
        opened = Place(parse_state_store(url, "app", what="The store"), url)
    yield opened
    opened.close()


class Run:
    """A run of the app's job."""

    def __init__(self, store):
        self.store = store
        store.declare(COUNTS)
        self.number, self.next = store.begin_run("app", "main", "checkpoint")

    def commit(self, batch_id, changes=(), **given):
        fence = Fence("app", "main", self.number, batch_id)
        given = {"position": {"t": {"0": batch_id}}, "status": {"batch": batch_id}, **given}
        return self.store.commit(fence, changes, **given)


def counts(**rows):
    return ViewChange("counts", pl.DataFrame({"word": list(rows), "n": list(rows.values())}))


def test_all_that_a_batch_commits_is_read_elsewhere(place):
    run = Run(place.open())
    ledger = [{"step": "a", "read": 1}, {"step": "ä\0", "read": 2}]
    state = {(0, 0): b"\0manifest\xff", (1, 3): b""}
    sinks = {"postgresql:1": "postgresql://host/db"}
    record = {"batch_id": 0, "phases": {"read": 1.5}}
    assert run.commit(0, [counts(a=1, b=2)], ledger=ledger, state=state, sinks=sinks, record=record)
    assert run.commit(1, [counts(b=2, c=3)], position={"u": {"1": 5}}, state={(0, 0): b"two"})
    run.store.put_description("app", "graph", {"nodes": ["é", None, 1.5]})
    read = place.open(readonly=True)
    assert read.scan("counts").rows() == [("a", 1), ("b", 2), ("c", 3)]
    assert read.changes("counts")["word"].to_list() == ["a", "b", "c"]
    assert read.position("counts") == read.position("app") == {"t": {"0": 0}, "u": {"1": 5}}
    assert read.status("app") == {"batch": 1}
    assert read.ledger("app") == ledger
    assert read.batches("app") == [record]
    assert read.state_manifests("app", "main") == {(0, 0): b"two", (1, 3): b""}
    assert read.sinks("app", "main") == [("postgresql:1", "postgresql://host/db", 0)]
    assert read.databases() == ["postgresql://host/db"]
    assert read.description("app", "graph") == {"nodes": ["é", None, 1.5]}
    assert read.description("app", "none") is None
    assert (read.last_batch_id("app"), read.checkpoint_id("app", "main")) == (1, "checkpoint")
    assert read.newest_changes() == {"counts": 3}


def test_a_store_before_its_first_batch_is_empty(place):
    store = place.open()
    assert (store.last_batch_id("app"), store.status("app"), store.position("app")) == (
        None,
        {},
        {},
    )
    assert (store.program("app", "main"), store.state_manifests("app", "main")) == (None, {})
    assert (store.views(), store.ledger("app"), store.version()) == ([], [], (0, 0, 0))


def test_a_second_driver_fences_the_first(place):
    first = Run(place.open())
    first.commit(0, [counts(a=1)])
    second = Run(place.open())
    assert (second.number, second.next) == (2, 1)
    with pytest.raises(FencedError, match=r"Run 1 of the job 'main'.*replaced by run 2"):
        first.commit(1, [counts(a=9)])
    with pytest.raises(FencedError, match="replaced by run 2"):
        first.store.is_next(Fence("app", "main", 1, 1))
    assert second.commit(1, [counts(a=2)])
    assert place.open(readonly=True).scan("counts").rows() == [("a", 2)]


def test_the_state_is_replaced_as_a_whole_and_by_the_newest_run_alone(place):
    store = place.open()
    program = StoredProgram(2, {}, {}, [], 0, {"bucket_count": 2})
    beginning = RunProgram(program, {}, "2026-01-01T00:00:00Z")
    number, _ = store.begin_run("app", "main", "checkpoint", beginning)
    state = {(0, 0): b"a", (0, 1): b"b", (1, 1): b"c"}
    store.commit(Fence("app", "main", number, 0), [], position={}, status={}, state=state)
    start = RunStart("app", "main", number, "checkpoint")
    made = {(0, 0): b"x", (0, 1): b"b", (0, 2): b"z"}
    with pytest.raises(ConflictError, match="Nothing was changed"):
        store.replace_state(start, {}, {"bucket_count": 3}, was={"bucket_count": 4})
    store.replace_state(start, made, {"bucket_count": 3}, was={"bucket_count": 2})
    read = place.open(readonly=True)
    assert read.state_manifests("app", "main") == made
    assert read.program("app", "main").partitioning == {"bucket_count": 3}
    store.begin_run("app", "main", "checkpoint")
    with pytest.raises(FencedError, match="was replaced by run 2"):
        store.replace_state(start, {}, {"bucket_count": 1}, was={"bucket_count": 3})
    assert read.state_manifests("app", "main") == made
    assert read.program("app", "main").partitioning == {"bucket_count": 3}


WIDE = ViewSchema("counts", (("word", "str"), ("n", "int"), ("m", "float")), ("word",))
SINCE = (CoverageSpan(BatchBoundary(1, {}, "2026-01-02T00:00:00Z")),)
OTHERS = ViewSchema("others", (("word", "str"), ("n", "int")), ("word",))


@pytest.fixture
def switching(place):
    """A store with two views and state, a run that switches, and a reader that stands beside it."""
    store = place.open()
    program = StoredProgram(2, {}, {}, [], 0, {"bucket_count": 2})
    number, _ = store.begin_run(
        "app", "main", "one", RunProgram(program, {}, "2026-01-01T00:00:00Z")
    )
    for schema in (COUNTS, OTHERS):
        store.declare(schema)
    rows = [counts(a=1, b=2), ViewChange("others", counts(a=1, b=2, c=3).upserts)]
    given = {"position": {"t": {"0": 9}}, "status": {}, "state": {(0, 0): b"a"}}
    store.commit(Fence("app", "main", number, 0), rows, **given)
    number, _ = store.begin_run("app", "main", "one")
    return store, place.open(readonly=True), RunStart("app", "main", number, "one")


def switch_of(*views, position=9, bucket_count=2, outputs=None, switched_by=None):
    divided = {"bucket_count": bucket_count}
    program = StoredProgram(2, {"k": {}}, {}, ["t"], 0, divided)
    beginning = RunProgram(program, {}, "2026-01-02T00:00:00Z")
    compared = ComparedProgram(StoredProgram(2, {}, outputs or {}, [], 0, divided), switched_by)
    return ProgramSwitch(beginning, compared, {"t": {"0": position}}, {(1, 0): b"z"}, views)


def test_a_switch_replaces_state_program_and_views_in_one_commit(switching):
    store, read, start = switching
    seen = read.newest_changes()
    wide = pl.DataFrame({"word": ["a"], "n": [5], "m": [0.5]})
    others = counts(b=2, c=4, d=5).upserts
    store.switch_program(start, switch_of(RebuiltView(WIDE, wide), RebuiltView(OTHERS, others)))
    assert read.state_manifests("app", "main") == {(1, 0): b"z"}
    assert read.program("app", "main").steps == {"k": {}}
    assert read.scan("counts").rows() == [("a", 5, 0.5)]
    assert sorted(read.scan("others").rows()) == [("b", 2), ("c", 4), ("d", 5)]
    changes = read.changes("others", since=seen["others"]).select("_op", "word", "n").rows()
    assert sorted(changes) == [("delete", "a", None), ("upsert", "c", 4), ("upsert", "d", 5)]
    with pytest.raises(OffsetOutOfRangeError):
        read.changes("counts", since=seen["counts"])
    assert read.position("app") == {"t": {"0": 9}}


@pytest.mark.parametrize(
    "wrong", [{"position": 8}, {"bucket_count": 3}, {"outputs": {"o": {}}}, {"switched_by": 1}]
)
def test_a_switch_of_another_time_changes_nothing(switching, wrong):
    store, read, start = switching
    with pytest.raises(ConflictError, match="Nothing was changed"):
        store.switch_program(start, switch_of(**wrong))
    store.begin_run("app", "main", "one")
    with pytest.raises(FencedError):
        store.switch_program(start, switch_of())
    assert read.state_manifests("app", "main") == {(0, 0): b"a"}
    assert read.program("app", "main").steps == {}


def test_a_switch_that_fails_at_its_end_leaves_what_was_there(switching, monkeypatch):
    store, read, start = switching
    monkeypatch.setattr("millstream.views.state_store.store.put_program", lambda *_: 1 / 0)
    wide = pl.DataFrame({"word": ["a"], "n": [5], "m": [0.5]})
    with pytest.raises(ZeroDivisionError):
        store.switch_program(start, switch_of(RebuiltView(WIDE, wide)))
    assert read.state_manifests("app", "main") == {(0, 0): b"a"}
    assert sorted(read.scan("counts").rows()) == [("a", 1), ("b", 2)]
    assert read.schema("counts") == COUNTS


def test_a_filled_view_is_there_with_its_rows_and_coverage_or_not_at_all(switching, monkeypatch):
    store, read, start = switching
    schema = ViewSchema("new", (("word", "str"), ("n", "int")), ("word",))
    declared, whole = (OutputCoverage("{}", spans) for spans in (SINCE, (CoverageSpan(),)))
    filled = FilledView(schema, counts(a=1, b=2).upserts, whole)
    program = StoredProgram(2, {}, {"new": {}}, [], 0, {"bucket_count": 2})
    beginning = RunProgram(program, {("new", "view"): declared}, "2026-01-02T00:00:00Z")
    with monkeypatch.context() as broken:
        broken.setattr("millstream.views.state_store.program_tables.put_program", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.register_program(start, beginning, [filled])
    assert "new" not in read.newest_changes()
    for _ in range(2):  # a connection that breaks after the commit has it repeated
        store.register_program(start, beginning, [filled])
        assert sorted(read.scan("new").rows()) == [("a", 1), ("b", 2)]
        assert read.coverage("new") == (CoverageSpan(),)
        assert read.newest_changes()["new"] == 2
    store.begin_run("app", "main", "one")
    with pytest.raises(FencedError):
        store.register_program(start, beginning, [filled])


def test_drivers_that_begin_at_once_get_numbers_of_their_own(place):
    Run(place.open())
    numbers, stores = [], [place.open() for _ in range(4)]
    together = threading.Barrier(4)

    def begin(store):
        together.wait()
        numbers.append(store.begin_run("app", "main", "checkpoint")[0])

    threads = [threading.Thread(target=begin, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [2, 3, 4, 5]


def test_a_batch_is_committed_once_and_in_order(place):
    run = Run(place.open())
    assert run.commit(0, [counts(a=1)])
    assert run.commit(0, [counts(a=5)]) is False
    with pytest.raises(CorruptionError, match=r"Batch 2 .* batch 1 is expected"):
        run.commit(2, [counts(a=5)])
    assert run.store.scan("counts").rows() == [("a", 1)]


def test_another_checkpoint_is_refused(place):
    run = Run(place.open())
    run.commit(0)
    with pytest.raises(ConfigError, match=r"checkpoint .* was replaced.*`millstream reset"):
        run.store.begin_run("app", "main", "another")


def test_a_failed_batch_leaves_nothing(place):
    run = Run(place.open())
    run.commit(0, [counts(a=1)])
    wrong = ViewChange("counts", pl.DataFrame({"word": ["b"], "n": ["text"]}))
    with pytest.raises(ConfigError, match="Column 'n'"):
        run.commit(1, [counts(a=2), wrong], ledger=[{"step": "x"}], state={(0, 0): b"x"})
    read = place.open(readonly=True)
    assert read.scan("counts").rows() == [("a", 1)]
    assert (read.ledger("app"), read.state_manifests("app", "main")) == ([], {})
    assert run.commit(1, [counts(a=3)])


def test_rows_are_amended_beside_the_job(place):
    run = Run(place.open())
    run.commit(0, [counts(a=1)])
    other = place.open()
    other.amend("counts", pl.DataFrame({"word": ["a", "z"], "n": [7, 8]}))
    assert run.commit(1, [counts(b=2)])
    assert run.store.scan("counts").rows() == [("a", 7), ("b", 2), ("z", 8)]


def test_a_view_that_differs_is_refused(place):
    store = place.open()
    store.declare(COUNTS)
    for other in (
        ViewSchema("counts", (("word", "str"), ("n", "float")), ("word",)),
        ViewSchema("Counts", COUNTS.columns, COUNTS.key),
    ):
        with pytest.raises(ConfigError, match=r"exists and differs.*`millstream reset"):
            store.declare(other)


KINDS = {
    "int": [0, 2**63 - 1, None, -(2**63)],
    "float": [math.nan, math.inf, None, -0.0],
    "str": ["", "a\0b ☃\uffff\\N\t\n", None, "x" * 10_000],
    "bool": [True, False, None, True],
    "datetime": [
        dt.datetime(2019, 11, 24, 0, 0, 0, 1, dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        None,
        dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, dt.UTC),
    ],
    "date": [dt.date(1969, 12, 31), dt.date(9999, 12, 31), None, dt.date(1, 1, 1)],
    "duration": [dt.timedelta(microseconds=-1), dt.timedelta(days=9), None, dt.timedelta(0)],
    "decimal(20,4)": [Decimal("1.5000"), Decimal("-0.0001"), None, Decimal(0)],
    "decimal(38,0)": [Decimal(10**37), Decimal(-(10**37)), None, Decimal(1)],
    "bytes": [b"", b"\0\xff\\x", None, b"x" * 5000],
    "json": ['{"a":"\\u0000"}', "[1e400]", None, "null"],
}


def test_every_kind_is_kept_without_loss(place):
    schema = ViewSchema("v", (("k", "int"), *((f"c {k}", k) for k in KINDS)), ("k",))
    data = {"k": [1, 2, 3, 4], **{f"c {k}": v for k, v in KINDS.items()}}
    frame = pl.DataFrame(data, schema=schema.dtypes)
    run = Run(place.open())
    run.store.declare(schema)
    run.commit(0, [ViewChange("v", frame)])
    read = place.open(readonly=True)
    assert read.scan("v").equals(frame)
    assert math.copysign(1, read.scan("v")["c float"][3]) == -1
    assert read.changes("v").drop("_seq", "_batch_id", "_op").equals(frame)
    run.commit(1, [ViewChange("v", frame)])
    assert read.changes("v").height == 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_kept_as_a_key(place, kind):
    schema = ViewSchema("v", (("k", kind), ("n", "int")), ("k",))
    keys = pl.Series(KINDS[kind], dtype=schema.dtypes["k"]).unique(maintain_order=True)
    run = Run(place.open())
    run.store.declare(schema)
    for n in (0, 1):
        rows = pl.DataFrame({"k": keys, "n": [n] * len(keys)}, schema=schema.dtypes)
        run.commit(n, [ViewChange("v", rows)])
    assert run.store.scan("v")["n"].to_list() == [1] * len(keys)
    run.commit(2, [ViewChange("v", rows.clear(), rows.select("k"))])
    assert run.store.count("v") == 0


WRITER = """
import os, signal, sys
from pathlib import Path
import polars as pl
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.state_store.store import StateStore
from millstream.views.sink import RunStart
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_switch import ProgramSwitch, RebuiltView
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.store_location import open_state_store, parse_state_store

text, point = sys.argv[1:]
location = parse_state_store(text, "app", what="x") if "://" in text else Path(text)
store = open_state_store(location)
run, batch_id = store.begin_run("app", "main", "checkpoint")

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if point in ("_apply", "_add_entries"):
    original = getattr(StateStore, point)
    def wrapped(*given):
        original(*given)
        die()
    setattr(StateStore, point, wrapped)
if point == "written":
    original_write = type(store)._write
    def write(self, work):
        def worked(db):
            work(db)
            die()
        return original_write(self, worked)
    type(store)._write = write
rows = pl.DataFrame({"word": ["a", "b"], "n": [2, 2]})
store.commit(
    Fence("app", "main", run, batch_id), [ViewChange("counts", rows)],
    position={"t": {"0": 2}}, status={"n": 2}, ledger=[{"n": 2}], state={(0, 0): b"two"},
)
die()
"""


@pytest.mark.parametrize("point", ["_apply", "_add_entries", "written", "committed"])
def test_a_driver_killed_at_any_point_leaves_all_of_the_batch_or_nothing(place, point):
    run = Run(place.open())
    run.commit(0, [counts(a=1)], ledger=[{"n": 1}], state={(0, 0): b"one"})
    run.store.close()
    ended = subprocess.run(
        [sys.executable, "-c", WRITER, place.text, point], check=False, env=os.environ
    )
    assert ended.returncode == -signal.SIGKILL
    again = Run(place.open())
    done = point == "committed"
    store = again.store
    assert (again.number, again.next) == (3, 2 if done else 1)
    assert store.scan("counts").rows() == ([("a", 2), ("b", 2)] if done else [("a", 1)])
    assert store.ledger("app") == [{"n": 1}, {"n": 2}][: again.next]
    assert store.state_manifests("app", "main") == {(0, 0): b"two" if done else b"one"}
    assert store.status("app") == ({"n": 2} if done else {"batch": 0})
    assert again.commit(again.next, [counts(a=3)])


def test_the_file_of_a_folder_and_a_url_are_told_apart(tmp_path):
    assert parse_state_store(None, "app", what="The store") is None
    assert parse_state_store("sqlite", "app", what="The store") is None
    assert isinstance(tmp_path / "views.db", Path)


def test_a_snapshot_has_the_wanted_views_as_of_one_commit_and_again_only_what_has_changed(
    switching,
):
    store, reader, start = switching
    first = reader.snapshot("app", {"counts", "others"}, {})
    assert {view: one.rows.height for view, one in first.rows.items()} == {"counts": 2, "others": 3}
    assert (first.batch_id, first.position) == (0, {"t": {"0": 9}})
    assert [schema.name for schema in first.schemas] == ["counts", "others"]
    assert not reader.snapshot("app", {"counts", "others"}, first.marks).rows
    fence = Fence("app", "main", start.run, 1)
    store.commit(fence, [counts(a=5)], position={"t": {"0": 11}}, status={})
    later = reader.snapshot("app", {"counts", "others"}, first.marks)
    assert [*later.rows] == ["counts"]
    assert later.position == {"t": {"0": 11}}
    assert not reader.snapshot("app", {"others"}, later.marks).rows
