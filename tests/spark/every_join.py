"""A pipeline with every operator of tables and joins, and each result in several places, which must agree.

A result is a bag of rows that changes: a view has its rows, a topic and a dataset have the changes, with their
sign. So what a sum of the changes gives must be what the view has, and what the kernels give in process.
"""

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

import millstream as ms
from millstream import testing
from millstream.testing import Row
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 40  # records
COUNT = 160  # rows of each topic


@dataclass
class User:
    id: int
    city: str | None
    score: int


@dataclass
class City:
    id: str
    country: str


@dataclass
class Click:
    id: int
    user: int
    at: datetime


@dataclass
class Rate:
    user: int
    at: datetime
    rate: int


def rows():
    """Return what each topic gets: rows that change their keys, come out of order, and are deleted."""
    users = [Row(User(n % 23, [None, "x", "y", "z", "q"][n * 7 % 5], n % 4)) for n in range(COUNT)]
    users = [row if n % 11 else Row(None, key=str(n % 23)) for n, row in enumerate(users)]
    cities = [Row(City("xyz"[n % 3], "ABC"[n * 5 % 3])) for n in range(COUNT // 4)]
    cities = [row if n % 7 else Row(None, key="xyz"[n % 3]) for n, row in enumerate(cities)]
    clicks = [Row(Click(n, n % 5, _at(n - 8 * (n % 9 == 0)))) for n in range(COUNT)]
    rates = [Row(Rate(n % 6, _at(n - 7 * (n % 8 == 0)), n)) for n in range(COUNT)]
    return {"users": users, "cities": cities, "clicks": clicks, "rates": rates}


def _at(seconds):
    return START + timedelta(seconds=seconds)


# Of each result the columns that are looked at, which a view has, too.
RESULTS = {
    "placed": ["id", "city", "score", "country"],
    "counts": ["country", "n", "most"],
    "best": ["city", "place", "id", "score"],
    "pairs": ["id", "user", "rate"],
    "priced": ["id", "user", "rate"],
    "looked_up": ["id", "user", "city"],
    "per_window": ["user", "n", "rate"],
    "named": ["id", "city", "letters"],
}
WITH_THEIR_OWN_KEY = {"placed", "counts", "best", "per_window", "named"}
WITHOUT_A_KEY = {"pairs"}


def letters_of(keys):
    """Say how many letters a city has: a look-up outside that always knows the same."""
    return keys.with_columns(letters=pl.col("city").str.len_chars().cast(pl.Int64))


def pipeline(folder, _url=None, *, topics=True, log=None):
    """Declare every result, with a view, a topic and a dataset of each."""
    folder = Path(folder)
    app = ms.App("joins", log=folder if log is None else log, state=folder, buckets=3)
    users = app.table("users", User, key="id", partitions=3)
    cities = app.table("cities", City, key="id", partitions=2)
    placed = users.join(cities, {"city": "id"}, how="left")
    wait = ms.watermark("10 seconds", idle=None)
    clicks = app.topic("clicks", Click, key="user", partitions=2).stream(time="at", watermark=wait)
    rates = app.topic("rates", Rate, key="user", partitions=2).stream(time="at", watermark=wait)
    updates = clicks.window(ms.tumbling("10 seconds"), by="user").emit("update", early="each")
    results = {
        "placed": placed,
        "counts": placed.group_by("country").agg(n=ms.count(), most=ms.max("score")),
        "best": users.top(2, by="score", per="city", rank="place"),
        "pairs": clicks.join(
            rates, "user", within=("-5 seconds", "5 seconds"), how="left", emit="eager"
        ),
        "priced": clicks.join_asof(rates.table("user").drop("at"), "user"),
        "looked_up": clicks.lookup(users, {"user": "id"}),
        "per_window": updates.agg(n=ms.count()).join_asof(rates.table("user").drop("at"), "user"),
        "named": users.enrich(letters_of, on="city", schema={"letters": pl.Int64}),
    }
    for name, result in results.items():
        if name not in WITHOUT_A_KEY:
            result.view(name, key=None if name in WITH_THEIR_OWN_KEY else "id")
        result.dataset(folder / "datasets" / name)
        if topics:
            result.to(f"out-{name}", partitions=2)
    return app


def send(folder):
    """Write the records, with the partitions that the test kit gives them."""
    with ms.connect(folder) as log, log.producer() as producer:
        app = pipeline(folder)
        for name, given in rows().items():
            topic = app.topics[name]
            log.create_topic(name, partitions=topic.partitions)
            for item in testing.inputs.items_of(topic, given, topic.partitions, 0):
                producer.send(name, item.value, key=item.key, partition=item.partition)


@dataclass
class Held:
    """The rows of each result by the place that has them, and whether the ledger balances."""

    results: dict
    read: int
    balanced: bool


def held(folder):
    """Read all outputs as a user reads them."""
    found = {name: {} for name in RESULTS}
    with SqliteStateStore(folder / "apps" / "joins" / "views.db", readonly=True) as store:
        for name in RESULTS.keys() - WITHOUT_A_KEY:
            found[name]["view"] = _bag(name, store.scan(name))
        ledger = pl.DataFrame(store.ledger("joins"))
    with ms.connect(folder) as log:
        for name, places in found.items():
            tables = [log.read(f"out-{name}", p, columns=("value",)) for p in range(2)]
            values = [json.loads(v) for table in tables for v in table["value"].to_pylist()]
            places["topic"] = _bag(name, pl.DataFrame(values, infer_schema_length=None))
            places["dataset"] = _bag(name, ms.dataset(folder / "datasets" / name).scan().collect())
    if ledger.is_empty():
        return Held(found, 0, True)
    exits = ledger.select("emitted", "held", "late", "dead", "filtered", "duplicate")
    balanced = bool((ledger["read"] == exits.sum_horizontal()).all())
    sources = ledger.filter(pl.col("step").is_in([*rows()]))
    return Held(found, sources["read"].sum(), balanced)


def _bag(name, table):
    bag = Counter()
    for row in table.iter_rows(named=True):
        bag[tuple(row[column] for column in RESULTS[name])] += row.get("_diff") or 1
    assert min(bag.values(), default=0) >= 0, name
    return +bag


def wanted(folder):
    """Say what the kernels give in process for the same records, in one batch."""
    result = testing.run(pipeline(folder), rows())
    return {name: _bag(name, result.topic(f"out-{name}")) for name in RESULTS}
