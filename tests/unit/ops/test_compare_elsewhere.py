"""Comparing what is not in the app's state store: views in databases, and what is named as not compared."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from edited_app import SOURCE, EditedApp, events, per_kind

from millstream.ops.compare import compare
from millstream.ops.deploy import Deployment, deploy
from millstream.ops.plan import plan_change
from millstream.views.reader import open_view
from millstream.views.runs.control_files import hold_run_lock

TYPES = """
n, cost, sign = pl.col("n"), pl.col("cost"), pl.when(pl.col("ad") == "a0")
per_ad.select(
    "ad", "window_start", n="n", is_dear=cost > 9, text=pl.col("ad") + pl.lit("\\t\\\\\\0\\uffff é"),
    number=sign.then(float("nan")).when(n > 3).then(-0.0).otherwise(1 / n), none=sign.then("n"),
    day=pl.col("window_start").dt.date(), late=pl.col("window_start").dt.convert_time_zone("Asia/Kolkata"),
    wait=pl.duration(milliseconds=n), price=cost.cast(pl.Decimal(12, 3)), raw=pl.col("ad").cast(pl.Binary),
    many=pl.concat_list("n", "cost"), both=pl.struct("n", "ad"), least=pl.lit(-(2**63)), small=n.cast(pl.UInt8),
).view("types", key=["ad", "window_start"], store=DATABASE)
per_ad.select("ad", "window_start", "n").view("here", key=["ad", "window_start"])
"""
TOP = ("n=ms.count(), cost", 'n=ms.count(), top=ms.max("cost"), cost')
FACTOR = ("FACTOR = 2", "FACTOR = 3")


@pytest.fixture
def edited(tmp_path, database):
    source = SOURCE.replace('view("per_kind")', f'view("per_kind", store={database!r})')
    made = EditedApp(tmp_path, 4, source=source + TYPES.replace("DATABASE", repr(database)))
    made.create()
    made.append(events(100, 3))
    made.run(made.write())
    return made


def test_a_view_in_a_database_is_compared_at_its_position_while_the_app_runs(edited, database):
    rows = events(100, 3)

    def expected(factor):
        return {row[:3]: row[3] for row in per_kind(rows, factor)}

    def in_database():
        with open_view("per_kind", None, store=database) as view:
            return {row[:3]: row[3] for row in view.scan().iter_rows()}

    app = edited.write(FACTOR)
    with hold_run_lock(app.folder, 1):
        for seed in (4, 5):
            found = compare(app)
            (view,) = found.views
            assert (view.view, view.equal, view.changed) == ("per_kind", 0, 2)
            assert view.columns[-1].largest == max(expected(2).values()) / 2
            assert found.not_compared == {}
            more = events(60, seed, first=len(rows))
            edited.append(more)
            edited.run(edited.write())
            rows += more
            app = edited.write(FACTOR)
        position = compare(app).positions["per_kind"]
        assert position == {"clicks": {str(number): len(rows) // 4 for number in range(4)}}
    assert in_database() == expected(2)
    assert deploy(app).records == 0  # it goes on with what was computed
    assert plan_change(app).verdict == "keeps"
    assert in_database() == expected(2)  # what is there stays, until there is another row
    more = events(40, 6, first=len(rows))
    edited.append(more)
    edited.run(app)
    rows += more
    assert in_database() == expected(3)


def test_a_batch_that_the_database_alone_has_is_compared_as_it_has_it(edited):
    app, positions, compute = edited.write(FACTOR, TOP), [], Deployment.compute

    def and_then_a_batch(self, on_batch, rows_per_batch, position=None):
        positions.append(position)
        if len(positions) == 2:  # the first view is read
            edited.append(events(20, 4, first=100))
            edited.run(edited.write())
        return compute(self, on_batch, rows_per_batch, position)

    with mock.patch.object(Deployment, "compute", and_then_a_batch):
        found = compare(app)
    differing = {view.view: view.different for view in found.views}
    assert differing["per_kind"] == 2
    assert not any(number for view, number in differing.items() if view != "per_kind")
    counted = [sum(at["clicks"].values()) for at in found.positions.values()]
    assert sorted({*counted}) == [100, 120]


def test_values_of_all_types_come_back_alike_from_a_database(edited):
    found = compare(edited.write(TOP))
    views = {view.view: view for view in found.views}
    assert {"types", "here", "per_ad", "busy"} == views.keys()
    for view in views.values():
        assert (view.different, view.rows > 3) == (0, True), view


def test_without_a_difference_that_could_hold_the_exit_code_says_what_was_not_compared(
    tmp_path, call
):
    source = (
        SOURCE
        + f"""
per_kind.dataset({str(tmp_path / "rows")!r})
per_kind.to("totals")
per_kind.foreach(lambda rows, batch: None, name="printed")
"""
    )
    edited = EditedApp(tmp_path, 1, source=source)
    edited.create()
    edited.append(events(60, 5))
    edited.run(edited.write())
    found = compare(edited.write(FACTOR))
    elsewhere = {"dataset(rows)", "to(totals)", "foreach(printed)"}
    assert {*found.not_compared} == elsewhere
    edited.write(FACTOR)
    line = ("compare", str(edited.file), "--fail-if")
    shown = call(*line, "removed > 0")
    assert shown.code == 4
    assert "to(totals): not compared: what was written there stays" in shown.out
    assert shown.out.splitlines()[-1].startswith("not known: whether a condition holds for")
    assert call(*line, "changed > 0").code == 3
    assert call(*line[:-1]).code == 0
    values = json.loads(call(*line, "removed > 0", "--json").out)
    assert {*values["not_compared"]} == elsewhere
    edited.write()
    assert call(*line, "removed > 0").code == 0


def test_a_view_of_which_only_stateless_steps_differ_is_named(tmp_path, call):
    edited = EditedApp(tmp_path, 1)
    edited.create()
    edited.append(events(60, 5))
    edited.run(edited.write())
    edited.write(('pl.col("cost") > 3', 'pl.col("cost") > 4'))
    shown = call("compare", str(edited.file), "--fail-if", "different > 0")
    assert shown.code == 4
    assert "dear: not compared: only stateless steps of it differ" in shown.out
