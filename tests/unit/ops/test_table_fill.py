"""Views of a table that are filled from its state: they are what they would be if they had been declared from the beginning."""

from __future__ import annotations

import json
import random
from datetime import timedelta

import pytest
from edited_app import START, EditedApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback

APP = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "tags": list[str], "gone": bool, "at": datetime}
clicks = app.topic("clicks", fields)
stream = clicks.stream(time="at", lateness="1 day")
latest = stream.table(key="ad", deleted=pl.col("gone"), name="latest")
kinds = latest.group_by("kind", name="kinds").agg(n=ms.count())
kinds.view("kinds")
"""
KINDS = 'kinds.view("kinds")\n'
VIEWS = {
    "all": 'latest.drop("gone").view("all")\n',
    "dear": 'latest.filter(pl.col("cost") > 3).select("ad", twice=pl.col("cost") * 2).view("dear", key="ad")\n',
    "tagged": 'latest.rename({"ad": "of"}).select("of", "tags", many=pl.col("tags").list.len() > 1).view("tagged")\n',
}
ALL = (KINDS, KINDS + "".join(VIEWS.values()))


def rows_of(count, seed, first=0):
    dice = random.Random(seed)
    return [
        {
            "ad": f"a{dice.randrange(9)}",
            "kind": dice.choice(("click", "show")),
            "cost": dice.randrange(7),
            "tags": [dice.choice("xyz") for _ in range(dice.randrange(4))],
            "gone": dice.random() < 0.2,
            "at": START + timedelta(seconds=number + dice.random()),
        }
        for number in range(first, first + count)
    ]


def table(rows):
    """The latest row of each ad, by its time."""
    latest = {row["ad"]: row for row in sorted(rows, key=lambda row: row["at"])}
    return [row for row in latest.values() if not row["gone"]]


def as_kept(tags):
    """What a view keeps of a list."""
    return json.dumps(tags, separators=(",", ":"))


def answers(rows):
    there = table(rows)
    return {
        "all": {(r["ad"], r["kind"], r["cost"], as_kept(r["tags"]), r["at"]) for r in there},
        "dear": {(r["ad"], r["cost"] * 2) for r in there if r["cost"] > 3},
        "tagged": {(r["ad"], as_kept(r["tags"]), len(r["tags"]) > 1) for r in there},
    }


def found(edited):
    """The rows of the three views, which are whole."""
    views = {}
    for name in VIEWS:
        with ms.view(name, edited.log) as view:
            assert view.partial_note is None
            views[name] = {*view.scan().iter_rows()}
    return views


def begun(folder, partitions, rows_per_batch, rows, source=APP):
    edited = EditedApp(folder, partitions, rows_per_batch, source)
    edited.create()
    edited.append(rows)
    edited.run(edited.write())
    return edited


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    partitions=st.sampled_from([1, 4, 7]),
    rows_per_batch=st.sampled_from([7, 40, 1000]),
    counts=st.tuples(st.integers(1, 60), st.integers(0, 40)),
)
def test_new_views_of_a_table_are_those_of_all_records_and_none_is_read(
    tmp_path_factory, seed, partitions, rows_per_batch, counts
):
    before, after = rows_of(counts[0], seed), rows_of(counts[1], seed + 100, counts[0])
    edited = begun(tmp_path_factory.mktemp("app"), partitions, rows_per_batch, before)
    app = edited.write(ALL)
    plan = plan_change(app)
    parts = {part.name: part for part in plan.change.parts if part.kind == "view"}
    assert {name: parts[name].filled_from_table for name in VIEWS} == dict.fromkeys(VIEWS, "latest")
    assert {part.verdict for part in plan.change.parts if part.kind == "step"} == {"keeps"}
    assert plan.records == 0
    result = deploy(app)
    assert (result.records, result.switched) == (0, True)
    assert plan_change(app).verdict == "keeps"
    assert found(edited) == answers(before)
    edited.append(after)
    edited.run(app)
    assert found(edited) == answers([*before, *after])


def test_a_view_that_gets_a_column_gets_it_of_the_table(tmp_path):
    narrow = (
        KINDS,
        KINDS + 'latest.filter(pl.col("cost") > 3).select("ad", "cost").view("dear", key="ad")\n',
    )
    rows, more = rows_of(80, 1), rows_of(30, 2, 80)
    edited = begun(tmp_path, 4, 30, rows, APP.replace(*narrow))
    app = edited.write((narrow[1], ALL[1]))
    part = next(one for one in plan_change(app).change.parts if one.name == "dear")
    assert part.filled_from_table == "latest"
    shown = compare(app)
    assert {one.view for one in shown.views} == {"dear"}
    assert (shown.views[0].new_columns, shown.views[0].old_columns) == (("twice",), ("cost",))
    with pytest.raises(ConfigError):
        edited.run(app)
    deploy(app)
    edited.append(more)
    edited.run(app)
    assert found(edited) == answers([*rows, *more])
    rollback(edited.write())
    with ms.view("dear", edited.log) as view:
        there = [row for row in table([*rows, *more]) if row["cost"] > 3]
        assert {*view.scan().iter_rows()} == {(row["ad"], row["cost"]) for row in there}


def test_without_a_deployment_a_new_view_has_what_comes_from_there_on_and_says_so(tmp_path, call):
    rows = rows_of(80, 3)
    edited = begun(tmp_path, 4, 30, rows)
    app = edited.write(ALL)
    done = call("plan", str(edited.file))
    assert "filled from table 'latest': 0 records read" in done.out
    assert "No record is read again." in done.out
    assert "millstream run fills what is new before it begins" in done.out
    edited.append(rows_of(10, 4, 80))
    edited.run(app)
    with pytest.warns(ms.PartialOutputWarning, match="is written since"):
        ms.view("all", edited.log)


def test_a_view_is_not_filled_of_a_table_of_which_no_view_says_that_it_is_whole(tmp_path):
    source = APP.replace(KINDS, 'kinds.to("kinds", key="kind")\n')
    edited = begun(tmp_path, 4, 30, rows_of(40, 5), source)
    last = 'kinds.to("kinds", key="kind")\n'
    plan = plan_change(edited.write((last, last + VIEWS["all"])))
    (part,) = (one for one in plan.change.parts if one.name == "all")
    assert (part.verdict, part.filled_from_table, part.filled_from) == ("keeps", None, None)
    assert "no view has the rows of the step above it" in " ".join(part.why)


def test_a_table_whose_log_has_lost_records_still_fills_its_views(tmp_path):
    rows = rows_of(80, 6)
    edited = begun(tmp_path, 1, 30, rows)
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 60)
    app = edited.write(ALL)
    deploy(app)
    assert found(edited) == answers(rows)


KEY_TYPES = {
    "milliseconds": 'pl.col("at").dt.cast_time_unit("ms")',
    "no zone": 'pl.col("at").dt.replace_time_zone(None)',
    "another zone": 'pl.col("at").dt.convert_time_zone("Europe/Berlin")',
    "decimal": 'pl.col("cost").cast(pl.Decimal(10, 2))',
}


@pytest.mark.parametrize("name", KEY_TYPES)
def test_a_view_that_comes_back_is_filled_whatever_the_type_of_its_key(tmp_path, name):
    keyed = APP.replace(
        'lateness="1 day")', f'lateness="1 day").with_columns(key={KEY_TYPES[name]})'
    )
    keyed = keyed.replace('table(key="ad", deleted=pl.col("gone")', 'table(key="key"')
    views = KINDS + 'latest.select("key", "kind", "tags").view("mine")\n'
    rows = [{**row, "at": row["at"].replace(microsecond=0)} for row in rows_of(18, 7)]
    edited = begun(tmp_path, 1, 30, rows[:12], keyed.replace(KINDS, views))
    left_out = edited.write((views, KINDS))
    edited.append(rows[12:])
    edited.run(left_out)
    app = edited.write()
    part = next(one for one in plan_change(app).change.parts if one.name == "mine")
    assert part.filled_from_table == "latest"
    (shown,) = compare(app).views
    assert (shown.equal, shown.removed) == (12, 0) or name == "decimal"
    deploy(app)
    key = "cost" if name == "decimal" else "at"
    latest = {row[key]: row for row in rows}
    with ms.view("mine", edited.log) as view:
        assert view.partial_note is None
        assert {*view.scan().iter_rows()} == {
            (at, row["kind"], as_kept(row["tags"])) for at, row in latest.items()
        }
