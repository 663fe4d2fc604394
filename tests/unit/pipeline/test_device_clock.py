"""Three clocks: the cases N1 to N10 of the rule, to the microsecond."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError

NOON = datetime(2014, 4, 29, 12, tzinfo=UTC)
NINE = datetime(2014, 4, 29, 9, 0, 54, tzinfo=UTC)
TRUE = datetime(2014, 4, 29, 8, tzinfo=UTC)
MS = timedelta(milliseconds=1)


def derived(created, sent, received, true=None, **options):
    frame = pl.DataFrame(
        {"created": [created], "sent": [sent], "received": [received], "true": [true]},
        schema=dict.fromkeys(["created", "sent", "received", "true"], pl.Datetime("us", "UTC")),
    )
    return frame.select(ms.device_time("created", "sent", "received", "true", **options)).item()


@pytest.mark.parametrize(
    ("created", "sent", "received", "true", "expected"),
    [
        pytest.param(NOON, NOON + MS, NINE, TRUE, TRUE, id="N1: a true time is the answer"),
        pytest.param(None, NOON, NINE, None, NINE, id="N2: no time of making"),
        pytest.param(NOON, None, NINE, None, NINE, id="N3: no time of sending"),
        pytest.param(NOON, NOON + MS, None, None, None, id="N4: no time of receipt"),
        pytest.param(NOON + MS, NOON, NINE, None, NINE, id="N5: sent before it was made"),
        pytest.param(NOON, NOON + MS, NINE, None, NINE - MS, id="N6: it waited a millisecond"),
        pytest.param(NOON, NOON, NINE, None, NINE, id="N7: it did not wait"),
        pytest.param(
            NOON - timedelta(days=40),
            NOON,
            NINE,
            None,
            NINE - timedelta(seconds=40 * 86_400),
            id="N8: it waited for 40 days, exactly",
        ),
        pytest.param(None, None, None, TRUE, TRUE, id="a true time needs no other"),
        pytest.param(
            NOON,
            NOON + timedelta(microseconds=1),
            NINE,
            None,
            NINE - timedelta(microseconds=1),
            id="a microsecond is not lost",
        ),
    ],
)
def test_the_answer_is_that_of_the_rule(created, sent, received, true, expected):
    assert derived(created, sent, received, true) == expected


@pytest.mark.parametrize(
    ("waited", "true", "expected"),
    [
        (timedelta(days=40), None, NINE - timedelta(days=7)),
        (timedelta(days=7), None, NINE - timedelta(days=7)),
        (timedelta(days=6), None, NINE - timedelta(days=6)),
        (timedelta(days=40), TRUE - timedelta(days=90), TRUE - timedelta(days=90)),
    ],
)
def test_n9_nothing_but_a_true_time_reaches_back_further_than_allowed(waited, true, expected):
    assert derived(NOON - waited, NOON, NINE, true, max_backdate="7 days") == expected


def test_n10_the_corrected_time_is_what_moves_the_watermark():
    @dataclass
    class Event:
        id: int
        created: datetime
        sent: datetime
        received: datetime

    app = ms.App("devices", log="unused")
    topic = app.topic("events", Event, partitions=1)
    stream = topic.stream(
        time=ms.device_time("created", "sent", "received"), watermark=ms.watermark("0 seconds")
    )
    stream.window(ms.tumbling("1 minute")).agg(n=ms.count()).view("by_minute")

    def event(number, minute, waited_s):
        """An event of a device whose clock is three years ahead."""
        received = NOON + timedelta(minutes=minute)
        sent = received + timedelta(days=1000)
        return Event(number, sent - timedelta(seconds=waited_s), sent, received)

    # Received in minute 5, made in minute 0: it closes no window, though its clock says 2017.
    out = testing.run(app, {"events": [event(1, 0, 0), event(2, 5, 290), event(3, 0, 0)]})
    assert out["by_minute"].is_empty()
    assert out.late == 0
    out = testing.run(app, {"events": [event(1, 0, 0), event(2, 5, 290), event(3, 1, 0)]})
    assert out["by_minute"].select("window_start", "n").rows() == [(NOON, 2)]


def test_limits_and_columns_are_checked_where_they_are_written():
    with pytest.raises(ConfigError, match="max_backdate is 0"):
        ms.device_time("created", "sent", "received", max_backdate="0 seconds")
    with pytest.raises(ConfigError, match="device_time's sent is 5"):
        ms.device_time("created", 5, "received")


MOMENTS = st.none() | st.timedeltas(timedelta(days=-16_000), timedelta(days=16_000)).map(
    lambda since: NOON + since
)


@given(MOMENTS, MOMENTS, MOMENTS, MOMENTS, st.none() | st.timedeltas(MS, timedelta(days=9999)))
def test_a_naive_reading_of_the_rule_agrees(created, sent, received, true, limit):
    if true is not None:
        expected = true
    elif None not in (created, sent, received) and created < sent:
        expected = received - min(sent - created, limit or timedelta.max)
    else:
        expected = received
    assert derived(created, sent, received, true, max_backdate=limit) == expected
