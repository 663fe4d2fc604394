"""Debezium's records as its connectors write them: golden ones, and values by the types of columns.

The statements and inputs are those of a run of Debezium 3.6.3 against PostgreSQL 15, with their results.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from millstream.kernels.decode.captured import COMMITTED, TOTAL, TRANSACTION, UNAVAILABLE
from millstream.kernels.decode.debezium_records import (
    TRANSACTION_FIELDS,
    DebeziumDecoder,
    DebeziumFormat,
    TransactionDecoder,
)
from millstream.kernels.decode.debezium_values import ColumnEncoding
from millstream.kernels.frames import EXTRA, KIND
from millstream.pipeline.schema import schema_of

PLACEHOLDER = "__debezium_unavailable_value"
STAMP = datetime(2026, 2, 1, tzinfo=UTC)


def decoded(schema, values, *, keys=None, encodings=(), several=False, transactions=False):
    """Decode values of a table whose key is ``id``; return its rows and errors."""
    fields = schema_of({"id": int, **schema}, what="t").fields
    made = DebeziumDecoder(DebeziumFormat((fields[0],), encodings, transactions), fields)
    keys = [None] * len(values) if keys is None else keys
    records = pa.record_batch(
        {
            "key": pa.array([as_json(key) for key in keys], pa.binary()),
            "value": pa.array([as_json(value) for value in values], pa.binary()),
            "timestamp": pa.array([STAMP] * len(values), pa.timestamp("ms", "UTC")),
        }
    )
    found = made.decode(records, several_partitions=several)
    return found.table.to_pylist(), found.errors


def as_json(value):
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


def value_of(kind, value, encoding=None, schema=None):
    """Return what a value becomes in a column of a type, or the error."""
    record = {"op": "c", "after": {"id": 1, "x": value}}
    if schema is not None:
        column = {"field": "x", **schema}
        after = {"field": "after", "type": "struct", "fields": [column]}
        record = {"schema": {"type": "struct", "fields": [after]}, "payload": record}
    encodings = () if encoding is None else (("x", encoding),)
    rows, errors = decoded({"x": kind | None}, [record], encodings=encodings)
    return errors[0][1] if errors else rows[0]["x"]


# ── statements ──────────────────────────────────────────────────────────────────────────────

SOURCE = {
    "version": "3.6.3.Final", "connector": "postgresql", "name": "demo", "ts_ms": 1767225600000,
    "snapshot": "false", "db": "shop", "sequence": '["26000000","26000056"]',
    "ts_us": 1767225600000123, "ts_ns": 1767225600000123000, "schema": "public",
    "table": "orders", "txId": 901, "lsn": 26000056, "xmin": None, "origin": None, "origin_lsn": None,
}  # fmt: skip
UPDATE = {
    "before": None,
    "after": {"id": 42, "status": "paid", "note": PLACEHOLDER},
    "source": SOURCE,
    "transaction": {"id": "901:26000056", "total_order": 1, "data_collection_order": 1},
    "op": "u", "ts_ms": 1767225600250, "ts_us": 1767225600250400, "ts_ns": 1767225600250400500,
}  # fmt: skip
ORDER = {"status": str | None, "note": str | None}
COMMIT = datetime(2026, 1, 1, 0, 0, 0, 123, tzinfo=UTC)


def test_an_update_with_an_unchanged_toast_column():
    (row,), errors = decoded(ORDER, [UPDATE], keys=[{"id": 42}])
    assert not errors
    assert (row["id"], row["status"], row["note"]) == (42, "paid", None)
    assert (row[KIND], row[UNAVAILABLE], row[EXTRA]) == ("upsert", ["note"], False)
    assert (row[TRANSACTION], row[TOTAL], row[COMMITTED]) == ("901:26000056", 1, COMMIT)


def test_a_change_of_the_key_is_a_deletion_a_tombstone_and_a_create():
    gone = {**UPDATE, "before": {"id": 42, "status": None, "note": None}, "after": None, "op": "d"}
    create = {**UPDATE, "after": {"id": 43, "status": "paid", "note": PLACEHOLDER}, "op": "c"}
    keys = [{"id": 42}, {"id": 42}, {"id": 43}]
    rows, errors = decoded(ORDER, [gone, None, create], keys=keys)
    assert not errors
    assert [(row[KIND], row["id"]) for row in rows] == [
        ("delete", 42),
        ("delete", 42),
        ("upsert", 43),
    ]


def test_a_keyless_table_has_null_keys_and_whole_rows_before():
    before = {"id": 1, "status": "a", "note": "b"}
    changes = [
        {**UPDATE, "before": before, "after": {**before, "status": "c"}},
        {**UPDATE, "before": before, "after": None, "op": "d"},
        None,
    ]
    rows, errors = decoded(ORDER, changes)
    assert not errors
    assert [(row[KIND], row["id"]) for row in rows] == [
        ("upsert", 1),
        ("delete", 1),
        ("mark", None),
    ]


def test_a_truncate_has_neither_key_nor_rows():
    truncate = {**UPDATE, "after": None, "op": "t"}
    assert decoded(ORDER, [truncate])[0][0][KIND] == "truncate"
    rows, errors = decoded(ORDER, [truncate], several=True)
    assert [row[KIND] for row in rows] == ["mark"]
    assert len(errors) == 1
    assert decoded(ORDER, [truncate], several=True, transactions=True)[0][0][KIND] == "truncate"


def test_begin_and_end_of_a_transaction():
    values = [
        {"status": "BEGIN", "id": "25862:811937960", "event_count": None, "data_collections": None},
        {
            "schema": {},
            "payload": {
                "status": "END",
                "id": "25862:811938768",
                "event_count": 2,
                "data_collections": [{"data_collection": "public.orders", "event_count": 2}],
            },
        },
        {"status": "END", "id": "1:2", "event_count": 3, "data_collections": None},
        {"status": "END", "id": "1:2", "event_count": 0, "data_collections": None},
        {"status": "END", "id": "1:2", "data_collections": [{"data_collection": "x"}]},
        {"status": "COMMIT", "id": "1:2"},
        [],
        None,
    ]
    found = TransactionDecoder(TRANSACTION_FIELDS).decode(
        pa.array([as_json(value) for value in values], pa.binary())
    )
    counts = [{"name": "public.orders", "n": 2}]
    assert found.table.to_pylist() == [
        {"status": "BEGIN", "id": "25862:811937960", "counts": []},
        {"status": "END", "id": "25862:811938768", "counts": counts},
        {"status": "END", "id": "1:2", "counts": []},
    ]
    assert [at for at, _ in found.errors] == [2, 4, 5, 6, 7]


# ── values ──────────────────────────────────────────────────────────────────────────────────

PRECISE = ColumnEncoding("precise", 2)
MICROS = ColumnEncoding(time_unit="us")


@pytest.mark.parametrize(
    ("kind", "value", "encoding", "plain"),
    [
        (Decimal, "BM4=", PRECISE, Decimal("12.30")),
        (Decimal, "BNI=", PRECISE, Decimal("12.34")),
        (Decimal, "+y4=", PRECISE, Decimal("-12.34")),
        (Decimal, "12.30", ColumnEncoding("string"), Decimal("12.30")),
        (Decimal, 12.5, None, Decimal("12.5")),
        (Decimal, {"scale": 2, "value": "BNI="}, None, Decimal("12.34")),
        (float, "BNI=", PRECISE, 12.34),
        (float, "NaN", None, float("inf")),
        (int, "BNI=", ColumnEncoding("precise", 0), 1234),
        (date, 20454, None, date(2026, 1, 1)),
        (date, "2026-01-01Z", None, date(2026, 1, 1)),
        (datetime, -126070041599876544, MICROS, "out of range"),
        (datetime, 1767225600000123, MICROS, COMMIT),
        (datetime, 1767225600000, ColumnEncoding(time_unit="ms"), COMMIT.replace(microsecond=0)),
        (datetime, 1767225600000123000, ColumnEncoding(time_unit="ns"), COMMIT),
        (datetime, "2026-01-01T01:00:00.000123+01:00", None, COMMIT),
        (time, 86_399_000_000, MICROS, time(23, 59, 59)),
        (time, "08:00:00Z", None, time(8)),
        (timedelta, 37091106700000, None, timedelta(microseconds=37091106700000)),
        (bytes, "AP8=", None, b"\x00\xff"),
        (bool, 1, None, True),
        (bool, True, None, True),
        (str, "10.0.0.1/24", None, "10.0.0.1/24"),
        (str, "abc  ", None, "abc  "),
        (dict[str, int], '{"a": 1}', None, [("a", 1)]),
        (list[str | None], ["a", None], None, ["a", None]),
        (list[date], [20454], None, [date(2026, 1, 1)]),
    ],
)
def test_values_are_read_by_the_type_of_their_column(kind, value, encoding, plain):
    found = value_of(kind, value, encoding)
    if value == "NaN":
        assert found != found
    elif plain == "out of range":
        assert plain in found
    elif isinstance(plain, list) and plain and isinstance(plain[0], tuple):
        assert [(one["key"], one["value"]) for one in found] == plain
    else:
        assert found == plain
        assert type(found) is type(plain)


@pytest.mark.parametrize(
    ("kind", "value", "encoding", "reason"),
    [
        (Decimal, "1234", None, "digits or base64 is not known"),
        (Decimal, "BNI=", ColumnEncoding("precise"), "its scale is not known"),
        (Decimal, "BN!=", PRECISE, "not base64 text"),
        (Decimal, "", PRECISE, "not base64 of a number"),
        (Decimal, {"scale": "2"}, None, "not a decimal with scale and value"),
        (datetime, 1767225600000, None, "its unit is not known"),
        (datetime, 123, ColumnEncoding(time_unit="ns"), "more than six digits"),
        (datetime, "-infinity", MICROS, "not a time such as"),
        (date, -2147472692, None, "out of range"),
        (time, 86400000000, MICROS, "not a time of day"),
        (timedelta, "P1Y2M", None, "not a duration"),
        (bool, 2, None, "not true or false"),
        (int, "7", None, "not a whole number"),
        (str, 7, None, "not text"),
        (dict[str, int], "{", None, "not JSON"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_column_and_value(kind, value, encoding, reason):
    found = value_of(kind, value, encoding)
    assert "'x'" in found
    assert reason in found


@pytest.mark.parametrize(
    ("kind", "value", "schema", "plain"),
    [
        (
            Decimal,
            "BNI=",
            {"name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}},
            Decimal("12.34"),
        ),
        (Decimal, "12.34", {"type": "string"}, Decimal("12.34")),
        (
            datetime,
            1767225600000,
            {"name": "io.debezium.time.Timestamp"},
            COMMIT.replace(microsecond=0),
        ),
        (datetime, 1767225600000123, {"name": "io.debezium.time.MicroTimestamp"}, COMMIT),
        (time, 28_800_000, {"name": "io.debezium.time.Time"}, time(8)),
        (timedelta, 3_600_000, {"name": "org.apache.kafka.connect.data.Time"}, timedelta(hours=1)),
        (timedelta, 3_600_000, {"name": "io.debezium.time.MicroDuration"}, timedelta(seconds=3.6)),
        (
            datetime,
            20454,
            {"name": "io.debezium.time.Date"},
            COMMIT.replace(hour=0, minute=0, second=0, microsecond=0),
        ),
    ],
)
def test_the_schema_of_a_record_says_how_its_values_are_written(kind, value, schema, plain):
    wrong = ColumnEncoding("string", 7, "ns")
    assert value_of(kind, value, wrong, schema={"type": "int64", **schema}) == plain


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (str, PLACEHOLDER),
        (Decimal, PLACEHOLDER),
        (bytes, "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="),
        (list[str], [PLACEHOLDER]),
        (list[int], list(PLACEHOLDER.encode())),
        (dict[str, str], {PLACEHOLDER: PLACEHOLDER}),
        (dict[str, str], f'{{"{PLACEHOLDER}":"{PLACEHOLDER}"}}'),
    ],
)
def test_every_form_of_an_unavailable_value_is_known(kind, value):
    (row,), errors = decoded({"x": kind}, [{"op": "u", "after": {"id": 1, "x": value}}])
    assert (row[UNAVAILABLE], errors) == (["x"], [])


def test_a_column_that_is_missing_and_not_optional_is_a_dead_letter():
    rows, errors = decoded({"x": str}, [{"op": "c", "after": {"id": 1}}])
    assert errors == [(0, "field 'x' is missing")]
    assert [(row[KIND], row["id"], row[EXTRA]) for row in rows] == [("spoil", 1, True)]


def test_times_beyond_the_calendar_are_those_of_the_record():
    values = [
        {"op": "c", "after": {"id": 1}, "source": source}
        for source in ({"ts_us": 1 << 62}, {"ts_ms": "x"}, {}, None)
    ]
    rows, _ = decoded({}, values)
    assert [row[COMMITTED] for row in rows] == [STAMP] * 4
