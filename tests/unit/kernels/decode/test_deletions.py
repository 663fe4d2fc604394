"""Tables of topics: tombstones among rows and bad records, from segments and from archives, compacted or not."""

import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import MillstreamError
from millstream.kernels.decode.archive_columns import ArchiveColumns, ArchivedRecords
from millstream.kernels.decode.records import RecordDecoder
from millstream.log.archive import RECORD_SCHEMA
from millstream.testing import Row

SCHEMA = {"id": int, "text": str | None, "n": int}
GOOD_KEYS = [b"1", b"2", b"-7"]
BAD_KEYS = [b"x", b"1.5", b"", None]
records = st.lists(
    st.tuples(
        st.sampled_from([*GOOD_KEYS, *GOOD_KEYS, *BAD_KEYS]),
        st.sampled_from(["row", "row", "row", "tombstone", "bad"]),
        st.sampled_from([None, "a", ""]),
    ),
    max_size=12,
)


def value_of(key, kind, text, number):
    if kind == "row":
        given_id = int(key) if key in GOOD_KEYS else 9
        return json.dumps({"id": given_id, "text": text, "n": number}).encode()
    return None if kind == "tombstone" else b"{bad"


def topic(bad="dead-letter", **options):
    app = ms.App("deletions", log="unused")
    return app.topic("t", SCHEMA, key="id", bad=bad, **options)


@settings(max_examples=some(150))
@given(records)
def test_archives_give_what_segments_give(drawn):
    declared = topic()
    values = pa.array([value_of(*one, n) for n, one in enumerate(drawn)], pa.binary())
    places = {
        "offset": pa.array(range(len(drawn)), pa.int64()),
        "timestamp": pa.array([0] * len(drawn), pa.timestamp("ms", "UTC")),
        "key": pa.array([key for key, *_ in drawn], pa.binary()),
    }
    columns, undecodable = ArchiveColumns(
        declared.values, declared.fields, RECORD_SCHEMA.names
    ).decode(values)
    tombstones = values.is_null().to_numpy(zero_copy_only=False)
    left = np.flatnonzero(tombstones | undecodable)
    archived = ArchivedRecords(
        pa.record_batch(places),
        columns.rename_columns([field.name for field in declared.fields]),
        left,
        values.take(pa.array(left)),
    )
    decoder = RecordDecoder(declared.values, declared.fields, "id")
    plain = decoder.decode(pa.record_batch({**places, "value": values}), 0)
    other = decoder.decode(archived, 0)
    assert plain.table.to_pylist() == other.table.to_pylist()
    assert (plain.good.tolist(), plain.errors) == (other.good.tolist(), other.errors)
    meant = [key for key, kind, _ in drawn if kind == "tombstone" and key in GOOD_KEYS]
    deleted = [row["id"] for row in plain.table.to_pylist() if row["__deleted"]]
    assert deleted == [int(key) for key in meant]
    bad = [kind == "bad" or (kind == "tombstone" and key in BAD_KEYS) for key, kind, _ in drawn]
    assert [position for position, _ in plain.errors] == np.flatnonzero(bad).tolist()


def compacted(rows):
    """Keep the last record of each key, at its place: what compaction leaves."""
    last = {row.key: number for number, row in enumerate(rows)}
    return [row for number, row in enumerate(rows) if last[row.key] == number]


def without_tombstones(rows):
    return [row for row in rows if row.values is not None]


changes = st.lists(
    st.tuples(st.sampled_from(GOOD_KEYS), st.sampled_from(["row", "row", "tombstone"]), st.none()),
    max_size=16,
)


@settings(max_examples=some(12))
@given(changes, changes, st.integers(1, 4), st.sampled_from([1, 4, 7]), st.integers(0, 99))
def test_a_table_of_a_compacted_topic_is_that_of_the_whole(
    before, after, batches, partitions, seed
):
    """What was read before compaction is followed by what it left of the rest, and read from the beginning."""
    given_rows = [
        Row(value_of(*one, number), key=one[0]) for number, one in enumerate([*before, *after])
    ]
    read, rest = given_rows[: len(before)], given_rows[len(before) :]
    app = topic().app
    table = app.topics["t"].table()
    table.view("rows")
    table.group_by("text").agg(n=ms.count(), most=ms.max("n")).view("counts")
    found = []
    for history in (
        given_rows,
        compacted(given_rows),
        without_tombstones(compacted(given_rows)),
        [*read, *compacted(rest)],
    ):
        out = testing.run(
            app, {"t": history}, batches=batches, partitions=partitions, seed=seed, crash=1
        )
        found.append((out["rows"].rows(), out["counts"].rows()))
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("bad", ["dead-letter", "skip", "stop"])
def test_a_tombstone_without_a_readable_key_is_a_bad_record_and_others_are_not(bad):
    declared = topic(bad)
    declared.table().view("rows")
    fine = [
        Row({"id": 1, "text": None, "n": 5}),
        Row({"id": 2, "text": "a", "n": 6}),
        Row(None, key="1"),
    ]
    out = testing.run(declared.app, {"t": fine}, batches=2)
    assert out["rows"]["id"].to_list() == [2]
    given_rows = {"t": [*fine, Row(None, key="x"), Row(b"{bad", key="2")]}
    if bad == "stop":
        with pytest.raises(MillstreamError, match='bad="dead-letter" or "skip"'):
            testing.run(declared.app, given_rows)
        return
    out = testing.run(declared.app, given_rows, batches=2)
    assert out["rows"]["id"].to_list() == [2]
    assert out.dead.height == (2 if bad == "dead-letter" else 0)
    assert out.ledger["dead"].sum() == 2


def test_a_table_by_time_loses_a_version_that_compaction_removes():
    """Compaction goes by offsets: docs/joins.md says so."""
    declared = topic()
    declared.table(order="time", time=pl.from_epoch("n", time_unit="s")).view("rows")
    records = [
        Row({"id": 1, "text": "later", "n": 9}, key="1"),
        Row({"id": 1, "text": "older", "n": 5}, key="1"),
    ]
    found = [
        testing.run(declared.app, {"t": rows})["rows"]["text"].item()
        for rows in (records, compacted(records))
    ]
    assert found == ["later", "older"]
