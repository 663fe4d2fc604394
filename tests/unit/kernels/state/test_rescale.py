"""State that is divided among other numbers of buckets has the same rows as a dict that never was."""

import numpy as np
import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.dedup.bloom_generations import FILTERS, BloomGenerations, BloomRule
from millstream.kernels.dedup.event_ids import EventIds
from millstream.kernels.frames import HASH, ROWS, WEIGHT
from millstream.kernels.joins.held_rows import HeldRows, numbered_families
from millstream.kernels.state import appended_rows, sorted_runs
from millstream.kernels.state.appended_rows import AppendedRows
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.joined_runs import one_chunk, put_together
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import buckets_of, hash_columns
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.rescale import hash_range, rescale_operator
from millstream.kernels.state.sorted_runs import MemoryRunStore, Run, Share
from millstream.kernels.state.timers import Timers, WaitingLedger

COUNTS = st.integers(1, 9)
KEYS = st.integers(0, 40)
SAME = {"watermark": 0, "clocks": {}, "seed": 0}


def hashed(keys):
    return hash_columns(pl.DataFrame({"k": pl.Series(keys, dtype=pl.Int64)}), ("k",))


@given(st.integers(1, 4096), st.integers(0, 2**64 - 1))
def test_a_bucket_is_the_range_in_which_its_hashes_are(count, value):
    value = np.array([value], np.uint64)
    bucket = int(buckets_of(value, count)[0])
    low, high = hash_range(bucket, count)
    assert low <= int(value[0]) < high
    assert hash_range(0, count)[0] == 0
    assert hash_range(count - 1, count)[1] == 2**64


class Divided:
    """The state of one operator in some buckets, between batches as messages; one store has all runs."""

    def __init__(self, layout=None):
        self.layout, self.count, self.parts = layout or StateLayout(), 1, {}
        self.store = MemoryRunStore(keeps_all=True)

    def rescale(self, count):
        parts = self.parts
        self.parts = rescale_operator("step", parts, self.layout, before=self.count, after=count)
        self.count = count

    def batch(self, keys, work):
        """Call some work with each bucket's state and the places of its keys; return what it gives."""
        buckets = buckets_of(hashed(keys), self.count)
        given = {}
        for bucket in range(self.count):
            state = OperatorState.from_message(self.parts.get(bucket), self.store)
            given[bucket] = work(state, np.flatnonzero(buckets == bucket))
            self.parts[bucket] = state.to_message() | SAME
        return given


BATCHES = st.lists(
    st.tuples(st.none() | COUNTS, st.lists(st.tuples(KEYS, st.integers(0, 3)), max_size=12)),
    max_size=14,
)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sorted_runs, "PART_ROWS", 4)


@settings(max_examples=some(40), deadline=None)
@given(BATCHES)
def test_rows_by_key_are_those_that_were_put_last(batches):
    model, held = {}, Divided()
    for count, rows in batches:
        if count is not None and held.parts:
            held.rescale(count)
        latest = dict(rows)  # a value of 0 takes the row of a key away
        keys, values = list(latest), list(latest.values())

        def work(state, places, keys=keys, values=values, model=model):
            kept = KeyedRows(state, "rows", ROWS)
            ledger = StateLedger("step", (kept.runs,))
            own = [keys[at] for at in places]
            hashes = np.unique(hashed(own))
            known = kept.get(hashes) if len(hashes) else None
            before = {} if known is None else dict(known.select("k", "v").rows())
            assert before == {key: model[key] for key in own if key in model}
            new = [(key, values[at]) for key, at in zip(own, places, strict=True) if values[at]]
            rows = pl.DataFrame(new, schema={"k": pl.Int64, "v": pl.Int64}, orient="row")
            rows = rows.with_columns(
                pl.Series(HASH, hashed(rows["k"].to_list())), pl.lit(1, pl.Int64).alias(ROWS)
            )
            kept.put(hashes, rows, known)
            ledger.events_in = rows.height
            ledger.events_out = 0 if known is None else known.height
            ledger.check()

        held.batch(keys, work)
        model.update(latest)
        model = {key: value for key, value in model.items() if value}
        found = held.batch([], lambda state, _: KeyedRows(state, "rows", ROWS).scan())
        tables = [part.select("k", "v") for part in found.values() if part is not None]
        assert sorted(row for part in tables for row in part.rows()) == sorted(model.items())


@settings(max_examples=some(40), deadline=None)
@given(BATCHES, st.booleans())
def test_rows_that_are_added_are_all_there_once(batches, appended):
    model, held = [], Divided(StateLayout(appended=("rows",)) if appended else None)
    for number, (count, rows) in enumerate(batches):
        if count is not None and held.parts:
            held.rescale(count)
        keys = [key for key, _ in rows]

        def work(state, places, rows=rows, number=number):
            kept = AppendedRows(state, "rows") if appended else Arrangement(state, "rows")
            own = [(rows[at][0], number * 100 + int(at)) for at in places]
            table = pl.DataFrame(own, schema={"k": pl.Int64, "v": pl.Int64}, orient="row")
            hashes = hashed(table["k"].to_list())
            weights = pl.lit(1, pl.Int64).alias(WEIGHT)
            kept.add(table.with_columns(pl.Series(HASH, hashes), weights))
            found = kept.look_up(hashes)
            return [] if found is None else found.select("k", "v").rows()

        found = held.batch(keys, work)
        model += [(key, number * 100 + at) for at, (key, _) in enumerate(rows)]
        assert sorted(row for part in found.values() for row in part) == sorted(
            row for row in model if row[0] in keys
        )


@settings(max_examples=some(40), deadline=None)
@given(BATCHES)
def test_timers_come_once_each_and_none_is_missing(batches):
    model, held = [], Divided()
    for now, (count, rows) in enumerate(batches, 1):
        if count is not None and held.parts:
            held.rescale(count)

        def work(state, places, rows=rows, now=now, model=model):
            timers, waiting = Timers(state, "timers", 3), WaitingLedger("step", state, 3)
            due = timers.due(now)
            keys = [rows[at][0] for at in places]
            times = np.array([now + 1 + rows[at][1] for at in places], np.int64)
            timers.add(times, hashed(keys))
            came = [time for key, time in model if time == now and hashed([key])[0] in due]
            waiting.update(np.array(came, np.int64), times, now)
            return due.tolist()

        found = held.batch([key for key, _ in rows], work)
        wanted = {int(hashed([key])[0]) for key, time in model if time == now}
        assert {value for part in found.values() for value in part} == wanted
        model += [(key, now + 1 + wait) for key, wait in rows]
        model = [one for one in model if one[1] > now]


@settings(max_examples=some(40), deadline=None)
@given(BATCHES)
def test_the_marks_of_held_rows_stay_theirs(batches):
    model, held = {}, Divided(StateLayout(numbered=numbered_families("left")))

    def held_rows(state):
        return HeldRows(state, "left", 10, 1000, marked=True, timed=False)

    for count, rows in batches:
        if count is not None and held.parts:
            held.rescale(count)

        def work(state, places, rows=rows):
            kept = held_rows(state)
            own = [rows[at][0] for at in places]
            table = pl.DataFrame({"k": pl.Series(own, dtype=pl.Int64)}).with_columns(
                pl.Series(HASH, hashed(own)), pl.lit(5, pl.Int64).alias("__time")
            )
            near = kept.near(table, -10, 10) if own else None
            alone = None if near is None else kept.without_mark(near)
            if own:
                matched = np.array([rows[at][1] > 1 for at in places])
                kept.add(kept.numbered(table), matched)
            return [] if alone is None else alone["k"].to_list()

        found = held.batch([key for key, _ in rows], work)
        asked = {key for key, _ in rows}
        wanted = [key for key, without in model.items() if key in asked for _ in range(without)]
        assert sorted(key for part in found.values() for key in part) == sorted(wanted)
        for key, value in rows:
            model[key] = model.get(key, 0) + (value <= 1)


@settings(max_examples=some(40), deadline=None)
@given(BATCHES)
def test_filters_that_are_shared_know_every_id(batches):
    rule = BloomRule(1000, ids=32, rate=1e-9, exact_check=False, buckets=1)
    seen, held = set(), Divided(StateLayout(filters=(FILTERS,)))
    for count, rows in batches:
        if count is not None and held.parts:
            held.rescale(count)
        keys = sorted({key for key, _ in rows})

        def work(state, places, keys=keys, count=held.count):
            own = [keys[at] for at in places]
            table = pl.DataFrame({"k": pl.Series(own, dtype=pl.Int64)})
            ids = EventIds.of(table.with_columns(pl.lit(5, pl.Int64).alias("__time")), ("k",))
            filters = BloomGenerations(rule.in_buckets(count), state, 1000, 0)
            repeats = filters.repeats(ids)
            if own:
                filters.add(ids.take(~repeats), 0)
            return {own[at] for at in ids.rows[repeats].tolist()}

        found = held.batch(keys, work)
        assert set().union(*found.values()) == seen & set(keys)
        seen |= set(keys)


def test_a_value_that_differs_and_has_no_rule_is_refused():
    message = {"runs": {}, "emitted": {}, **SAME}
    parts = {0: message | {"values": {"other": 1}}, 1: message | {"values": {"other": 2}}}
    with pytest.raises(CorruptionError, match="differ in 'other'"):
        rescale_operator("step", parts, StateLayout(), before=2, after=1)


def test_a_run_in_parts_is_shared_part_by_part():
    held = Divided()

    def work(state, places):
        keys = list(range(40))
        rows = pl.DataFrame({"k": keys}).with_columns(
            pl.Series(HASH, hashed(keys)), pl.lit(1, pl.Int64).alias(ROWS)
        )
        KeyedRows(state, "rows", ROWS).put(np.unique(hashed(keys)), rows)

    held.batch([], work)
    whole = held.parts[0]["runs"]["rows"]
    held.rescale(4)
    shared = [run for part in held.parts.values() for run in part["runs"]["rows"]]
    assert len(whole) == 10
    assert len(shared) <= 10 + 3  # a part is divided where a new bucket begins, and nowhere else


def _added(held, keys):
    """Add rows to the appended rows of a divided state; return what is found of their keys."""

    def work(state, places):
        own = [keys[at] for at in places]
        hashes = hashed(own)
        table = pl.DataFrame({"k": pl.Series(own, dtype=pl.Int64)})
        kept = AppendedRows(state, "rows")
        kept.add(table.with_columns(pl.Series(HASH, hashes), pl.lit(1, pl.Int64).alias(WEIGHT)))
        found = kept.look_up(hashes)
        return [] if found is None else found["k"].to_list()

    return sorted(key for part in held.batch(keys, work).values() for key in part)


def test_chunks_that_an_earlier_version_kept_in_one_slot_are_put_together_again():
    held = Divided(StateLayout(appended=("rows",)))
    for number in range(6):
        _added(held, [number, 90])
    for entry in held.parts[0]["runs"]["rows.rows"]:
        entry[1] = 0  # where they stood then, one behind the other
    held.rescale(4)
    held.rescale(1)
    chunks = held.parts[0]["runs"]["rows.rows"]
    assert [(slot, rows) for _, slot, rows, *_ in chunks] == [(2 * n, 2) for n in range(6)]
    assert _added(held, [90]) == [90] * 7


def test_places_that_run_out_are_refused():
    held = Divided(StateLayout(appended=("rows",)))
    _added(held, [1, 2, 3])
    held.parts[0]["runs"]["rows.rows"][0][1] = 2**62 - 2**37
    held.rescale(1)
    with pytest.raises(ConfigError, match=r"'step' have places up to \d+, and 4 buckets.*fewer"):
        held.rescale(4)


def test_rows_of_small_chunks_are_moved_together_and_those_of_other_buckets_left(monkeypatch):
    monkeypatch.setattr(appended_rows, "_SMALL_CHUNKS_MAX", 6)
    held = Divided(StateLayout(appended=("rows",)))
    for number in range(5):
        _added(held, list(range(8 * number, 8 * number + 8)))
    held.rescale(2)
    for number in range(3):
        _added(held, list(range(40 + 8 * number, 48 + 8 * number)))
    chunks = [part["runs"]["rows.rows"] for part in held.parts.values()]
    assert [len(of_bucket) for of_bucket in chunks] == [2, 2]  # moved, and one batch after that
    assert sum(rows for of_bucket in chunks for _, _, rows, *_ in of_bucket) == 64
    assert all(len(entry) == 5 for of_bucket in chunks for entry in of_bucket)  # none is shared
    assert _added(held, list(range(64))) == sorted([*range(64), *range(64)])


def _shares(*ranges, name="a", rows=10, whole=(0, 8)):
    runs = []
    for low, high in ranges:
        share = Share(low, high, rows, counted=False, whole_low=whole[0], whole_high=whole[1])
        runs.append(Run(name, 0, rows, 100, share=share))
    return runs


def test_a_share_waits_for_the_rest_of_its_run_that_stands_further_behind():
    one, other = _shares((0, 4), (4, 8), rows=30)
    before = Run("b", 0, 5, 50, share=Share(4, 8, 5, counted=True, whole_low=4, whole_high=8))
    made = put_together([[[one]], [[before], [other]]], (0, 8))
    assert [run.name for run in made] == ["b", "a"]
    assert made[1].share is None


def test_shares_that_do_not_meet_stay_apart_and_a_chunk_is_there_once():
    first, third = _shares((0, 2), (4, 8))
    made = put_together([[[first]], [[third]]], (0, 8))
    assert [(run.share.low, run.share.high) for run in made] == [(0, 2), (4, 8)]
    chunk = one_chunk([first, third], (0, 8))
    assert not chunk.is_whole
    assert one_chunk(_shares((0, 2), (2, 4), (4, 8)), (0, 8)).share is None
