"""An app in a file that tests edit: its text, events for it, and the answers by a naive model.

The model knows nothing of the library: it groups events in dictionaries, by the rules of the documentation.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import millstream as ms
from millstream.cli.run import find_app
from millstream.engine.local_run import LocalProgress, LocalRun
from millstream.engine.source.planner import LogPlanner
from millstream.kernels.state.keyhash import Buckets
from millstream.views.position import SOURCE_OFFSET
from millstream.views.schema import JOB
from millstream.views.store_location import open_state_store

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SEED = 42

SOURCE = '''
from datetime import datetime

import polars as pl

import millstream as ms

FACTOR = 2


def weigh(frame):
    """Weigh each click by its cost."""
    weight = pl.col("cost") * FACTOR  # whole numbers
    return frame.select("kind", weight=weight)


app = ms.App("ads", log=LOG, buckets=2)
fields = {"ad": str, "kind": str, "cost": int, "at": datetime}
clicks = app.topic("clicks", fields)
rule = ms.watermark("1 minute")
stream = clicks.stream(time="at", watermark=rule, lateness="1 day")

per_ad = stream.window(ms.tumbling("1 minute"), by="ad", name="per_ad").emit("update")
per_ad = per_ad.agg(n=ms.count(), cost=ms.sum("cost"))
per_ad.view("per_ad")

weighed = stream.select("kind", "cost").map_frames(weigh, schema={"kind": str, "weight": int}, name="weigh")
per_kind = weighed.window(ms.tumbling("1 hour"), by="kind", name="per_kind").emit("update")
per_kind = per_kind.agg(weight=ms.sum("weight"))
per_kind.view("per_kind")

busy = per_ad.window(ms.tumbling("1 hour"), by="ad", name="busy").emit("update")
busy.agg(most=ms.max("n")).view("busy")

stream.filter(pl.col("cost") > 3).select("ad", "at", "cost").view("dear", key=["ad", "at"])
'''

Event = Mapping[str, Any]
Rows = set[tuple[Any, ...]]


def events(count: int, seed: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Make clicks, one every three seconds, of which no two have the same time."""
    dice = random.Random(seed)
    return [
        {
            "ad": f"a{dice.randrange(4)}",
            "kind": dice.choice(("click", "show")),
            "cost": dice.randrange(7),
            "at": START + timedelta(seconds=3 * number),
        }
        for number in range(first, first + count)
    ]


@dataclass
class EditedApp:
    """A log with the topic, and an app in a file beside it. ``by_ad``: an ad has all its clicks in one partition."""

    folder: Path
    partitions: int
    rows_per_batch: int = 100_000
    source: str = SOURCE
    by_ad: bool = False

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def file(self) -> Path:
        return self.folder / "app.py"

    def create(self) -> None:
        with ms.connect(self.log) as log:
            log.create_topic("clicks", partitions=self.partitions)

    def append(self, rows: Iterable[Event], topic: str = "clicks") -> None:
        """Append rows, one after the other to all partitions, or by ad."""
        with ms.connect(self.log) as log, log.producer() as producer:
            for number, row in enumerate(rows):
                value = json.dumps({**row, "at": row["at"].isoformat()}).encode()
                chosen = int(row["ad"][1:]) if self.by_ad else number
                producer.send(topic, value, partition=chosen % self.partitions)

    def write(self, *edits: tuple[str, str]) -> ms.App:
        """Write the app with some texts replaced, and load it."""
        text = self.source
        for before, after in edits:
            assert before in text, before
            text = text.replace(before, after)
        self.file.write_text(text.replace("LOG", repr(str(self.log))))
        return find_app(self.file, None)

    def run(self, app: ms.App, *, same_expressions: bool = False) -> list[LocalProgress]:
        """Run the app to the end of the log, and return its batches."""
        done: list[LocalProgress] = []
        division = {"bucket_count": 2, "partitions": 1, "shuffle_partitions": 1, "hash_seed": SEED}
        local = LocalRun(
            app.plan(Buckets(2, SEED)), self.log, app.folder, app.state_store, self.rows_per_batch
        )
        local.run(on_batch=done.append, partitioning=division, same_expressions=same_expressions)
        return done

    def views(self, app: ms.App) -> dict[str, Rows]:
        """Return the rows of all views but the dead letters."""
        with open_state_store(app.state_store, readonly=True) as store:
            names = [schema.name for schema in store.views() if schema.name != "dead_letters"]
            return {name: {*store.scan(name).iter_rows()} for name in names}


def plan_batch(edited: EditedApp, app: ms.App) -> int:
    """Write the next batch into the offset log, as Spark does before it begins a batch; return its number."""
    local = LocalRun(app.plan(Buckets(2, SEED)), edited.log, app.folder, app.state_store)
    with open_state_store(app.state_store, readonly=True) as store:
        batch_id = store.last_batch_id(app.name)
        known = store.status(app.name, JOB).get(SOURCE_OFFSET)
    batch_id = 0 if batch_id is None else batch_id + 1
    planner = LogPlanner(local._spec)
    planner.pin_end_offsets()
    end = planner.next_offset(known or planner.initial_offset())
    path = app.folder / "checkpoint" / "offsets" / str(batch_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"v1\n{{}}\n{json.dumps(end)}")
    return batch_id


# ── the model ───────────────────────────────────────────────────────────────────────────────


def texts_of(views: Mapping[str, Rows]) -> dict[str, list[str]]:
    """Return the rows of views as sorted texts, in which a time is the same in every zone of that name."""
    return {
        name: sorted(json.dumps(row, default=str) for row in rows) for name, rows in views.items()
    }


def floor(at: datetime, size: timedelta) -> datetime:
    return at - (at - datetime(1970, 1, 1, tzinfo=UTC)) % size


def windows(
    rows: Sequence[Event],
    by: str,
    *values: Callable[[Sequence[Event]], Any],
    size: timedelta = timedelta(minutes=1),
    time: Callable[[Event], datetime] = lambda row: row["at"],
) -> Rows:
    """Return rows of windows: start, end, key, and each value of the events in them."""
    found = defaultdict(list)
    for row in rows:
        found[floor(time(row), size), row[by]].append(row)
    return {
        (start, start + size, key, *(value(members) for value in values))
        for (start, key), members in found.items()
    }


def total(field: str) -> Callable[[Sequence[Event]], Any]:
    return lambda members: sum(row[field] for row in members)


def weight(factor: int) -> Callable[[Sequence[Event]], Any]:
    return lambda members: sum(row["cost"] * factor for row in members)


HOUR = timedelta(hours=1)


def per_ad(rows: Sequence[Event]) -> Rows:
    return windows(rows, "ad", len, total("cost"))


def per_kind(rows: Sequence[Event], factor: int = 2) -> Rows:
    return windows(rows, "kind", weight(factor), size=HOUR)


def busy(rows: Sequence[Event], minutes: Rows | None = None) -> Rows:
    """Of windows by ad, the most clicks within an hour."""
    most: dict[tuple[datetime, str], int] = {}
    for start, _, ad, n, *_ in per_ad(rows) if minutes is None else minutes:
        hour = floor(start, HOUR)
        most[hour, ad] = max(most.get((hour, ad), 0), n)
    return {(hour, hour + HOUR, ad, n) for (hour, ad), n in most.items()}


def dear(rows: Sequence[Event], above: int = 3) -> Rows:
    return {(row["ad"], row["at"], row["cost"]) for row in rows if row["cost"] > above}


def answers(rows: Sequence[Event]) -> dict[str, Rows]:
    """Return all views of the app as it is first."""
    return {
        "per_ad": per_ad(rows),
        "per_kind": per_kind(rows),
        "busy": busy(rows),
        "dear": dear(rows),
    }


EDIT = (
    ("n=ms.count(), cost", 'n=ms.count(), top=ms.max("cost"), cost'),
    ("FACTOR = 2", "FACTOR = 3"),
)
"""An edit of the app: a step that has other columns then, and one that has the same."""


def edited_answers(rows: Sequence[Event]) -> dict[str, Rows]:
    """Return the answers of the edited app."""

    def top(members: Sequence[Event]) -> int:
        return max(row["cost"] for row in members)

    changed = {
        "per_ad": windows(rows, "ad", len, top, total("cost")),
        "per_kind": per_kind(rows, 3),
    }
    return answers(rows) | changed
