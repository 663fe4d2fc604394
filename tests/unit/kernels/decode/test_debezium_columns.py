"""Envelopes decoded in blocks are what they are record by record, however odd a record is, and in any block."""

import base64
import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.decode.debezium_columns import PlainKeys
from millstream.kernels.decode.debezium_records import DebeziumDecoder, DebeziumFormat
from millstream.kernels.decode.debezium_values import PLACEHOLDER, ColumnEncoding
from millstream.kernels.decode.fields import Field

BASE64 = base64.b64encode(PLACEHOLDER.encode()).decode()
FIELDS = (
    Field("id", pa.int64(), required=True),
    Field("name", pa.string(), required=False),
    Field("price", pa.decimal128(38, 9), required=True),
    Field("at", pa.timestamp("us", "UTC"), required=False),
    Field("data", pa.binary(), required=False, wire="raw"),
    Field("ratio", pa.float64(), required=False),
    Field("done", pa.bool_(), required=False, default=True),
)
GOOD = {
    "id": st.integers(1, 3),
    "name": st.sampled_from(["a", "ü", "", None]),
    "price": st.sampled_from(["1.50", "-3", 7, "12345678901234567890.123456789"]),
    "at": st.sampled_from(
        ["2026-01-02T03:04:05.6Z", "2026-01-02T03:04:05", None, "2026-01-02 03:04"]
    ),
    "raw": st.sampled_from(["", "AP8=", None]),
    "ratio": st.sampled_from([0.5, 1, -0.0, None, 1e300]),
    "done": st.sampled_from([True, False, None]),
    "other": st.just({"x": [1]}),
}
ODD = st.sampled_from(
    [
        None,
        "NaN",
        "Infinity",
        PLACEHOLDER,
        BASE64,
        [PLACEHOLDER],
        0,
        1,
        -1,
        True,
        1.5,
        "x",
        {},
        [],
        1 << 70,
        json.dumps({PLACEHOLDER: PLACEHOLDER}, separators=(",", ":")),
        "1e400",
        "\ud800",
        "AP8",
        10**30,
    ]
)
KEY = FIELDS[:1]


@st.composite
def rows(draw):
    row = {name: draw(values) for name, values in GOOD.items()}
    for name in draw(st.lists(st.sampled_from(list(row)), max_size=2)):
        if draw(st.booleans()):
            row[name] = draw(ODD)
        else:
            row.pop(name, None)
    return row


TRANSACTION = st.sampled_from(
    [{"id": "7:1", "total_order": 3, "data_collection_order": 1}] * 5
    + [None, {"id": "7:1"}, {"id": 7, "total_order": 1}, {"id": "a", "total_order": -1}]
    + [{"id": "a", "total_order": True}, {"id": "a", "total_order": 1 << 62}, "7:1", {}]
)
SOURCE = st.sampled_from(
    [{"ts_ms": 1_767_225_600_000, "ts_us": 1_767_225_600_000_123}] * 5
    + [
        {"ts_ms": 1_767_225_600_000},
        None,
        {},
        {"ts_us": 1.5},
        {"ts_us": 1 << 60},
        {"ts_ms": -(1 << 60)},
    ]
    + [{"ts_us": None, "ts_ms": 253_402_300_799_999}, {"ts_ms": True}, [1]]
)


@st.composite
def envelopes(draw):
    value = {
        "op": draw(st.sampled_from([*"ccuuurrddd", "t", "m", "x", None, 1])),
        "before": draw(st.one_of(st.none(), rows(), st.just({"id": 2}))),
        "after": draw(st.one_of(rows(), rows(), st.none(), st.just(5))),
        "transaction": draw(TRANSACTION),
        "source": draw(SOURCE),
    }
    if draw(st.integers(0, 5)) == 0:
        value["unavailable"] = draw(st.sampled_from([[], None, ["name"], ["other"], [1], "name"]))
    if draw(st.integers(0, 5)) == 0:
        value["carry_from"] = draw(st.sampled_from([{"id": 1}, None, 3]))
    if draw(st.integers(0, 9)) == 0:
        value.pop(draw(st.sampled_from(list(value))))
    if draw(st.integers(0, 9)) == 0:
        value = {"schema": None, "payload": value}
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    return draw(st.sampled_from([text] * 9 + [None, b"", b"[]", text[:-1], b" " + text + b"\n"]))


KEYS = (
    b'{"id":1}',
    b'{"id": 1}',
    b'{"id":"a,\\"x\\":"}',
    b'{"id":1,"x":2}',
    b'{"x":1}',
    b"[",
    None,
)


def records(values, keys=None):
    count = len(values)
    return pa.record_batch(
        {
            "offset": pa.array(range(count), pa.int64()),
            "timestamp": pa.array([1_700_000_000_000] * count, pa.timestamp("ms", "UTC")),
            "key": pa.array(keys or [b'{"id": 1}'] * count, pa.binary()),
            "value": pa.array(values, pa.binary()),
        }
    )


def outcome(decoded):
    table = decoded.table.to_pylist()
    return [repr(row) for row in table], decoded.good.tolist(), sorted(decoded.errors)


@settings(max_examples=some(60), deadline=None)
@given(
    values=st.lists(envelopes(), min_size=1, max_size=12),
    transactions=st.booleans(),
    several=st.booleans(),
    decimals=st.sampled_from([None, "string", "double"]),
    strict=st.booleans(),
    data=st.data(),
)
def test_in_blocks_and_record_by_record_give_the_same(
    values, transactions, several, decimals, strict, data
):
    encodings = tuple((one.name, ColumnEncoding(decimals, time_unit="us")) for one in FIELDS)
    form = DebeziumFormat(KEY, encodings, transactions, strict_key=strict)
    decoder = DebeziumDecoder(form, FIELDS)
    batch = records(values, [data.draw(st.sampled_from(KEYS)) for _ in values])
    by_record = decoder._by_record(batch, np.arange(len(values)), transactions or not several)
    assert outcome(decoder.decode(batch, several_partitions=several)) == outcome(by_record)


def test_a_deletion_and_its_tombstone_leave_the_rows_behind_them_at_their_places():
    """Where nothing is left to be decoded by itself, and the tombstones are added behind the rows."""
    written, deleted = (
        json.dumps({"op": op, "before": None, "after": None, **row}).encode()
        for op, row in (("c", {"after": {"id": 1}}), ("d", {"before": {"id": 1}}))
    )
    values = [written, deleted, None, written]
    found = DebeziumDecoder(DebeziumFormat(KEY, transactions=True), KEY).decode(
        records(values), several_partitions=False
    )
    assert found.good.tolist() == [0, 1, 2, 3]
    assert found.table["__kind"].to_pylist() == ["upsert", "delete", "mark", "upsert"]


@pytest.mark.parametrize(
    ("names", "key", "fits"),
    [
        (("id",), b'{"id":1}', True),
        (("id",), b'{"id":"a,\\"b\\":{"}', True),
        (("id",), b'{"id":1,"part":2}', False),
        (("id", "part"), b'{"part":"}","id":-1.5}', True),
        (("id", "part"), b'{"id":1,"id":2}', False),
        (("id", "part"), b'{"id":1}', False),
        (("é.*",), '{"é.*":null}'.encode(), True),
        (("é.*",), '{"ééé":1}'.encode(), False),
        (('a"b',), b'{"a\\"b":1}', True),
        (("id",), None, False),
    ],
)
def test_keys_with_other_columns_are_not_plain(names, key, fits):
    assert PlainKeys(names).fit(pa.array([key], pa.binary())).tolist() == [fits]


def test_records_as_capture_writes_them_are_decoded_in_blocks():
    after = {
        "id": 1,
        "name": "a",
        "price": "1.5",
        "at": None,
        "raw": None,
        "ratio": None,
        "done": True,
    }
    base = {
        "source": {"ts_us": 1_767_225_600_000_123},
        "transaction": {"id": "t", "total_order": 1},
    }
    values = [
        {**base, "op": "c", "before": None, "after": after},
        {**base, "op": "u", "before": {"id": 1}, "after": after},
        {**base, "op": "d", "before": {"id": 1}, "after": None},
        {**base, "op": "u", "before": {"id": 2}, "after": after},  # another key
        {**base, "op": "u", "before": None, "after": after, "unavailable": ["name"]},
        {**base, "op": "t", "before": None, "after": None},
    ]
    form = DebeziumFormat(KEY, (("price", ColumnEncoding("string")),), transactions=True)
    decoder = DebeziumDecoder(form, FIELDS)
    batch = records([*(json.dumps(value).encode() for value in values), None])
    table, at = decoder._plain.decode(batch)
    assert at.tolist() == [0, 1, 2, 6]
    assert table.column("__kind").to_pylist() == ["upsert", "upsert", "delete", "mark"]
    committed = datetime(2026, 1, 1, tzinfo=UTC).replace(microsecond=123)
    assert table.column("__committed").to_pylist()[:3] == [committed] * 3
    assert table.column("id").to_pylist() == [1, 1, 1, None]


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.list_(pa.int64())])
def test_columns_that_json_has_otherwise_are_read_record_by_record(kind):
    fields = (*FIELDS, Field("odd", kind, required=False))
    decoder = DebeziumDecoder(DebeziumFormat(KEY), fields)
    assert len(decoder._plain.decode(records([b"{}"]))[1]) == 0
