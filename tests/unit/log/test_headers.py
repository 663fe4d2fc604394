"""Headers of records: in rows, in columns, and lies about them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, CorruptBatchError
from millstream.log.batch import EncodedBatch, finish, walk
from millstream.log.decoding import (
    ALL_COLUMNS,
    COLUMNS,
    SCHEMA,
    Block,
    decode,
    select_schema,
)
from millstream.log.encoding import SimpleRecord, encode_records, split_columns
from millstream.log.varint import encode_varint


def decoded(*batches: EncodedBatch, columns: tuple[str, ...] = ("headers",)) -> pa.RecordBatch:
    data, offset = b"", 0
    for batch in batches:
        data += batch.prefix(offset, 0) + batch.tail
        offset += batch.count
    return decode(Block(data, list(walk(data, 0)), "a.log", 0), 0, offset, columns)


def headers_of(batch: pa.RecordBatch) -> list[list[tuple[str, bytes | None]]]:
    return [[(one["key"], one["value"]) for one in some] for some in batch["headers"].to_pylist()]


def batch_with(headers: bytes, *, key: bytes = b"k") -> EncodedBatch:
    """Return a batch of one record that ends in these bytes."""
    record = b"\0\0\0" + encode_varint(len(key)) + key + encode_varint(1) + b"v" + headers
    return finish(encode_varint(len(record)) + record, records=1, timestamps_ms=(0, 0))


def test_headers_are_read_only_if_they_are_asked_for() -> None:
    batch = encode_records([SimpleRecord(1, b"k", b"v", (("a", b"1"), ("a", None), ("", b"")))])
    assert tuple(decoded(batch, columns=COLUMNS).schema.names) == COLUMNS
    found = decoded(batch, columns=ALL_COLUMNS)
    assert found.schema == SCHEMA == select_schema(ALL_COLUMNS)
    assert headers_of(found) == [[("a", b"1"), ("a", None), ("", b"")]]


def test_an_unknown_column_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'topic'\. Choose .*or \"headers\""):
        select_schema(("topic",))


@pytest.mark.parametrize("count", [1, 2, 600])
def test_many_rows_of_which_one_has_headers_keep_them(count: int) -> None:
    rows = [SimpleRecord(n, None, b"v" * (n % 200)) for n in range(count)]
    rows[count // 2] = rows[count // 2]._replace(headers=(("trace", b"\x01"),))
    found = headers_of(decoded(encode_records(rows)))
    assert found == [list(row.headers) for row in rows]


@given(start=st.integers(0, 40), count=st.integers(0, 40))
def test_a_stretch_of_offsets_is_the_same_stretch_of_all_columns(start: int, count: int) -> None:
    batches = [
        encode_records(
            [SimpleRecord(n, None if n % 3 else b"k%d" % n, b"v" * n, ()) for n in range(size)]
        )
        for size in (9, 1, 30)
    ]
    data, offset = b"", 0
    for batch in batches:
        data += batch.prefix(offset, 0) + batch.tail
        offset += batch.count
    block = Block(data, list(walk(data, 0)), "a.log", 0)
    whole = decode(block, 0, offset, ALL_COLUMNS)
    found = decode(block, start, min(offset, start + count), ALL_COLUMNS)
    found.validate(full=True)
    assert found.to_pylist() == whole.slice(start, count).to_pylist()


def test_no_header_in_any_record_is_a_column_of_empty_lists() -> None:
    found = decoded(encode_records([SimpleRecord(n, b"k", None) for n in range(600)]))
    found.validate(full=True)
    assert headers_of(found) == [[]] * 600


def test_a_row_is_never_larger_than_its_size() -> None:
    row = SimpleRecord(2**50, b"k" * 9, None, tuple(("é" * n, b"x" * n * 50) for n in range(100)))
    for one in (row, row._replace(headers=()), row._replace(headers=(("", None),) * 1000)):
        assert len(encode_records([SimpleRecord(0, None, None), one]).tail) - 44 - 8 <= one.size


def test_columns_with_headers_are_split_and_keep_them() -> None:
    headers = [[("n", b"%d" % n)] if n % 3 else [] for n in range(100)]
    column = pa.array(
        [[{"key": key, "value": value} for key, value in some] for some in headers],
        SCHEMA.field("headers").type,
    )
    values = pa.array([b"v" * 100] * 100, pa.binary())
    times = np.arange(100, dtype=np.int64)
    for keys in (None, values):
        parts = list(split_columns(times, keys, values, column, bytes_max=2000))
        assert len(parts) > 5
        found = decoded(*parts, columns=ALL_COLUMNS)
        assert headers_of(found) == headers
        assert found["key"].to_pylist() == (values if keys else pa.nulls(100)).to_pylist()
    empty = pa.array([[]] * 100, SCHEMA.field("headers").type)
    assert list(split_columns(times, None, values, empty, bytes_max=2000)) == list(
        split_columns(times, None, values, bytes_max=2000)
    )


def test_a_key_that_is_not_utf8_is_read_with_replacements() -> None:
    body = encode_varint(1) + encode_varint(3) + b"a\xffb" + encode_varint(-1)
    found = decoded(batch_with(body))
    found.validate(full=True)
    assert headers_of(found) == [[("a�b", None)]]


LIES = {
    "no number of headers": b"",
    "a number that does not end": b"\xff" * 12,
    "a negative number": encode_varint(-1),
    "more headers than bytes": encode_varint(2**40),
    "fewer headers than bytes": encode_varint(0) + b"\0\0",
    "a header that is missing": encode_varint(2) + b"\0\0",
    "a key that is too long": encode_varint(1) + encode_varint(5) + b"abc\0",
    "a key that is null": encode_varint(1) + encode_varint(-1) + b"\0",
    "a value that is too long": encode_varint(1) + b"\0" + encode_varint(2**33) + b"abc",
    "a value of length -2": encode_varint(1) + b"\0" + encode_varint(-2),
    "no value": encode_varint(1) + encode_varint(2) + b"ab",
}


@pytest.mark.parametrize("body", LIES.values(), ids=LIES.keys())
def test_headers_that_lie_are_refused_and_named(body: bytes) -> None:
    good = encode_records([SimpleRecord(0, b"k", b"v", (("a", b"b"),))])
    with pytest.raises(CorruptBatchError, match=r"header") as caught:
        decoded(good, batch_with(body))
    assert caught.value.position == good.size


@given(st.binary(max_size=40))
def test_any_bytes_for_headers_give_headers_or_an_error(body: bytes) -> None:
    try:
        found = decoded(batch_with(body))
    except CorruptBatchError:
        return
    found.validate(full=True)
    assert found.num_rows == 1
