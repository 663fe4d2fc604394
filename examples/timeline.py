"""The home timeline of a social network, maintained: what the people whom you follow have posted.

    pip install "millstream[spark]"
    python examples/timeline.py                       # 20,000 people, a million follows
    python examples/timeline.py --people 1000 --follows 20000

A timeline is a join of two tables, *who follows whom* and *posts*, and of its rows the newest few for each
reader. Four things change it, and the join knows all four without being told:

1. somebody posts: the post appears in the timelines of all followers;
2. a post is deleted: it disappears from all of them, and an older post takes its place;
3. somebody follows: the posts of the one followed appear in the follower's timeline;
4. somebody unfollows: they disappear from it.

The program writes both topics, with deletions and people who change their minds, runs the pipeline, and
compares each timeline with one plain batch over the same tables.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

import millstream as ms

FOLLOWS, POSTS, PARTITIONS = "follows", "posts", 4
NEWEST = 10  # posts that a timeline shows
FIRST_MS = 1_767_225_600_000  # 2026-01-01


@dataclass(frozen=True)
class Follow:
    """A person follows another, or no longer does."""

    follower: int
    followed: int
    active: bool


@dataclass(frozen=True)
class Post:
    """A post; without a value, its record says that it was deleted."""

    id: int
    author: int
    at_ms: int


def pipeline(folder: Path | str) -> ms.App:
    """Declare the view ``timeline``: of each reader the newest posts of those whom they follow."""
    app = ms.App("timeline", log=folder)
    follows = app.topic(FOLLOWS, Follow, key="follower", partitions=PARTITIONS).table(
        key=["follower", "followed"], deleted=~pl.col("active")
    )
    posts = app.table(POSTS, Post, key="id", partitions=PARTITIONS)
    (
        follows.drop("active")
        .join(posts, on={"followed": "author"})
        .top(NEWEST, by=[("at_ms", "desc")], per="follower", rank="place")
        .view("timeline")
    )
    return app


# The data: tables of changes, in the order in which they are made.


def follow_changes(people: int, count: int, seed: int) -> pl.DataFrame:
    """Return who follows whom, ``count`` pairs at first, and who then stops: few are followed by many."""
    if count > people**2 // 2:
        sys.exit(f"{people:,} people can follow {people**2 // 2:,} times here. Give more --people.")
    dice = np.random.default_rng(seed)
    pairs = pl.DataFrame(schema={"follower": pl.Int64, "followed": pl.Int64})
    while pairs.height < count:  # some pairs are drawn twice
        drawn = pl.DataFrame(
            {
                "follower": dice.integers(0, people, count),
                "followed": (people * dice.random(count) ** 2).astype(np.int64),
            }
        )
        pairs = pl.concat([pairs, drawn]).unique(maintain_order=True).head(count)
    stops = pairs.sample(count // 20, seed=seed)
    return pl.concat(
        [
            pairs.with_columns(active=pl.lit(value=True)),
            stops.with_columns(active=pl.lit(value=False)),
        ]
    )


def post_changes(people: int, count: int, seed: int) -> pl.DataFrame:
    """Return posts, and those that are deleted, without an author."""
    dice = np.random.default_rng(seed + 1)
    posts = pl.DataFrame(
        {
            "id": np.arange(count),
            "author": dice.integers(0, people, count),
            "at_ms": FIRST_MS + np.sort(dice.integers(0, 86_400_000, count)),
        }
    )
    deleted = posts.sample(count // 10, seed=seed).select("id")
    return pl.concat([posts, deleted], how="diagonal")


def fill(folder: Path, changes: dict[str, pl.DataFrame], keys: dict[str, str]) -> None:
    """Write the changes into the log, one transaction for each topic. Once is enough."""
    with ms.connect(folder) as log:
        for topic, rows in changes.items():
            log.create_topic(topic, partitions=PARTITIONS, exist_ok=True)
            if any(log.read(topic, partition).num_rows for partition in range(PARTITIONS)):
                continue
            # A row of nulls but for the key is a tombstone: a record without a value.
            gone = rows.drop(keys[topic]).select(pl.all_horizontal(pl.all().is_null())).to_series()
            values = pl.select(
                pl.when(~gone).then(rows.to_struct().struct.json_encode())
            ).to_series()
            with log.producer(transactional_id=f"fill-{topic}") as producer, producer.transaction():
                producer.send_many(
                    topic,
                    keys=rows[keys[topic]].cast(pl.String).cast(pl.Binary).to_arrow(),
                    values=values.cast(pl.Binary).to_arrow(),
                ).result()
            print(f"{rows.height:,} changes of {topic} written to {folder}")


# The same as one batch, over the tables as they are at the end.


def timelines_of(follows: pl.DataFrame, posts: pl.DataFrame) -> pl.DataFrame:
    """Return what the view must hold."""
    follows = follows.unique(["follower", "followed"], keep="last").filter("active")
    posts = posts.unique("id", keep="last").drop_nulls("author")
    joined = follows.drop("active").join(posts, left_on="followed", right_on="author")
    # Of posts of one moment, those of the lower number first.
    newest = joined.sort("follower", -pl.col("at_ms"), "followed", "id")
    place = pl.int_range(1, pl.len() + 1).over("follower")
    return newest.with_columns(place=place).filter(pl.col("place") <= NEWEST)


def differing(found: pl.DataFrame, expected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that one of the tables has alone."""
    both = pl.concat([found.select(expected.columns), expected])
    return both.filter(both.is_unique())


def main() -> int:
    """Fill a log, run the pipeline over it, show, and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="The home timelines of a social network, maintained.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default="timeline-log", help="where the log is")
    parser.add_argument("--people", type=int, default=20_000, help="how many people there are")
    parser.add_argument("--follows", type=int, default=1_000_000, help="how many follows")
    parser.add_argument("--posts", type=int, default=10_000, help="how many posts")
    parser.add_argument("--batch", type=int, default=100_000, help="changes per batch")
    options = parser.parse_args()

    follows = follow_changes(options.people, options.follows, seed=1)
    posts = post_changes(options.people, options.posts, seed=1)
    fill(options.folder, {FOLLOWS: follows, POSTS: posts}, {FOLLOWS: "follower", POSTS: "id"})
    app = pipeline(options.folder)
    print(app.run(until="caught-up", rows_per_batch=options.batch, show=True))

    timelines = ms.view("timeline", log=options.folder).scan()
    expected = timelines_of(follows, posts)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"  {size / 2**20:,.0f} MiB in {options.folder}: the log, the state, and the view")
    reader = int(timelines["follower"].min())
    print(f"\nThe timeline of {reader}:")
    print(timelines.filter(pl.col("follower") == reader).sort("place"))
    wrong = differing(timelines, expected)
    print(
        f"{expected.height:,} rows in {expected['follower'].n_unique():,} timelines, equal to the batch's"
        if wrong.is_empty()
        else wrong
    )
    return 0 if wrong.is_empty() else 1


if __name__ == "__main__":
    sys.exit(main())
