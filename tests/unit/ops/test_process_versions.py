"""A process function that is edited: rebuilt, or its state carried over by a version that migrates it."""

from collections import Counter

import pytest
from edited_app import EditedApp, events

from millstream.errors import ConfigError, UserCodeError
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change

SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms


class Totals(ms.ProcessFunction):
    total = ms.value_state(pl.Int64, default=0)
    kinds = ms.map_state(pl.String, pl.Int64)

    def on_row(self, context, row):
        state = context.state
        state.total += row["cost"]
        state.kinds[row["kind"]] = state.kinds.get(row["kind"], 0) + 1
        context.emit({"ad": row["ad"], "total": state.total, "note": str(dict(sorted(state.kinds.items())))})


app = ms.App("ads", log=LOG, buckets=2)
clicks = app.topic("clicks", {"ad": str, "kind": str, "cost": int, "at": datetime})
stream = clicks.stream(time="at", watermark=ms.watermark("1 minute"), lateness="1 day")
totals = stream.process(
    Totals(), by="ad", schema={"ad": pl.String, "total": pl.Int64, "note": pl.String}, order="arrival"
)
totals.view("totals", key="ad")
"""
OTHER_CODE = ('+= row["cost"]', '+= 1 * row["cost"]')
NEWER = (
    "    total = ms.value_state(pl.Int64, default=0)\n    kinds = ms.map_state(pl.String, pl.Int64)",
    """    version = 2
    total = ms.value_state(pl.Float64, default=0.0)
    kinds = ms.map_state(pl.String, pl.Int64)

    def migrate(self, version, state):
        assert version == 1
        return {"total": state["total"] + 0.5, "kinds": {**state["kinds"], "migrated": state["total"]}}""",
)
FLOAT = ('"total": pl.Int64, "note"', '"total": pl.Float64, "note"')
AS_INT = ('"total": state.total, "note"', '"total": int(2 * state.total), "note"')


def began(folder):
    edited = EditedApp(folder, 4, rows_per_batch=60, source=SOURCE)
    edited.create()
    rows = events(150, 5)
    edited.append(rows)
    edited.run(edited.write())
    return edited, rows


def totals(rows):
    found = Counter()
    for row in rows:
        found[row["ad"]] += row["cost"]
    return found


def shown(edited, app):
    return {ad: (total, note) for ad, total, note in edited.views(app)["totals"]}


def test_other_code_is_rebuilt_and_refused_until_then(tmp_path):
    edited, _ = began(tmp_path)
    app = edited.write(OTHER_CODE)
    assert plan_change(app).verdict == "rebuilds"
    with pytest.raises(ConfigError, match="process"):
        edited.run(app)


def test_a_newer_version_takes_the_state_over_and_reads_nothing_again(tmp_path):
    edited, rows = began(tmp_path)
    app = edited.write(NEWER, AS_INT)
    plan = plan_change(app)
    assert plan.verdict == "keeps"
    step = next(part for part in plan.change.parts if part.kind == "step")
    assert step.why == ("its state is migrated from version 1 to 2",)
    deployed = deploy(app)
    assert deployed.records == 0
    more = events(40, 6, first=150)
    edited.append(more)
    edited.run(app)
    before, kinds = totals(rows), totals([*rows, *more])
    for ad, (total, note) in shown(edited, app).items():
        assert total == 2 * kinds[ad] + 1
        assert f"'migrated': {before[ad]}" in note


def test_a_migration_that_fails_says_of_which_key_and_changes_nothing(tmp_path):
    edited, rows = began(tmp_path)
    failing = (NEWER[0], NEWER[1].replace('state["total"] + 0.5', 'state["totla"]'))
    app = edited.write(failing, AS_INT)
    deploy(app)
    edited.append(events(4, 6, first=150))
    with pytest.raises(UserCodeError, match=r"migrate of step .* of version 1 of the key .*totla"):
        edited.run(app)
    assert {ad: total for ad, (total, _) in shown(edited, app).items()} == totals(rows)
    app = edited.write(NEWER, AS_INT)
    deploy(app)
    edited.run(app)
