"""A pipeline that writes to every kind of output; what it must hold in the end, and at any moment.

Every row that comes out is another one, and each comes once in whatever batches: so a row that is
there twice was doubled, and one that is not there in the end was lost.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

import millstream as ms
from millstream import testing
from millstream.views.state_store.sqlite_store import SqliteStateStore

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 60  # records


@dataclass
class Event:
    user: str
    at: datetime
    cost: int


def rows(count):
    return [
        {
            "user": f"u{i % 41}",
            "at": (START + timedelta(seconds=i - 300 * (i % 50 == 0))).isoformat(),
            "cost": i % 7,
        }
        for i in range(count)
    ]


def keep(path):
    """Make a function that keeps each key with its rows, in a file, and so works once."""

    def kept(frame, context):
        place = path / context.key.replace("/", "-")
        with path.with_suffix(".calls").open("a") as calls:
            calls.write(context.key + "\n")
        if not place.exists():
            new = place.with_suffix(".new")
            frame.write_parquet(new)
            new.rename(place)

    return kept


def pipeline(folder, url=None, *, topics=True, log=None):
    """Two stages; views at home and in a database, topics, a dataset, a function."""
    folder = Path(folder)
    app = ms.App("matrix", log=folder if log is None else log, state=folder, buckets=4)
    events = app.topic("events", Event, key="user", partitions=3)
    stream = events.stream(time="at", watermark=ms.watermark("2 minutes", idle=None))
    minutes = stream.window(ms.tumbling("1 minute"), by="user").agg(cost=ms.sum("cost"))
    minutes.view("minutes").dataset(folder / "out")
    tens = minutes.window(ms.tumbling("10 minutes")).emit("update").agg(total=ms.sum("cost"))
    tens.view("tens")
    dear = stream.filter(pl.col("cost") == 6)
    dear.view("dear", key=["user", "at"])
    if url is not None:
        minutes.view("minutes_there", store=url)
    if topics:
        minutes.to("minutes", key="user", partitions=2)
        dear.to("dear", key="user", partitions=1)
    (folder / "kept").mkdir(exist_ok=True, parents=True)
    minutes.foreach(keep(folder / "kept"), name="keep")
    return app


def send(address, events):
    with ms.connect(address) as log:
        log.create_topic("events", partitions=3)
        with log.producer() as producer:
            for event in events:
                producer.send("events", event, key=event["user"])


@dataclass
class Held:
    """Everything that came out, by output, in an order that does not depend on batches."""

    outputs: dict
    read: int
    balanced: bool

    def doubled(self):
        return [name for name, rows in self.outputs.items() if len(rows) != len(set(rows))]


MINUTES = ["user", "cost", "window_start", "window_end"]


def sorted_rows(table, columns):
    return sorted(table.select(columns).rows()) if table.width else []


def held(folder, url=None, *, topics=True, log=None):
    """Read all outputs as a user reads them."""
    out = {}
    with SqliteStateStore(folder / "apps" / "matrix" / "views.db", readonly=True) as store:
        names = {schema.name for schema in store.views()}
        for name in names & {"minutes", "tens", "dear"}:
            table = store.scan(name)
            out[name] = sorted_rows(table, sorted(table.columns))
        ledger = pl.DataFrame(store.ledger("matrix"))
    if url is not None:
        with ms.view("minutes_there", log=folder, store=url) as view:
            out["in the database"] = sorted_rows(view.scan(), MINUTES)
    out["dataset"] = sorted_rows(ms.dataset(folder / "out").scan().collect(), MINUTES)
    if topics:
        with ms.connect(folder if log is None else log) as opened:
            for topic, partitions in (("minutes", (0, 1)), ("dear", (0,))):
                tables = [opened.read(topic, p, columns=("value",)) for p in partitions]
                values = [value for table in tables for value in table["value"].to_pylist()]
                out[f"topic {topic}"] = sorted(values)
    files = [path for path in (folder / "kept").iterdir() if path.suffix != ".new"]
    out["kept"] = sorted(
        row for path in files for row in sorted_rows(pl.read_parquet(path), MINUTES)
    )
    if ledger.is_empty():
        return Held(out, 0, True)
    exits = ledger.select("emitted", "held", "late", "dead", "filtered", "duplicate")
    balanced = bool((ledger["read"] == exits.sum_horizontal()).all())
    return Held(out, ledger.filter(step="events")["read"].sum(), balanced)


def wanted(folder, events, *, url=None, topics=True):
    """Say what the kernel runner gives for the same events, in one batch."""
    result = testing.run(pipeline(folder, topics=topics), {"events": events})
    out = {}
    for name in ("minutes", "tens", "dear"):
        out[name] = sorted_rows(result[name], sorted(result[name].columns))
    minutes = sorted_rows(result["minutes"], MINUTES)
    out |= dict.fromkeys(["dataset", "kept"], minutes)
    if url is not None:
        out["in the database"] = minutes
    if topics:
        for name in ("minutes", "dear"):
            table = result.topic(name).drop("partition", "offset", "key", "timestamp")
            out[f"topic {name}"] = sorted(
                json.dumps(row, separators=(",", ":")).encode() for row in table.to_dicts()
            )
    assert len(minutes) > 100
    return out


def calls_of_functions(folder):
    return (folder / "kept.calls").read_text().split()
