"""A rebuilt step has all that the steps above it have given out, also where partitions were idle meanwhile.

Idle partitions do not hold the watermark of the app that runs. Read again, the log has their records at once, so
windows end at other moments. The model knows nothing of that: it groups events, and rows, in dictionaries.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from edited_app import HOUR, START, EditedApp, floor, windows

from millstream.engine.source import planner
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change

SOURCE = """
from datetime import datetime

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
rule = ms.watermark("2 seconds", idle="5 seconds")
stream = app.topic("clicks", fields).stream(time="at", watermark=rule, lateness="0 seconds")
minutes = stream.window(ms.tumbling("1 minute"), by="kind", name="minutes").emit(EMIT)
minutes = minutes.agg(n=ms.count(), cost=ms.sum("cost"))
minutes.view("minutes")
hours = minutes.window(ms.tumbling("1 hour"), by="kind", name="hours").emit("update")
hours.agg(n=ms.sum("n"), most=ms.max("cost")).view("hours")
"""
EDIT = ('most=ms.max("cost")', 'most=ms.max("n")')
BOTH = (
    SOURCE.partition("minutes.view")[0]
    + """
halves = stream.window(ms.tumbling("30 seconds"), by="kind", name="halves").emit(EMIT)
halves = halves.agg(n=ms.count(), cost=ms.max("cost"))
minutes.union(halves).view("both", key=["window_start", "window_end", "kind"])
"""
)
MINUTE = timedelta(minutes=1)
END = START + timedelta(days=2)
"""The time of events that end all windows before it."""


def hours(rows: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return the hours of rows of minutes, as the edited app counts them."""
    found = defaultdict(list)
    for start, _, kind, n, _ in rows:
        found[floor(start, HOUR), kind].append(n)
    return {(start, start + HOUR, kind, sum(n), max(n)) for (start, kind), n in found.items()}


@pytest.fixture
def clock(monkeypatch):
    """Let three seconds of running time pass whenever a planner looks at the clock."""
    now = SimpleNamespace(seconds=0.0)

    def monotonic() -> float:
        now.seconds += 3
        return now.seconds

    monkeypatch.setattr(
        planner, "time", SimpleNamespace(monotonic=monotonic, time_ns=planner.time.time_ns)
    )


def rounds(
    dice: random.Random, partitions: int, *, late: bool
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Return the events of some runs: in each, random partitions have none.

    One that comes back goes on where the others are; if ``late``, where it stopped.
    """
    made, at = [], [START] * partitions
    for _ in range(3):
        active = [p for p in range(partitions) if dice.random() < 0.5] or [0]
        if not late:
            at = [max(at)] * partitions
        made.append([])
        for _ in range(dice.randrange(15, 40)):
            p = dice.choice(active)
            at[p] += timedelta(seconds=dice.randrange(1, 30))
            kind, cost = dice.choice(("click", "show")), dice.randrange(9)
            made[-1].append({"ad": f"a{p}", "kind": kind, "cost": cost, "at": at[p]})
    return made


@pytest.mark.parametrize("late", [False, True], ids=["on time", "late"])
@pytest.mark.parametrize("emit", ['"final"', '"retract"'])
@pytest.mark.parametrize(("partitions", "seed"), [(4, 1), (7, 3)])
@pytest.mark.usefixtures("clock")
def test_a_rebuilt_step_has_what_those_above_it_gave_out(tmp_path, partitions, seed, emit, late):
    dice = random.Random(seed)
    source = SOURCE.replace("EMIT", emit)
    edited = EditedApp(tmp_path, partitions, rows_per_batch=7, source=source, by_ad=True)
    edited.create()
    *first, last = rounds(dice, partitions, late=late)
    for rows in first:
        edited.append(rows)
        edited.run(edited.write())
    app = edited.write(EDIT)
    assert plan_change(app).records == sum(map(len, first))
    deploy(app, rows_per_batch=dice.choice((30, 1000)))
    found = edited.views(app)
    assert found["hours"] == hours(found["minutes"])
    edited.append(last)
    edited.run(app)
    edited.append({"ad": f"a{p}", "kind": "end", "cost": 0, "at": END} for p in range(partitions))
    edited.run(app)
    found = edited.views(app)
    ended = {row for row in found["minutes"] if row[2] != "end"}
    assert {row for row in found["hours"] if row[2] != "end"} == hours(ended)
    events = [row for rows in (*first, last) for row in rows]
    all_minutes = windows(events, "kind", len, lambda each: sum(row["cost"] for row in each))
    if late:  # what came too late is in no window
        counts = {row[:3]: row[3] for row in all_minutes}
        assert all(row[3] <= counts[row[:3]] for row in ended)
    else:
        assert ended == all_minutes


@pytest.mark.usefixtures("clock")
def test_a_view_of_two_steps_has_rows_of_one_reading(tmp_path):
    """What a step had given out at other moments would be missing, if only the other one were rebuilt."""
    dice = random.Random(0)
    source = BOTH.replace("EMIT", '"final"')
    edited = EditedApp(tmp_path, 4, rows_per_batch=30, source=source, by_ad=True)
    edited.create()
    *first, last = rounds(dice, 4, late=False)
    for rows in first:
        edited.append(rows)
        edited.run(edited.write())
    app = edited.write(('ms.max("cost")', 'ms.min("cost")'))
    plan = plan_change(app)
    (kept,) = [one for one in plan.change.parts if one.name == "minutes"]
    assert kept.verdict == "rebuilds"
    assert kept.why == ("the view 'both' has rows of it and of 'halves', which is rebuilt",)
    deploy(app)
    edited.append(last)
    edited.append({"ad": f"a{p}", "kind": "end", "cost": 0, "at": END} for p in range(4))
    edited.run(app)
    found = {row for row in edited.views(app)["both"] if row[2] != "end"}
    events = [row for rows in (*first, last) for row in rows]
    costs = [lambda each, of=of: of(row["cost"] for row in each) for of in (sum, min)]
    halves = windows(events, "kind", len, costs[1], size=MINUTE / 2)
    assert found == windows(events, "kind", len, costs[0]) | halves
