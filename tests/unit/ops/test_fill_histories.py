"""Histories of an app of tables: rows with hostile values, edits that are filled, rollbacks, and a log that loses records.

After each event the views are those of a naive model of the tables, and those of a new app that has read all rows; the model knows nothing of the
library. It was written from docs/tables.md: of each key the latest row counts, a deletion removes it, and with a ttl it is gone once the watermark
is above its time plus the ttl.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import pytest
from debezium_model import ORDERS, TRANSACTIONS, USERS, Source
from edited_app import START, EditedApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import ConfigError
from millstream.ops import fills
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.rollback import rollback
from millstream.ops.version_retention import utc_now
from millstream.views.coverage import partial_note
from millstream.views.store_location import open_state_store

DELAY, TTL = timedelta(seconds=5), timedelta(seconds=15)
SOURCE = """
from datetime import datetime

import polars as pl

import millstream as ms

app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str | None, "kind": str | None, "cost": int | None, "text": str | None, "gone": bool, "at": datetime}
clicks = app.topic("clicks", fields).stream(time="at", watermark=ms.watermark("5 seconds"), lateness="1 day")
clicks = clicks.with_columns(price=pl.col("text").cast(pl.Float64))
latest = clicks.table(key="ad", deleted=pl.col("gone"), name="latest")
placed = clicks.table(key="ad", order="offset", deleted=pl.col("gone"), name="placed")
recent = clicks.table(key="ad", deleted=pl.col("gone"), ttl="15 seconds", name="recent")
latest.select("ad", "kind", "cost").view("latest")
placed.select("ad", "kind", "cost").view("placed")
recent.select("ad", "kind", "cost").view("recent")
# MORE
"""
TABLES = ("latest", "placed", "recent")
PRICES = ("0.0", "-0.0", "nan", "inf", "-inf", "1e308", "-1e308", "5e-324", "0.1", "0.2", None)
COSTS = (0, 1, 2, 3, 2**63 - 1, -(2**63), None)
STEPS = (
    'T.group_by("kind", name="kinds_T").agg(n=ms.count()).view("kinds_T")\n',
    (
        'T.group_by("kind", name="prices_T").agg(paid=ms.sum("price"), least=ms.min("price"), most=ms.max("cost"), '
        'some=ms.distinct("price"), mean=ms.mean("price"), spread=ms.variance("price"), half=ms.quantile("price", 0.5), '
        'often=ms.top_k("price", 2), all=ms.list("price")).view("prices_T")\n'
    ),
    'T.group_by("price", "cost", name="by_price_T").agg(n=ms.count(), last=ms.max("at")).view("by_price_T")\n',
    'T.distinct("kind", "price", name="pairs_T").group_by("price", name="of_pairs_T").agg(n=ms.count()).view("pairs_T")\n',
    'T.select("kind", "cost").except_(U.select("kind", "cost"), name="except_T").view("except_T")\n',
    'T.select("ad", "cost").top(2, by="cost", ties="rank", name="top_T").view("top_T", key="ad")\n',
    (
        'T.join(U.select("ad", of="kind"), on="ad", how="full", name="join_T").group_by("kind", "of", name="joined_T")'
        '.agg(n=ms.count()).view("joined_T")\n'
    ),
    (
        'T.select("ad", whole=pl.col("price").cast(pl.Int64)).group_by("whole", name="whole_T")'  # fails on some
        '.agg(n=ms.count()).view("whole_T")\n'
    ),
)
VIEWS = (
    'T.select("ad", "price").view("own_T")\n',
    'T.rename({"ad": "of"}).select("of", "cost").view("own_T")\n',
    'T.filter(pl.col("price") >= 0).select("ad", "price", more=pl.col("cost") > 1).view("own_T", key="ad")\n',
    'T.select("ad", "kind").view("own_T")\n',
    'T.select("ad", whole=pl.col("price").cast(pl.Int64)).view("own_T")\n',
)
"""Views of one name and other keys and columns."""


def program(dice: random.Random) -> str:
    """Declare some steps behind the tables, and some views of them."""
    lines = []
    for table in TABLES:
        other = dice.choice([one for one in TABLES if one != table])
        chosen = dice.sample(STEPS, dice.randrange(3))
        chosen += [dice.choice(VIEWS)] if dice.random() < 0.5 else []
        lines += [one.replace("T", table).replace("U", other) for one in chosen]
    return "".join(lines)


def rows_of(dice: random.Random, first: int, count: int) -> list[dict]:
    """Make rows of few keys, of which some have none; no two have one time, and many come behind later ones."""
    return [
        {
            "ad": None if dice.random() < 0.05 else f"a{dice.randrange(8)}",
            "kind": dice.choice(("click", "show", None)),
            "cost": dice.choice(COSTS),
            "text": dice.choice(PRICES),
            "gone": dice.random() < 0.2,
            "at": START
            + timedelta(seconds=max(0, number - dice.randrange(12)), microseconds=number),
        }
        for number in range(first, first + count)
    ]


def partition_of(row: dict, partitions: int) -> int:
    """All rows of an ad are in one partition, as the order of offsets needs it."""
    return int((row["ad"] or "a0")[1:]) % partitions


@dataclass
class App(EditedApp):
    """An app over a log in which the rows of an ad are in one partition."""

    def append(self, rows, topic="clicks"):
        with ms.connect(self.log) as log, log.producer() as producer:
            for row in rows:
                value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
                producer.send(topic, value, partition=partition_of(row, self.partitions))


def plain(value):
    """A value that equals itself, and of the two zeros is one."""
    if not isinstance(value, float):
        return value
    return "NaN" if math.isnan(value) else value + 0.0


def rows_in(views):
    return {name: {tuple(map(plain, row)) for row in rows} for name, rows in views.items()}


# ── the model ───────────────────────────────────────────────────────────────────────────────


def tables(rows, partitions):
    """The rows of the three tables."""
    by_time, by_place = {}, {}
    newest = {}
    for number, row in enumerate(rows):
        partition = partition_of(row, partitions)
        newest[partition] = max(newest.get(partition, row["at"]), row["at"])
        if row["ad"] is not None:
            by_time[row["ad"]] = max(
                by_time.get(row["ad"], (row["at"], number)), (row["at"], number)
            )
            by_place[row["ad"]] = number
    watermark = min(newest.values()) - DELAY
    latest = [rows[number] for _, number in by_time.values() if not rows[number]["gone"]]
    return {
        "latest": latest,
        "placed": [rows[number] for number in by_place.values() if not rows[number]["gone"]],
        "recent": [row for row in latest if row["at"] >= watermark - TTL],
    }


def model(rows, partitions):
    """The views that the model knows, of those that a program may have."""
    found = {}
    for name, held in tables(rows, partitions).items():
        found[name] = {(row["ad"], row["kind"], row["cost"]) for row in held}
        found[f"kinds_{name}"] = {*Counter(row["kind"] for row in held).items()}
        whole = (row["text"] if row["text"] is None else float(row["text"]) for row in held)
        kept = (
            one if one is None else int(one) for one in whole if one is None or abs(one) < 2**63
        )
        found[f"whole_{name}"] = {*Counter(kept).items()}
    return found


# ── histories ───────────────────────────────────────────────────────────────────────────────


@dataclass
class History:
    """An app to which things happen, and beside it all rows, and what happened how often."""

    edited: App
    dice: random.Random
    seen: Counter
    rows: list[dict] = field(default_factory=list)
    now: str = ""
    before: str | None = None
    lost: bool = False
    news: int = 0

    def append(self, count):
        more = rows_of(self.dice, len(self.rows), count)
        self.rows += more
        self.edited.append(more)
        self.edited.run(self.app())

    def app(self):
        return self.edited.write(("# MORE\n", self.now))

    def lose(self):
        """Let the log lose records that the app has read."""
        with ms.connect(self.edited.log) as log:
            for partition, (start, end) in enumerate(log.offsets("clicks")):
                log.delete_records("clicks", partition, self.dice.randrange(start, end + 1))
        self.lost = True

    def deploy(self):
        program_before, self.now = self.now, program(self.dice)
        app = self.app()
        plan = plan_change(app)
        reads = any(part.is_computed for part in plan.change.parts)
        assert not (reads and self.lost), "all that is behind the tables is filled"
        assert plan.records == 0
        if self.dice.random() < 0.3:
            self.compare(app)
        deploy(app)
        self.seen["deployed"] += 1
        if plan.verdict != "keeps" or plan.change.moves_state:
            self.before = program_before
        else:
            self.edited.run(app)

    def compare(self, app):
        expected = self.expected()
        found = compare(app)
        assert {*found.not_compared} <= {view for view in expected if view.startswith("own_")}
        for view in found.views:
            assert view.equal + view.changed + view.added == len(expected[view.view])
            self.seen["compared"] += 1

    def rollback(self):
        if self.before is None:
            return
        self.now, self.before = self.before, self.now
        try:
            rollback(self.app())
            self.seen["went back"] += 1
        except ConfigError as error:
            self.now, self.before = self.before, None
            assert "the log no longer holds" in str(error) or "is not the" in str(error), error
            self.app()
            self.seen["did not go back"] += 1

    def expected(self):
        """The views of a new app that reads all rows at once."""
        self.news += 1
        new = App(self.edited.folder / f"new {self.news}", self.edited.partitions, source=SOURCE)
        new.folder.mkdir()
        new.create()
        new.append(self.rows)
        app = new.write(("# MORE\n", self.now))
        new.run(app)
        return rows_in(new.views(app))

    def check(self):
        app = self.app()
        found, expected = rows_in(self.edited.views(app)), self.expected()
        known = model(self.rows, self.edited.partitions)
        with open_state_store(app.state_store, readonly=True) as store:
            notes = {name: partial_note(store.coverage(name)) for name in expected}
        assert notes == dict.fromkeys(expected)
        for name, rows in expected.items():
            assert found[name] == rows, name
            assert found[name] == known.get(name, rows), name

    def expire(self):
        """Let the time run out for which the version before is kept."""
        if self.before is not None:
            with pytest.raises(ConfigError, match="is kept to go back to"):
                rollback(self.app(), clock=lambda: utc_now() + timedelta(days=8))
            self.before = None
            self.seen["dropped"] += 1


EVENTS = {
    "expire": History.expire,
    "append": lambda history: history.append(history.dice.randrange(1, 30)),
    "deploy": History.deploy,
    "rollback": History.rollback,
    "lose": History.lose,
}


def check_history(folder, seed, partitions, rows_per_batch, part_rows, seen, events=5):
    dice = random.Random(seed)
    edited = App(folder, partitions, rows_per_batch, SOURCE)
    edited.create()
    history = History(edited, dice, seen)
    history.append(60)
    with mock.patch.object(fills, "_ROWS_PER_BATCH", part_rows):
        history.deploy()
        history.check()
        for _ in range(events):
            event = dice.choice(
                ("append", "append", "deploy", "deploy", "rollback", "lose", "expire")
            )
            EVENTS[event](history)
            history.check()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "examples", [1, pytest.param(60, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_after_each_event_views_are_those_of_the_model_and_of_a_new_app(tmp_path_factory, examples):
    seen = Counter()

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        seed=st.integers(0, 10_000),
        partitions=st.sampled_from([1, 4, 7]),
        rows_per_batch=st.sampled_from([7, 40, 1000]),
        part_rows=st.sampled_from([3, 1000]),
    )
    def check(seed, partitions, rows_per_batch, part_rows):
        folder = tmp_path_factory.mktemp("app")
        check_history(folder, seed, partitions, rows_per_batch, part_rows, seen)

    check()
    assert seen["deployed"]


# ── rows that wait ──────────────────────────────────────────────────────────────────────────

WAITING = f"""
import millstream as ms

app = ms.App("shop", log=LOG, buckets=2)
schema = {{"id": int, "name": str | None, "big": str | None}}
whole = ms.debezium(transactions={TRANSACTIONS!r})
users = app.table({USERS!r}, schema, key="id", envelope=whole)
orders = app.table({ORDERS!r}, schema, key="id", envelope=whole)
users.view("users")
orders.view("orders")
# MORE
"""
BEHIND = """
users.group_by("name", name="names").agg(n=ms.count()).view("names")
users.select("id", of="name").join(orders, on="id", how="left", name="both").group_by("of", "name", name="pairs").agg(n=ms.count()).view("pairs")
users.select("id", "big").view("bigs")
"""


def behind(users, orders):
    """The views behind the tables, of the rows of these."""
    named = {number: name for number, name, _ in orders}
    return {
        "users": {*users},
        "orders": {*orders},
        "names": {*Counter(name for _, name, _ in users).items()},
        "pairs": {
            (of, name, n)
            for (of, name), n in Counter((of, named.get(number)) for number, of, _ in users).items()
        },
        "bigs": {(number, big) for number, _, big in users},
    }


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), partitions=st.sampled_from([1, 4, 7]))
def test_rows_that_wait_for_their_transaction_come_after_what_was_filled(
    tmp_path_factory, seed, partitions
):
    source, dice = Source(seed), random.Random(seed)
    source.begin()
    for _ in range(8):
        source.commit()
    edited = EditedApp(tmp_path_factory.mktemp("app"), partitions, 7, WAITING)
    with ms.connect(edited.log) as log:
        for topic in (USERS, ORDERS):
            log.create_topic(topic, partitions=partitions)
        log.create_topic(TRANSACTIONS, partitions=1)

    def send(topic, rows):
        with ms.connect(edited.log) as log, log.producer() as producer:
            for row in rows:
                value = None if row.values is None else json.dumps(row.values).encode()
                place = {} if row.partition is None else {"partition": row.partition}
                producer.send(topic, value, key=row.key, **place)

    for topic, rows in source.snapshot.items():
        send(topic, rows)
    edited.run(edited.write())
    cuts = {topic: dice.randrange(len(rows) + 1) for topic, rows in source.topics.items()}
    for topic, cut in cuts.items():
        send(topic, source.topics[topic][:cut])
    before = edited.write()
    edited.run(before)
    there = edited.views(before)
    app = edited.write(("# MORE\n", BEHIND))
    assert plan_change(app).records == 0
    deploy(app)
    assert edited.views(app) == behind(there["users"], there["orders"])
    for topic, cut in cuts.items():
        send(topic, source.topics[topic][cut:])
    edited.run(app)
    last = source.states[-1]
    assert edited.views(app) == behind(last[USERS], last[ORDERS])
