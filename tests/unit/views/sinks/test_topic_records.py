"""Rows as records: what JSON has stays, what it lacks becomes text, and a row taken back is told."""

import base64
import datetime as dt
import json
import math
from decimal import Decimal

import polars as pl
import pytest
from after_main_thread import run_after_the_main_thread
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.plan import TopicSinkSpec
from millstream.views.sinks.topic_records import to_records


def end(key, value, cleanup="delete"):
    return TopicSinkSpec("t", key, value, 1, cleanup)


def values(records):
    return [value.as_py() for value in records.values]


def naive(value):
    """The JSON value of a Python value, as the documentation says it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime):
        text = value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
        return text.replace("000Z", "Z") if "." in text else text
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, list):
        return [naive(one) for one in value]
    if isinstance(value, dict):
        return {name: naive(one) for name, one in value.items()}
    return value


TYPES = {
    "^i$": pl.Int64,
    "f": pl.Float64,
    "s": pl.String,
    "b": pl.Boolean,
    "at": pl.Datetime("us", "UTC"),
    "day": pl.Date,
    "d": pl.Decimal(20, 4),
    "raw": pl.Binary,
    "l": pl.List(pl.Datetime("us", "UTC")),
    "o": pl.Struct({"x": pl.Decimal(10, 1), "y": pl.List(pl.Struct({"z": pl.Binary}))}),
}
_TIMES = st.datetimes(dt.datetime(1000, 1, 1), dt.datetime(9000, 1, 1), timezones=st.just(dt.UTC))  # noqa: DTZ001
_MS_TIMES = _TIMES.map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000))
_X = st.decimals(-999, 999, places=1)
ROWS = st.fixed_dictionaries(
    {
        "^i$": st.integers(-(2**63), 2**63 - 1) | st.none(),
        "f": st.floats() | st.none(),
        "s": st.text(st.characters(codec="utf-8")) | st.none(),
        "b": st.booleans() | st.none(),
        "at": _MS_TIMES | st.none(),
        "day": st.dates(dt.date(1000, 1, 1), dt.date(9000, 1, 1)) | st.none(),
        "d": st.decimals(-(10**15), 10**15, places=4) | st.none(),
        "raw": st.binary(max_size=9) | st.none(),
        "l": st.lists(_MS_TIMES | st.none(), max_size=3) | st.none(),
        "o": st.none()
        | st.fixed_dictionaries(
            {
                "x": _X | st.none(),
                "y": st.lists(st.fixed_dictionaries({"z": st.binary(max_size=5)}), max_size=3)
                | st.none(),
            }
        ),
    }
)


@settings(max_examples=some(100), deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_every_column_is_the_json_that_is_promised(rows):
    frame = pl.DataFrame(rows, schema=TYPES).with_columns(pl.lit(0, pl.Int64).alias(TIME))
    (made,) = to_records(frame, end(None, tuple(TYPES)), compacted=False)
    assert [json.loads(value) for value in values(made)] == [naive(row) for row in rows]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (dt.timedelta(hours=1, minutes=30), "PT1H30M"),
        (dt.timedelta(seconds=1.5), "PT1.5S"),
        (dt.timedelta(microseconds=-1), "-PT0.000001S"),
        (dt.datetime(2020, 1, 1, 0, 0, 0, 5), "2020-01-01T00:00:00.000005Z"),  # noqa: DTZ001
    ],
)
def test_durations_and_microseconds_are_whole(value, text):
    (made,) = to_records(pl.DataFrame({"v": [value]}), end(None, ("v",)), compacted=False)
    assert values(made) == [json.dumps({"v": text}, separators=(",", ":")).encode()]


def test_a_zoned_time_is_the_same_instant():
    berlin = pl.Series("v", [dt.datetime(2020, 6, 1, 12)]).dt.replace_time_zone("Europe/Berlin")  # noqa: DTZ001
    (made,) = to_records(berlin.to_frame(), end(None, ("v",)), compacted=False)
    assert json.loads(values(made)[0]) == {"v": "2020-06-01T10:00:00Z"}


def test_keys_are_text_and_timestamps_are_event_time():
    frame = pl.DataFrame({"k": [7, None], "v": ["a", "b"], TIME: [1_999, -1]})
    (made,) = to_records(frame, end("k", "v"), compacted=False)
    assert [key.as_py() for key in made.keys] == [b"7", None]
    assert values(made) == [b"a", b"b"]
    assert made.timestamps_ms.to_pylist() == [1, -1]
    assert made.headers is None


def test_rows_taken_back_say_so_in_the_object_or_beside_a_bare_value():
    frame = pl.DataFrame({"k": ["x", "x"], "v": ["a", "b"], TIME: [0, 0], DIFF: [-1, 1]})
    (made,) = to_records(frame, end("k", ("v",)), compacted=False)
    assert values(made) == [b'{"v":"a","_diff":-1}', b'{"v":"b","_diff":1}']
    (made,) = to_records(frame, end("k", "v"), compacted=False)
    assert made.headers.to_pylist() == [
        [{"key": "_diff", "value": b"-1"}],
        [{"key": "_diff", "value": b"1"}],
    ]


def test_in_a_compacted_topic_a_key_taken_back_is_a_tombstone():
    frame = pl.DataFrame(
        {"k": ["x", "x", "y"], "v": [1, 2, 3], TIME: [5000, 5000, 6000], DIFF: [-1, 1, -1]}
    )
    gone, kept = to_records(frame, end("k", ("v",), "compact"), compacted=True)
    assert [key.as_py() for key in gone.keys] == [b"y"]
    assert values(gone) == [None]
    assert gone.timestamps_ms.to_pylist() == [6]
    assert [key.as_py() for key in kept.keys] == [b"x"]
    assert values(kept) == [b'{"v":2}']
    assert to_records(frame.clear(), end("k", ("v",)), compacted=True) == []


def test_records_are_made_one_ahead_when_the_main_thread_has_ended():
    run_after_the_main_thread(
        """
        from millstream.views.sinks.topics import prefetch
        assert list(prefetch(iter(["a", "b"]))) == ["a", "b"]
        """
    )
