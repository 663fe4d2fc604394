"""Which rows of a batch are changes of a view, whether they are compared first or written at once."""

import sqlite3

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.views.schema import ViewSchema
from millstream.views.state_store import sqlite_upsert
from millstream.views.state_store.sqlite_values import decode_rows, normalize
from millstream.views.state_store.view_table import ViewTable

SCHEMA = ViewSchema("v", (("k", "int"), ("x", "float"), ("t", "str")), ("k",))
ROW = st.tuples(
    st.one_of(st.none(), st.integers(0, 12)),
    st.sampled_from([None, 0.0, 1.5, float("nan")]),
    st.sampled_from([None, "", "a"]),
)


@settings(max_examples=some(100))
@given(
    batches=st.lists(st.lists(ROW, max_size=12), max_size=4),
    compared=st.integers(0, 5),
    part=st.integers(1, 5),
)
def test_the_changes_are_the_rows_that_were_not_there_as_they_are(batches, compared, part):
    table = ViewTable(SCHEMA)
    there = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_upsert, "_COMPARED_ROWS", compared)
        patch.setattr(sqlite_upsert, "_PART_ROWS", part)
        db = sqlite3.connect(":memory:", isolation_level=None)
        db.execute(table.create)
        db.execute("BEGIN")
        for batch in batches:
            types = dict(SCHEMA.dtypes)
            rows = normalize(pl.DataFrame(batch, types, orient="row"), SCHEMA, SCHEMA.names)
            changed = sqlite_upsert.upsert_rows(db, table, rows)
            expected = [row for row in rows.rows() if repr(there.get(row[0])) != repr(row)]
            assert repr(changed.rows()) == repr(expected)
            there |= {row[0]: row for row in rows.rows()}
            found = decode_rows(db.execute(table.select()).fetchall(), SCHEMA)
            assert sorted(map(repr, found.rows())) == sorted(map(repr, there.values()))
        db.close()


def test_a_part_of_which_some_rows_are_there_already_is_undone_and_compared(monkeypatch):
    monkeypatch.setattr(sqlite_upsert, "_COMPARED_ROWS", 1)
    monkeypatch.setattr(sqlite_upsert, "_PART_ROWS", 3)
    table = ViewTable(SCHEMA)
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute(table.create)
    db.execute("BEGIN")
    rows = pl.DataFrame({"k": range(10), "x": [0.5] * 10, "t": ["a"] * 10})
    sqlite_upsert.upsert_rows(db, table, rows[5:6])
    assert sqlite_upsert.upsert_rows(db, table, rows)["k"].to_list() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert sqlite_upsert.upsert_rows(db, table, rows).height == 0
    assert db.execute("SELECT count(*) FROM v").fetchone() == (10,)
    db.close()
