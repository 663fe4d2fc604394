"""A table of a stream: of each key the latest row, whatever the order of arrival and the division."""

import itertools

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import TIME, Folded, KernelRun, plain

import millstream as ms
from millstream import testing
from millstream.errors import UserCodeError
from millstream.kernels.frames import DELETED, ORDER
from millstream.kernels.state.row_digest import digest_rows
from millstream.kernels.tables.upserts import Upserts
from millstream.kernels.time.log_order import log_order_of

NAN = float("nan")
COLUMNS = {
    "k": pl.Float64(),
    "^v.*$": pl.Int64(),
    "vx": pl.String(),
    "n": pl.Struct({"a": pl.List(pl.Float64)}),
}
SCHEMA = {**COLUMNS, TIME: pl.Int64(), ORDER: pl.Int64(), DELETED: pl.Boolean()}

keys = st.sampled_from([0.5, 0.0, -0.0, NAN, 1.0])
rows = st.fixed_dictionaries(
    {
        "k": keys,
        "^v.*$": st.sampled_from([4, 1, 2, 3]),
        "vx": st.sampled_from(["", "a"]),
        "n": st.sampled_from([None, {"a": None}, {"a": [0.0, NAN]}]),
        TIME: st.integers(0, 3),
        DELETED: st.sampled_from([False, False, True]),
    }
)


def upserts(by=("k",), **options):
    return Upserts("table", by, tuple(COLUMNS.items()), **options)


def latest(rows, by, order, deleted):
    """The published rule: of each key the row that is later counts, unless it deletes."""
    found = {}
    for row in rows:
        version = (row[TIME], row[ORDER]) if order == "time" else (row[ORDER],)
        key = tuple(plain(row[name]) for name in by)
        if key not in found or version >= found[key][0]:
            found[key] = version, row
    for _, row in found.values():
        if not (row[DELETED] or deleted(row)):
            yield {name: row[name] for name in (*COLUMNS, TIME)}


def partition_of(row, by, order):
    """By offset, all rows of a key are in one partition; by time they are anywhere."""
    return hash(tuple(plain(row[name]) for name in by)) % 3 if order == "offset" else row[TIME] % 3


@settings(max_examples=some(150))
@given(
    st.lists(st.lists(rows, max_size=5), min_size=1, max_size=4),
    st.sampled_from([("k",), ("^v.*$",), ("k", "vx")]),
    st.sampled_from(["time", "offset"]),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_the_table_has_of_each_key_the_latest_row_that_does_not_delete(
    batches, by, order, conditional, buckets
):
    condition = (pl.nth(1) == 3) if conditional else None
    run, folded = KernelRun(upserts(by, order=order, deleted=condition), buckets=buckets), Folded()
    seen, offsets = [], itertools.count()
    for batch in batches:
        placed = [
            {**row, ORDER: log_order_of(0, partition_of(row, by, order), next(offsets))}
            for row in batch
        ]
        seen += placed
        frame = pl.DataFrame(placed, schema=SCHEMA)
        folded.take(run.batch({0: [frame[:2], frame[2:]]}))
        folded.holds(latest(seen, by, order, lambda row: conditional and row["^v.*$"] == 3))
    run.check_counts()


@settings(max_examples=some(60))
@given(st.lists(rows, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_rows_of_one_time_without_a_place_give_one_table_in_any_order(given_rows, dice):
    frame = pl.DataFrame(given_rows, schema=SCHEMA).drop(ORDER)
    tables = []
    for shuffled in (False, True):
        run, folded = KernelRun(upserts()), Folded()
        order = list(range(frame.height))
        if shuffled:
            dice.shuffle(order)
        for place in order:
            folded.take(run.batch({0: [frame[[place]]]}))
        tables.append(folded.rows)
    assert tables[0] == tables[1]


def test_a_row_that_differs_only_in_a_nested_column_has_another_digest():
    def digests(values, dtype):
        return digest_rows([pl.Series(values, dtype=dtype)]).tolist()

    lists = [None, [], [None], [0.0], [1.0], [1.0, 2.0], [2.0, 1.0], [NAN]]
    assert len(set(digests(lists, pl.List(pl.Float64)))) == len(lists)
    assert digests([[0.0], [NAN]], pl.List(pl.Float64)) == digests(
        [[-0.0], [-NAN]], pl.List(pl.Float64)
    )
    pairs = [[1, 2], [2, 1], None]
    assert len(set(digests(pairs, pl.Array(pl.Int64, 2)))) == len(pairs)
    structs = [{"a": [1]}, {"a": [2]}, {"a": None}, None]
    assert len(set(digests(structs, pl.Struct({"a": pl.List(pl.Int64)})))) == len(structs)
    nested = [[[1], [2]], [[1, 2]], [[1, 2], []]]
    assert len(set(digests(nested, pl.List(pl.List(pl.Int64))))) == len(nested)
    assert digests([{}, {}], pl.Struct({}))[0] == digests([{}], pl.Struct({}))[0]


def frame_of(*places, key=1.0, deleted=False):
    made = [
        {"k": key, "^v.*$": 1, "vx": "", "n": None, TIME: 0, ORDER: place, DELETED: deleted}
        for place in places
    ]
    return pl.DataFrame(made, schema=SCHEMA)


def test_by_offset_a_key_in_two_partitions_stops_the_job():
    first, second = log_order_of(0, 1, 5), log_order_of(0, 0, 9)
    run = KernelRun(upserts(order="offset"))
    with pytest.raises(
        UserCodeError, match=r'rows of the key 1\.0 in several partitions.*order="time"'
    ):
        run.batch({0: [frame_of(first, second)]})
    run.batch({0: [frame_of(first)]})
    with pytest.raises(UserCodeError, match="several partitions"):
        run.batch({0: [frame_of(second, deleted=True)]})
    run.batch({0: [frame_of(second, key=2.0)]})


def test_what_a_deletion_deletes_leaves_the_state_by_offset_and_by_time_its_columns_do():
    for order, left in (("offset", 0), ("time", 1)):
        run = KernelRun(upserts(order=order))
        run.batch({0: [frame_of(1)]})
        run.batch({0: [frame_of(2, deleted=True)]})
        (entry,) = run.manifests[0]["runs"].get("rows", [[None, 0, 0]])
        assert entry[2] == left


def test_a_batch_of_nothing_new_changes_nothing():
    run = KernelRun(upserts(order="offset"))
    run.batch({0: [frame_of(5)]})
    before = run.manifests[0]
    assert run.batch({0: [frame_of(3), frame_of(4, deleted=True)]}) is None
    assert run.manifests[0] == before


def test_a_row_without_a_key_is_a_dead_letter_and_the_others_go_on():
    app = ms.App("keys", log="unused")
    stream = app.topic("t", {"id": int | None, "v": int}, partitions=1).stream()
    stream.table("id").view("rows")
    rows = [{"id": 1, "v": 1}, {"id": None, "v": 2}, {"id": 2, "v": 3}]
    found = testing.run(app, {"t": rows}, batches=2)
    assert found["rows"].rows() == [(1, 1), (2, 3)]
    assert found.dead["reason"].to_list() == ["the key 'id' is null"]
    assert found.dead["offset"].to_list() == [1]
