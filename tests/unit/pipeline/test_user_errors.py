"""Rows on which the user's code fails: aside with their place and reason, or the job stops."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import App, count, sum, testing, tumbling, watermark  # noqa: A004
from millstream.errors import UserCodeError

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Event:
    at: datetime
    id: int
    text: str
    words: list[str]


def event(number, text="1", words=()):
    return Event(START + timedelta(seconds=number), number, text, list(words))


def new_app(**options):
    app = App("errors", log="unused", **options)
    rule = watermark("0 seconds", idle=None)
    return app, app.topic("events", Event, partitions=3).stream(time="at", watermark=rule)


NUMBER = pl.col("text").str.to_integer()


@given(
    texts=st.lists(st.sampled_from(["1", "2", "x", "y"]), max_size=40),
    batches=st.integers(1, 5),
    partitions=st.sampled_from([1, 4, 7]),
    seed=st.integers(0, 99),
)
@settings(max_examples=some(30), deadline=None)
def test_dead_rows_keep_their_place_and_bytes_past_other_steps(texts, batches, partitions, seed):
    app, stream = new_app()
    kept = stream.filter(pl.col("text") != "2").drop("words")
    kept.with_columns(number=NUMBER, name="parse").view("out", key="id")
    events = [event(i, text) for i, text in enumerate(texts)]
    inputs = {"events": events}
    out = testing.run(app, inputs, batches=batches, partitions=partitions, seed=seed)
    everything = new_app()
    everything[1].view("all", key="id")
    dead = out.dead.to_dicts()
    values = [json.loads(letter["value"]) for letter in dead]
    assert sorted(v["id"] for v in values) == [i for i, t in enumerate(texts) if t in "xy"]
    assert all(value["words"] == [] for value in values)  # a field that the plan never reads
    assert {(d["topic"], d["step"], d["number"]) for d in dead} <= {("events", "parse", 0)}
    places = {(d["partition"], d["offset"]): v["id"] for d, v in zip(dead, values, strict=True)}
    assert len(places) == len(dead)
    for partition in range(partitions):  # within a partition, offsets are in the order of sending
        ids = [places[place] for place in sorted(places) if place[0] == partition]
        assert ids == sorted(ids)
    assert out["out"]["id"].to_list() == [i for i, t in enumerate(texts) if t == "1"]


def test_several_dead_rows_of_one_record_are_told_apart():
    app, stream = new_app()
    words = stream.explode("words").with_columns(n=pl.col("words").str.to_integer(), name="parse")
    words.view("out", key="words")
    out = testing.run(app, {"events": [event(0, words=["1", "a", "b", "a"])]})
    dead = out.dead
    assert dead["number"].to_list() == [0, 1, 2]
    assert dead["offset"].to_list() == [0, 0, 0]
    assert out.ledger.filter(step="parse").select("read", "emitted", "dead").row(0) == (4, 1, 3)


def test_undecodable_records_are_dead_at_their_source():
    app, stream = new_app()
    stream.view("out", key="id")
    out = testing.run(app, {"events": [b"nonsense", event(1)]}, partitions=1)
    letter = out.dead.to_dicts()[0]
    assert (letter["step"], letter["value"], letter["number"]) == ("events", b"nonsense", 0)


def test_behind_a_window_the_row_itself_is_kept():
    app, stream = new_app()
    results = stream.window(tumbling("10 seconds"), by="text").emit("update").agg(n=count())
    results.with_columns(number=NUMBER, name="late parse").view("out")
    out = testing.run(app, {"events": [event(1, "7"), event(2, "x"), event(3, "x")]}, batches=1)
    letter = out.dead.to_dicts()[0]
    assert (letter["topic"], letter["partition"], letter["offset"]) == ("", -1, -1)
    assert json.loads(letter["value"]) == {
        "window_start": "2026-01-01T00:00:00+00:00",
        "window_end": "2026-01-01T00:00:10+00:00",
        "text": "x",
        "n": 2,
    }
    assert out["out"]["number"].to_list() == [7]


def test_rows_that_an_aggregate_fails_on_are_dead_at_its_window():
    app, stream = new_app()
    total = stream.window(tumbling("10 seconds"), name="total").emit("update").agg(t=sum(NUMBER))
    total.view("out", key="window_start")
    out = testing.run(app, {"events": [event(1, "7"), event(2, "x"), event(3, "8")]}, partitions=1)
    assert out["out"]["t"].to_list() == [15]
    assert out.dead["step"].to_list() == ["total"]
    line = out.ledger.filter(step="total")
    assert (line["read"].sum(), line["held"].sum(), line["dead"].sum()) == (3, 2, 1)


def test_a_row_without_a_good_reading_does_not_hold_the_watermark_back():
    app, stream = new_app()
    parsed = stream.with_columns(number=NUMBER)
    parsed.window(tumbling("10 seconds")).agg(n=count()).view("out", key="window_start")
    out = testing.run(app, {"events": [event(1), event(25, "x")]}, partitions=1)
    assert out["out"]["n"].to_list() == [1]


@pytest.mark.parametrize("by_app", [True, False])
def test_to_stop_is_for_an_app_or_a_step(by_app):
    app, stream = new_app(on_error="stop" if by_app else "dead-letter")
    parsed = stream.with_columns(number=NUMBER, on_error=None if by_app else "stop")

    parsed.view("out", key="id")
    with pytest.raises(UserCodeError, match=r"step 'with_columns\(number\)' failed") as caught:
        testing.run(app, {"events": [event(1), event(2, "x")]})
    assert '"text":"x"' in str(caught.value)
    assert f"It is declared at {__file__}:" in str(caught.value)
    if by_app:
        calm = stream.with_columns(number=NUMBER, on_error="dead-letter")
        app.outputs.clear()
        calm.view("calm", key="id")
        assert testing.run(app, {"events": [event(2, "x")]}).dead.height == 1


def test_a_program_that_fails_on_every_row_stops_whatever_the_policy():
    app, stream = new_app()
    stream.with_columns(number=NUMBER).view("out", key="id")
    many = [event(i, "x") for i in range(2000)]
    with pytest.raises(UserCodeError, match="each of more than 100 rows"):
        testing.run(app, {"events": many}, partitions=1)
