"""Kinds of edits: what the plan says of each, and that it comes true when the edited app is deployed and run.

Every case runs the app over some records, edits its file, asks for the plan, deploys, appends more records and
runs the edited app. The views must be those of the model: over all records where a part keeps or is rebuilt,
and from the stated position on where it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from edited_app import (
    HOUR,
    EditedApp,
    Event,
    Rows,
    answers,
    busy,
    dear,
    events,
    floor,
    per_ad,
    per_kind,
    total,
    weight,
    windows,
)

from millstream.errors import ConfigError
from millstream.ops.deploy import deploy
from millstream.ops.plan import ChangePlan, plan_change

Model = Callable[[list[Event], list[Event]], Rows]
KEPT = {
    "step per_ad": "keeps",
    "step per_kind": "keeps",
    "step busy": "keeps",
    "view per_ad": "keeps",
    "view per_kind": "keeps",
    "view busy": "keeps",
    "view dear": "keeps",
}
PER_AD = {"step per_ad", "step busy", "view per_ad", "view busy"}
PER_KIND = {"step per_kind", "view per_kind"}


@dataclass(frozen=True)
class Edit:
    """Texts that are replaced, what the plan must say, and the views that are not those of the first app.

    ``rebuilt`` and ``dropped`` are parts; ``more`` are parts that the first app has not, or that are said
    otherwise. ``views`` has None for a view that is not compared. ``why`` must be said somewhere. ``filled``: the view from
    which another is filled, so that nothing is read.
    """

    texts: tuple[tuple[str, str], ...]
    rebuilt: frozenset[str] | set[str] = frozenset()
    more: Mapping[str, str] = field(default_factory=dict)
    gone: frozenset[str] | set[str] = frozenset()
    views: Mapping[str, Model] = field(default_factory=dict)
    why: str = ""
    code: int | None = None
    filled: str | None = None

    def said(self) -> dict[str, str]:
        kept = {part: verdict for part, verdict in KEPT.items() if part not in self.gone}
        return kept | dict.fromkeys(self.rebuilt, "rebuilds") | dict(self.more)

    def exit_code(self) -> int:
        if self.code is not None:
            return self.code
        return 3 if self.rebuilt else 0


def over_all(model: Callable[[list[Event]], Rows]) -> Model:
    return lambda before, after: model([*before, *after])


def two_minutes(rows: list[Event]) -> Rows:
    return windows(rows, "ad", len, total("cost"), size=2 * (HOUR / 60))


def only(keep: Callable[[Event], bool], model: Callable[[list[Event]], Rows]) -> Model:
    return lambda before, after: model([row for row in [*before, *after] if keep(row)])


def doubled_cost(row: Event) -> bool:
    return row["cost"] * 2 > 3


STREAM = 'stream = clicks.stream(time="at", watermark=rule, lateness="1 day")\n'
BUSY = """busy = per_ad.window(ms.tumbling("1 hour"), by="ad", name="busy").emit("update")
busy.agg(most=ms.max("n")).view("busy")
"""
DEAR = (
    'stream.filter(pl.col("cost") > 3).select("ad", "at", "cost").view("dear", key=["ad", "at"])\n'
)
EDITS = {
    "nothing": Edit(()),
    "a step is renamed": Edit((('name="per_ad"', 'name="clicks of ads"'),), gone={"step per_ad"},
        more={"step clicks of ads": "keeps"}),
    "declarations change places": Edit(((BUSY, ""), (DEAR, DEAR + BUSY))),
    "comments, docstrings and names of locals": Edit((
        ("Weigh each click by its cost.", "Weigh."), ("  # whole numbers", ""),
    )),
    "a field that only a new view reads": Edit((
        ('"cost": int,', '"cost": int, "note": str | None,'),
        (DEAR, DEAR + 'stream.filter(pl.col("note").is_not_null()).view("notes", key="at")\n'),
    ), more={"view notes": "keeps"}, views={"notes": lambda _b, _a: set()}, why="it is new, and is written from"),
    "how long a partition may be idle": Edit((
        ('ms.watermark("1 minute")', 'ms.watermark("1 minute", idle="3 minutes")'),
    )),
    "an aggregate is added": Edit(
        (("n=ms.count(), cost", 'n=ms.count(), top=ms.max("cost"), cost'),), PER_AD,
        views={"per_ad": over_all(lambda rows: windows(
            rows, "ad", len, lambda each: max(row["cost"] for row in each), total("cost")))},
        why="aggregate 'top' was not there"),
    "an aggregate is removed": Edit(
        (('n=ms.count(), cost=ms.sum("cost")', "n=ms.count()"),), PER_AD,
        views={"per_ad": over_all(lambda rows: windows(rows, "ad", len))},
        why="aggregate 'cost' was sum"),
    "an aggregate of another column": Edit(
        (('most=ms.max("n")', 'most=ms.max("cost")'),), PER_AD,
        views={"busy": over_all(lambda rows: busy(rows, {
            (s, e, ad, cost, n) for s, e, ad, n, cost in per_ad(rows)}))},
        why='col("n")'),
    "the size of a window": Edit(
        (('ms.tumbling("1 minute"), by="ad"', 'ms.tumbling("2 minutes"), by="ad"'),), PER_AD,
        views={"per_ad": over_all(two_minutes),
               "busy": over_all(lambda rows: busy(rows, two_minutes(rows)))},
        why="window was tumbling(size=1 minute"),
    "the size of a window below another": Edit(
        (('per_ad.window(ms.tumbling("1 hour")', 'per_ad.window(ms.tumbling("2 hours")'),),
        PER_AD,
        views={"busy": over_all(lambda rows: {
            (floor(s, 2 * HOUR), floor(s, 2 * HOUR) + 2 * HOUR, ad, max(
                n for t, _, other, n in busy(rows) if other == ad and floor(t, 2 * HOUR) == floor(s, 2 * HOUR)))
            for s, _, ad, _ in busy(rows)})}),
    "the key of a window": Edit(
        (('by="ad", name="busy"', 'by="n", name="busy"'), ("most=ms.max", "most=ms.min")), PER_AD,
        views={"busy": over_all(lambda rows: {
            (floor(s, HOUR), floor(s, HOUR) + HOUR, n, n) for s, _, _, n, _ in per_ad(rows)})},
        why="by was [ad], is [n]"),
    "how a window emits": Edit(
        (('name="per_kind").emit("update")', 'name="per_kind").emit("final")'),), PER_KIND,
        views={"per_kind": lambda _b, _a: set()}, why="is final"),  # no hour has ended a day ago
    "a filter in front of a window": Edit(
        (("per_kind = weighed.window", 'per_kind = weighed.filter(pl.col("weight") > 3).window'),), PER_KIND,
        views={"per_kind": only(doubled_cost, per_kind)}, why="is new on the way to it"),
    "the code of a function": Edit(
        (('pl.col("cost") * FACTOR', 'pl.col("cost") * FACTOR + 1'),), PER_KIND,
        views={"per_kind": over_all(lambda rows: windows(
            rows, "kind", lambda each: sum(row["cost"] * 2 + 1 for row in each), size=HOUR))},
        why="the code of its functions differ"),
    "a constant that a function uses": Edit(
        (("FACTOR = 2", "FACTOR = 3"),), PER_KIND,
        views={"per_kind": over_all(lambda rows: per_kind(rows, 3))},
        why="the code of its functions differ"),
    "how a field is decoded": Edit(
        (('"kind": str', '"kind": str | None'),), PER_KIND, why="field 'kind'"),
    "the event time": Edit(
        (('time="at"', 'time=pl.col("at").dt.offset_by("1h")'),), PER_AD | PER_KIND,
        views={
            "per_ad": over_all(lambda rows: windows(
                rows, "ad", len, total("cost"), time=lambda row: row["at"] + HOUR)),
            "per_kind": over_all(lambda rows: windows(
                rows, "kind", weight(2), size=HOUR, time=lambda row: row["at"] + HOUR)),
            "busy": over_all(lambda rows: {(s + HOUR, e + HOUR, *r) for s, e, *r in busy(rows)}),
        }, more={"view dear": "keeps"}, why="time was"),
    "a new sink of a step that is there": Edit(
        ((DEAR, DEAR + 'per_ad.view("minutes")\n'),), more={"view minutes": "keeps"},
        views={"minutes": over_all(per_ad)}, why="it is new", filled="per_ad"),
    "a new sink below a filter and an expression": Edit(
        ((DEAR, DEAR + 'per_ad.filter(pl.col("n") > 4).select("window_start", "ad", per=pl.col("cost") / pl.col("n"))'
          '.view("rates")\n'),), more={"view rates": "keeps"},
        views={"rates": over_all(lambda rows: {
            (s, ad, cost / n) for s, _, ad, n, cost in per_ad(rows) if n > 4})},
        why="it is new", filled="per_ad"),
    "a view is renamed": Edit(
        (('per_ad.view("per_ad")', 'per_ad.view("minutes")'),), more={"view minutes": "keeps"},
        views={"minutes": over_all(per_ad), "per_ad": lambda before, _after: per_ad(before)},
        why="it is left out: its rows stay", filled="per_ad"),
    "a sink is removed": Edit(
        (('per_ad.view("per_ad")\n', ""),),
        views={"per_ad": lambda before, _after: per_ad(before)},
        why="it is left out: its rows stay"),
    "a topic is written, too": Edit(
        ((DEAR, DEAR + 'per_ad.to("minutes", key="ad")\n'),), more={"topic to(minutes)": "keeps"}),
    "a stateless step of a view": Edit(
        (('pl.col("cost") > 3', 'pl.col("cost") > 4'),),
        views={"dear": lambda before, after: dear(before) | dear(after, above=4)},
        why="takes effect at"),
    "a column of a stateless view": Edit(
        (('select("ad", "at", "cost")', 'select("ad", "at", "cost", "kind")'),), {"view dear"},
        views={"dear": over_all(lambda rows: {
            (row["ad"], row["at"], row["cost"], row["kind"]) for row in rows if row["cost"] > 3})},
        why="column 'kind' is not there"),
    "a column of a view above which all is as before": Edit(
        (('per_ad.view("per_ad")', 'per_ad.drop("cost").view("per_ad")'),),
        {"view per_ad"}, views={"per_ad": over_all(lambda rows: windows(rows, "ad", len))},
        why="column 'cost' is int, not left out", filled="per_ad"),
    "a column of a view is computed of others": Edit(
        (('per_ad.view("per_ad")', 'per_ad.with_columns(rate=pl.col("cost") * 2).view("per_ad")'),), {"view per_ad"},
        views={"per_ad": over_all(lambda rows: {(*row, row[-1] * 2) for row in per_ad(rows)})},
        why="column 'rate' is not there", filled="per_ad"),
    "a column of a view comes of a function": Edit(
        (('per_ad.view("per_ad")', 'per_ad.map_frames(lambda rows: rows.with_columns(one=pl.lit(1))).view("per_ad")'),),
        {"step per_ad", "view per_ad", "step busy", "view busy"},
        views={"per_ad": over_all(lambda rows: {(*row, 1) for row in per_ad(rows)})},
        why="which rows of a key it has depends on their order"),
    "a step is added": Edit(
        ((DEAR, DEAR + 'stream.window(ms.tumbling("1 hour"), by="ad", name="hours").emit("update")'
          '.agg(n=ms.count()).view("hours")\n'),),
        more={"step hours": "rebuilds", "view hours": "rebuilds"}, code=3,
        views={"hours": over_all(lambda rows: windows(rows, "ad", len, size=HOUR))}, why="it is new"),
    "a step is declared a second time": Edit(
        ((DEAR, DEAR + 'stream.window(ms.tumbling("1 minute"), by="ad", name="again").emit("update")'
          '.agg(n=ms.count(), cost=ms.sum("cost")).view("again")\n'),),
        more={"step again": "keeps", "view again": "keeps"}, views={"again": over_all(per_ad)}, filled="per_ad"),
    "a step is removed": Edit(
        ((BUSY, ""),), gone={"step busy", "view busy"}, more={"step busy": "drops", "view busy": "keeps"},
        views={"busy": lambda before, _after: busy(before)}, why="it is no longer there", code=3),
    "a step is removed, and another is changed": Edit(
        ((BUSY, ""), ("FACTOR = 2", "FACTOR = 4")), PER_KIND, gone={"step busy", "view busy"},
        more={"step busy": "drops", "view busy": "keeps"},
        views={"busy": lambda before, _after: busy(before),
               "per_kind": over_all(lambda rows: per_kind(rows, 4))}),
}  # fmt: skip

REFUSED = {
    "another topic is read, too": (
        ((DEAR, DEAR + 'app.topic("other", fields).stream(time="at").view("other", key="at")\n'),),
        "it read the topics 'clicks', and reads 'clicks', 'other'",
    ),
    "another topic is read instead": (
        (('app.topic("clicks", fields)', 'app.topic("others", fields)'),),
        "it read the topics 'clicks', and reads 'others'",
    ),
    "the number of buckets": ((("buckets=2", "buckets=3"),), "divided into 2 buckets"),
}


def parts_of(plan: ChangePlan) -> dict[str, str]:
    return {f"{part.kind} {part.name}": part.verdict for part in plan.change.parts}


def said_in(plan: ChangePlan) -> str:
    return " ".join(
        [*plan.change.refusals, *(why for part in plan.change.parts for why in part.why)]
    )


def began(folder: Path, seed: int) -> tuple[EditedApp, list[Event], list[Event]]:
    """Run the first app over the first records; return it, and those and the ones to come."""
    edited = EditedApp(folder, (1, 4, 7)[seed % 3], rows_per_batch=(40, 1000, 90)[seed % 3])
    edited.create()
    before, after = events(170, seed), events(90, seed + 1000, first=170)
    edited.append(before)
    edited.run(edited.write())
    return edited, before, after


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_the_plan_says(tmp_path, name):
    edit = EDITS[name]
    edited, before, after = began(tmp_path, list(EDITS).index(name))
    app = edited.write(*edit.texts)
    found = edited.views(app)
    plan = plan_change(app)
    assert parts_of(plan) == edit.said()
    assert edit.why in said_in(plan)
    assert plan.exit_code == edit.exit_code()
    reads = plan.verdict == "rebuilds" and edit.filled is None
    assert plan.records == (170 if reads else 0)
    rows = [] if edit.filled is None else [(edit.filled, len(answers(before)[edit.filled]))]
    assert [(one.source, one.rows) for one in plan.filled] == rows
    assert edited.views(app) == found == answers(before)  # a plan changes nothing
    if plan.change.moves_state or plan.verdict == "rebuilds":
        with pytest.raises(ConfigError):
            edited.run(app)
    result = deploy(app)
    assert result.switched
    assert result.records == plan.records
    assert plan_change(app).verdict == "keeps"
    edited.append(after)
    assert sum(batch.read for batch in edited.run(app)) == len(
        after
    )  # what is kept is not read again
    expected = answers([*before, *after]) | {
        view: model(before, after) for view, model in edit.views.items()
    }
    assert edited.views(app) == expected


def test_there_are_twenty_kinds_of_edits():
    assert len(EDITS) + len(REFUSED) >= 20


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plan_refuses_is_refused_and_changes_nothing(tmp_path, name):
    texts, why = REFUSED[name]
    edited, before, after = began(tmp_path, list(REFUSED).index(name))
    with_others = edited.write()
    edited.append([], topic="others")
    app = edited.write(*texts)
    plan = plan_change(app)
    assert (plan.verdict, plan.exit_code) == ("refuses", 4)
    assert why in said_in(plan)
    with pytest.raises(ConfigError, match="cannot take the place"):
        deploy(app)
    assert edited.views(app) == answers(before)
    edited.append(after)
    edited.run(with_others)
    assert edited.views(app) == answers([*before, *after])
