"""Alerts of users: "flats in this part of town under 900", matched with new flats while both arrive.

    python examples/flat_alerts.py --alerts 1000000 --flats 20000

makes up alerts and flats, matches them, and compares the matches of some flats with trying every alert on them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import millstream as ms

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
WORDS = [
    "balcony",
    "garden",
    "cellar",
    "lift",
    "quiet",
    "bright",
    "parquet",
    "kitchen",
    "terrace",
    "furnished",
]
EARTH_RADIUS_KM = 6371.0088


@dataclass(frozen=True)
class Alert:
    """What a user wants to hear of, from a time on."""

    id: int
    query: str
    since: datetime


@dataclass(frozen=True)
class Flat:
    """A flat that is to let."""

    id: int
    title: str
    rent: int
    lat: float
    lon: float
    listed: datetime


@dataclass(frozen=True)
class Wish:
    """What an alert says, for those who read no query."""

    words: tuple[str, ...]
    rent_below: int
    lat: float
    lon: float
    km: int

    def query(self) -> str:
        """Return it as a query."""
        return f"{' '.join(self.words)} rent:<{self.rent_below} place:near({self.lat} {self.lon} {self.km}km)"

    def is_met(self, flat: Flat) -> bool:
        """Return whether a flat is wanted."""
        return (
            flat.rent < self.rent_below
            and all(word in flat.title.split() for word in self.words)
            and distance_km(self.lat, self.lon, flat.lat, flat.lon) <= self.km
        )


def pipeline(folder: Path | str) -> ms.App:
    """Declare the topic ``found``: a record for each flat and alert."""
    app = ms.App("flat-alerts", log=folder)
    idle = ms.watermark("1 second", idle="1 second")
    alerts = app.table("alerts", Alert, key="id", time="since", watermark=idle, partitions=1)
    flats = app.topic("flats", Flat, key="id", partitions=1).stream(time="listed", watermark=idle)
    found = flats.percolate(
        alerts, "query", analyzers={"title": "english"}, points={"place": ("lat", "lon")}
    )
    found.view("found", key=("id", "id_query"))
    return app


def distance_km(lat: float, lon: float, to_lat: float, to_lon: float) -> float:
    """Return the length of the great circle between two points, by the spherical law of cosines."""
    one, other, turn = map(math.radians, (lat, to_lat, to_lon - lon))
    cosine = math.sin(one) * math.sin(other) + math.cos(one) * math.cos(other) * math.cos(turn)
    return math.acos(max(-1.0, min(1.0, cosine))) * EARTH_RADIUS_KM


def place(dice: random.Random) -> tuple[float, float]:
    """Return a point in or around Berlin."""
    return round(dice.gauss(52.52, 0.08), 5), round(dice.gauss(13.4, 0.12), 5)


def wishes(count: int) -> list[Wish]:
    """Make up what users want."""
    dice = random.Random(1)
    return [
        Wish(
            tuple(dice.sample(WORDS, dice.randint(0, 2))),
            dice.randint(5, 25) * 100,
            *place(dice),
            dice.randint(1, 3),
        )
        for _ in range(count)
    ]


def flats(count: int) -> Iterator[Flat]:
    """Make up flats, a second apart."""
    dice = random.Random(2)
    for number in range(count):
        title = " ".join(dice.sample(WORDS, 4))
        listed = NEW_YEAR + timedelta(hours=1, seconds=number)
        yield Flat(number, title, dice.randint(400, 2500), *place(dice), listed)


def send(folder: Path | str, wanted: list[Wish], offered: list[Flat]) -> None:
    """Write alerts and flats to the log."""
    with ms.connect(folder) as log, log.producer() as producer:
        for topic in ("alerts", "flats"):
            log.create_topic(topic, partitions=1)
        for number, wish in enumerate(wanted):
            alert = {"id": number, "query": wish.query(), "since": NEW_YEAR.isoformat()}
            producer.send("alerts", alert, key=str(number))
        # Without it the flats would wait: an alert that is in force before them might come.
        last = {"id": -1, "query": "NOT *:*", "since": (NEW_YEAR + timedelta(days=365)).isoformat()}
        producer.send("alerts", last, key="-1")
        for flat in offered:
            value = {**vars(flat), "listed": flat.listed.isoformat()}
            producer.send("flats", value, key=str(flat.id))


def check(rows: list[tuple[int, int]], wanted: list[Wish], tried: list[Flat]) -> int:
    """Compare the matches of some flats with trying every alert on them; return how many there are.

    Raises:
        SystemExit: they differ.
    """
    ids = {flat.id for flat in tried}
    meant = {(f.id, number) for f in tried for number, wish in enumerate(wanted) if wish.is_met(f)}
    found = {pair for pair in rows if pair[0] in ids}
    if found != meant:
        raise SystemExit(f"{len(found ^ meant)} matches differ")
    return len(meant)


def main() -> None:
    """Send alerts and flats, match them, and compare."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--alerts", type=int, default=20_000)
    options.add_argument("--flats", type=int, default=1_000)
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    with TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        wanted, offered = wishes(given.alerts), list(flats(given.flats))
        send(folder, wanted, offered)
        pipeline(folder).run(until="caught-up")
        pairs = ms.view("found", log=folder).scan().select("id", "id_query").rows()
        # The last flats wait: others of the same time might come.
        tried = offered[: min(200, max((flat for flat, _ in pairs), default=0))]
        count = check(pairs, wanted, tried)
        if not count:
            raise SystemExit("nothing matched")
        print(
            f"{len(pairs)} matches; those of {len(tried)} flats, {count}, are as by trying all alerts"
        )


if __name__ == "__main__":
    main()
