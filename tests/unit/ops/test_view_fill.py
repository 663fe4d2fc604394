"""New views that are filled from a view that there is: what they hold, what a crash leaves, and where it is not possible.

The model is one of lists and dictionaries: windows of events, then conditions and expressions over their rows in Python.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from edited_app import EditedApp, events, per_ad
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError, ConflictError
from millstream.ops import deploy as deployment
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.testing.disk import SimulatedCrash
from millstream.views.coverage import partial_note
from millstream.views.schema import JOB, ViewSchema
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.sqlite_values import normalize
from millstream.views.state_store.view_fill import _pipeline_type, _typed, fill_views
from millstream.views.store_location import open_state_store

APP = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
clicks = app.topic("clicks", fields)
stream = clicks.stream(time="at", watermark=ms.watermark("1 minute"), lateness="1 day")
per_ad = stream.window(ms.tumbling("1 minute"), by="ad", name="per_ad").emit("EMIT")
per_ad = per_ad.agg(n=ms.count(), cost=ms.sum("cost"))
per_ad.view("per_ad")
last = clicks.stream(time="at").table(key="ad", name="last")
last.view("last")
kinds = last.group_by("kind").agg(n=ms.count(), cost=ms.sum("cost"))
kinds.view("kinds")
"""


def began(folder, source=APP, *, emit="update", partitions=4, rows_per_batch=40, count=170, seed=3):
    edited = EditedApp(folder, partitions, rows_per_batch, source=source.replace("EMIT", emit))
    edited.create()
    rows = events(count, seed)
    edited.append(rows)
    edited.run(edited.write())
    return edited, rows


def with_view(text):
    return ('kinds.view("kinds")\n', f'kinds.view("kinds")\n{text}\n')


def note(app, view):
    with open_state_store(app.state_store, readonly=True) as store:
        return partial_note(store.coverage(view))


def said(plan, name):
    return " ".join(why for part in plan.change.parts if part.name == name for why in part.why)


# ── what a filled view holds ────────────────────────────────────────────────────────────────

WINDOW_STEPS = [
    ('filter(pl.col("n") > 3)', lambda rows: [r for r in rows if r["n"] > 3]),
    (
        'filter(pl.col("cost") % 2 == 0)',
        lambda rows: [r for r in rows if r["cost"] % 2 == 0],
    ),
    (
        'with_columns(rate=pl.col("cost") / pl.col("n"))',
        lambda rows: [{**r, "rate": r["cost"] / r["n"]} for r in rows],
    ),
    (
        'with_columns(n=pl.col("n") * 2)',
        lambda rows: [{**r, "n": r["n"] * 2} for r in rows],
    ),
    ('drop("window_end")', lambda rows: [{k: r[k] for k in r if k != "window_end"} for r in rows]),
    ('rename({"ad": "who"})', lambda rows: [{("who" if k == "ad" else k): r[k] for k in r} for r in rows]),
]  # fmt: skip


@st.composite
def chains(draw):
    """Return steps that may follow each other: one that takes a column away comes once."""
    chosen = draw(st.lists(st.sampled_from(range(len(WINDOW_STEPS))), max_size=4))
    once = [n for at, n in enumerate(chosen) if n < 4 or n not in chosen[:at]]
    return [WINDOW_STEPS[n] for n in once]


def declared(chain):
    return ".".join(["per_ad", *(text for text, _ in chain)])


def expected(chain, rows):
    found = [
        dict(zip(("window_start", "window_end", "ad", "n", "cost"), r, strict=True)) for r in rows
    ]
    for _, step in chain:
        found = step(found)
    return {tuple(sorted(row.items())) for row in found}


def held(app, view):
    with open_state_store(app.state_store, readonly=True) as store:
        return {tuple(sorted(row.items())) for row in store.scan(view).iter_rows(named=True)}


def check_random_chains(folder, first, more, emit, partitions, rows_per_batch, by):
    """Declare a view, and later another one of more steps; compare it with the model, filled by a run or a deployment."""
    source = APP.replace('per_ad.view("per_ad")', f'{declared(first)}.view("per_ad")')
    if emit == "final":  # a window ends once the watermark is past its end by the lateness
        source = source.replace('lateness="1 day"', 'lateness="30 seconds"')
    edited, rows = began(
        folder, source, emit=emit, partitions=partitions, rows_per_batch=rows_per_batch, count=60
    )
    app = edited.write(with_view(f'{declared([*first, *more])}.view("more")'))
    plan = plan_change(app)
    assert (plan.exit_code, plan.records) == (0, 0)
    assert [(one.view, one.source, one.rows) for one in plan.filled] == [
        ("more", "per_ad", len(held(app, "per_ad")))
    ]
    if by == "deploy":  # another part of the edit needs one
        app = edited.write(
            with_view(f'{declared([*first, *more])}.view("more")'),
            ('n=ms.count(), cost=ms.sum("cost"))\nkinds', "n=ms.count())\nkinds"),
        )
        assert deploy(app).switched
    assert edited.run(app) == []
    if emit != "final":  # of the last windows, final rows are to come
        assert held(app, "more") == expected([*first, *more], per_ad(rows))
    assert note(app, "more") is None
    after = events(60, 9, first=60)
    edited.append(after)
    edited.run(app)
    every = per_ad([*rows, *after])
    if emit == "final":
        with open_state_store(app.state_store, readonly=True) as store:
            watermark = store.status(app.name, "main")["watermark"]
        past = datetime.fromisoformat(watermark) - timedelta(seconds=30)
        every = {row for row in every if row[1] <= past}
        assert every
    assert held(app, "more") == expected([*first, *more], every)


@pytest.mark.parametrize("by", ["run", "deploy"])
def test_a_filled_view_is_what_it_would_be_from_the_beginning(tmp_path, by):
    first, more = [WINDOW_STEPS[0]], [WINDOW_STEPS[2], WINDOW_STEPS[1], WINDOW_STEPS[5]]
    check_random_chains(tmp_path, first, more, "update", 4, 25, by)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=25, deadline=None)
@given(
    first=chains(),
    more=chains(),
    emit=st.sampled_from(["update", "retract", "final"]),
    partitions=st.sampled_from([1, 4, 7]),
    rows_per_batch=st.integers(5, 80),
    by=st.sampled_from(["run", "deploy"]),
)
def test_random_steps_give_what_they_would_from_the_beginning(
    tmp_path_factory, first, more, emit, partitions, rows_per_batch, by
):
    twice = [text for text, _ in [*first, *more]]
    more = [step for step in more if twice.count(step[0]) == 1 or WINDOW_STEPS.index(step) < 4]
    folder = tmp_path_factory.mktemp("fill")
    check_random_chains(folder, first, more, emit, partitions, rows_per_batch, by)


def test_views_of_tables_are_filled_whatever_their_types(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(
        with_view(
            'kinds.filter(pl.col("n") > 1).view("many")\n'
            'last.select("ad", day=pl.col("at").dt.date(), cheap=pl.col("cost") < 3).view("days", key="ad")\n'
            'last.view("again", key=["ad", "kind"])'
        )
    )
    assert {one.view: one.source for one in plan_change(app).filled} == {
        "many": "kinds",
        "days": "last",
        "again": "last",
    }
    for seed in (8, 9):
        edited.run(app)
        newest = {}
        for row in rows:
            newest[row["ad"]] = row
        found = edited.views(app)
        assert found["days"] == {
            (ad, row["at"].date(), row["cost"] < 3) for ad, row in newest.items()
        }
        assert found["again"] == found["last"]
        kinds = {}
        for row in newest.values():
            n, cost = kinds.get(row["kind"], (0, 0))
            kinds[row["kind"]] = (n + 1, cost + row["cost"])
        assert found["many"] == {(kind, *two) for kind, two in kinds.items() if two[0] > 1}
        more = events(30, seed, first=len(rows))
        edited.append(more)
        rows = [*rows, *more]


def test_a_view_that_was_left_out_has_what_came_out_meanwhile(tmp_path):
    edited, rows = began(tmp_path, APP.replace(*with_view('per_ad.view("twin")')))
    without = edited.write(('per_ad.view("twin")\n', ""))
    more = events(40, 4, first=len(rows))
    edited.append(more)
    edited.run(without)
    app = edited.write()
    part = next(part for part in plan_change(app).change.parts if part.name == "twin")
    assert (part.verdict, part.filled_from) == ("keeps", "per_ad")
    edited.run(app)
    assert edited.views(app)["twin"] == per_ad([*rows, *more])
    assert note(app, "twin") is None


def test_rows_on_which_a_step_fails_are_left_out_as_in_a_batch(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(
        with_view(
            'per_ad.with_columns(low=(pl.col("cost") - 8).cast(pl.UInt8)).view("low")'
        )
    )  # fmt: skip
    edited.run(app)
    assert edited.views(app)["low"] == {(*row, row[-1] - 8) for row in per_ad(rows) if row[-1] >= 8}


# ── what it lacks, and where it is not possible ─────────────────────────────────────────────


def test_a_view_lacks_what_its_source_lacks_and_says_so(tmp_path):
    edited, rows = began(tmp_path, APP.replace('ad.view("per_ad")', 'ad.view("per_ad", key="ad")'))
    app = edited.write(with_view('per_ad.view("late", key=["window_start", "ad"])'))
    assert "'per_ad' has not one row for each row that holds" in said(plan_change(app), "late")
    edited.append(events(10, 7, first=len(rows)))
    edited.run(app)
    since = note(app, "late")
    app = edited.write(
        with_view(
            'per_ad.view("late", key=["window_start", "ad"])\n'
            'per_ad.filter(pl.col("n") > 1).view("later", key=["window_start", "ad"])'
        )
    )
    edited.run(app)
    assert since is not None
    assert note(app, "later") == since
    found = edited.views(app)
    assert found["later"] == {row for row in found["late"] if row[3] > 1}


@pytest.mark.parametrize(
    ("view", "why"),
    [
        ('per_ad.view("new", key="ad")', "which rows of a key it has depends on their order"),
        ('stream.view("new", key="at")', "its rows are not those of one stateful step"),
        (
            'per_ad.map_frames(lambda rows: rows).view("new", key=["window_start", "ad"])',
            "which rows of a key it has depends on their order",
        ),
        (
            'per_ad.with_columns(ad=pl.lit("x")).view("new", key=["window_start", "ad"])',
            "which rows of a key it has depends on their order",
        ),
        ('per_ad.filter(pl.all_horizontal(pl.all() == pl.all())).view("new")', "does not name"),
    ],
)
def test_what_cannot_be_filled_says_why_and_is_written_from_now_on(tmp_path, view, why):
    edited, rows = began(tmp_path, count=20)
    app = edited.write(with_view(view))
    plan = plan_change(app)
    assert plan.filled == ()
    assert plan.exit_code == 0
    assert why in said(plan, "new")
    edited.append(events(5, 4, first=len(rows)))
    edited.run(app)
    assert note(app, "new") is not None


def test_a_column_that_the_view_has_not_or_not_exactly_is_not_made_up(tmp_path):
    source = APP.replace('ad.view("per_ad")', 'ad.drop("cost").view("per_ad")').replace(
        'n=ms.count(), cost=ms.sum("cost"))\nper_ad', 'n=ms.count(), cost=ms.sum("cost"), all=ms.list("cost"))\nper_ad'
    )  # fmt: skip
    edited, _ = began(tmp_path, source, count=30)
    app = edited.write(
        with_view(
            'per_ad.view("one")\n'
            'per_ad.drop("cost").with_columns(m=pl.col("all").list.len()).view("two")\n'
            'per_ad.drop("cost").rename({"all": "every"}).view("three")'
        )
    )
    plan = plan_change(app)
    assert "the view 'per_ad' lacks the column 'cost'" in said(plan, "one")
    assert "does not keep the column 'all' exactly" in said(plan, "two")
    assert [one.view for one in plan.filled] == ["three"]  # it goes on as it is kept
    edited.run(app)
    found = edited.views(app)
    assert found["three"] == found["per_ad"]


def test_a_name_that_differs_in_case_alone_is_refused_as_that_of_the_view_there_is(tmp_path):
    edited, rows = began(tmp_path, count=20)
    app = edited.write(with_view('per_ad.filter(pl.col("n") > 1).view("PER_AD")'))
    with pytest.raises(ConfigError, match=r"The view 'PER_AD' of .* exists and differs"):
        edited.run(app)
    app = edited.write()
    edited.run(app)
    assert edited.views(app)["per_ad"] == per_ad(rows)


SIX = 'filter(pl.any_horizontal(pl.all().cast(pl.String) == "6"))'


def test_a_condition_over_all_columns_is_another_one_where_another_column_was_left_out(tmp_path):
    source = APP.replace('ad.view("per_ad")', f'ad.drop("cost").{SIX}.view("per_ad")')
    edited, _ = began(tmp_path, source, count=30)
    app = edited.write(
        with_view(
            f'per_ad.{SIX}.drop("cost").view("other")\n'
            f'per_ad.drop("cost").{SIX}.with_columns(m=pl.col("n") * 2).drop("n").view("same")'
        )
    )
    plan = plan_change(app)
    assert "the view 'per_ad' has other steps above it" in said(plan, "other")
    assert [one.view for one in plan.filled] == ["same"]
    edited.run(app)
    found = edited.views(app)
    assert found["same"] == {(start, end, ad, n * 2) for start, end, ad, n in found["per_ad"]}
    assert note(app, "other") is not None


# ── runs, deployments, crashes ──────────────────────────────────────────────────────────────

TRIPLED = 'per_ad.with_columns(n=pl.col("n") * 3).view("tripled")'


def tripled(rows):
    return {(start, end, ad, n * 3, cost) for start, end, ad, n, cost in per_ad(rows)}


def test_a_run_that_is_killed_at_any_write_leaves_the_view_whole_or_not_there(
    tmp_path, monkeypatch
):
    edited, rows = began(tmp_path, count=40)
    before = edited.views(edited.write())
    app = edited.write(with_view(TRIPLED))
    real, left = SqliteStateStore._write, [0]

    def write(self, work):
        left[0] -= 1
        if left[0] == 0:
            raise SimulatedCrash
        done = real(self, work)
        if left[0] == -1:
            raise SimulatedCrash  # it is durable, and nobody was told
        return done

    found = []
    monkeypatch.setattr(SqliteStateStore, "_write", write)
    for number in range(1, 40):
        for late in (0, 1):
            left[0] = number - late if number > late else 1
            with suppress(SimulatedCrash):
                edited.run(app)
            now = edited.views(app)
            if "tripled" in now:
                assert now == {**before, "tripled": tripled(rows)}
                assert note(app, "tripled") is None
            else:
                assert now == before
            found.append("tripled" in now)
    assert found[0] is False
    assert found == sorted(found)
    assert found[-1]
    monkeypatch.undo()
    more = events(20, 5, first=len(rows))
    edited.append(more)
    edited.run(app)
    assert edited.views(app)["tripled"] == tripled([*rows, *more])


CHANGED = (
    'per_ad.view("per_ad")',
    'per_ad.with_columns(twice=pl.col("cost") * 2).drop("cost").view("per_ad")',
)


def changed(rows):
    return {(start, end, ad, n, cost * 2) for start, end, ad, n, cost in per_ad(rows)}


def test_a_view_with_other_columns_is_compared_switched_and_gone_back_to_without_the_log(tmp_path):
    edited, rows = began(tmp_path)
    other = ('cost=ms.sum("cost"))\nper_ad', 'cost=ms.sum("cost"))\n' + TRIPLED + "\nper_ad")
    app = edited.write(CHANGED, other)
    plan = plan_change(app)
    assert (plan.exit_code, plan.records, plan.lacks_records) == (3, 0, False)
    with pytest.raises(ConfigError, match="exists and differs"):
        edited.run(app)
    assert edited.views(app)["per_ad"] == per_ad(rows)
    assert "tripled" not in edited.views(app)  # the run was refused as a whole
    (view,) = compare(app).views
    assert (view.view, view.equal, view.changed) == ("per_ad", len(per_ad(rows)), 0)
    done = deploy(app)
    assert (done.switched, done.records) == (True, 0)
    assert edited.views(app)["per_ad"] == changed(rows)
    assert edited.views(app)["tripled"] == tripled(rows)
    more = events(20, 5, first=len(rows))
    edited.append(more)
    edited.run(app)
    every = [*rows, *more]
    assert edited.views(app)["per_ad"] == changed(every)
    back = edited.write()
    assert rollback(back).switched
    assert edited.views(back)["per_ad"] == per_ad(every)
    assert edited.run(back) == []


def test_what_is_lost_from_the_log_is_not_missed_by_a_view_that_is_filled(tmp_path):
    edited, rows = began(tmp_path, partitions=1)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 100)
    app = edited.write(CHANGED)
    plan = plan_change(app)
    assert (plan.exit_code, plan.gone) == (3, 0)
    assert deploy(app).switched
    assert edited.views(app)["per_ad"] == changed(rows)
    assert note(app, "per_ad") is None


def test_a_source_that_a_run_has_declared_otherwise_meanwhile_is_refused(tmp_path, monkeypatch):
    edited, rows = began(tmp_path, count=40)
    app = edited.write(CHANGED)
    real, made = deployment.prepare, []

    def prepared(*args, **options):
        made.append(found := real(*args, **options))
        other = edited.write(
            ('per_ad.view("per_ad")', 'per_ad.filter(pl.col("n") > 2).view("per_ad")')
        )
        edited.append(events(3, 9, first=len(rows)))
        edited.run(other)
        return found

    monkeypatch.setattr(deployment, "prepare", prepared)
    with pytest.raises(ConflictError, match="has read more of the log"):
        deploy(app)
    with open_state_store(app.state_store, readonly=True) as store:
        outputs = store.outputs(app.name, JOB)
        with pytest.raises(ConflictError, match="was declared otherwise by a run"):
            fill_views(made[0].filled_views.values(), outputs, store.scan)


def test_a_plan_says_from_which_view_and_how_many_rows(tmp_path, call):
    edited, rows = began(tmp_path, count=40)
    edited.write(with_view(TRIPLED))
    answer = call("plan", str(edited.file))
    count = len(per_ad(rows))
    assert answer.code == 0
    lines = [line.strip() for line in answer.out.splitlines()]
    at = lines.index("keeps     view 'tripled'")
    assert lines[at + 1 : at + 3] == ["it is new", f"filled from view 'per_ad': {count} rows"]
    assert lines[-1] == "A run resumes where the last one stopped."
    values = json.loads(call("plan", str(edited.file), "--json").out)
    assert values["filled"] == [{"view": "tripled", "source": "per_ad", "rows": count}]
    edited.write(CHANGED)
    answer = call("plan", str(edited.file))
    assert answer.code == 3
    assert "No record is read again." in answer.out


def test_a_new_step_below_a_view_reads_the_log_and_says_why(tmp_path):
    edited, _ = began(tmp_path, count=40)
    app = edited.write(
        with_view('per_ad.window(ms.tumbling("1 hour"), by="ad", name="hours").agg(n=ms.sum("n")).view("hours")')
    )  # fmt: skip
    plan = plan_change(app)
    assert plan.records == 40
    assert "no view holds the event times and the order of rows" in said(plan, "hours")


def test_types_come_back_as_they_were_before_they_were_stored():
    at = datetime(2026, 3, 29, 0, 59, 59, 123000, tzinfo=UTC)
    frame = pl.DataFrame(
        {
            "small": pl.Series([-128, None], dtype=pl.Int8),
            "single": pl.Series([0.1, float("nan")], dtype=pl.Float32),
            "local": pl.Series([at.replace(tzinfo=None), None], dtype=pl.Datetime("ms")),
            "zoned": pl.Series([at, None]).dt.convert_time_zone("Europe/Berlin"),
            "took": pl.Series([timedelta(milliseconds=1), None], dtype=pl.Duration("ms")),
            "exact": pl.Series(["1.25", None]).cast(pl.Decimal(10, 2)),
            "raw": pl.Series([b"\xff", b""], dtype=pl.Binary),
        }
    )
    schema = ViewSchema.of("v", frame, ())
    for name, dtype in frame.schema.items():
        one = ViewSchema("v", ((name, schema.kinds[name]),), (name,))
        stored = normalize(frame.select(name), one, (name,))[name]
        found = _pipeline_type(schema, name, repr(dtype))
        assert found == dtype, name
        assert _typed(stored, found).sort().equals(frame[name].sort(), null_equal=True), name
    keyed = ViewSchema.of("v", frame.rename({"single": "key"}), ("key",))
    assert _pipeline_type(keyed, "key", "Float32") is None  # -0.0 is gone
