"""A changed program: what goes on with the state that there is, and what is refused, with what it says."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream.engine.job_metadata import JobMetadata, load_job_metadata
from millstream.engine.rescale import rescale
from millstream.errors import ConfigError, FencedError
from millstream.kernels.plan import (
    DatasetSinkSpec,
    ForeachSinkSpec,
    JobPlan,
    Program,
    SinkPlan,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.state_store.program import StoredProgram, check_same_program
from millstream.views.state_store.sqlite_store import SqliteStateStore

FIELDS = {"ad": str, "kind": str, "at": datetime, "cost": float, "a": int, "b": int}
MINUTE = ms.tumbling("1 minute")


def plan(
    *,
    fields=FIELDS,
    by="ad",
    window=MINUTE,
    name="pm",
    agg=None,
    mode="final",
    before=lambda stream: stream,
    after=lambda _: None,
    view="per_minute",
    buckets=2,
    rule=None,
    **read,
):
    """Make a plan: events of clicks, something before the window, the window, and an end."""
    app = ms.App("app", log="unused", buckets=buckets)
    options = {"time": "at", "lateness": "1 minute", **read}
    stream = app.topic("clicks", fields).stream(
        watermark=rule or ms.watermark("5 seconds"), **options
    )
    windowed = before(stream).window(window, by=by, name=name).emit(mode)
    windowed.agg(**(agg or {"n": ms.count()})).view(view, key=["window_start"])
    after(stream)
    return app.plan()


def run(folder, made, batches=1, **options):
    """Begin a run as a job does, and commit batches that change nothing."""
    with open_committer(made, folder / "views.db", folder / "log") as committer:
        first = committer.begin_run("main", "one", **options)
        for batch_id in range(first, first + batches):
            committer.commit(batch_id, BatchResult(), {})


def plus_one(frame):
    return frame.with_columns(pl.col("cost") + 1)


def plus_two(frame):
    return frame.with_columns(pl.col("cost") + 2)


REFUSED = {
    "aggregate redefined": (
        {},
        {"agg": {"n": ms.count(pl.col("cost") > 1)}},
        r"step 'pm': aggregate 'n' was count\(\), is count\(.*cost.* > ",
    ),
    "another column": (
        {"agg": {"n": ms.sum("a")}},
        {"agg": {"n": ms.sum("b")}},
        r"""'n' was sum\(col\("a"\)\), is sum\(col\("b"\)\)\. Undo""",
    ),
    "another order": (
        {"agg": {"n": ms.max_by("kind", "a")}},
        {"agg": {"n": ms.max_by("kind", "b")}},
        r"aggregate 'n' was pick\(.*max_by.*, is pick\(",
    ),
    "an option that text does not show": (
        {"agg": {"n": ms.sum(pl.col("cost").round(1))}},
        {"agg": {"n": ms.sum(pl.col("cost").round(2))}},
        r"aggregate 'n' reads sum\(.*round.* as before, but its options",
    ),
    "aggregate renamed": ({}, {"agg": {"m": ms.count()}}, r"'m' was not there, is count\(\)"),
    "aggregates in another order": (
        {"agg": {"n": ms.count(), "m": ms.sum("a")}},
        {"agg": {"m": ms.sum("a"), "n": ms.count()}},
        r"the order of aggregates was n, m, is m, n",
    ),
    "window": ({}, {"window": ms.tumbling("2 minutes")}, r"window was tumbling\(size=1 minute"),
    "key": ({}, {"by": "kind"}, r"by was \[ad\], is \[kind\]"),
    "type of the key": ({}, {"fields": {**FIELDS, "ad": int}}, r"field 'ad' was .*is .*int"),
    "mode of a window": ({}, {"mode": "update"}, r"mode was final, is update"),
    "mode of a sliding window": (
        {"window": ms.sliding("10 seconds")},
        {"window": ms.sliding("10 seconds"), "mode": "update"},
        r"step 'pm': mode was final, is update",
    ),
    "lateness": ({}, {"lateness": "2 minutes"}, r"lateness"),
    "late policy": ({}, {"late": "side"}, r"late_policy was drop, is side"),
    "filter above": (
        {},
        {"before": lambda s: s.filter(pl.col("ad") != "7")},
        r"step 'pm': filter\(.*ad.*is new on the way to it",
    ),
    "filter gone": (
        {"before": lambda s: s.filter(pl.col("ad") != "7")},
        {},
        r"step 'pm': filter\(.*is no longer on the way to it",
    ),
    "a column left out above an expression over all of them": (
        {"before": lambda s: s.drop("kind").filter(pl.any_horizontal(pl.all().is_null()))},
        {"before": lambda s: s.filter(pl.any_horizontal(pl.all().is_null()))},
        r"step 'pm': drop\(\[kind\]\) is no longer on the way to it",
    ),
    "a cast above": (
        {"before": lambda s: s.with_columns(g=pl.col("a").cast(pl.Int64)), "by": "g"},
        {"before": lambda s: s.with_columns(g=pl.col("a").cast(pl.String)), "by": "g"},
        r"on the way to it was with_columns\(.*Int64.* is with_columns\(.*String",
    ),
    "a function above": (
        {"before": lambda s: s.map_frames(plus_one, name="f")},
        {"before": lambda s: s.map_frames(plus_two, name="f")},
        r"on the way to it was .*plus_one.* is .*plus_two",
    ),
    "time": ({}, {"time": pl.col("at").dt.offset_by("1h")}, r"time was col\(.*is .*offset_by"),
    "watermark": ({}, {"rule": ms.watermark("9 seconds")}, r"delay was 5 seconds, is 9 seconds"),
    "union": (
        {},
        {"before": lambda s: s.union(s.app.topic("more", FIELDS).stream(time="at"))},
        r"it read the topics 'clicks', and reads 'clicks', 'more'",
    ),
    "another window": (
        {},
        {"after": lambda s: s.window(MINUTE, name="second").agg(n=ms.count()).view("second")},
        r"step 'second' is new",
    ),
    "buckets": ({}, {"buckets": 3}, r"divided into 2 buckets and the app asks for 3"),
    "dedup's horizon": (
        {"before": lambda s: s.dedup("ad", within="1 hour", name="once")},
        {"before": lambda s: s.dedup("ad", within="2 hours", name="once")},
        r"step 'once': within was 1 hour, is 2 hours\. Undo",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_meaning_of_a_state_is_refused_and_said(tmp_path, name):
    was, now, said = REFUSED[name]
    run(tmp_path, plan(**was))
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, plan(**now))
    run(tmp_path, plan(**was))  # and the program that made the state still goes on


ALLOWED = {
    "nothing": {},
    "an unused field": {"fields": {**FIELDS, "country": str}},
    "an optional field": {"fields": {**FIELDS, "country": str | None}},
    "fields in another order": {"fields": dict(reversed(FIELDS.items()))},
    "the step's name": {"name": "renamed"},
    "the view's name": {"view": "renamed"},
    "a stateless view": {"after": lambda s: s.view("raw", key="ad")},
    "how long partitions are waited for": {"rule": ms.watermark("5 seconds", idle="1 hour")},
    "a column left out below": {"before": lambda s: s.drop("kind")},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_does_not_change_the_meaning_of_a_state_goes_on(tmp_path, name):
    run(tmp_path, plan())
    before = stored(tmp_path)
    run(tmp_path, plan(**ALLOWED[name]))
    assert stored(tmp_path).steps.keys() == before.steps.keys()


def stored(folder):
    with SqliteStateStore(folder / "views.db", readonly=True) as state_store:
        return state_store.program("app", "main")


def test_before_the_first_batch_any_program_may_take_the_place_of_another(tmp_path):
    run(tmp_path, plan(), batches=0)
    run(tmp_path, plan(by="kind", view="per_kind"))
    assert stored(tmp_path).steps.keys() == plan(by="kind").program.steps.keys()


def test_a_refused_program_leaves_no_view_behind_and_fences_nobody_off(tmp_path):
    run(tmp_path, plan())
    with open_committer(plan(), tmp_path / "views.db", tmp_path / "log") as alive:
        following = alive.begin_run("main", "one")
        with pytest.raises(ConfigError):
            run(tmp_path, plan(by="kind", view="other"))
        assert alive.commit(following, BatchResult(), {})
        assert [schema.name for schema in alive.state_store.views()] == [
            "dead_letters",
            "per_minute",
        ]


def test_views_that_do_not_say_by_what_program_they_were_made_are_refused(tmp_path):
    run(tmp_path, plan())
    with SqliteStateStore(tmp_path / "views.db") as state_store, state_store._transaction() as db:
        db.execute("DELETE FROM _programs")
    with pytest.raises(ConfigError, match=r"does not say by what program"):
        run(tmp_path, plan())


def test_what_follows_from_a_changed_step_above_is_not_told_again(tmp_path):
    def two(size):
        app = ms.App("app", log="unused")
        stream = app.topic("clicks", FIELDS).stream(time="at")
        first = stream.window(ms.tumbling(size), by="ad", name="first").agg(n=ms.count())
        first.window(ms.tumbling("1 day"), name="second").agg(n=ms.sum("n")).view("v")
        return app.plan()

    run(tmp_path, two("1 minute"))
    with pytest.raises(ConfigError, match="step 'first': window was") as refused:
        run(tmp_path, two("1 hour"))
    assert "'second'" not in str(refused.value)


# ── another version of polars or Python ─────────────────────────────────────────────────────


def recoded(program, *, versions=None):
    """Give a program as another version would have described it: other codes, the same texts."""
    text = json.dumps(program.steps).replace('"code": "', '"code": "0')
    versions = {**program.versions, **(versions or {})}
    return replace(program, steps=json.loads(text), versions=versions)


def test_other_codes_of_the_same_versions_are_another_program():
    now = StoredProgram.of(plan(before=lambda s: s.filter(pl.col("a") > 1)), {})
    with pytest.raises(ConfigError, match=r"as before, but its options"):
        check_same_program(recoded(now), now, Path("here"), same_expressions=True)


def test_after_an_upgrade_what_cannot_be_compared_is_asked_for_once():
    now = StoredProgram.of(plan(before=lambda s: s.filter(pl.col("a") > 1)), {})
    older = recoded(now, versions={"polars": "1.0.0"})
    with pytest.raises(ConfigError, match=r"polars was 1.0.0 and is .*same_expressions=True"):
        check_same_program(older, now, Path("here"), same_expressions=False)
    check_same_program(older, now, Path("here"), same_expressions=True)


def test_after_an_upgrade_steps_that_read_alike_and_differ_are_refused():
    def two(app_of=ms.App):
        app = app_of("app", log="unused")
        stream = app.topic("clicks", FIELDS).stream(time="at")
        for digits in (1, 2):
            total = ms.sum(pl.col("cost").round(digits))
            stream.window(MINUTE, by="ad").agg(n=total).view(f"v{digits}")
        return app.plan()

    now = StoredProgram.of(two(), {})
    assert len(now.steps) == 2
    check_same_program(now, now, Path("here"), same_expressions=False)
    older = recoded(now, versions={"polars": "1.0.0"})
    with pytest.raises(ConfigError, match="which state belongs to which step is not known"):
        check_same_program(older, now, Path("here"), same_expressions=True)


def test_after_an_upgrade_what_is_described_alike_goes_on_unasked():
    now = StoredProgram.of(plan(), {})
    older = replace(now, versions={"polars": "1.0.0", "Python": "3.9"})
    check_same_program(older, now, Path("here"), same_expressions=False)


def test_what_reads_differently_is_refused_whatever_is_said_of_expressions():
    older = replace(StoredProgram.of(plan(agg={"n": ms.sum("a")}), {}), versions={})
    now = StoredProgram.of(plan(agg={"n": ms.sum("b")}), {})
    with pytest.raises(ConfigError, match=r"aggregate 'n' was sum"):
        check_same_program(older, now, Path("here"), same_expressions=True)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (3, r"made by an earlier version of Millstream \(state format 3; .*millstream reset"),
        (99, r"made by a later version of Millstream \(state format 99; .*Upgrade millstream"),
    ],
)
def test_state_of_another_format_is_refused_whatever_else_its_program_says(number, message):
    now = StoredProgram.of(plan(), {})
    stored = StoredProgram.from_json(json.dumps({"format": number, "a key of that format": {}}))
    with pytest.raises(ConfigError, match=message):
        check_same_program(stored, now, Path("here"), same_expressions=True)


def test_a_store_of_an_earlier_format_is_refused_plainly(tmp_path):
    run(tmp_path, plan())
    with SqliteStateStore(tmp_path / "views.db") as state_store:
        assert state_store._writer is not None
        state_store._writer.execute("PRAGMA user_version = 2")
    for readonly in (True, False):
        with pytest.raises(
            ConfigError, match=r"has format 2, of an earlier version.*millstream reset"
        ):
            SqliteStateStore(tmp_path / "views.db", readonly=readonly)


# ── batches that were cut off ───────────────────────────────────────────────────────────────

COLUMNS = (("k", pl.String()), ("n", pl.Int64()))
SHARING = {"hash_seed": 7}


def writing(folder, *, meaning="as it was", view="as it was", more=False, buckets=1):
    """Make a plan that gives rows to a topic, a dataset, a function and a view."""
    ends = {
        "home": ViewSinkSpec(),
        "to(out)": TopicSinkSpec("out", "k", ("k", "n"), 1, "delete"),
        "dataset(rows)": DatasetSinkSpec(str(folder / "rows"), ()),
        "calls": ForeachSinkSpec(plus_one),
        **({"dataset(more)": DatasetSinkSpec(str(folder / "more"), ())} if more else {}),
    }
    sinks = tuple(
        SinkPlan(name, 8 + number, ("k",) if name == "home" else (), COLUMNS, end)
        for number, (name, end) in enumerate(ends.items())
    )
    outputs = {**dict.fromkeys(ends, meaning), "home": view, "calls": view}
    return JobPlan("app", (), (), (), sinks, Buckets(buckets), program=Program({}, outputs, (), 0))


def result(made):
    rows = pl.DataFrame({"k": ["a"], "n": [1]})
    books = {"step": Counter(read=1, emitted=1)}
    names = [sink.name for sink in made.sinks if sink.name != "calls"]
    return BatchResult(rows=dict.fromkeys(names, rows), step_counts=books)


def cut_off(folder, made, committed):
    """Commit batches, and one that the process dies of between the other sinks and the state store."""
    with open_committer(made, folder / "views.db", folder / "log") as committer:
        first = committer.begin_run("main", "one", partitioning=SHARING)
        for batch_id in range(first, committed):
            committer.commit(batch_id, result(made), {})
        committer.state_store.commit = dies
        with pytest.raises(SimulatedCrash):
            committer.commit(committed, result(made), {})


def dies(*_, **__):
    raise SimulatedCrash


@pytest.mark.parametrize("committed", [0, 2])
def test_a_batch_that_one_program_has_begun_is_not_ended_by_another(tmp_path, committed):
    cut_off(tmp_path, writing(tmp_path), committed)
    changed = {
        "to(out)": writing(tmp_path, meaning="another"),
        "dataset(more)": writing(tmp_path, more=True),
    }
    for name, other in changed.items():
        for _ in range(2):  # one refusal does not make it the program that is known
            with pytest.raises(ConfigError, match=f"batch {committed} .*{re.escape(name)}.*once"):
                run(tmp_path, other, partitioning=SHARING)
    with open_committer(writing(tmp_path), tmp_path / "views.db", tmp_path / "log") as committer:
        assert committer.begin_run("main", "one", partitioning=SHARING) == committed
        assert committer.commit(committed, result(writing(tmp_path)), {})
    run(tmp_path, changed["to(out)"], partitioning=SHARING)
    since = {label: one.spans[-1].since for (_, label), one in coverage_in(tmp_path).items()}
    assert since["topic out"].batch_id == committed + 1
    assert since["view"] is None


def coverage_in(folder):
    with SqliteStateStore(folder / "views.db", readonly=True) as state_store:
        return state_store.outputs("app")


def test_what_is_at_home_alone_and_functions_may_change_before_a_batch_is_ended(tmp_path):
    cut_off(tmp_path, writing(tmp_path), 2)
    run(tmp_path, writing(tmp_path, view="another"), partitioning=SHARING)


def test_the_first_batch_that_was_begun_is_ended_with_the_same_hashes(tmp_path):
    cut_off(tmp_path, writing(tmp_path), 0)
    with pytest.raises(ConfigError, match="how keys are divided"):
        run(tmp_path, writing(tmp_path), partitioning={"hash_seed": 8})
    run(tmp_path, writing(tmp_path), partitioning=SHARING)


def test_a_batch_that_was_begun_before_a_rescale_is_ended_in_the_buckets_of_then(tmp_path):
    folder = tmp_path / "apps" / "app"
    folder.mkdir(parents=True)
    created = JobMetadata(4, 2, 2, hash_seed=7)
    with open_committer(writing(folder, buckets=4), folder / "views.db", folder / "log") as made:
        made.begin_run("main", "one", partitioning=created.partitioning)
        made.commit(0, result(writing(folder)), {})
        made.state_store.commit = dies
        with pytest.raises(SimulatedCrash):
            made.commit(1, result(writing(folder)), {})
    for buckets in (8, 2):
        rescale("app", folder, buckets=buckets)
        metadata = load_job_metadata("app", folder / "views.db")
        divided = writing(folder, buckets=buckets)
        for _ in range(2):  # one refusal does not divide it
            with pytest.raises(ConfigError, match=r"batch 1 .*how keys are divided.*--buckets 4\)"):
                run(folder, divided, partitioning=metadata.partitioning)
    rescale("app", folder, buckets=4)
    metadata = load_job_metadata("app", folder / "views.db")
    with open_committer(writing(folder, buckets=4), folder / "views.db", folder / "log") as made:
        assert made.begin_run("main", "one", partitioning=metadata.partitioning) == 1
        made.commit(1, result(writing(folder)), {})
    rescale("app", folder, buckets=8)
    metadata = load_job_metadata("app", folder / "views.db")
    run(folder, writing(folder, buckets=8), partitioning=metadata.partitioning)


def test_a_run_that_was_replaced_while_it_began_does_not_keep_its_program(tmp_path, monkeypatch):
    with open_committer(writing(tmp_path), tmp_path / "views.db", tmp_path / "log") as older:
        began = older.state_store.register_program

        def replaced(*given):
            older.state_store.begin_run("app", "main", "one")
            began(*given)

        monkeypatch.setattr(older.state_store, "register_program", replaced)
        with pytest.raises(FencedError, match=r"Run 1 .*replaced by run 2"):
            older.begin_run("main", "one")
        assert older.state_store.program("app", "main") is None
