"""Sorted runs against a dict: what is looked up and scanned is what was added, merged per key."""

import itertools
from unittest.mock import patch
from zlib import crc32

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.kernels.frames import HASH
from millstream.kernels.state import sorted_runs
from millstream.kernels.state.sorted_runs import (
    FOLD_RATIO,
    TIER_RATIO,
    MemoryRunStore,
    SortedRuns,
    decode_run,
    encode_run,
)

SCHEMA = {"k": pl.String, "n": pl.Int64, HASH: pl.UInt64}


def merge(rows):
    return rows.group_by("k").agg(pl.col("n").sum(), pl.col(HASH).first())


def rows_of(counts, hash_of):
    keys = list(counts)
    columns = {"k": keys, "n": [counts[k] for k in keys], HASH: [hash_of(k) for k in keys]}
    return pl.DataFrame(columns, schema=SCHEMA)


def collide(key):
    return len(key) % 3  # many keys share a hash


batches = st.lists(
    st.tuples(
        st.sampled_from([0, 10]),
        st.dictionaries(st.text("abc", min_size=1, max_size=5), st.integers(-5, 5), min_size=1),
    ),
    max_size=25,
)


def divided(part_rows):
    """Let runs have so many rows to a part, about."""
    return patch.object(sorted_runs, "PART_ROWS", part_rows)


@given(batches, st.sampled_from([1, 3, 1_000_000]))
def test_runs_hold_what_was_added_whatever_the_batches(added, part_rows):
    runs = SortedRuns(MemoryRunStore())
    model = {0: {}, 10: {}}
    for slot, counts in added:
        with divided(part_rows):
            runs.add(slot, rows_of(counts, collide), merge)
        for key, count in counts.items():
            model[slot][key] = model[slot].get(key, 0) + count
        runs = SortedRuns.from_message(runs.to_message(), runs.store)
    for slot, expected in model.items():
        pieces = list(runs.scan(slot))
        total = merge(pl.concat(pieces)) if pieces else pl.DataFrame(schema=SCHEMA)
        assert dict(total.select("k", "n").iter_rows()) == expected


@given(batches, st.sets(st.integers(0, 2), min_size=1), st.sampled_from([1, 3, 1_000_000]))
def test_a_look_up_gives_every_row_of_the_wanted_hashes_and_no_other(added, wanted, part_rows):
    runs = SortedRuns(MemoryRunStore())
    for _, counts in added:
        with divided(part_rows):
            runs.add(0, rows_of(counts, collide), merge)
    looked = [
        row for rows in runs.look_up(0, np.array(sorted(wanted), np.uint64)) for row in rows.rows()
    ]
    held = [row for rows in runs.scan(0) for row in rows.rows() if row[2] in wanted]
    assert sorted(looked) == sorted(held)


@pytest.mark.not_in_lane("thresholds", "it counts runs, which have many parts there")
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_a_slot_keeps_few_runs_and_the_store_keeps_only_those(sizes):
    store = MemoryRunStore()
    runs = SortedRuns(store)
    for number, size in enumerate(sizes):
        counts = {f"{number}-{i}": 1 for i in range(size)}
        runs.add(0, rows_of(counts, lambda k: hash(k) & 0xFFFF), merge)
    held = runs.slots[0]
    assert all(older.rows > FOLD_RATIO * newer.rows for older, newer in itertools.pairwise(held))
    assert set(store.tables) == {run.name for run in held}


@pytest.mark.not_in_lane("thresholds", "it counts runs, which have many parts there")
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_of_runs_in_tiers_a_slot_keeps_few_and_all_rows(sizes):
    store = MemoryRunStore()
    runs = SortedRuns(store)
    for number, size in enumerate(sizes):
        counts = {f"{number}-{i}": 1 for i in range(size)}
        runs.add(0, rows_of(counts, lambda k: hash(k) & 0xFFFF), merge, tiered=True)
    newest_first = [run.rows for run in reversed(runs.slots[0])]
    newer = newest_first[0]
    for rows in newest_first[1:]:
        assert rows > TIER_RATIO * newer
        newer += rows
    assert newer == sum(sizes)
    assert set(store.tables) == {run.name for run in runs.slots[0]}


@pytest.mark.not_in_lane("thresholds", "it counts runs, which have many parts there")
def test_four_runs_of_a_size_are_folded_in_tiers():
    runs = SortedRuns(MemoryRunStore())
    seen = []
    for number in range(16):
        runs.add(0, rows_of({f"{number}": 1}, int), merge, tiered=True)
        seen.append([run.rows for run in runs.slots[0]])
    assert seen[2:8] == [[1, 1, 1], [4], [4, 1], [4, 1, 1], [4, 1, 1, 1], [4, 4]]
    assert seen[15] == [16]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_large_run_is_in_parts_of_rising_hashes_and_folded_as_a_whole(sizes):
    store = MemoryRunStore()
    runs = SortedRuns(store)
    for number, size in enumerate(sizes):
        counts = {f"{number}-{i}": 1 for i in range(size)}
        with divided(10):
            runs.add(0, rows_of(counts, lambda k: crc32(k.encode())), merge)
        runs = SortedRuns.from_message(runs.to_message(), store)
    held = runs.slots[0]
    begins = [at for at, run in enumerate(held) if run.part == 0]
    whole = [held[a:b] for a, b in itertools.pairwise([*begins, len(held)])]
    assert [[run.part for run in parts] for parts in whole] == [
        list(range(len(parts))) for parts in whole
    ]
    for parts in whole:
        hashes = [store.tables[run.name].column(HASH).to_pylist() for run in parts]
        assert all(low[-1] < high[0] for low, high in itertools.pairwise(hashes))
        assert all(len(part) <= 40 for part in hashes)
    rows = [sum(run.rows for run in parts) for parts in whole]
    assert all(older > FOLD_RATIO * newer for older, newer in itertools.pairwise(rows))
    assert set(store.tables) == {run.name for run in held}


def test_rows_of_one_key_are_merged_oldest_first_also_in_parts():
    store = MemoryRunStore()
    runs = SortedRuns(store)
    seen = []

    def merge_last(rows):
        seen.append(rows.height)
        return rows.unique("k", keep="last", maintain_order=True)

    with divided(5):
        for turn in range(6):
            counts = {f"{i}": turn for i in range(12)}
            runs.add(0, rows_of(counts, lambda k: int(k) // 2), merge_last)
    assert {row[:2] for rows in runs.scan(0) for row in rows.rows()} == {
        (str(i), 5) for i in range(12)
    }
    assert max(seen) < 20  # 24 rows were folded each time, never all of them at once


def test_dropping_a_slot_leaves_nothing_of_it():
    store = MemoryRunStore()
    runs = SortedRuns(store)
    runs.add(0, rows_of({"a": 1}, len), merge)
    runs.add(10, rows_of({"b": 1}, len), merge)
    runs.drop_slot(0)
    assert list(runs.slots) == [10]
    assert len(store.tables) == 1


def test_an_encoded_run_is_read_back_from_a_memory_mapped_file(tmp_path):
    table = rows_of({"a": 1, "b": 2}, len).to_arrow(compat_level=pl.CompatLevel.oldest())
    path = tmp_path / "run.arrow"
    path.write_bytes(encode_run(table))
    back = decode_run(pa.memory_map(str(path)))
    assert back.equals(table.combine_chunks())
    assert back.column(HASH).num_chunks == 1
