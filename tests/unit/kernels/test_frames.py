"""Frames: what goes in comes out, of every type, and no more than that goes."""

import datetime as dt
from decimal import Decimal

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels import frames
from millstream.kernels.frames import decode_frame, encode_frame
from millstream.kernels.state.sorted_runs import decode_run, encode_run, to_arrow

KINDS = {
    "int": pl.Series([1, None]),
    "small": pl.Series([-1, 1], dtype=pl.Int8),
    "wide": pl.Series([1 << 100, None], dtype=pl.Int128),
    "float": pl.Series([1.5, float("nan")], dtype=pl.Float32),
    "bool": pl.Series([True, None]),
    "text": pl.Series(["é" * 40, None]),
    "bytes": pl.Series([b"\0x", None]),
    "decimal": pl.Series([Decimal("1.23"), None], dtype=pl.Decimal(23, 3)),
    "date": pl.Series([dt.date(2020, 1, 1), None]),
    "time": pl.Series([dt.time(1, 2, 3, 4), None]),
    "duration": pl.Series([dt.timedelta(1), None], dtype=pl.Duration("ms")),
    "instant": pl.Series(
        [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None], dtype=pl.Datetime("us", "UTC")
    ),
    "list": pl.Series([[{"a": "x"}], []]),
    "array": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2)),
    "struct": pl.Series([{"a": 1, "b": "x"}, None]),
    "category": pl.Series(["a", None], dtype=pl.Categorical),
    "enum": pl.Series(["a", None], dtype=pl.Enum(["b", "a"])),
    "nothing": pl.Series([None, None]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_comes_out_as_it_went_in(kind):
    table = pl.DataFrame({"n": [1, 2], kind: KINDS[kind]})
    for each in (table, table.clear(), pl.concat([table, table], rechunk=False)):
        found = decode_frame(encode_frame(each))
        assert found.schema == each.schema
        assert found.equals(each)


def test_a_table_without_columns_has_none():
    assert decode_frame(encode_frame(pl.DataFrame())).schema == {}


def test_a_few_rows_of_a_large_table_are_a_small_frame():
    table = pl.DataFrame(
        {"k": range(10_000), "s": [f"text that is long {n}" for n in range(10_000)]}
    )
    few = table[[5, 9_000]]
    assert len(encode_frame(few)) < 2_000
    assert decode_frame(encode_frame(few)).equals(few)
    parts = [table.filter(pl.col("k") % 4 == rest) for rest in range(4)]
    assert sum(len(encode_frame(part)) for part in parts) < 1.2 * len(encode_frame(table))


LISTS = {
    "of records": [[{"a": "x", "b": 1}], [{"a": "y", "b": 2}], []],
    "of numbers and flags": [[{"a": 1, "b": True}], [{"a": 2, "b": False}], []],
    "of lists": [[[1]], [[2]], []],
    "of text": [["x"], ["y"], []],
}


def groups_of_empty_lists(lists):
    """Give lists, gathered from groups that have none but empty ones, between two other columns."""
    empty = pl.DataFrame({"lists": lists}).rechunk().filter(pl.col("lists").list.len() == 0)
    gathered = empty.group_by(pl.lit(0).alias("k")).agg(
        pl.col("lists").explode(empty_as_null=False)
    )
    return gathered.with_columns(n=pl.lit(7), text=pl.lit("after"), weight=pl.lit(1.5))


@pytest.mark.parametrize("kind", LISTS)
def test_what_follows_lists_that_are_all_empty_comes_out_as_it_went_in(kind):
    table = groups_of_empty_lists(LISTS[kind])
    for each in (table, table.select("n", "lists", "text"), table.select("n", "lists")):
        assert decode_frame(encode_frame(each)).equals(each)
        assert pl.from_arrow(decode_run(encode_run(to_arrow(each)))).equals(each)
    for each in (table.clear(), table.slice(1), pl.concat([table, table], rechunk=False)):
        assert decode_frame(encode_frame(each)).equals(each)
        assert pl.from_arrow(decode_run(encode_run(to_arrow(each)))).equals(each)


@given(st.lists(st.integers(0, 300), max_size=40))
def test_a_large_table_is_cut_into_frames_in_its_order_and_no_row_is_lost(lengths):
    table = pl.DataFrame({"n": range(len(lengths)), "text": ["x" * length for length in lengths]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FRAME_BYTES_MAX", 500)
        parts = list(frames.cut_for_frames(table))
    assert pl.concat(parts).equals(table)
    assert all(part.height == 1 or part.estimated_size() <= 500 for part in parts if part.height)
    assert len(list(frames.cut_for_frames(table))) == 1
