"""Dead letters: where a failing row stands in the log, as far as it still belongs to a record."""

import polars as pl
import pyarrow as pa
import pytest

from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.errors.dead_letters import (
    DEAD_LETTER_KEY,
    DEAD_LETTER_SCHEMA,
    REASON_CHARS_MAX,
)
from millstream.kernels.errors.user_code import UserCodeResult
from millstream.kernels.frames import ORDER, SPLIT
from millstream.kernels.time.log_order import (
    SOURCES_MAX,
    log_order_of,
    offset_in,
    partition_in,
    split_number,
    topic_in,
)


def rejects_of(rows):
    rejects = DeadLetterCollector()
    rejects.add("parse", UserCodeResult(None, rows.clear(), rows, ["no number"] * rows.height))
    return rejects


def lying_at(*places):
    """Make rows of records at (topic, partition, offset)."""
    return pl.DataFrame(
        {
            "n": list(range(len(places))),
            ORDER: [log_order_of(*place) for place in places],
            SPLIT: [split_number(source, partition, 3) for source, partition, _ in places],
        },
        schema_overrides={ORDER: pl.Int64, SPLIT: pl.Int64},
    )


@pytest.mark.parametrize(
    "place", [(0, 0, 0), (5, 17, 12_345), (SOURCES_MAX - 1, (1 << 16) - 1, (1 << 40) - 1)]
)
def test_a_rows_place_can_be_read_off_its_order(place):
    order = lying_at(place)[ORDER].to_numpy()
    assert (topic_in(order)[0], partition_in(order)[0], offset_in(order)[0]) == place


def test_a_reason_is_cut_at_a_stated_length():
    rows = lying_at((0, 0, 0), (0, 0, 1), (0, 0, 2))
    rejects = DeadLetterCollector()
    reasons = ["ä" * REASON_CHARS_MAX, "ä" * (REASON_CHARS_MAX + 1), "short"]
    rejects.add("parse", UserCodeResult(None, rows.clear(), rows, reasons))
    (letters,) = rejects.drain_rows(["events"])
    cut = "ä" * (REASON_CHARS_MAX - 1) + "…"
    assert letters["reason"].to_list() == [reasons[0], cut, "short"]


def test_of_a_batch_of_records_the_bytes_are_kept():
    records = pa.record_batch(
        {
            "offset": [10, 12, 13],
            "timestamp": pa.array([1, 2, 3], pa.timestamp("ms", "UTC")),
            "value": pa.array([b"a", b"b", b"c"]),
        }
    )
    rejects = rejects_of(lying_at((0, 4, 13), (0, 4, 10), (0, 4, 13)))
    (letters,) = rejects.drain_with_records(records, "events", 4, None)
    assert letters.schema == DEAD_LETTER_SCHEMA
    assert letters.select("partition", "offset", "number", "value").rows() == [
        (4, 13, 0, b"c"),
        (4, 10, 0, b"a"),
        (4, 13, 1, b"c"),
    ]
    assert rejects.drain_with_records(records, "events", 4, None) == []


def test_behind_a_shuffle_the_row_is_kept_with_its_place():
    (letters,) = rejects_of(lying_at((1, 4, 13), (0, 2, 10))).drain_rows(["clicks", "views"])
    assert letters.select("topic", "partition", "offset", "step", "reason", "value").rows() == [
        ("views", 4, 13, "parse", "no number", b'{"n":0}'),
        ("clicks", 2, 10, "parse", "no number", b'{"n":1}'),
    ]


def test_rows_that_are_no_records_are_told_apart_by_what_they_hold():
    rows = pl.DataFrame({"n": [1, 2, 1]})
    (letters,) = rejects_of(rows).drain_rows()
    (again,) = rejects_of(rows).drain_rows()
    assert letters.equals(again)
    assert letters["topic"].unique().to_list() == [""]
    assert letters.select(DEAD_LETTER_KEY).unique().height == 2
    assert (letters["number"] >= 0).all()
