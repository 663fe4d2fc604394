"""Lists and maps of a key behave as Python's own, are undone as a whole, and are only those of the present call."""

from datetime import UTC, datetime

import polars as pl
import pytest
from process_run import SECOND, Run, as_table, kernel_of, stored_keys

import millstream as ms
from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.process.key_state import KeyStates

DECLARED = (
    ("items", ms.list_state(pl.Int64)),
    ("places", ms.map_state(pl.Float64, pl.Int64)),
    ("times", ms.map_state(pl.Datetime("ms", "UTC"), pl.Int64)),
    ("zero", ms.value_state(pl.Float64, default=0.0)),
)


def states(items=(), places=None):
    made = KeyStates(DECLARED)
    made.load_nothing()
    made.begin(0)
    made.state.items, made.state.places = items, places or {}
    made.begin(1)
    return made


def test_however_much_a_call_changes_it_keeps_one_copy_to_undo_it():
    made = states(range(1000), dict.fromkeys(map(float, range(1000)), 0))
    items, places = made.state.items, made.state.places
    for number in range(900):
        items.pop(0)
        items.insert(1, number)
        items.append(number)
        items.extend([number])
        items.reverse()
        places.popitem()
        places[-1.0 - number] = number
        made.state.items = [*items][:50]
        made.state.places = {**places, 0.5: number}
    assert len(made.cells.undo) < 8
    made.undo()
    assert made.state.items == [*range(1000)]
    assert [*made.state.places.items()] == [(float(n), 0) for n in range(1000)]


def test_what_is_appended_or_put_before_a_copy_is_taken_is_undone_too():
    made = states([1], {1.0: 1})
    made.state.items.extend([2, 3])
    made.state.items.append(4)
    made.state.places[2.0] = 2
    made.state.places[1.0] = 7
    made.state.items.pop(0)
    made.state.places.clear()
    made.undo()
    assert made.state.items == [1]
    assert dict(made.state.places) == {1.0: 1}


def test_a_list_takes_its_own_elements_and_a_failing_one_changes_nothing():
    made = states([1, 2])
    made.state.items.extend(made.state.items)
    assert made.state.items == [1, 2, 1, 2]
    with pytest.raises(UnusableRowError):
        made.state.items.extend([5, "x"])
    made.state.items += [3]
    assert made.state.items == [1, 2, 1, 2, 3]


def test_a_map_gives_back_the_key_that_was_added_last_as_a_dict_does():
    made = states(places={1.0: 1, 2.0: 2})
    assert made.state.places.popitem() == (2.0, 2)
    assert made.state.places.popitem() == (1.0, 1)
    with pytest.raises(KeyError):
        made.state.places.popitem()


def test_a_key_of_a_map_is_found_as_it_was_stored():
    made = states()
    finer = datetime(2026, 1, 1, microsecond=1999, tzinfo=UTC)
    made.state.times[finer] = 7
    assert made.state.times[finer] == 7
    assert [*made.state.times] == [finer.replace(microsecond=1000)]
    made.state.places[1] = 3
    del made.state.times[finer], made.state.places[1]
    assert not made.state.times


def test_nan_is_no_key_of_a_map_and_zero_has_one_key():
    made = states()
    with pytest.raises(UnusableRowError, match="NaN, which is equal to no key"):
        made.state.places[float("nan")] = 1
    made.state.places[0.0] = 1
    made.state.places[-0.0] = 2
    assert [*made.state.places.items()] == [(0.0, 2)]


def test_a_list_or_map_that_was_kept_from_another_call_is_refused():
    made = states([1], {1.0: 1})
    items, places = made.state.items, made.state.places
    made.begin(2)
    for use in (lambda: items.append(2), lambda: len(places), places.clear):
        with pytest.raises(UnusableRowError, match="kept from another call"):
            use()
    assert made.state.items == [1]


def test_minus_zero_is_not_taken_for_a_default_of_zero():
    made = states()
    assert made.is_empty()
    made.state.zero = 0.0
    assert made.is_empty()
    made.state.zero = -0.0
    assert not made.is_empty()


class Keeps(ms.ProcessFunction):
    """Keeps the list of the first call, which is of another key or another batch in the second."""

    items = ms.list_state(pl.Int64)

    def __init__(self):
        self.kept = []

    def on_row(self, context, row):
        self.kept.append(context.state.items)
        self.kept[0].append(row["n"])


def test_state_kept_over_calls_fails_the_row_that_uses_it():
    run = Run(kernel_of(Keeps(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, "", 1)], "y": [(2, "", 2)]}), 3 * SECOND)
    assert len(run.failed) == 1
    assert "kept from another call" in run.failed[0][-1]


class Migrated(ms.ProcessFunction):
    kept = ms.value_state(pl.Int64)

    def on_row(self, context, row):
        context.state.kept = row["n"]


class Migrates(Migrated):
    version = 2
    kept = ms.value_state(pl.Int64, ttl="5 seconds")

    def migrate(self, version, state):
        return state


def test_migrated_state_expires_without_another_row_of_its_key():
    run = Run(kernel_of(Migrated(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, "", 1)], "y": [(8, "", 1)]}), 9 * SECOND)
    run.kernel = kernel_of(Migrates(), {"k": pl.String})
    nothing = as_table({})
    for watermark_us, keys in ((9 * SECOND, 2), (9 * SECOND + 1, 1), (13 * SECOND, 1)):
        run.batch(nothing, watermark_us)
        assert stored_keys(run) == keys
    run.batch(nothing, 13 * SECOND + 1)
    assert stored_keys(run) == 0
