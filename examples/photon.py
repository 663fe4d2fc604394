"""Queries joined with the clicks on their results, as Google joins them, and the queries without a click.

    pip install "millstream[spark]"
    python examples/photon.py

Two streams are written to the log: what people searched for, and which result they clicked. Both come
out of order, and for seven minutes the clicks of one data center do not arrive at all. A click
belongs to the query with its id if it was made within half an hour after it. A query that nobody
clicked on comes out, too, but only when no click can come any more: when both streams are past the end
of its half hour. At the end the result is compared with a plain computation.

After R. Ananthanarayanan et al., "Photon: Fault-tolerant and Scalable Joining of Continuous Data
Streams", SIGMOD 2013.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

import millstream as ms

HALF_HOUR = timedelta(minutes=30)
CENTERS = 3  # data centers, each with a partition of both topics


@dataclass(frozen=True)
class Query:
    """Somebody searched for something."""

    query_id: int
    at: datetime
    text: str


@dataclass(frozen=True)
class Click:
    """Somebody clicked on a result of a query."""

    query_id: int
    at: datetime
    result: int  # 1 is the topmost


def pipeline(folder: Path | str) -> ms.App:
    """Declare the join, and two views of it."""
    app = ms.App("photon", log=folder)
    # A watermark says: nothing older will come. Each partition has one, a minute behind its newest event,
    # because events come out of order by less than that. idle=None: also a partition that is silent holds
    # the join back, because what it has to say may still change the answer.
    watermark = ms.watermark("1 minute", idle=None)
    queries = app.topic("queries", Query, partitions=CENTERS).stream(time="at", watermark=watermark)
    clicks = app.topic("clicks", Click, partitions=CENTERS).stream(time="at", watermark=watermark)
    joined = queries.join(
        clicks, on="query_id", within=("0 minutes", "30 minutes"), how="left", suffix="_clicked"
    )
    # A query with two clicks makes two rows; one that was never clicked makes one, without a result.
    joined.filter(pl.col("result").is_not_null()).view("clicked", key=("query_id", "result"))
    joined.filter(pl.col("result").is_null()).view("never_clicked", key="query_id")
    return app


# The data: an hour and a half of queries, and the clicks on them.

TEXTS = {  # what people search for, and how many in a hundred then click
    "weather tomorrow": 8,
    "how old is the moon": 15,
    "train to berlin": 65,
    "red bicycle": 80,
}
FIRST = datetime(2026, 1, 1, 12, tzinfo=UTC)
TOMORROW = FIRST + timedelta(days=1)
CUT_OFF = (
    FIRST + timedelta(minutes=40),
    FIRST + timedelta(minutes=47),
)  # clicks of the last center


def events(count: int, seed: int) -> tuple[list[Query], list[Click]]:
    """Make the queries of an hour and a half, clicks on them, and tomorrow's first of each data center."""
    dice = random.Random(seed)
    queries, clicks = [], []
    for number in range(count):
        text = dice.choice(list(TEXTS))
        query = Query(number, FIRST + timedelta(seconds=dice.uniform(0, 5400)), text)
        queries.append(query)
        # One in ten has slept over it: half an hour is over, and the click is nobody's.
        longest = 40 * 60 if dice.random() < 0.1 else 300
        for result in dice.sample(range(1, 6), k=dice.choice([1, 1, 1, 2])):
            if dice.random() < TEXTS[text] / 100:
                seconds = dice.uniform(1, longest)
                clicks.append(Click(number, query.at + timedelta(seconds=seconds), result))
    for center in range(CENTERS):  # a stream goes on: these close what is open from today
        number = (count // CENTERS + 1) * CENTERS + center
        queries.append(Query(number, TOMORROW, "good morning"))
        clicks.append(Click(number, TOMORROW + timedelta(seconds=9), 1))
    return queries, clicks


def center_of(event: Query | Click) -> int:
    """Return the data center that has served a query, and logs what follows from it."""
    return event.query_id % CENTERS


def arrivals(count: int, seed: int) -> Iterator[tuple[datetime, Query | Click]]:
    """Give the events with the times at which they arrive, in that order.

    Each is up to 50 seconds late, and for seven minutes the clicks of one data center cannot get through.
    """
    dice = random.Random(seed)
    late: dict[tuple[datetime, datetime, int], Query | Click] = {}
    for number, event in enumerate(itertools.chain(*events(count, seed))):
        sent = event.at + timedelta(seconds=dice.uniform(0, 50))
        cut_off = isinstance(event, Click) and center_of(event) == CENTERS - 1
        waits = cut_off and CUT_OFF[0] < sent < CUT_OFF[1]
        late[CUT_OFF[1] if waits else sent, sent, number] = event
    for arrival in sorted(late):
        yield arrival[0], late[arrival]


def send(log: ms.EventLog, events: Iterable[Query | Click]) -> None:
    """Write events to the log, each to the partition of its data center."""
    with log.producer() as producer:
        for event in events:
            topic = "queries" if isinstance(event, Query) else "clicks"
            producer.send(topic, event, partition=center_of(event))


# The same without a stream: dictionaries, and the rule.


def answers(count: int, seed: int) -> tuple[set[tuple[int, int]], set[int]]:
    """Return what must come out: pairs of a query and a result clicked, and queries never clicked."""
    queries, clicks = events(count, seed)
    asked = {query.query_id: query.at for query in queries}
    pairs = {
        (click.query_id, click.result)
        for click in clicks
        if timedelta(0) <= click.at - asked[click.query_id] <= HALF_HOUR
    }
    return pairs, asked.keys() - {query_id for query_id, _ in pairs}


def found(folder: Path | str) -> tuple[set[tuple[int, int]], set[int]]:
    """Return what has come out."""
    clicked = ms.view("clicked", log=folder).scan()
    never = ms.view("never_clicked", log=folder).scan()
    return set(clicked.select("query_id", "result").rows()), set(never["query_id"])


def show(folder: Path | str) -> None:
    """Print, for what was searched, how often something was clicked, and how often nothing."""
    views = {name: ms.view(name, log=folder).scan() for name in ("clicked", "never_clicked")}
    counts = [
        rows.group_by("text").agg(pl.col("query_id").n_unique().alias(name))
        for name, rows in views.items()
    ]
    table = (
        counts[0].join(counts[1], on="text", how="full", coalesce=True).fill_null(0).sort("text")
    )
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
        print(table)
    last = views["never_clicked"]["at"].max()
    print(f"The last query that is known to be never clicked was at {last:%H:%M:%S}.\n")


def main() -> int:
    """Write what has arrived while one center's clicks are missing, look, then the rest; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="Queries joined with clicks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--queries", type=int, default=20_000, help="how many queries")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other queries")
    options = parser.parse_args()
    arrived = list(arrivals(options.queries, options.seed))
    missing = CUT_OFF[1] - timedelta(minutes=1)
    with tempfile.TemporaryDirectory() as folder:
        app = pipeline(folder)
        with ms.connect(folder) as log:
            for topic in ("queries", "clicks"):
                log.create_topic(topic, partitions=CENTERS)
            send(log, (event for at, event in arrived if at <= missing))
        print(app.run(until="caught-up", show=True))
        print(f"\nAt {missing:%H:%M}, with clicks missing since {CUT_OFF[0]:%H:%M}:")
        show(folder)

        with ms.connect(folder) as log:
            send(log, (event for at, event in arrived if at > missing))
        print(app.run(until="caught-up", show=True))
        print("\nIn the end:")
        show(folder)
        equal = found(folder) == answers(options.queries, options.seed)
    print("Equal to the plain computation." if equal else "The plain computation has it otherwise.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
