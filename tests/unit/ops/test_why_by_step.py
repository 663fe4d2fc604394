"""`millstream why` for each kind of step, on random records: its answers are those of a naive model.

What a record did and where it went (`why record`), which records are behind a row (`why value`), how many were late and by how
much (`why late`), and what holds a window open (`why open`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
import why_model
from edited_app import EditedApp

from millstream.ops.record_trace import trace_record
from millstream.ops.value_records import records_behind
from millstream.ops.why import why_late, why_open
from millstream.views.store_location import open_state_store

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
HEAD = """
from datetime import datetime, timedelta

import polars as pl

import millstream as ms


class Numbered(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.emit({"ad": row["ad"], "what": "row", "at": context.time, "count": context.state.count})
        context.set_timer(context.time + timedelta(seconds=10))

    def on_timer(self, context, time):
        context.emit({"ad": context.key["ad"], "what": "timer", "at": time, "count": context.state.count})


app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "n": int, "id": str, "cost": int, "at": datetime}
rule = ms.watermark("5 seconds", idle=None)
stream = app.topic("clicks", fields).stream(time="at", watermark=rule, lateness="3 seconds")
sums = {"n": ms.count(), "cost": ms.sum("cost")}
cheap, dear = stream.filter(pl.col("cost") <= 1), stream.filter(pl.col("cost") > 1)
other = stream.select("id", other="n")
"""


@dataclass(frozen=True)
class Kind:
    """A step, the columns of its view's key and of its other values, and its model."""

    step: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    model: object
    waits_for_all: bool = (
        False  # a late record is decided on once all partitions are as far as its own
    )

    @property
    def source(self):
        return HEAD + self.step.replace(".view()", f'.view("out", key={[*self.key]!r})') + "\n"


def window(assigner, model, *end):
    step = f'stream.window(ms.{assigner}, by="ad", name="step").agg(**sums).view()'
    return Kind(step, ("ad", "window_start", *end), ("n", "cost"), model)


PAIRS = 'stream.join(other, "id", within=("1 second", "20 seconds"), HOWname="step")'
MATCH = """pattern = ms.sequence("low", pl.col("cost") == 0).followed_by("high", pl.col("cost") == 3).within("40 seconds")
measures = {"high": ms.matched("high", "n").last()}
stream.match(pattern.skip("past_last"), by="ad", measures=measures, name="step").view()"""
PROCESS = """schema = {"ad": pl.String, "what": pl.String, "at": pl.Datetime("us", "UTC"), "count": pl.Int64}
stream.process(Numbered(), by="ad", schema=schema, name="step").view()"""

KINDS = {
    "filter": Kind(
        'stream.filter(pl.col("cost") > 1, name="step").view()',
        ("n",),
        ("cost",),
        why_model.filtered,
    ),
    "dedup": Kind(
        'stream.dedup("id", within="30 seconds", name="step").view()',
        ("n",),
        ("cost",),
        why_model.deduplicated,
    ),
    "tumbling": window(
        'tumbling("20 seconds")', why_model.windowed(why_model.tumbling), "window_end"
    ),
    "hopping": window(
        'hopping("20 seconds", "10 seconds")', why_model.windowed(why_model.hopping), "window_end"
    ),
    "hopping with gaps": window(
        'hopping("5 seconds", "20 seconds", allow_gaps=True)',
        why_model.windowed(why_model.with_gaps),
        "window_end",
    ),
    "cumulating": window(
        'cumulating("30 seconds", "10 seconds")',
        why_model.windowed(why_model.cumulating),
        "window_end",
    ),
    "calendar": window(
        'calendar("1 minute", tz="Europe/Berlin")',
        why_model.windowed(why_model.minutes),
        "window_end",
    ),
    "count": Kind(
        'stream.window(ms.count_window(2, unbounded=True), by="ad", name="step").agg(**sums).view()',
        ("ad", "window_number"),
        ("window_start", "window_end", "n", "cost"),
        why_model.counted,
    ),
    "sliding": Kind(
        'stream.window(ms.sliding("15 seconds"), by="ad", name="step").agg(**sums).view()',
        ("ad", "window_end"),
        ("n", "cost"),
        why_model.sliding,
    ),
    "session": Kind(
        'stream.window(ms.session("15 seconds"), by="ad", name="step").agg(**sums).view()',
        ("ad", "window_start"),
        ("n", "cost", "window_end", "overlaps_closed"),
        why_model.sessions,
        waits_for_all=True,
    ),
    "join": Kind(
        PAIRS.replace("HOW", "") + '.select("n", "other").view()',
        ("n", "other"),
        (),
        why_model.pairs,
    ),
    "left join": Kind(
        PAIRS.replace("HOW", 'how="left", ') + '.select("n", pl.col("other").fill_null(-1)).view()',
        ("n", "other"),
        (),
        lambda records: why_model.pairs(records, alone=True),
    ),
    "join as of": Kind(
        'cheap.select("ad", "n").join_asof(dear.table("ad").select("ad", "cost"), "ad", name="step").view()',
        ("n",),
        ("cost",),
        why_model.as_of,
    ),
    "lookup": Kind(
        'cheap.select("ad", "n").lookup(dear.table("ad").select("ad", "cost"), "ad", name="step").view()',
        ("n",),
        ("cost",),
        why_model.looked_up,
    ),
    "table": Kind(
        'stream.table("ad", name="step").select("ad", "n", "cost").view()',
        ("ad",),
        ("n", "cost"),
        why_model.latest,
    ),
    "group": Kind(
        'stream.group_by("ad", name="step").agg(n=ms.count(), cost=ms.max("cost")).view()',
        ("ad",),
        ("n", "cost"),
        why_model.grouped,
    ),
    "top": Kind(
        'stream.top(2, by=[("cost", "desc"), ("n", "asc")], per="ad", rank="place", name="step")'
        '.select("ad", "place", "n", "cost").view()',
        ("ad", "place"),
        ("n", "cost"),
        why_model.best,
    ),
    "process": Kind(PROCESS, ("ad", "what", "at"), ("count",), why_model.processed),
    "match": Kind(MATCH, ("ad", "match_start"), ("high",), why_model.matched),
}


def clicks(count, seed, ads):
    """Records of which no two have the same time; some are out of order, and some late."""
    dice, taken, rows = random.Random(seed), set(), []
    for n in range(count):
        at = 6 * n - dice.choice((0, 0, 0, 7, 13, 31))
        while at in taken:
            at += 1
        taken.add(at)
        ad = f"a{dice.randrange(ads)}"
        rows.append(
            {
                "ad": ad,
                "n": n,
                "id": f"{ad}-{dice.randrange(2)}",
                "cost": dice.randrange(4),
                "at": at,
            }
        )
    return rows


def plain(value):
    return round((value - START).total_seconds()) if isinstance(value, datetime) else value


@dataclass
class Case:
    """An app with one step that has run over random records."""

    kind: Kind
    app: object
    records: list
    place: dict  # of each record in the log
    ads: int

    @classmethod
    def ran(cls, folder, kind, *, seed, ads, count=8):
        rows = clicks(count, seed, ads)
        # What a lookup finds depends on batches: with one record in each, as documented, on the order of arrival.
        batch_rows = 1 if ".lookup(" in kind.step else random.Random(seed).choice((2, 3, 100))
        edited = EditedApp(folder, ads, batch_rows, kind.source, by_ad=True)
        edited.create()
        edited.append({**row, "at": START + timedelta(seconds=row["at"])} for row in rows)
        app = edited.write()
        edited.run(app)
        ends, place = dict.fromkeys(range(ads), 0), {}
        for row in rows:
            partition = int(row["ad"][1:])
            place[row["n"]] = ("clicks", partition, ends[partition])
            ends[partition] += 1
        return cls(kind, app, list(why_model.seen(rows)), place, ads)

    def key(self, row):
        return tuple(plain(row[name]) for name in self.kind.key)

    def stored(self):
        """Return the rows that are in the view, by key."""
        with open_state_store(self.app.state_store, readonly=True) as store:
            rows = store.scan("out").to_dicts()
        return {self.key(row): row for row in rows}

    def values(self, row):
        return tuple(plain(row[name]) for name in self.kind.values)

    def check_view(self):
        """What is in the view is what the model says; not all need be there yet."""
        meant = self.kind.model(self.records)[1]
        for key, row in self.stored().items():
            assert self.values(row) == meant[key], key

    def reached(self):
        """Return the latest time of each ad, which has a partition of its own."""
        found = dict.fromkeys((f"a{number}" for number in range(self.ads)), why_model.BEFORE_ALL)
        for one in self.records:
            found[one.ad] = max(found[one.ad], one.at)
        return found

    def exits(self):
        """Return how many rows of each record have left by which exit so far."""
        exits = self.kind.model(self.records)[0]
        watermark = min(self.reached().values()) - why_model.DELAY_S
        if self.kind.waits_for_all:
            undecided = {one.n for one in self.records if one.watermark > watermark}
            exits |= {n: {"held": 1} for n in undecided if exits[n] == {"late": 1}}
        return exits

    def check_records(self):
        exits = self.exits()
        stored = self.stored()
        for one in self.records:
            found = trace_record(self.app, self.place[one.n])
            said = (one, found.sentences)
            (step,) = (each for each in found.steps if each.step == "step")
            if one.n in exits:
                assert step.exits == exits[one.n], said
            given, gone = why_model.because_of(self.kind.model, self.records, one.n)
            rows = [row for row in found.rows if row.output == "out"]
            assert {self.key(row.key) for row in rows if not row.removed} == given, said
            assert {self.key(row.key) for row in rows if row.removed} <= gone, said
            for row in rows:
                assert row.now == stored.get(self.key(row.key)), said
            self.check_outcome(found, step, {key for key in given if key in stored}, said)

    @staticmethod
    def check_outcome(found, step, there, said):
        """The one word for it: in a row that is there, or else where it went."""
        if there:
            assert found.outcome == "in the outputs", said
        elif not found.rows:
            assert {found.outcome} == step.exits.keys() - {"emitted"} or "emitted" in step.exits, (
                said
            )

    def check_values(self, most=2):
        stored = self.stored()
        for key, row in [*stored.items()][:most]:
            found = records_behind(self.app, "out", {name: row[name] for name in self.kind.key})
            assert found.same, (key, found.sentences)
            names = {"/".join(map(str, place)): n for n, place in self.place.items()}
            mine = {names[one.record] for one in found.records}
            assert mine == why_model.behind(self.kind.model, self.records, key), (
                key,
                found.sentences,
            )

    def check_times(self):
        """The watermark is the least of the partitions', and that one holds it; late are those that the model says."""
        with open_state_store(self.app.state_store, readonly=True) as store:
            late, opened = why_late(store, "ads"), why_open(store, "ads")
        counted = sum(each.events for each in late if each.step == "step")
        assert counted == sum(counts.get("late", 0) for counts in self.exits().values())
        reached = self.reached()
        for each in opened:
            if each.step == "step":
                least = min(reached.values())
                assert plain(each.watermark) == least - why_model.DELAY_S
                assert set(each.held_by) == {
                    f"clicks/{ad[1:]}" for ad, at in reached.items() if at == least
                }

    def check(self):
        self.check_view()
        self.check_records()
        self.check_values()
        self.check_times()


@pytest.mark.parametrize("kind", KINDS)
def test_why_says_what_a_naive_model_says_happened(tmp_path, kind):
    Case.ran(tmp_path, KINDS[kind], seed=1, ads=1).check()


def test_an_answer_that_depends_on_batches_says_so(tmp_path):
    case = Case.ran(tmp_path, KINDS["lookup"], seed=1, ads=1, count=3)
    key = next(iter(case.stored().values()))["n"]
    for found in (
        trace_record(case.app, case.place[key]),
        records_behind(case.app, "out", {"n": key}),
    ):
        assert any("step takes what its table has when a row arrives" in one for one in found.notes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_why_says_it_of_many_random_records_in_two_partitions(tmp_path, kind, seed):
    Case.ran(tmp_path, KINDS[kind], seed=seed, ads=2, count=12).check()
