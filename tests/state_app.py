"""A small app with state, run without a JVM in many small batches, for tests of where its state is."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import millstream as ms

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    id: str
    user: str
    at: datetime


def declare(folder, state=None):
    app = ms.App("counts", log=folder, state=state, buckets=3)
    events = app.topic("events", Event, key="user", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    once = stream.dedup("id", within="5 minutes")
    once.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count()).view("minutes")
    return app


def send(folder, first, end):
    with ms.connect(folder) as log:
        log.create_topic("events", partitions=2, exist_ok=True)
        with log.producer() as producer:
            for number in range(first, end):
                at = START + timedelta(seconds=number)
                value = {
                    "id": f"e{number % 900}",
                    "user": f"u{number % 37}",
                    "at": at.isoformat(),
                }
                producer.send("events", value, key=value["user"])


def run(folder, state, after=lambda _: None):
    """Run the app until it has read all; ``after`` is called with the number of each batch. Return how many there were."""
    done = []
    declare(folder, state).run(
        until="caught-up",
        engine="local",
        rows_per_batch=200,
        on_progress=lambda progress: (done.append(progress), after(len(done))),
        show=None,
    )
    return len(done)


def minutes(folder):
    with ms.view("minutes", log=folder) as view:
        return view.scan().rows()
