"""The rows of files, against what wrote them: any row, read in batches of any size, from wherever a run stopped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.tables import rows_to_json
from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.folder import parquet_rows
from millstream.connectors.folder.csv_rows import CsvRows
from millstream.connectors.folder.file_content import FileContent, UnreadableFileError
from millstream.connectors.folder.json_lines import JsonLines
from millstream.connectors.folder.parquet_rows import ParquetRows
from millstream.connectors.record_fields import RecordFields

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def content_of(data: bytes, compression: str = "") -> FileContent:
    return FileContent("file", partial(io.BytesIO, data), compression)


def read(format_, content, *, batch: int = 1000, fields: RecordFields | None = None):
    """Return values and dead letters, with a new start from the position after each batch."""
    values, dead, keys, times, at = [], [], [], [], {}
    while True:
        rows = BatchRows(fields or RecordFields(), batch)
        found = next(format_.read(content, at, rows), None)
        done = rows.take({})
        values += done.values
        dead += done.dead
        keys += done.keys or []
        times += done.timestamps_ms or []
        if found is None:
            return [json.loads(value) for value in values], dead, keys, times
        at = json.loads(json.dumps(found))


@given(
    rows=st.lists(
        st.one_of(
            st.tuples(TEXT, TEXT, TEXT),
            st.lists(TEXT, min_size=4, max_size=6),  # more fields than the header has
        ),
        max_size=12,
    ),
    # Python's writer leaves a lone \r unquoted where lines end with \n, against RFC 4180.
    written=st.sampled_from(
        [("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL)]
    ),
    compression=st.sampled_from(["", "gz", "zst"]),
    batch=st.integers(1, 5),
)
def test_rows_of_csv_are_those_that_were_written(rows, written, compression, batch) -> None:
    end, quoting = written
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator=end, quoting=quoting)
    writer.writerows([("a", "b", "ç"), *rows])
    data = compressed(stream.getvalue().encode(), compression)
    values, dead, *_ = read(CsvRows(), content_of(data, compression), batch=batch)
    assert values == [dict(zip("abç", row, strict=True)) for row in rows if len(row) == 3]
    assert len(dead) == sum(len(row) != 3 for row in rows)


def compressed(data: bytes, compression: str) -> bytes:
    """Compress it in two parts, as files that were put together have."""
    half = len(data) // 2
    if compression == "gz":
        return gzip.compress(data[:half]) + gzip.compress(data[half:])
    if compression == "zst":
        return b"".join(
            pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]) if part
        )
    return data


LINES = {
    b'{"a": 1}': {"a": 1},
    b' {"a": [1, {"b": null}], "c": "\xc3\xa4"} \r': {"a": [1, {"b": None}], "c": "ä"},
    b"{}": {},
    b"": None,
    b"  \t\r": None,
    b'{"a": 1': "dead",
    b"[1]": "dead",
    b"7": "dead",
    b'{"a": NaN}': "dead",
    b'{"a": -Infinity}': "dead",
    b'{"a": "\xff"}': "dead",
    b"[" * 100_000: "dead",
}


@given(
    lines=st.lists(st.sampled_from(sorted(LINES)), max_size=20),
    ended=st.booleans(),
    marked=st.booleans(),
    compression=st.sampled_from(["", "gz", "zst"]),
    batch=st.integers(1, 5),
)
def test_lines_of_json_are_records_or_dead_letters(
    lines, ended, marked, compression, batch
) -> None:
    data = b"\xef\xbb\xbf" * marked + b"\n".join(lines) + b"\n" * ended
    content = content_of(compressed(data, compression), compression)
    values, dead, *_ = read(JsonLines(), content, batch=batch)
    assert values == [LINES[line] for line in lines if isinstance(LINES[line], dict)]
    bad = [
        (line.strip(), f"file, line {number}")
        for number, line in enumerate(lines, 1)
        if LINES[line] == "dead"
    ]
    assert [(one.value, one.where) for one in dead] == bad


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "id": st.integers(-(2**63), 2**63 - 1),
                "text": st.none() | TEXT,
                "share": st.floats(width=64),
                "many": st.lists(st.integers(0, 9), max_size=3),
            }
        ),
        max_size=20,
    ),
    group=st.integers(1, 7),
    batch=st.integers(1, 5),
)
def test_rows_of_parquet_are_those_that_were_written(rows, group, batch) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.string()),
            ("share", pa.float64()),
            ("many", pa.list_(pa.int64())),
        ]
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, row_group_size=group)
    content = content_of(sink.getvalue().to_pybytes())
    values, dead, keys, _ = read(ParquetRows(), content, batch=batch, fields=RecordFields(key="id"))
    good = [row for row in rows if math.isfinite(row["share"])]
    assert values == good
    assert keys == [str(row["id"]).encode() for row in good]
    assert len(dead) == len(rows) - len(good)


@pytest.mark.parametrize(
    ("bad", "good", "kind", "reason"),
    [
        (10**18, 5_000_000, pa.timestamp("us"), "times go from the year 1 to 9999"),
        (1_700_000_000_000_000, 5000, pa.int64(), "in the years 1 to 9999"),  # microseconds
        (2**64 - 1, 5000, pa.uint64(), "in the years 1 to 9999"),
    ],
)
def test_a_time_in_parquet_that_is_none_is_a_dead_letter(bad, good, kind, reason) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"at": pa.array([good, bad, good], kind)}), sink)
    content = content_of(sink.getvalue().to_pybytes())
    values, (dead,), _, times = read(ParquetRows(), content, fields=RecordFields(time="at"))
    assert (len(values), times) == (2, [5000, 5000])
    assert reason in dead.reason
    assert dead.where == "file, row 2"


def test_a_column_that_no_record_can_have_makes_dead_letters() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": pa.array([[1], [2]], pa.list_(pa.decimal256(50, 2)))}), sink)
    values, dead, *_ = read(ParquetRows(), content_of(sink.getvalue().to_pybytes()))
    assert not values
    assert [one.where for one in dead] == ["file, row 1", "file, row 2"]
    assert "more digits than 38" in dead[0].reason


def test_columns_have_the_types_that_are_given() -> None:
    types = {"id": int, "price": float, "paid": bool, "note": str}
    data = b"id,price,paid,note,more\n1,2.5,true,x,y\n-7,1e3,0,,\n,,,,\n"
    values, dead, *_ = read(CsvRows(columns=types), content_of(data))
    assert not dead
    assert values == [
        {"id": 1, "price": 2.5, "paid": True, "note": "x", "more": "y"},
        {"id": -7, "price": 1000.0, "paid": False, "note": "", "more": ""},
        {"id": None, "price": None, "paid": None, "note": "", "more": ""},
    ]


@pytest.mark.parametrize(
    "row",
    [b"x,1,1", b"1_0,1,1", b"1.5,1,1", b"1,nan,1", b"1,1e999,1", b"1,1,yes", "٣,1,1".encode()],
)
def test_what_is_not_of_the_type_is_a_dead_letter_that_names_the_column(row) -> None:
    types = {"id": int, "price": float, "paid": bool}
    values, (dead,), *_ = read(
        CsvRows(columns=types), content_of(b"id,price,paid\n" + row + b"\n2,2,true\n")
    )
    assert values == [{"id": 2, "price": 2.0, "paid": True}]
    assert (dead.value, dead.where) == (row + b"\n", "file, line 2")
    assert "type given in columns" in dead.reason


@pytest.mark.parametrize("header", [b"a,a\n", b"a,,b\n", b"\n", b'"a\n', b"\xff,a\n"])
def test_a_file_whose_header_is_none_cannot_be_read(header) -> None:
    with pytest.raises(UnreadableFileError):
        read(CsvRows(), content_of(header + b"1,2\n"))


def test_a_file_that_lacks_a_column_with_a_type_cannot_be_read() -> None:
    with pytest.raises(UnreadableFileError, match="has not id"):
        read(CsvRows(columns={"id": int}), content_of(b"a,b\n1,2\n"))


def test_a_row_in_many_lines_with_bytes_that_are_no_text_is_one_dead_letter() -> None:
    data = b'a,b\n1,"x\n\xff,y\nz"\n2,w\n'
    values, (dead,), *_ = read(CsvRows(), content_of(data))
    assert values == [{"a": "2", "b": "w"}]
    assert dead.value == b'1,"x\n\xff,y\nz"\n'
    assert "UTF-8" in dead.reason


def test_an_empty_file_has_no_rows() -> None:
    for format_ in (CsvRows(), JsonLines()):
        assert read(format_, content_of(b"")) == ([], [], [], [])


@pytest.mark.parametrize("compression", ["gz", "zst"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_of_a_damaged_file_what_is_before_the_damage_is_read(compression, kept) -> None:
    whole = b"".join(b'{"n": %d}\n' % n for n in range(50_000))
    data = gzip.compress(whole) if compression == "gz" else pa.compress(whole, "zstd", asbytes=True)
    rows = BatchRows(records_max=100_000)
    cut = content_of(data[: int(len(data) * kept)], compression)
    with pytest.raises(UnreadableFileError, match="damaged"):
        list(JsonLines().read(cut, {}, rows))
    values = [json.loads(value)["n"] for value in rows.take({}).values]
    assert values == list(range(len(values)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": 1.5, "at": 5}', "the key is the field 'id'"),
        (b'{"id": 1}', "the time is the field"),
    ],
)
def test_a_record_without_its_key_or_time_is_a_dead_letter(line, reason) -> None:
    good = b'{"id": "x", "at": "1970-01-01T00:00:01Z"}'
    values, (dead,), keys, times = read(
        JsonLines(), content_of(line + b"\n" + good), fields=RecordFields("id", "at")
    )
    assert (len(values), keys, times) == (1, [b"x"], [1000])
    assert reason in dead.reason


def test_a_line_that_is_too_long_is_passed_over(monkeypatch) -> None:
    monkeypatch.setattr("millstream.connectors.folder.file_content.LINE_BYTES_MAX", 20)
    data = b'{"a": 1}\n{"a": "' + b"x" * 3_000_000 + b'"}\n{"a": 2}\n'
    values, (dead,), *_ = read(JsonLines(), content_of(data), batch=1)
    assert values == [{"a": 1}, {"a": 2}]
    assert len(dead.value) == 21
    values, (dead,), *_ = read(CsvRows(), content_of(b"a\nx\n" + b"y" * 50 + b"\nz\n"), batch=1)
    assert values == [{"a": "x"}, {"a": "z"}]


@pytest.mark.parametrize("compression", ["", "gz", "zst"])
def test_a_file_of_csv_is_opened_once(compression) -> None:
    data = b"n\n" + b"".join(b"%d\n" % n for n in range(5))
    if compression:
        data = (
            gzip.compress(data) if compression == "gz" else pa.compress(data, "zstd", asbytes=True)
        )
    opened = []

    def open_raw():
        opened.append(1)
        return io.BytesIO(data)

    content = FileContent("file", open_raw, compression)
    rows = BatchRows(records_max=2)
    at = next(CsvRows().read(content, {}, rows))
    assert len(opened) == 1
    list(CsvRows().read(content, at, rows))
    assert len(opened) == 2
    assert [json.loads(value)["n"] for value in rows.take({}).values] == list("01234")


def test_a_row_of_parquet_that_is_no_record_does_not_make_the_others_slow(monkeypatch) -> None:
    calls = []

    def counted(table, key):
        calls.append(len(table))
        return rows_to_json(table, key)

    monkeypatch.setattr(parquet_rows, "rows_to_json", counted)
    numbers = [float(n) for n in range(1024)]
    numbers[700] = math.nan
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": numbers}), sink)
    values, (dead,), *_ = read(ParquetRows(), content_of(sink.getvalue().to_pybytes()), batch=5000)
    assert [value["n"] for value in values] == numbers[:700] + numbers[701:]
    assert dead.where == "file, row 701"
    assert len(calls) < 30
