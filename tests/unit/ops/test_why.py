"""What holds a window open, and by how much events missed: sentences that a user can act on."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.ops.why import why_late, why_open

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Click:
    user: str
    at: datetime


def click(seconds, partition):
    at = START + timedelta(seconds=seconds)
    return testing.Row(Click("u", at), partition=partition, at=START)


def after(*rows, idle=None, lateness="0 seconds"):
    app = ms.App("ads", log="unused")
    stream = app.topic("clicks", Click).stream(
        time="at", watermark=ms.watermark("10 seconds", idle=idle), lateness=lateness
    )
    minutes = stream.window(ms.tumbling("1 minute"), name="minutes").agg(n=ms.count())
    minutes.view("minutes", key="window_start")
    minutes.window(ms.tumbling("1 hour"), name="hours").agg(n=ms.sum("n")).view("hours", key="n")
    out = testing.run(app, {"clicks": list(rows)}, partitions=2)
    return out._store, out  # the result keeps its folder for as long as it lives


def test_the_slowest_partition_holds_the_watermark():
    store, _out = after(click(40, 0), click(400, 1))
    minutes, _hours = why_open(store, "ads")
    assert minutes.held_by == ("clicks/0",)
    assert minutes.watermark == START + timedelta(seconds=30)
    text = " ".join(minutes.sentences)
    assert "its watermark is at 2026-01-01 12:00:30Z, since batch 0" in text
    assert "another is at 2026-01-01 12:06:30Z, 6 minutes ahead" in text
    assert "It is never left out" in text


def test_what_would_release_it_depends_on_the_rule():
    store, _out = after(click(40, 0), click(400, 1), idle="30 seconds")
    (minutes,) = why_open(store, "ads", "minutes")
    assert "quiet for 30 seconds of running time" in minutes.sentences[-1]


def test_a_step_behind_another_is_held_by_it():
    store, _out = after(click(40, 0), click(400, 1))
    (hours,) = why_open(store, "ads", "hours")
    assert hours.held_by == ("the step 'minutes'",)


def test_with_nothing_read_from_a_partition_there_is_no_watermark():
    store, _out = after(click(40, 0), testing.Tick("1 second"))
    (minutes,) = why_open(store, "ads", "minutes")
    assert minutes.watermark is None
    assert minutes.held_by == ("clicks/1",)
    assert "no event has come from it yet" in minutes.sentences[1]
    assert "its watermark is not set yet" in minutes.sentences[0]


def test_since_when_is_kept_while_the_watermark_stands():
    rows = [click(40, 0), click(400, 1), testing.Tick("1 second"), click(500, 1)]
    store, _out = after(*rows)
    (minutes,) = why_open(store, "ads", "minutes")
    assert minutes.since_batch_id == 0


def test_late_events_are_counted_with_the_most_that_one_missed_by():
    rows = [click(200, 0), click(200, 1), click(50, 0), click(20, 1), click(70, 1)]
    store, _out = after(*rows, lateness="20 seconds")
    (late,) = why_late(store, "ads")
    # Both lanes stand at 190: the first minute expired at 80, the second at 140.
    assert (late.step, late.events, late.missed_by_us) == ("minutes", 3, 110_000_000)
    assert "The latest missed by 1 minute 50 seconds" in late.sentences[1]


def test_a_step_that_is_not_there_is_named_with_those_that_are():
    store, _out = after(click(40, 0))
    with pytest.raises(ConfigError, match=r"no step 'minuts'.*'minutes', 'hours'"):
        why_open(store, "ads", "minuts")
    with pytest.raises(ConfigError, match="no step 'minuts'"):
        why_late(store, "ads", "minuts")


def test_nothing_late_needs_no_words():
    store, _out = after(click(40, 0))
    assert why_late(store, "ads") == []
