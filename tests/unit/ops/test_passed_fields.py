"""Fields that come to a step only through others that pass rows on: an edit of where they are read is seen below.

Of each kind of step that passes on rows as they came, the same app is run, edited, planned, deployed and gone on with. The answers are
those of a dictionary over all records.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable

import pytest
from edited_app import EditedApp, Event, Rows, events, windows

import millstream as ms
from millstream.errors import ConfigError
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.views.coverage import PartialOutputWarning

HEAD = """
from datetime import datetime

import polars as pl
from pydantic import BaseModel, Field

import millstream as ms


class Click(BaseModel):
    ad: str
    kind: str
    cost: int = Field(alias="cost")
    other: int = 0
    at: datetime


def named(keys):
    return keys.with_columns(name=pl.lit("x"))


app = ms.App("ads", log=LOG, buckets=2)
clicks = app.topic("clicks", Click)
given = app.static_table(pl.DataFrame({"ad": ["a0"], "x": [1]}), key="ad")
ads = clicks.table(key="kind", name="ads").select("kind", latest="ad")
stream = clicks.stream(time="at", watermark=ms.watermark("1 minute"), lateness="1 day")
brief = clicks.stream(time="at", watermark=ms.watermark("0 s"), late="side", name="brief")
"""
WINDOW = (
    '{}.window(ms.tumbling("1 minute"), by="ad", name="sums").emit("update")'
    '.agg(cost=ms.sum("cost")).view("sums")\n'
)
PATHS = {
    "dedup": 'stream.dedup("at", within="20 seconds")',
    "dedup, twice": 'stream.dedup("at", within="20 s").dedup(["ad", "at"], within="20 s")',
    "budget": 'stream.budget("ad", cost=pl.lit(0), limit=pl.lit(40), zone="UTC")',
    "enrich": 'stream.enrich(named, on="ad", schema={"name": str}, name="asked")',
    "look-up": 'stream.lookup(ads, on="kind", how="left")',
    "look-up in given rows, and dedup": 'stream.lookup(given, on="ad", how="left").dedup("at", within="20 s")',
    "a filter, and dedup": 'stream.filter(pl.col("kind") != "none").dedup("at", within="20 s")',
    "dedup, and renamed": 'stream.dedup("at", within="20 s").rename({"cost": "paid"}).rename({"paid": "cost"})',
    "dedup, in a union": 'stream.filter(pl.col("kind") == "show").select("ad", "at", "other").rename({"other": "cost"})'
    '.union(stream.filter(pl.col("kind") == "click").dedup("at", within="20 s").select("ad", "at", "cost"))',
}
ALIAS = ('alias="cost"', 'alias="price"')


def priced(count: int, seed: int, first: int = 0) -> list[Event]:
    dice = random.Random(seed)
    rows = events(count, seed, first=first)
    return [{**row, "price": dice.randrange(1000, 2000), "other": 7} for row in rows]


def sums(rows: Iterable[Event], path: str, column: str) -> Rows:
    taken = [
        {**row, column: 7} if "union" in path and row["kind"] == "show" else row for row in rows
    ]
    return windows(taken, "ad", lambda members: sum(row[column] for row in members))


def begun(folder, path: str, seed: int) -> tuple[EditedApp, list[Event], list[Event]]:
    edited = EditedApp(folder, (1, 4, 7)[seed % 3], (40, 1000, 90)[seed % 3], HEAD + path)
    edited.create()
    before, after = priced(120, seed), priced(60, seed + 100, first=120)
    edited.append(before)
    edited.run(edited.write())
    return edited, before, after


@pytest.mark.long
def test_a_step_is_rebuilt_where_another_one_differs_from_it_in_what_is_passed_on_alone(tmp_path):
    names = '[("one", "kind"), ("two", "other"), ("three", "at_all")]'
    source = HEAD.replace("    at: datetime\n", "    at: datetime\n    at_all: int = 0\n")
    edited = EditedApp(tmp_path, 1, 1000, source + TWICE.replace("NAMES", names))
    edited.create()
    rows = priced(60, 8)
    edited.append(rows)
    edited.run(edited.write())
    app = edited.write(('("one", "kind")', '("one", "other")'))
    assert plan_change(app).verdict != "refuses"
    deploy(app)
    edited.run(app)
    found = edited.views(app)
    assert found["one"] == found["two"] == sums(rows, "", "cost")
    assert found["three"] == sums(({**row, "cost": row["cost"] + 7} for row in rows), "", "cost")


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("dedup", "look-up", "dedup, in a union")
        else pytest.param(name, marks=pytest.mark.long)
        for name in PATHS
    ],
)
def test_what_is_read_of_another_field_is_rebuilt(tmp_path, name):
    path = PATHS[name]
    edited, before, after = begun(tmp_path, WINDOW.format(path), list(PATHS).index(name))
    assert edited.views(edited.write()) == {"sums": sums(before, name, "cost")}
    assert plan_change(edited.write()).verdict == "keeps"
    app = edited.write(ALIAS)
    plan = plan_change(app)
    verdicts = {part.name: part.verdict for part in plan.change.parts}
    assert verdicts["sums"] == "rebuilds"
    why = " ".join(why for part in plan.change.parts for why in part.why)
    assert "wire=cost" in why
    assert "wire=price" in why
    with pytest.raises(ConfigError, match=r"field 'cost' was .*wire=price"):
        edited.run(app)
    deploy(app, ask_again=True)
    assert plan_change(app).verdict == "keeps"
    edited.append(after)
    edited.run(app)
    assert edited.views(app) == {"sums": sums([*before, *after], name, "price")}


def test_a_rollback_goes_back_to_the_field_of_before(tmp_path):
    edited, before, after = begun(tmp_path, WINDOW.format(PATHS["dedup"]), 1)
    deploy(edited.write(ALIAS))
    edited.append(after)
    edited.run(edited.write(ALIAS))
    with pytest.raises(ConfigError, match="runs this program now"):
        rollback(edited.write(ALIAS))
    rollback(edited.write())
    assert edited.views(edited.write()) == {"sums": sums([*before, *after], "dedup", "cost")}


def test_a_field_that_nothing_below_takes_may_come_from_elsewhere(tmp_path):
    edited, _, _ = begun(tmp_path, WINDOW.format(PATHS["dedup"]), 0)
    app = edited.write(("other: int = 0", 'other: int = Field(0, alias="others")'))
    assert plan_change(app).verdict == "keeps"
    edited.run(app)


def test_columns_that_are_left_out_above_count_where_an_expression_stands_for_all(tmp_path):
    path = (
        'stream.drop("other").dedup("at", within="20 s")'
        '.with_columns(cost=pl.sum_horizontal(pl.col("^cost|other$")))'
    )
    edited, before, after = begun(tmp_path, WINDOW.format(path), 1)
    app = edited.write(('drop("other")', 'drop("kind")'))
    plan = plan_change(app)
    assert plan.verdict == "rebuilds"
    assert "drop([other]), is drop([kind])" in str(plan.change.parts)
    deploy(app)
    edited.append(after)
    edited.run(app)
    rows = [{**row, "cost": row["cost"] + 7} for row in [*before, *after]]
    assert edited.views(app) == {"sums": sums(rows, "", "cost")}


def test_late_rows_are_passed_on_too(tmp_path):
    path = (
        'quick = brief.window(ms.tumbling("1 minute"), by="ad", name="quick").agg(n=ms.count())\n'
        'quick.view("quick")\n'
        'quick.late.select("at", "cost").view("missed", key="at")\n'
    )
    edited = EditedApp(tmp_path, 1, 1000, HEAD + path)
    edited.create()
    rows = priced(120, 3)
    edited.append([*rows[60:], *rows[:20]])
    edited.run(edited.write())
    app = edited.write(ALIAS)
    (why,) = (part.why for part in plan_change(app).change.parts if part.name == "missed")
    assert "wire=price" in why[0]
    edited.append(rows[20:40])
    edited.run(app)
    missed = {(row["at"], row["cost"]) for row in rows[:20]}
    missed |= {(row["at"], row["price"]) for row in rows[20:40]}
    assert edited.views(app)["missed"] == missed
    with pytest.warns(PartialOutputWarning, match="was declared differently before"):
        ms.view("missed", edited.log)


def test_a_view_of_passed_rows_says_from_where_on_a_column_is_another_field(tmp_path):
    path = 'stream.dedup("at", within="20 s").select("at", "cost").view("paid", key="at")\n'
    edited, before, after = begun(tmp_path, path, 2)
    app = edited.write(ALIAS)
    plan = plan_change(app)
    assert plan.verdict == "keeps"
    assert any("takes effect at" in why for part in plan.change.parts for why in part.why)
    edited.append(after)
    edited.run(app)
    found = {(row["at"], row["cost"]) for row in before} | {
        (row["at"], row["price"]) for row in after
    }
    assert edited.views(app) == {"paid": found}
    with pytest.warns(PartialOutputWarning, match="was declared differently before"):
        ms.view("paid", edited.log)


def forget_passed(edited: EditedApp, app) -> None:
    """Make the state one that an earlier version has left, which did not say what is passed on."""
    with sqlite3.connect(app.state_store) as store:
        ((text,),) = store.execute("SELECT program FROM _programs")
        program = json.loads(text)
        known = [one.pop("passed", None) for one in program["steps"].values()]
        assert any(known)
        for one in program["outputs"].values():
            one.pop("passed", None)
        store.execute("UPDATE _programs SET program = ?", [json.dumps(program)])
        for name, value in [*store.execute("SELECT name, value FROM _outputs")]:
            values = json.loads(value)
            definition = json.loads(values["definition"])
            definition.pop("passed", None)
            values["definition"] = json.dumps(definition, ensure_ascii=False)
            store.execute(
                "UPDATE _outputs SET value = ? WHERE name = ?", [json.dumps(values), name]
            )
    store.close()


def test_state_of_a_version_that_did_not_say_it_goes_on_and_says_it_then(tmp_path):
    deduplicated = 'stream.dedup("at", within="20 s")'
    path = (
        WINDOW.format(deduplicated)
        + f'{deduplicated}.select("at", "cost").view("paid", key="at")\n'
    )
    edited, before, after = begun(tmp_path, path, 1)
    app = edited.write()
    forget_passed(edited, app)
    plan = plan_change(app)
    assert plan.verdict == "keeps"
    assert not any(part.why for part in plan.change.parts)
    edited.append(after)
    edited.run(app)
    assert ms.view("paid", edited.log).partial_note is None
    assert plan_change(edited.write(ALIAS)).verdict == "rebuilds"
    assert edited.views(app)["sums"] == sums([*before, *after], "", "cost")


TWICE = """
for name, left_out in NAMES:
    rows = stream.drop(left_out).dedup("at", within="20 s").with_columns(cost=pl.sum_horizontal(pl.col("^cost|other$")))
    rows = rows.window(ms.tumbling("1 minute"), by="ad", name=name).emit("update")
    rows.agg(cost=ms.sum("cost")).view(name)
"""


@pytest.mark.long
def test_steps_that_differ_only_in_what_is_passed_on_find_their_own_state(tmp_path):
    names = '[("one", "kind"), ("two", "other")]'
    edited = EditedApp(tmp_path, 4, 50, HEAD + TWICE.replace("NAMES", names))
    edited.create()
    before, after = priced(120, 5), priced(60, 6, first=120)
    edited.append(before)
    edited.run(edited.write())
    swapped = edited.write((names, '[("two", "other"), ("one", "kind")]'))
    deploy(swapped)
    edited.append(after)
    edited.run(swapped)
    rows = [*before, *after]
    assert edited.views(swapped) == {
        "one": sums(({**row, "cost": row["cost"] + 7} for row in rows), "", "cost"),
        "two": sums(rows, "", "cost"),
    }


def test_a_view_is_not_filled_from_one_whose_rows_come_from_another_field(tmp_path):
    late = 'stream.dedup("at", within="20 s").select("at", "cost").view("paid", key="at")\n'
    edited, _, _ = begun(tmp_path, late, 0)
    app = edited.write(ALIAS, (late, late + late.replace('view("paid"', 'view("again"')))
    plan = plan_change(app)
    assert not plan.filled
