"""Rows that are read by column are, byte for byte, the records of rows that are read one by one."""

import base64
import json
import math
import sqlite3
from functools import partial

import captured_records
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.capture.sqlite import cells
from millstream.capture.sqlite.cells import row_block
from millstream.capture.sqlite.encoding import encoded
from millstream.capture.sqlite.table_info import SqliteTable
from millstream.capture.units import TableChange

TYPES = ("INTEGER", "TEXT", "BLOB", "REAL", "")
TEXTS = st.text(max_size=6) | st.sampled_from(["", '"', "\\", "a\x00b\n", "é\u2028😀"])
VALUES = {
    "integers": st.integers(-(2**63), 2**63 - 1),
    "texts": TEXTS,
    "blobs": st.binary(max_size=6),
    "reals": st.floats(allow_nan=False).map(lambda value: value + 0.0),  # SQLite stores no -0.0
}
VALUES["any"] = st.one_of(*VALUES.values())


def expected(value, declared):
    """Return the JSON of a value by the table in the documentation."""
    if isinstance(value, bytes):
        text = base64.b64encode(value).decode()
        return text if declared == "BLOB" else {"blob": text}
    if isinstance(value, str):
        return {"text": value} if declared == "BLOB" else value
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def written(rows, width):
    """Return rows as the SQL of the triggers writes them, which SQLite runs here."""
    names = [f"c{at}" for at in range(width)]
    database = sqlite3.connect(":memory:")
    database.execute(f"CREATE TABLE t ({', '.join(names)})")
    database.executemany(f"INSERT INTO t VALUES ({', '.join('?' * width)})", rows)
    return [text for (text,) in database.execute(f"SELECT {encoded(names, 't')} FROM t")]


@st.composite
def tables(draw):
    """Return a table of which the first column is the key, and rows of it before and after."""
    declared = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
    columns = tuple((f"c{at}", kind) for at, kind in enumerate(declared))
    kinds = [draw(st.sampled_from(sorted(VALUES))) for _ in declared]
    row = st.tuples(
        VALUES[kinds[0]],
        *(st.none() | VALUES[kind] if draw(st.booleans()) else VALUES[kind] for kind in kinds[1:]),
    )
    rows = draw(st.lists(row, min_size=1, max_size=6))
    after = [(old[0], *draw(row)[1:]) for old in rows]
    return SqliteTable("t", columns, ("c0",), ()), rows, after


records_of = partial(captured_records.records_of, database="sqlite", position="7", at=5)


@pytest.fixture(autouse=True)
def blocks_of_few_rows(monkeypatch):
    monkeypatch.setattr(cells, "BLOCK_ROWS_MIN", 1)


def as_row(table, values):
    kinds = dict(table.columns)
    names = table.column_names
    return {name: expected(value, kinds[name]) for name, value in zip(names, values, strict=True)}


@settings(max_examples=some(150))
@given(tables(), st.sampled_from("crud"))
def test_a_block_is_what_its_rows_say(drawn, op):
    table, rows, after = drawn
    width = len(table.columns)
    changes = []
    for old, new in zip(rows, after, strict=True):
        before = as_row(table, old) if op in "ud" else None
        now = None if op == "d" else as_row(table, new if op == "u" else old)
        changes.append(TableChange("main", "t", op, table.key, before, now))
    texts = written(rows, width)
    block = row_block(
        "main", table, op, *((written(after, width), texts) if op == "u" else (texts,))
    )
    assert block is not None
    assert records_of([block]) == records_of(changes)


def simple(*texts):
    return row_block(
        "main", SqliteTable("t", (("a", "INT"), ("b", "TEXT")), ("a",), ()), "c", texts
    )


@pytest.mark.parametrize(
    "text",
    ["i1", "i1,t61,n", "n,t61", "i,t61", "i1x,t61", "i1,t6", "i1,tzz", "i1,tff", "i1,nx", "i1,", "i1,q61", "t61,q61"],
)  # fmt: skip
def test_what_no_trigger_writes_is_left_to_the_reader_of_single_rows(text):
    assert simple("i7,t61", "i8,n") is not None
    assert simple("i7,t61", text) is None


def test_values_of_one_row_do_not_make_up_for_those_of_another():
    assert simple("i1,t61,n", "i2") is None


def test_a_row_whose_key_changes_is_left_to_the_reader_of_single_rows():
    table = SqliteTable("t", (("a", "INT"),), ("a",), ())
    assert row_block("main", table, "u", ["i1", "i3"], ["i1", "i2"]) is None


def test_few_rows_are_not_a_block(monkeypatch):
    monkeypatch.undo()
    rows = [f"i{number},n" for number in range(cells.BLOCK_ROWS_MIN)]
    assert simple(*rows[1:]) is None
    assert [json.loads(row)["a"] for row in simple(*rows).rows.to_pylist()] == list(
        range(len(rows))
    )
