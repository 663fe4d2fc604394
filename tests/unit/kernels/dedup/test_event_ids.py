"""Which events of a batch are the first of their id, and how long ids are held."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels.dedup import event_ids as arrivals
from millstream.kernels.dedup.event_ids import EventIds, SearchRanges, keep_first
from millstream.kernels.dedup.kept_ids import KeptIds
from millstream.kernels.dedup.operator import Dedup
from millstream.kernels.frames import ORDER, SPLIT, TIME
from millstream.kernels.operator import BatchContext
from millstream.kernels.pass_through import in_arrival_order
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK

MINUTE_US = 60_000_000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 60)), max_size=80),
    st.integers(0, 25),
    st.sampled_from([1, 3, 64]),
)
def test_the_first_events_are_those_of_a_loop_over_all(drawn, within, rounds):
    table = pl.DataFrame(drawn, schema={"id": pl.Int64, TIME: pl.Int64}, orient="row")
    expected, kept = [], []
    for name, at in drawn:
        first = not any(n == name and abs(t - at) <= within for n, t in kept)
        kept += [(name, at)] * first
        expected.append(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_ROUNDS_MAX", rounds)  # few: the rest goes event by event
        events = EventIds.of(table, ("id",))
        spans = SearchRanges(events.times, events.times - within, events.times + within)
        first = keep_first(events.first_of_id(), spans)
    found = np.zeros(len(drawn), bool)
    found[events.rows[first]] = True
    assert found.tolist() == expected


def test_an_id_that_is_kept_thousands_of_times_in_a_batch_is_no_trouble():
    times = np.arange(20_000) * 11
    spans = SearchRanges(times, times - 10, times + 10)
    begins = np.zeros(20_000, bool)
    begins[0] = True
    assert keep_first(begins, spans).all()


def test_ids_that_share_the_first_hash_are_told_apart_by_the_second(monkeypatch):
    def one_hash(table, names, seed=0):
        return hash_columns(table, names, seed) if seed else np.zeros(table.height, np.uint64)

    monkeypatch.setattr(arrivals, "hash_columns", one_hash)
    table = pl.DataFrame({"id": [5, 9, 5, 9, 7, 5], TIME: [0] * 6})
    events = EventIds.of(table, ("id",))
    assert events.first_of_id().sum() == 3
    kept = KeptIds(OperatorState(MemoryRunStore()).runs("kept"), MINUTE_US, 0)
    kept.add(events.take(table["id"].to_numpy()[events.rows] == 5), NO_WATERMARK)
    found = np.zeros(6, bool)
    found[events.rows] = kept.repeats(events)
    assert found.tolist() == [True, False, True, False, False, True]


@pytest.mark.not_in_lane("one_bit_hashes", "it says what the hashes are")
@pytest.mark.not_in_lane("two_bit_hashes", "it says what the hashes are")
def test_hashes_with_different_seeds_have_nothing_to_do_with_one_another():
    for values in (range(1000), [f"id-{n}" for n in range(1000)]):
        table = pl.DataFrame({"id": values})
        plain, seeded = hash_columns(table, ("id",)), hash_columns(table, ("id",), 7)
        assert len(np.unique(plain)) == len(np.unique(seeded)) == 1000
        differing = np.unpackbits((plain ^ seeded).view(np.uint8)).mean()
        assert 0.49 < differing < 0.51
        assert len(np.unique(plain ^ seeded)) == 1000  # not one the other with a constant mixed in


@pytest.mark.not_in_lane("thresholds", "it goes by the width of slots")
@pytest.mark.parametrize(
    ("within_us", "lateness_us"), [(80 * MINUTE_US, 0), (60 * MINUTE_US, 20 * MINUTE_US)]
)
def test_ids_are_held_while_an_event_in_time_can_repeat_them_and_then_go(within_us, lateness_us):
    state = OperatorState(MemoryRunStore())
    kept = KeptIds(state.runs("kept"), within_us, lateness_us)
    assert kept.slot_us == 10 * MINUTE_US
    table = pl.DataFrame({"id": [1, 2], TIME: [0, 10 * MINUTE_US - 1]})
    kept.add(EventIds.of(table, ("id",)), NO_WATERMARK)
    last = 10 * MINUTE_US - 1 + within_us  # the last repeat of the second
    kept.add(EventIds.none(), last + lateness_us)
    asked = EventIds.of(pl.DataFrame({"id": [2, 2], TIME: [last, last + 1]}), ("id",))
    assert kept.repeats(asked).tolist() == [True, False]
    kept.add(EventIds.none(), last + lateness_us + 1)
    assert state.size_bytes == 0
    kept.add(EventIds.of(table, ("id",)), last + lateness_us + 1)  # past when they come
    assert state.size_bytes == 0


def test_rows_are_taken_in_the_order_of_the_log_or_of_time_where_they_have_no_place_in_it():
    rows = pl.DataFrame({"n": [0, 1, 2], TIME: [5, 9, 1], SPLIT: [0, 1, 1], ORDER: [8, 3, 7]})
    assert in_arrival_order([rows])["n"].to_list() == [1, 2, 0]
    placeless = pl.DataFrame({"n": [0, 1, 2, 3], "tags": [["x"]] * 4, TIME: [5, 9, 1, 5]})
    assert in_arrival_order([placeless])["n"].to_list() in ([2, 0, 3, 1], [2, 3, 0, 1])
    assert in_arrival_order([placeless]).equals(in_arrival_order([placeless.reverse()]))


def test_frames_of_one_batch_may_have_their_columns_in_any_order():
    kernel = Dedup(
        "dedup", ("id",), lateness_us=0, side_output=False, types=("Int64",), within_us=MINUTE_US
    )
    first = pl.DataFrame({"id": [1, 2], "n": [0, 1], TIME: [0, 0], SPLIT: [0, 0], ORDER: [10, 11]})
    second = pl.DataFrame({SPLIT: [1], TIME: [0], "n": [2], ORDER: [5], "id": [2]})
    state, moment = OperatorState(MemoryRunStore()), BatchContext(NO_WATERMARK, NO_WATERMARK)
    outcome = kernel.process(state, {0: [first, second]}, moment)
    assert outcome.rows["n"].to_list() == [2, 0]
    assert outcome.counts == {"emitted": 2, "duplicate": 1}
