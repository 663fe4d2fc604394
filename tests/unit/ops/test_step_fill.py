"""Steps that are filled of tables: they are what they would be if they had been declared from the beginning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from edited_app import EditedApp, texts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_fills import EDIT, MORE, SOURCE, began, program, rows_of, tables_in_state

import millstream as ms
from millstream.errors import ConfigError, ConflictError, CorruptionError
from millstream.kernels.rescale import rescale_manifests
from millstream.kernels.state.keyhash import Buckets
from millstream.ops import compare as comparison
from millstream.ops import deploy as deployment
from millstream.ops import fills
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.schema import JOB
from millstream.views.sink import RunStart
from millstream.views.state_store import store as state_store
from millstream.views.store_location import open_state_store

TESTS = Path(__file__).parents[2]
KINDS = 'latest.group_by("kind", name="kinds").agg(n=ms.count()).view("kinds")\n'


def parts_of(app):
    return {(part.kind, part.name): part for part in plan_change(app).change.parts}


def assert_filled(plan):
    """A plan fills all that it changes, and reads nothing."""
    changed = [part for part in plan.change.parts if part.verdict != "keeps"]
    assert changed
    for part in changed:
        assert part.verdict == "rebuilds", part
        assert part.filled_from_steps or part.filled_from_table, part
    assert (plan.records, plan.replays, plan.change.topics) == (0, (), ())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "examples", [4, pytest.param(60, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_steps_that_are_filled_are_those_of_a_new_app_that_reads_the_whole_log(
    tmp_path_factory, examples
):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        seed=st.integers(0, 10_000),
        partitions=st.sampled_from([1, 4, 7]),
        rows_per_batch=st.sampled_from([7, 40, 1000]),
        part_rows=st.sampled_from([3, 1000]),
        counts=st.tuples(st.integers(1, 60), st.integers(0, 40)),
    )
    def check(seed, partitions, rows_per_batch, part_rows, counts):
        folder, edit = tmp_path_factory.mktemp("app"), (MORE, program(seed))
        before, after = rows_of(counts[0], seed), rows_of(counts[1], seed + 1, counts[0])
        edited = began(folder / "filled", partitions, rows_per_batch, before)
        app = edited.write(edit)
        assert_filled(plan_change(app))
        with mock.patch.object(fills, "_ROWS_PER_BATCH", part_rows):
            result = deploy(app)
        assert (result.records, result.switched) == (0, True)
        assert plan_change(app).verdict == "keeps"
        other = began(folder / "new", partitions, rows_per_batch, before, edit)
        new = other.write(edit)
        assert edited.views(app) == other.views(new)
        assert tables_in_state(app) == tables_in_state(new)
        for view in edited.views(app):
            with ms.view(view, edited.log) as found:
                assert found.partial_note is None
        for one, its in ((edited, app), (other, new)):
            one.append(after)
            one.run(its)
        assert edited.views(app) == other.views(new)
        assert tables_in_state(app) == tables_in_state(new)

    check()


def naive_kinds(rows, *values):
    """Groups of the latest row of each ad that is not gone."""
    latest = {}
    for number, row in enumerate(rows):
        latest[row["ad"]] = max(
            latest.get(row["ad"], (row["at"], number, row)), (row["at"], number, row)
        )
    there = [row for _, _, row in latest.values() if not row["gone"]]
    groups = {}
    for row in there:
        groups.setdefault(row["kind"], []).append(row)
    return {(kind, *(value(members) for value in values)) for kind, members in groups.items()}


def most(members):
    return max(row["cost"] for row in members)


def without_equal_times(rows):
    """Rows of which no two have one time, so that the model needs no rule for ties."""
    return [row for at, row in sorted({row["at"]: row for row in rows}.items())]


def test_a_changed_aggregate_is_filled_compared_and_gone_back_from(tmp_path):
    rows = without_equal_times(rows_of(90, 1))
    rows, more = rows[:60], rows[60:]
    edited = began(tmp_path, 4, 17, rows, (MORE, KINDS))
    assert edited.views(edited.write((MORE, KINDS)))["kinds"] == naive_kinds(rows, len)
    changed = (MORE, KINDS.replace("n=ms.count()", 'n=ms.count(), most=ms.max("cost")'))
    app = edited.write(changed)
    assert_filled(plan_change(app))
    with pytest.raises(ConfigError):
        edited.run(app)
    (shown,) = compare(app).views
    assert (shown.view, shown.new_columns, shown.added, shown.removed) == ("kinds", ("most",), 0, 0)
    assert shown.equal == len(naive_kinds(rows, len))
    assert deploy(app).records == 0
    assert edited.views(app)["kinds"] == naive_kinds(rows, len, most)
    edited.append(more)
    edited.run(app)
    rows += more
    assert edited.views(app)["kinds"] == naive_kinds(rows, len, most)
    app = edited.write((MORE, KINDS))
    rollback(app)
    assert edited.views(app)["kinds"] == naive_kinds(rows, len)
    assert plan_change(app).verdict == "keeps"


def test_what_is_filled_is_compared_at_one_commit_while_the_app_commits(tmp_path):
    edited = began(tmp_path, 1, 17, rows_of(40, 1), (MORE, KINDS))
    old = edited.write((MORE, KINDS))
    app = edited.write((MORE, KINDS.replace("n=ms.count()", 'n=ms.count(), most=ms.max("cost")')))
    compute, reads = fills.StepFills.compute, []

    def compute_beside_a_batch(self, *state):
        reads.append(len(edited.views(old)["kinds"]))
        assert len(reads) < 3, "it waits for an app that commits no more"
        edited.append(rows_of(9, 2, 40 + len(reads)))
        edited.run(old)
        compute(self, *state)

    with mock.patch.object(fills.StepFills, "compute", compute_beside_a_batch):
        (shown,) = compare(app).views
    assert (shown.equal, shown.changed, shown.added, shown.removed) == (reads[-1], 0, 0, 0)


def test_state_that_an_app_replaces_again_and_again_is_not_compared(tmp_path):
    edited = began(tmp_path, 1, 17, rows_of(40, 1), (MORE, KINDS))
    old = edited.write((MORE, KINDS))
    app = edited.write((MORE, KINDS.replace("n=ms.count()", 'n=ms.count(), most=ms.max("cost")')))

    def replaced(_self, *_state):
        edited.append(rows_of(1, 2))
        edited.run(old)
        raise CorruptionError("a run is missing")

    with (
        mock.patch.object(fills.StepFills, "compute", replaced),
        mock.patch.object(comparison, "_READS_MAX", 2),
        pytest.raises(ConflictError, match="has replaced runs of its state"),
    ):
        compare(app)


def test_a_view_that_gets_a_column_of_a_join_has_the_join_filled_again(tmp_path):
    join = (
        'both = latest.join(dear.select("kind", "cost", other="ad"), on=["kind", "cost"], name="both")\n'
        'both.select("ad", "kind", "cost").view("both", key="ad")\n'
    )
    edits = (MORE, join), (MORE, join.replace('"cost").view', '"cost", "other").view'))
    edited = began(tmp_path, 4, 17, rows_of(60, 2), edits[0])
    before = edited.views(edited.write(edits[0]))["both"]
    app = edited.write(edits[1])
    assert_filled(plan_change(app))
    assert parts_of(app)["step", "both"].filled_from_steps == ("dear", "latest")
    deploy(app)
    assert {row[:-1] for row in edited.views(app)["both"]} == before


def test_a_step_behind_a_join_that_keeps_its_state_is_filled_of_the_tables_of_the_join(tmp_path):
    join = (
        'both = latest.join(dear.select("kind", "cost", other="ad"), on=["kind", "cost"], name="both")\n'
        'both.select("ad", "kind", "other").view("both", key="ad")\n'
    )
    counted = 'both.group_by("kind", name="counted").agg(n=ms.count()).view("counted")\n'
    edited = began(tmp_path, 4, 17, rows_of(60, 2), (MORE, join))
    app = edited.write((MORE, join + counted))
    plan = plan_change(app)
    assert_filled(plan)
    assert parts_of(app)["step", "both"].verdict == "keeps"
    assert plan.change.only_fills_new
    deploy(app)
    pairs = edited.views(app)["both"]
    kinds = [kind for _, kind, _ in pairs]
    assert edited.views(app)["counted"] == {(kind, kinds.count(kind)) for kind in kinds}


NOT_FILLED = {
    "rows of a topic": 'latest.join(stream.group_by("kind").agg(n=ms.count()), on="kind").view("x", key="ad")\n',
    "a look-up": (
        'stream.lookup(latest.select("ad", was="kind"), on="ad", name="looked up")'
        '.group_by("was").agg(n=ms.count()).view("x")\n'
    ),
}


@pytest.mark.parametrize("name", ["rows of a topic", "a look-up"])
def test_what_does_not_follow_from_the_rows_of_tables_is_read_from_the_log(tmp_path, name):
    rows = rows_of(60, 3)
    edited = EditedApp(tmp_path / "filled", 1, 1000, SOURCE)
    edited.create()
    edited.append(rows)
    # The same records, not their like: a look-up goes by the milliseconds in which they arrived.
    shutil.copytree(edited.folder, tmp_path / "new")
    edited.run(edited.write())
    edit = (MORE, NOT_FILLED[name])
    app = edited.write(edit)
    assert plan_change(app).records == len(rows)
    assert parts_of(app)["view", "x"].filled_from_steps == ()
    assert not parts_of(app)["view", "x"].is_addition
    assert deploy(app).records == len(rows)
    other = EditedApp(tmp_path / "new", 1, 1000, SOURCE)
    other.run(other.write(edit))
    assert edited.views(app) == other.views(other.write(edit))


def test_a_step_behind_a_table_of_which_no_view_says_that_it_is_whole_is_read_from_the_log(
    tmp_path,
):
    source = SOURCE.replace(
        'latest.select("ad", "cost").view("latest")\n', 'latest.to("latest", key="ad")\n'
    )
    edited = began(tmp_path, 1, 17, rows_of(40, 4), source=source)
    plan = plan_change(edited.write((MORE, KINDS)))
    assert plan.records == 40
    step = next(one for one in plan.change.parts if one.name == "kinds" and one.kind == "step")
    assert (step.filled_from_steps, step.is_computed) == ((), True)


def test_where_the_log_has_lost_records_steps_are_filled_all_the_same(tmp_path):
    rows = without_equal_times(rows_of(60, 5))
    edited = began(tmp_path, 1, 17, rows)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 50)
    app = edited.write((MORE, KINDS))
    plan = plan_change(app)
    assert (plan.gone, plan.exit_code) == (0, 3)
    deploy(app)
    assert edited.views(app)["kinds"] == naive_kinds(rows, len)


def test_what_is_filled_and_what_is_read_from_the_log_are_deployed_together(tmp_path):
    rows = without_equal_times(rows_of(60, 6))
    both = KINDS + 'stream.group_by("kind", name="all").agg(n=ms.count()).view("all")\n'
    edited = began(tmp_path, 4, 17, rows)
    app = edited.write((MORE, both))
    parts = parts_of(app)
    assert parts["step", "kinds"].filled_from_steps == ("latest",)
    assert parts["step", "all"].is_computed
    with hold_run_lock(app.folder, 1):
        assert not deploy(app).switched
    assert deploy(app).switched
    kinds = [row["kind"] for row in rows]
    assert edited.views(app)["kinds"] == naive_kinds(rows, len)
    assert edited.views(app)["all"] == {(kind, kinds.count(kind)) for kind in kinds}


def test_tables_that_were_rescaled_fill_steps_of_the_shares_that_their_buckets_have(tmp_path):
    rows = rows_of(60, 13)
    edited = began(tmp_path / "filled", 4, 17, rows)
    app = edited.write()
    with open_state_store(app.state_store) as store:
        was = store.program(app.name, JOB).partitioning
        start = RunStart(app.name, JOB, store.newest_run(app.name, JOB), "local-run")
        plan = app.plan(Buckets(2, was["hash_seed"]))
        made = rescale_manifests(plan.stages, store.state_manifests(app.name, JOB), 2, 8)
        now = {**was, "bucket_count": 8, "declared_buckets": 2}
        store.replace_state(start, made, now, was=was)
    app = edited.write(*EDIT)
    assert_filled(plan_change(app))
    deploy(app)
    other = began(tmp_path / "new", 4, 17, rows, *EDIT)
    assert edited.views(app) == other.views(other.write(*EDIT))


def run_line(edited):
    return "run", str(edited.file), "--engine", "local", "--until", "caught-up"


def test_a_plan_names_the_tables_and_their_rows_and_a_run_fills_what_is_new(tmp_path, call):
    rows = without_equal_times(rows_of(60, 7))
    edited = EditedApp(tmp_path, 4, 17, SOURCE)
    edited.create()
    edited.append(rows)
    edited.write()
    assert call(*run_line(edited)).code == 0
    edited.write((MORE, KINDS))
    shown = call("plan", str(edited.file))
    assert shown.code == 3
    assert "filled from the state of 'latest' (up to " in shown.out
    assert "No record is read again." in shown.out
    assert "millstream run fills what is new before it begins" in shown.out
    found = json.loads(call("plan", str(edited.file), "--json").out)
    (table,) = found["tables_read"]
    ads = {row["ad"] for row in rows}
    assert table["step"] == "latest"
    assert len(ads) <= table["rows"] <= 3 * len(rows)
    assert (found["records"], found["read_again"]) == (0, [])
    run = call(*run_line(edited))
    assert run.code == 0, run.err
    assert "filled from the state of 'latest': step 'kinds', view 'kinds'" in run.out
    assert "millstream rollback goes back to it." in run.out
    assert edited.views(edited.write((MORE, KINDS)))["kinds"] == naive_kinds(rows, len)


def test_a_run_that_fills_keeps_what_ran_before_it_alone_and_a_rollback_says_so(tmp_path, call):
    edited = EditedApp(tmp_path, 1, 17, SOURCE)
    edited.create()
    edited.append(rows_of(40, 14))
    first = edited.write()
    assert call(*run_line(edited)).code == 0
    edited.write((MORE, KINDS))
    assert call("deploy", str(edited.file)).code == 0
    pairs = 'latest.distinct("kind", name="pairs").view("pairs")\n'
    edited.write((MORE, KINDS + pairs))
    assert call(*run_line(edited)).code == 0
    edited.write()
    asked = call("rollback", str(edited.file))
    assert asked.code == 2
    assert "That was a run: at " in asked.err
    assert "is the one version that is kept" in asked.err
    edited.write((MORE, KINDS))
    assert call("rollback", str(edited.file)).code == 0  # which is kept in its turn, by no run
    edited.write()
    assert "That was a run" not in call("rollback", str(edited.file)).err
    assert edited.views(first)["kinds"]


def test_a_run_fills_nothing_that_takes_the_place_of_what_is_there(tmp_path, call):
    edited = EditedApp(tmp_path, 4, 17, SOURCE)
    edited.create()
    edited.append(rows_of(40, 8))
    app = edited.write((MORE, KINDS))
    assert call(*run_line(edited)).code == 0
    before = edited.views(app)
    edited.write((MORE, KINDS.replace("n=ms.count()", 'n=ms.count(), most=ms.max("cost")')))
    run = call(*run_line(edited))
    assert run.code == 2
    assert "millstream deploy" in run.err
    assert edited.views(edited.write((MORE, KINDS))) == before


# ── captured tables, and compacted topics ───────────────────────────────────────────────────

CAPTURED = """
import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
orders = app.table("clicks", {"id": int, "kind": str, "cents": int}, key="id", envelope="debezium")
orders.select("id", "cents").view("orders")
# MORE
"""
CAPTURED_MORE = (
    'orders.group_by("kind", name="kinds").agg(n=ms.count(), cents=ms.sum("cents")).view("kinds")\n'
    'orders.select("id", "kind").view("plain")\n'
)


def send_changes(log, changes, state):
    """Write changes of a database's table as Debezium does; ``state`` is its rows."""
    with ms.connect(log) as opened, opened.producer() as producer:
        for number, kind, cents in changes:
            before = state.get(number)
            if cents is None:
                if before is None:
                    continue
                after = None
                del state[number]
            else:
                after = state[number] = {"id": number, "kind": kind, "cents": cents}
            op = "d" if after is None else ("c" if before is None else "u")
            value = {"before": before, "after": after, "op": op, "ts_ms": 1}
            producer.send("clicks", json.dumps(value).encode(), key=json.dumps({"id": number}))


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from("ab"), st.none() | st.integers(-5, 5)),
        min_size=1,
        max_size=40,
    ),
    cut=st.integers(0, 40),
    partitions=st.sampled_from([1, 4]),
)
def test_behind_a_captured_table_steps_and_views_are_filled(
    tmp_path_factory, changes, cut, partitions
):
    edited = EditedApp(tmp_path_factory.mktemp("app"), partitions, 7, CAPTURED)
    edited.create()
    state = {}

    def expected():
        groups = {}
        for row in state.values():
            groups.setdefault(row["kind"], []).append(row["cents"])
        return {
            "orders": {(row["id"], row["cents"]) for row in state.values()},
            "kinds": {(kind, len(cents), sum(cents)) for kind, cents in groups.items()},
            "plain": {(row["id"], row["kind"]) for row in state.values()},
        }

    send_changes(edited.log, [(1, "a", 1), *changes[:cut]], state)
    edited.run(edited.write())
    app = edited.write((MORE, CAPTURED_MORE))
    assert_filled(plan_change(app))
    assert deploy(app).records == 0
    assert edited.views(app) == expected()
    send_changes(edited.log, changes[cut:], state)
    edited.run(app)
    assert edited.views(app) == expected()


COMPACTED = """
import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
orders = app.table("clicks", {"id": int, "kind": str, "cents": int}, key="id")
orders.select("id", "cents").view("orders")
# MORE
"""


def test_behind_a_table_of_a_compacted_topic_steps_are_filled(tmp_path):
    edited = EditedApp(tmp_path, 1, 7, COMPACTED)
    with ms.connect(edited.log) as log:
        own = {"segment.bytes": "2000", "min.cleanable.dirty.ratio": "0"}
        log.create_topic("clicks", partitions=1, cleanup="compact", settings=own)
        with log.producer() as producer:
            for number in range(200):
                row = {"id": number % 7, "kind": "ab"[number % 2], "cents": number}
                producer.send("clicks", json.dumps(row).encode(), key=str(number % 7))
                if number % 5 == 4:
                    producer.flush()
            producer.send("clicks", None, key="3")
    edited.run(edited.write())
    with ms.connect(edited.log) as log:
        log.run_maintenance()
    app = edited.write((MORE, CAPTURED_MORE))
    plan = plan_change(app)
    assert_filled(plan)
    assert not plan.lacks_records
    deploy(app)
    there = {n % 7: ("ab"[n % 2], n) for n in range(200)}
    del there[3]
    cents = {kind: [c for k, c in there.values() if k == kind] for kind in "ab"}
    views = edited.views(app)
    assert views["kinds"] == {(kind, len(all_), sum(all_)) for kind, all_ in cents.items() if all_}
    assert views["plain"] == {(number, kind) for number, (kind, _) in there.items()}


KEY_TYPES = (
    'pl.col("at").dt.cast_time_unit("ms")',
    'pl.col("at").dt.replace_time_zone(None)',
    'pl.col("at").dt.convert_time_zone("Europe/Berlin")',
    'pl.col("cost").cast(pl.Decimal(10, 2))',
    'pl.col("at").dt.date()',
    'pl.col("price")',
    'pl.col("cost") > 3',
    'pl.col("kind").cast(pl.Binary)',
    'pl.when(pl.col("cost") > 3).then("kind")',  # some are null
)
KEYED = """
keyed = latest.with_columns(key=TYPE)
keyed.group_by("key", name="keys NUMBER").agg(n=ms.count(), paid=ms.sum("price")).view("keysNUMBER")
keyed.distinct("key", "kind", name="pairs NUMBER").view("pairsNUMBER")
"""


def test_groups_are_filled_whatever_the_type_of_their_key(tmp_path):
    rows, more = rows_of(30, 9), rows_of(20, 10, 30)
    made = [KEYED.replace("TYPE", key).replace("NUMBER", str(n)) for n, key in enumerate(KEY_TYPES)]
    edit = (MORE, "".join(made))
    edited = began(tmp_path / "filled", 1, 17, rows)
    app = edited.write(edit)
    assert_filled(plan_change(app))
    deploy(app)
    other = began(tmp_path / "new", 1, 17, rows, edit)
    new = other.write(edit)
    for one, its in ((edited, app), (other, new)):
        one.append(more)
        one.run(its)
    assert edited.views(app) == other.views(new)
    assert len(edited.views(app)) == 2 + 2 * len(KEY_TYPES)
    assert tables_in_state(app) == tables_in_state(new)


# ── killed, and in other stores ─────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_killed_in_front_of_each_step_of_the_switch_one_version_is_there(tmp_path):
    rows, more = rows_of(60, 11), rows_of(30, 12, 60)
    edited = began(tmp_path / "base", 4, 100_000, rows)
    old = edited.views(edited.write())
    done = subprocess.run(
        [
            sys.executable,
            TESTS / "killed_deployment.py",
            tmp_path / "base",
            tmp_path,
            "4",
            "step_fills",
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    last = int(done.stdout)
    other = began(tmp_path / "new", 4, 100_000, rows, *EDIT)
    new = other.views(other.write(*EDIT))
    other.append(more)
    other.run(other.write(*EDIT))
    found = []
    for number in range(1, last + 1):
        killed = EditedApp(tmp_path / str(number), 4, source=SOURCE)
        views = killed.views(killed.write())
        assert views in (old, new), number
        found.append(views == new)
    assert found == sorted(found)  # old until one step, and new from there on
    switched = found.index(True) + 1
    assert 10 < switched < last
    for number in {1, switched - 2, switched - 1, switched, last}:
        killed = EditedApp(tmp_path / str(number), 4, source=SOURCE)
        app = killed.write(*EDIT)
        assert deploy(app).switched
        killed.append(more)
        killed.run(app)
        assert killed.views(app) == other.views(other.write(*EDIT)), number


@pytest.mark.long
def test_in_postgresql_steps_are_filled_or_not_whenever_a_deployment_is_killed(tmp_path, database):
    source = SOURCE.replace("log=LOG", f"log=LOG, store={database!r}")
    rows, more = rows_of(60, 11), rows_of(30, 12, 60)
    edited = began(tmp_path / "filled", 4, 17, rows, source=source)
    old = edited.views(edited.write())
    app = edited.write(*EDIT)
    other = began(tmp_path / "new", 4, 17, rows, *EDIT)
    new = other.views(other.write(*EDIT))
    for place, name, expected in (
        (state_store, "put_program", old),
        (deployment, "kept_until", new),
    ):
        with mock.patch.object(place, name, side_effect=SimulatedCrash), suppress(SimulatedCrash):
            deploy(app)
        assert texts_of(edited.views(app)) == texts_of(expected)
    for one, its in ((edited, app), (other, other.write(*EDIT))):
        one.append(more)
        one.run(its)
    last = other.views(other.write(*EDIT))
    assert texts_of(edited.views(app)) == texts_of(last)
    app = edited.write()
    rollback(app)
    views = {name: edited.views(app)[name] for name in old}
    assert texts_of(views) == texts_of({name: last[name] for name in old})
