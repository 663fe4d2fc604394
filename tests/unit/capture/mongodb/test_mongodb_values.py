"""Values by the table of docs/capture-mongodb.md, and change events as MongoDB's manual describes them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pymongo", reason="the driver of MongoDB is not installed here")

import bson
from bson import Code, DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.dbref import DBRef
from bson.json_util import loads

from millstream.capture.mongodb.events import ClusterTime, merged, read_event, token_time
from millstream.capture.mongodb.session import _CODEC
from millstream.capture.mongodb.values import (
    json_value,
    key_value,
    moment,
    parsed_id,
    row_of,
    stored_id,
)
from millstream.errors import ConfigError, CorruptionError

OBJECT_ID = ObjectId("65a1b2c3d4e5f60718293a4b")
EVENTS = json.loads((Path(__file__).parent / "change_events.json").read_text())


def served(value):
    """Return a value as the driver gives it to a capture."""
    return bson.decode(bson.encode({"v": value}), _CODEC)["v"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, 1),
        (Int64(2**63 - 1), 2**63 - 1),
        (1.5, 1.5),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (Decimal128("1.10"), "1.10"),
        (Decimal128("NaN"), "NaN"),
        (True, True),
        (None, None),
        ("é\u2028", "é\u2028"),
        (OBJECT_ID, "65a1b2c3d4e5f60718293a4b"),
        (datetime(2026, 1, 2, 3, 4, 5, 678000, UTC), "2026-01-02T03:04:05.678Z"),
        (DatetimeMS(-62167219200001), "-000001-12-31T23:59:59.999Z"),
        (DatetimeMS(253402300800000), "+010000-01-01T00:00:00.000Z"),
        (b"\0\xff", "AP8="),
        (Binary(b"\0\xff", 128), "AP8="),
        (Binary(bytes(range(16)), 4), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (Timestamp(7, 2), {"t": 7, "i": 2}),
        (Regex("^a", "i"), {"pattern": "^a", "options": "i"}),
        (Code("f()"), "f()"),
        (Code("f()", {"a": OBJECT_ID}), {"code": "f()", "scope": {"a": str(OBJECT_ID)}}),
        (DBRef("c", OBJECT_ID), {"$ref": "c", "$id": str(OBJECT_ID)}),
        (MinKey(), {"minKey": 1}),
        (MaxKey(), {"maxKey": 1}),
        ([{"a": [OBJECT_ID]}, 2], [{"a": [str(OBJECT_ID)]}, 2]),
    ],
)
def test_each_type_is_as_the_table_says(value, shown):
    found = json_value(served(value))
    assert json.dumps(found) == json.dumps(shown)


@given(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)))  # noqa: DTZ001
def test_dates_are_iso_8601(at):
    at = at.replace(microsecond=at.microsecond // 1000 * 1000, tzinfo=UTC)
    ms = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    expected = at.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    assert moment(ms) == expected


IDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1).map(Int64)
    | st.floats()
    | st.text("0123456789abcdef", min_size=24, max_size=24)
    | st.text(max_size=3).filter(lambda text: "\0" not in text)
    | st.binary(min_size=12, max_size=12).map(ObjectId)
    | st.binary(max_size=3)
    | st.binary(min_size=16, max_size=16).map(lambda data: Binary(data, 4))
    | st.integers(-(2**40), 2**40).map(DatetimeMS)
    | st.decimals(places=1, min_value=-9, max_value=9).map(lambda number: Decimal128(str(number))),
    lambda inner: st.dictionaries(st.sampled_from(["a", "b", "text"]), inner, max_size=2),
    max_leaves=3,
)


def like(value):
    """Return what MongoDB compares of an ``_id``: numbers by their value, all else with its type."""
    if isinstance(value, dict):
        return tuple((name, like(one)) for name, one in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (type(value).__name__, repr(value))
    return ("number", repr(float(value)), repr(int(value)) if value == value // 1 else "") if value == value and abs(value) != float("inf") else ("number", repr(value))  # fmt: skip


@settings(max_examples=some(300))
@given(IDS, IDS)
def test_two_documents_never_have_one_key(one, other):
    one, other = served(one), served(other)
    keys = [json.dumps(key_value(value)) for value in (one, other)]
    if like(one) != like(other):
        assert keys[0] != keys[1]
    assert json.dumps(key_value(parsed_id(stored_id(one)))) == keys[0]


def test_a_text_that_looks_like_an_object_id_says_that_it_is_a_text():
    assert row_of({"_id": OBJECT_ID, "ref": OBJECT_ID}) == {
        "_id": str(OBJECT_ID),
        "ref": str(OBJECT_ID),
    }
    assert row_of({"_id": str(OBJECT_ID)}) == {"_id": {"$text": str(OBJECT_ID)}}


def test_a_type_that_is_not_known_is_an_error():
    with pytest.raises(TypeError, match="has the type complex"):
        row_of({"_id": 1, "a": [1j]})


# ── events ──────────────────────────────────────────────────────────────────────────────────


def document(event):
    """Return an event, which is stored as Extended JSON, as the driver gives it."""
    return bson.decode(bson.encode(loads(json.dumps(event))), _CODEC)


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_events_of_the_manual_are_read(name):
    event, expected = EVENTS[name]["event"], EVENTS[name]["read"]
    found = read_event(document(event))
    for field, value in expected.items():
        shown = getattr(found, field)
        if isinstance(shown, dict):
            shown = row_of(shown)
        assert json.loads(json.dumps(shown)) == value, field
    assert found.token == event["_id"]


def test_an_event_that_is_not_known_is_refused():
    known = document(EVENTS["insert"]["event"])
    with pytest.raises(ConfigError, match="of type 'explode'"):
        read_event(known | {"operationType": "explode"})
    with pytest.raises(CorruptionError, match="lacks what each has"):
        read_event({"operationType": "insert"})


def test_fragments_are_one_event():
    whole = document(EVENTS["update"]["event"])
    fields = [{name: value} for name, value in whole.items() if name != "_id"]
    fragments = [
        {"_id": {"_data": f"82{at}"}, "splitEvent": {"fragment": at, "of": len(fields)}, **field}
        for at, field in enumerate(fields, 1)
    ]
    found = merged(fragments)
    assert found == whole | {"_id": fragments[-1]["_id"]}


@pytest.mark.parametrize(
    ("token", "time"),
    [
        ({"_data": "8262F66C02000000032B022C0100296E"}, ClusterTime(0x62F66C02, 3)),
        ({"_data": "8262F66C020000000"}, None),
        ({"_data": "8162F66C02000000032B"}, None),
        ({"_data": "82zz"}, None),
        ({"_data": 5}, None),
        ({}, None),
    ],
)
def test_the_time_of_a_token_is_its_first_field(token, time):
    assert token_time(token) == time
