"""Reach: how many people have seen a page, if everybody sees what those whom they follow have shared.

    python examples/reach.py

Nobody maintains a view for this: there are too many pages, and few are asked for. So it is a question. Its function gathers
who has shared the page, and then all who follow one of them, from the state of two steps as of one position of the log;
and counts them once each. It is the example of distributed RPC in Apache Storm. The answers are compared with a plain
computation over all events.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

import millstream as ms

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
PARTITIONS = 2


@dataclass
class Share:
    """Somebody shared a page."""

    url: str
    user: int
    at: datetime


@dataclass
class Follow:
    """Somebody follows somebody from now on."""

    user: int
    follower: int
    at: datetime


def pipeline(folder: Path) -> ms.App:
    """Declare who has shared what and who follows whom, and the question."""
    app = ms.App("reach", log=folder)
    shares = app.topic("shares", Share, key="url", partitions=PARTITIONS).stream(time="at")
    shares.group_by("url").agg(users=ms.set("user")).view("sharers")
    follows = app.topic("follows", Follow, key="user", partitions=PARTITIONS).stream(time="at")
    follows.group_by("user").agg(followers=ms.set("follower")).view("followers")

    @app.question("reach")
    def reach(state: ms.StateReader, url: str) -> int:
        users = state.rows("sharers", url=url)["users"].explode().drop_nulls()
        return state.rows("followers", users)["followers"].explode().n_unique()

    return app


def events(people: int, follows: int, shares: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Draw who follows whom, some of them many, and who shares which page."""
    dice = np.random.default_rng(1)
    ats = [FIRST + timedelta(seconds=n) for n in range(max(follows, shares))]
    followed = (people * dice.random(follows) ** 3).astype(np.int64)
    pages = (50 * dice.random(shares) ** 2).astype(np.int64)
    return (
        pl.DataFrame(
            {"user": followed, "follower": dice.integers(0, people, follows), "at": ats[:follows]}
        ),
        pl.DataFrame(
            {
                "url": [f"example.com/{page}" for page in pages],
                "user": dice.integers(0, people, shares),
                "at": ats[:shares],
            }
        ),
    )


def fill(folder: Path, topic: str, rows: pl.DataFrame) -> None:
    """Write events into the log."""
    with ms.connect(folder) as log:
        log.create_topic(topic, partitions=PARTITIONS, exist_ok=True)
        with log.producer() as producer:
            for row in rows.iter_rows(named=True):
                value = {**row, "at": row["at"].isoformat()}
                producer.send(topic, value, key=str(row[rows.columns[0]]))


def reach_of(follows: pl.DataFrame, shares: pl.DataFrame, url: str) -> int:
    """Return the reach of a page by a plain computation over all events."""
    users = shares.filter(pl.col("url") == url).select("user").unique()
    return follows.join(users, on="user", how="semi")["follower"].n_unique()


def main() -> int:
    """Fill a log, run the pipeline over it, ask for some pages, and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="The reach of a page, asked of a running job's state.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default="reach-log", help="where the log is")
    parser.add_argument("--people", type=int, default=20_000, help="how many people there are")
    parser.add_argument("--follows", type=int, default=100_000, help="how many follows")
    parser.add_argument("--shares", type=int, default=2_000, help="how many shares")
    options = parser.parse_args()

    follows, shares = events(options.people, options.follows, options.shares)
    fill(options.folder, "follows", follows)
    fill(options.folder, "shares", shares)
    app = pipeline(options.folder)
    print(app.run(until="caught-up", show=True))

    wrong = 0
    for page in (0, 1, 7, 30, 49, 77):
        url = f"example.com/{page}"
        answer = app.ask("reach", url=url, deadline="1 minute")
        expected = reach_of(follows, shares, url)
        wrong += answer.value != expected
        print(f"{url}: {answer.value:,} people; by the plain computation {expected:,}")
    print("equal" if not wrong else f"{wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
