"""State of keys that an earlier format has left is gone on with, and what a later one has left is refused."""

import polars as pl
import pytest
from process_run import SECOND, Run, as_table, kernel_of

import millstream as ms
from millstream.errors import CorruptionError
from millstream.kernels.frames import WEIGHT
from millstream.kernels.process import operator, stored_keys
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.operator_state import OperatorState

SCHEMA = {"count": pl.Int64}


class ByRow(ms.ProcessFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_row(self, context, row):
        context.state.count += 1
        context.emit({"count": context.state.count})


class InFrames(ms.FrameFunction):
    count = ms.value_state(pl.Int64, default=0)

    def on_rows(self, context, rows, state):
        found = rows.group_by("__key").agg(pl.len().cast(pl.Int64).alias("more"))
        state = state.join(found, on="__key", maintain_order="left")
        state = state.with_columns(pl.col("count") + pl.col("more"))
        context.emit(state.select("__key", "count"))
        return state


def columns_of(run):
    """The columns of each run of state."""
    runs = OperatorState.from_message(run.stored, run.store).families["keys.1"]
    return [runs.table(one).column_names for one in runs.slots[0]]


def rows_of(keys, time):
    return as_table({key: [(time, "count", 0)] for key in keys})


@pytest.mark.parametrize("function", [ByRow, InFrames])
def test_state_of_the_first_format_is_gone_on_with(function, monkeypatch):
    run = Run(kernel_of(ByRow(), SCHEMA))
    with monkeypatch.context() as earlier:
        whole = lambda state, version: KeyedRows(state, f"keys.{version}", WEIGHT)  # noqa: E731
        earlier.setattr(stored_keys, "keyed_rows", whole)
        earlier.setattr(operator, "keyed_rows", whole)
        earlier.setattr(stored_keys, "FORMAT", 1)
        run.batch(rows_of("abcdef", 1), 2 * SECOND)
    assert run.stored["values"]["process.format"] == 1
    assert all({"__timers", "__version", "__gone", WEIGHT} <= {*names} for names in columns_of(run))
    run.kernel = kernel_of(function(), SCHEMA)
    made = [
        run.batch(rows_of(keys, 3 + at), (4 + at) * SECOND).rows["count"].to_list()
        for at, keys in enumerate(("ag", "ah", "abcdefg"))
    ]
    assert [sorted(counts) for counts in made] == [[1, 2], [1, 3], [2, 2, 2, 2, 2, 2, 4]]
    assert run.stored["values"]["process.format"] == 2
    (names,) = columns_of(run)
    assert not {"__timers", "__version", "__gone", WEIGHT} & {*names}


def test_state_of_a_later_format_is_refused():
    run = Run(kernel_of(ByRow(), SCHEMA))
    run.batch(rows_of("a", 1), 2 * SECOND)
    run.stored["values"]["process.format"] = 3
    with pytest.raises(CorruptionError, match=r"format 3, .* formats up to 2"):
        run.batch(rows_of("a", 3), 4 * SECOND)
