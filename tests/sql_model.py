"""An app whose views and topics are asked in SQL, and what the answers must be: computed anew from the records up to a position."""

import json
import random
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import polars as pl

import millstream as ms
from millstream.client import connect
from millstream.engine.local_run import LocalRun
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
CLICK = {"ad": int, "user": str, "at": datetime, "cost": int}
USERS = ["ann", "bob", "cid", "dan"]


def sql_app(log, **options):
    """Declare the app: `totals` of each user."""
    app = ms.App("shop", log=log, **options)
    clicks = app.topic("clicks", CLICK, key="ad").stream()
    clicks.group_by("user").agg(n=ms.count(), cost=ms.sum("cost")).view("totals")
    return app


def draw_clicks(seed, count, partitions):
    """Draw clicks by partition; some are no JSON."""
    dice = random.Random(seed)
    records = defaultdict(list)
    for number in range(count):
        at = START + timedelta(seconds=number * 4 + dice.randint(0, 90))
        click = {"ad": dice.randint(0, 4), "user": dice.choice(USERS), "cost": dice.randint(1, 30)}
        value = json.dumps({**click, "at": at.isoformat()}).encode()
        if dice.random() < 0.05:
            value = dice.choice([b"{", b"\xff\x00", b'{"ad": "x"}'])
        records[dice.randrange(partitions)].append(value)
    return records


def write_clicks(folder, records, partitions):
    with connect(folder) as log:
        log.create_topic("clicks", partitions=partitions, exist_ok=True)
        with log.producer() as producer:
            for partition, values in records.items():
                for number, value in enumerate(values):
                    producer.send("clicks", value, key=f"k{number}", partition=partition)


def run_job(app, folder, rows_per_batch=7, ends=None, on_batch=None):
    """Run the app without Spark up to the ends of partitions, or to what there is."""
    app.folder.mkdir(parents=True, exist_ok=True)
    job = LocalRun(app.plan(), folder, app.folder, app.state_store, rows_per_batch=rows_per_batch)
    job.run(ends, **({} if on_batch is None else {"on_batch": on_batch}))


def clicks_up_to(records, position):
    """Return the clicks that can be read, and how many cannot, up to a position."""
    good, bad = [], 0
    for partition, end in position.get("clicks", {}).items():
        for value in records[int(partition)][:end]:
            try:
                click = json.loads(value)
                click["at"] = datetime.fromisoformat(click["at"])
                good.append(click)
            except (ValueError, KeyError):
                bad += 1
    return good, bad


def totals_of(clicks):
    """Return what the view `totals` is of these clicks: user → count and cost."""
    found = defaultdict(lambda: [0, 0])
    for click in clicks:
        found[click["user"]][0] += 1
        found[click["user"]][1] += click["cost"]
    return {user: tuple(both) for user, both in found.items()}


# One statement over a view and the topic that it is made of, which must find no difference at any position.
DIFFERENCES = """
    SELECT count(*) FROM (SELECT "user", count(*) AS n, sum(cost) AS cost FROM topics.clicks WHERE _error IS NULL GROUP BY ALL) AS t
    FULL JOIN views.totals AS v ON v."user" = t."user"
    WHERE v.n IS DISTINCT FROM t.n OR v.cost IS DISTINCT FROM t.cost
"""

EVERY_KIND = pl.DataFrame(
    {
        "id": [1, 2, 3],
        "whole": [2**63 - 1, None, -(2**63)],
        "number": [float("nan"), None, -0.1],
        "exact": pl.Series(
            [Decimal("12345678901234567890123456789.123456789"), None, Decimal("-0.000000001")],
            dtype=pl.Decimal(38, 9),
        ),
        "text": ["a'\"\\é€😀\n", None, ""],
        "flag": [True, None, False],
        "moment": pl.Series(
            [
                datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
                None,
                datetime(9999, 12, 31, tzinfo=UTC),
            ],
            dtype=pl.Datetime("us", "UTC"),
        ),
        "day": [date(1, 1, 1), None, date(2026, 2, 28)],
        "span": [timedelta(days=400, microseconds=1), None, timedelta(seconds=-1)],
        "raw": [b"\x00\xff'", None, b""],
        "nested": [[1, None], None, []],
    }
)
"""Rows with every kind that views keep, and values at its ends."""


def write_every_kind(folder):
    """Make the view `kinds` of an app `kinds`, with rows of every kind."""
    with SqliteStateStore(folder / "apps" / "kinds" / "views.db") as store:
        run, batch_id = store.begin_run("kinds", "main", "c")
        store.declare(ViewSchema.of("kinds", EVERY_KIND, ("id",)))
        fence = Fence("kinds", "main", run, batch_id)
        store.commit(fence, [ViewChange("kinds", EVERY_KIND)], position={}, status={})
