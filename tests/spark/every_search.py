"""A pipeline with stored searches, whose matches go to a view, a topic and a dataset, and the matches by a naive model.

A query is words that must be there, words that must not, and a highest number. It is in force from its time until the next one of its
key; a row is matched with those that are in force at its own time. The model tries every query on every row.
"""

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import millstream as ms

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 60  # records
ROWS = 240
QUERIES = 120
KEYS = 17
WORDS = ["red", "green", "blue", "bike", "boat", "house", "quiet", "street"]


@dataclass
class Offer:
    id: int
    text: str
    rent: int
    at: datetime


@dataclass
class Alert:
    key: int
    query: str
    since: datetime


def at(seconds):
    return START + timedelta(seconds=seconds)


def offers():
    return [
        Offer(n, " ".join(WORDS[(n * step) % 8] for step in (1, 3, 5)), n * 37 % 100, at(n))
        for n in range(ROWS)
    ]


def asked(n):
    """Return the words that must be there, those that must not, and the highest rent."""
    return {WORDS[n % 8]}, {WORDS[n * 5 % 7]} if n % 3 == 0 else set(), 30 + n * 13 % 60


def alerts():
    made = []
    for n in range(QUERIES):
        words, absent, rent = asked(n)
        text = " ".join([*words, *(f"NOT {word}" for word in absent), f"rent:<{rent}"])
        # Every eleventh is no query: it becomes a dead letter, and the one before it stays.
        made.append(Alert(n % KEYS, "rent:(" if n % 11 == 10 else text, at(2 * n + 0.5)))
    return made


def matches():
    """Return (offer, key, query) of each match, by trying every query on every offer."""
    found = Counter()
    for offer in offers():
        words = set(offer.text.split())
        for key in range(KEYS):
            numbers = [
                n for n in range(key, QUERIES, KEYS) if n % 11 != 10 and at(2 * n + 0.5) <= offer.at
            ]
            if numbers:
                wanted, absent, rent = asked(numbers[-1])
                if wanted <= words and not absent & words and offer.rent < rent:
                    found[offer.id, key, alerts()[numbers[-1]].query] += 1
    return found


def pipeline(folder, _url=None, *, topics=True, log=None):
    """Declare the matches, with a view, a topic and a dataset of them."""
    folder = Path(folder)
    app = ms.App("searches", log=folder if log is None else log, state=folder, buckets=3)
    wait = ms.watermark("10 seconds", idle=None)
    stream = app.topic("offers", Offer, key="id", partitions=2).stream(time="at", watermark=wait)
    stored = app.table("alerts", Alert, key="key", time="since", watermark=wait, partitions=2)
    found = stream.percolate(stored, "query", default="text", shards=2)
    found.view("found", key=["id", "key"])
    found.dataset(folder / "datasets" / "found")
    if topics:
        found.to("out-found", partitions=2)
    return app


def send(folder):
    """Write the records: of each topic in the order of time, and a last one that lets the time of all others pass."""
    ends = [Offer(-1, "", 999, at(9999)), Offer(-2, "", 999, at(9999))]
    last = [Alert(-1, "never", at(9999)), Alert(-2, "never", at(9999))]
    with ms.connect(folder) as log, log.producer() as producer:
        for topic, rows, ending in (("offers", offers(), ends), ("alerts", alerts(), last)):
            log.create_topic(topic, partitions=2)
            for number, row in enumerate(rows):
                key = number if topic == "offers" else row.key
                _send(producer, topic, row, key % 2)
            for partition, row in enumerate(ending):
                _send(producer, topic, row, partition)


def _send(producer, topic, row, partition):
    value = json.dumps(vars(row), default=lambda time: time.isoformat())
    producer.send(topic, value.encode(), partition=partition)


def held(folder):
    """Return the matches that each place has, as often as it has them."""
    with ms.view("found", log=folder) as view:
        places = {"view": view.scan().select("id", "key", "query").rows()}
    rows = ms.dataset(Path(folder) / "datasets" / "found").scan().select("id", "key", "query")
    places["dataset"] = rows.collect().rows()
    with ms.connect(folder) as log:
        values = [log.read("out-found", n, columns=("value",))["value"].to_pylist() for n in (0, 1)]
    told = [json.loads(value) for of_partition in values for value in of_partition]
    places["topic"] = [(one["id"], one["key"], one["query"]) for one in told]
    return {name: Counter(rows) for name, rows in places.items()}
