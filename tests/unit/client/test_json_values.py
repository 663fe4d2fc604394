"""What a program sends is what a schema reads back: the same value, or an error where it is sent."""

import dataclasses
import enum
import json
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.client.serializers import encode_value
from millstream.client.tables import rows_to_json
from millstream.errors import ConfigError


class Kind(enum.Enum):
    SEEN = "seen"


@dataclasses.dataclass
class Place:
    city: str
    since: date


@dataclasses.dataclass
class Event:
    at: datetime
    day: date
    hour: time
    took: timedelta
    cost: Decimal
    id: UUID
    raw: bytes
    kind: str
    place: Place
    n: int | None


ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30))])
MICROSECONDS = st.integers(-(10**15), 10**15).map(lambda us: timedelta(microseconds=us))
COSTS = st.decimals(-(10**12), 10**12, places=6)
EVENTS = st.builds(
    Event,
    at=st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=ZONES),  # noqa: DTZ001
    day=st.dates(),
    hour=st.times(),
    took=MICROSECONDS,
    cost=COSTS,
    id=st.uuids(),
    raw=st.binary(),
    kind=st.just(Kind.SEEN),
    place=st.builds(Place, city=st.text(), since=st.dates()),
    n=st.none() | st.integers(-(2**63), 2**63 - 1),
)


def read_back(values):
    app = ms.App("a", log="unused")
    stream = app.topic("t", Event, metadata=("offset",)).stream()
    hours = stream.with_columns(hour=pl.col("hour").dt.to_string("%H:%M:%S%.6f"))  # views have none
    hours.view("v", key="offset")
    out = testing.run(app, {"t": [encode_value(value) for value in values]}, partitions=1)
    assert out.dead.is_empty(), out.dead
    return out["v"].sort("offset").to_dicts()


@settings(max_examples=6, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_what_is_sent_is_read_back_by_its_schema_as_the_same_value(events):
    for sent, got in zip(events, read_back(events), strict=True):
        zoned = sent.at if sent.at.tzinfo else sent.at.replace(tzinfo=UTC)
        assert got["at"] == zoned
        hour = sent.hour.strftime("%H:%M:%S.%f")
        wanted = [sent.day, hour, sent.took, sent.cost, str(sent.id), sent.raw]
        assert [got[name] for name in ("day", "hour", "took", "cost", "id", "raw")] == wanted
        place = {"city": sent.place.city, "since": sent.place.since.isoformat()}
        assert (got["kind"], json.loads(got["place"]), got["n"]) == ("seen", place, sent.n)


def test_a_pydantic_model_is_sent_under_the_names_that_it_reads():
    class Click(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", populate_by_name=True)
        user: str = pydantic.Field(validation_alias="userId", serialization_alias="uid")
        cost: Decimal
        tags: list[Kind] = []

    click = Click(userId="u", cost=Decimal("1.50"), tags=[Kind.SEEN], more=1)
    sent = encode_value(click)
    assert json.loads(sent) == {"userId": "u", "cost": "1.50", "tags": ["seen"], "more": 1}
    assert Click.model_validate_json(sent) == click


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": Decimal("NaN")}, "the Decimal NaN is no number"),
        ({"x": float("inf")}, "cannot be sent"),
        ({"x": {1, 2}}, "a value of type set"),
        ({"x": time(1, tzinfo=UTC)}, "has a time zone"),
        ({"x": pd.Timestamp("2026-01-01T00:00:00.123456789")}, "has nanoseconds"),
        ({"x": pd.Timedelta(5, "ns")}, "has nanoseconds"),
        ({"x": object()}, "a value of type object"),
        ({datetime(2026, 1, 1, tzinfo=UTC): 1}, "cannot be sent"),
    ],
)
def test_what_nothing_would_read_back_is_refused_where_it_is_sent(value, words):
    with pytest.raises(ConfigError, match=words):
        encode_value(value)


def test_small_things_of_other_libraries_are_sent_as_what_they_are():
    offset = timezone(timedelta(minutes=53, seconds=28))
    value = {
        "n": np.int64(3),
        "missing": pd.NaT,
        "at": datetime(1893, 1, 1, tzinfo=offset),
        "short": timedelta(microseconds=-1),
    }
    assert json.loads(encode_value(value)) == {
        "n": 3,
        "missing": None,
        "at": "1892-12-31T23:06:32+00:00",
        "short": "-PT0.000001S",
    }


# -- tables -------------------------------------------------------------------------------------

AT = datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=UTC)
ROWS = {"user": ["a", "b", None], "n": [1, None, 3], "at": [AT, AT, None], "cost": [0.1, 2.0, None]}
WANTED = [
    {"user": "a", "n": 1, "at": AT.isoformat(), "cost": 0.1},
    {"user": "b", "n": None, "at": AT.isoformat(), "cost": 2.0},
    {"user": None, "n": 3, "at": None, "cost": None},
]


@pytest.mark.parametrize(
    "made",
    [
        pl.DataFrame,
        pa.table,
        pa.RecordBatch.from_pydict,
        lambda rows: pl.DataFrame(rows).to_pandas().astype({"n": "Int64"}),
    ],
    ids=["polars", "arrow", "batch", "pandas"],
)
def test_the_rows_of_a_table_are_sent_as_json_objects_with_a_column_as_key(made, tmp_path):
    with ms.connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("t")
        assert producer.send_many("t", rows=made(ROWS), key="user").result() == 3
        got = list(log.consumer("t", follow=False))
    assert [record.json() for record in got] == WANTED
    assert [record.key for record in got] == [b"a", b"b", None]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"s": st.none() | st.text(), "n": st.none() | st.integers(-(2**63), 2**63 - 1)}
        ),
        min_size=1,
    )
)
def test_rows_that_polars_writes_are_those_that_python_writes(rows):
    frame = pl.DataFrame(rows, schema={"s": pl.String, "n": pl.Int64})
    values, _ = rows_to_json(frame, None)
    assert [json.loads(value) for value in values.to_pylist()] == rows


@pytest.mark.parametrize(
    ("rows", "key", "words"),
    [
        (pl.DataFrame({"user": ["a"]}), "usr", "Did you mean 'user'"),
        (pl.DataFrame({"x": [1.5]}), "x", "a column of Float64"),
        (pl.DataFrame({"x": [float("nan")]}), None, "cannot be sent"),
        (pl.DataFrame(), None, "give each another name"),
        ({"x": [1]}, None, "rows is a dict"),
    ],
)
def test_tables_that_cannot_be_sent_are_refused(rows, key, words):
    with pytest.raises(ConfigError, match=words):
        rows_to_json(rows, key)


def test_an_index_of_pandas_is_a_column_if_it_has_a_name():
    frame = pd.DataFrame({"n": [1, 2]}, index=pd.Index(["a", "b"], name="user"))
    values, keys = rows_to_json(frame, "user")
    assert json.loads(values[0].as_py()) == {"user": "a", "n": 1}
    assert keys.to_pylist() == [b"a", b"b"]


def test_a_table_with_values_may_be_of_any_of_the_three_and_goes_alone(tmp_path):
    with ms.connect(tmp_path) as log, log.producer() as producer:
        log.create_topic("t")
        for table in (pl.DataFrame({"value": ["x"]}), pd.DataFrame({"value": ["x"]})):
            assert producer.send_many("t", table).result() == 1
        with pytest.raises(ConfigError, match="give it as rows="):
            producer.send_many("t", pl.DataFrame({"user": ["a"]}))
        with pytest.raises(ConfigError, match="give one of them"):
            producer.send_many("t", pl.DataFrame({"value": ["x"]}), rows=pl.DataFrame({"a": [1]}))
        with pytest.raises(ConfigError, match="no rows were given"):
            producer.send_many("t", values=["x"], key="user")
        assert [record.value for record in log.consumer("t", follow=False)] == [b"x", b"x"]
