"""The test kit: rows in, views out, and clear words where it cannot do what is asked."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UnknownViewError


@dataclass
class Event:
    at: datetime
    ad: int


AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def app():
    app = ms.App("kit", log="unused")
    stream = app.topic("events", Event, key="ad").stream(time="at")
    stream.window(ms.tumbling("1 hour"), by="ad").emit("update").agg(n=ms.count()).view("by_ad")
    return app


def test_rows_may_be_instances_mappings_or_bytes(app):
    rows = [Event(AT, 1), {"at": AT, "ad": 1}, b'{"at":"2026-01-01T00:00:00Z","ad":1}']
    assert testing.run(app, {"events": rows})["by_ad"]["n"].to_list() == [3]


def test_changes_tell_how_a_view_came_to_be(app):
    rows = [Event(AT, 1)] * 4
    changes = testing.run(app, {"events": rows}, batches=4, partitions=1, seed=5).changes("by_ad")
    assert changes["n"].is_sorted()
    assert changes["n"][-1] == 4


def test_no_batch_is_large_because_it_is_the_first():
    app = ms.App("sizes", log="unused")
    app.topic("events", Event, key="ad").stream(time="at").view("latest", key="ad")
    rows = [Event(AT, n) for n in range(1_000)]
    out = testing.run(app, {"events": rows}, batches=20, partitions=1, seed=1)
    reads = out.ledger.filter(step="events")["read"]
    assert reads.sum() == 1_000
    assert reads.max() < 250
    assert reads.tail(5).sum() > 100


def test_an_app_can_be_run_again_and_starts_from_nothing(app):
    for _ in range(2):
        assert testing.run(app, {"events": [Event(AT, 1)]})["by_ad"]["n"].to_list() == [1]


@pytest.mark.parametrize(("option", "number"), [("batches", 0), ("partitions", 0), ("crash", -1)])
def test_numbers_that_mean_nothing_are_refused(app, option, number):
    with pytest.raises(ConfigError, match=f"run's {option} is {number}"):
        testing.run(app, {"events": []}, **{option: number})


def test_what_cannot_be_a_row_is_refused(app):
    with pytest.raises(ConfigError, match="An input row is 5"):
        testing.run(app, {"events": [5]})
    with pytest.raises(ConfigError, match="cannot be JSON"):
        testing.run(app, {"events": [{"ad": {1, 2}}]})
    with pytest.raises(ConfigError, match='Choose "kernel", "local" or "spark"'):
        testing.run(app, {"events": []}, engine="flink")


def test_a_view_that_is_not_there_is_named_with_those_that_are(app):
    with pytest.raises(UnknownViewError, match="by_ad"):
        testing.run(app, {"events": []})["by_add"]


def test_a_native_step_needs_spark():
    app = ms.App("native", log="unused")
    stream = app.topic("events", Event, key="ad").stream(time="at").spark(lambda frame: frame)
    stream.view("latest", key="ad")
    with pytest.raises(ConfigError, match='engine="spark"'):
        testing.run(app, {"events": []})
