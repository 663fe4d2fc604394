"""What the matcher reads and changes, as arrays: the automaton, the rows of keys, and partial matches.

An entry of a partial match is a row of ``Work.entries``: see :mod:`millstream.kernels.patterns.matcher`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.kernels.arrays import Float64s, Int64s

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]  # two-dimensional

# Columns of an entry.
PARENT, ROW, STATE, COUNT, MASK, ROOT, DEPTH, FRESH, COMPLETE, LIVE = range(10)
ENTRY_WIDTH = 10
# How an entry is complete.
BY_ROW, BY_TIME = 1, 2
# Places in ``Work.numbers``.
ENTRIES, LIVES, HELD, MATCHES, OLDEST, FULL = range(6)
# Contiguities.
STRICT, RELAXED, ANY = range(3)
# Skip strategies.
SKIP_NONE, SKIP_TO_NEXT, SKIP_PAST_LAST, SKIP_TO_FIRST, SKIP_TO_LAST = range(5)
# Aggregates of matched rows.
FIRST, LAST, SUM, MIN, MAX, ROWS, VALUES, TOTAL = range(8)  # a total of none is null, a sum is 0
NEVER = 2**63 - 1


class Tables(NamedTuple):
    """The automaton as arrays. State ``len(least)`` is that of entry 0, and the target of the end."""

    transitions_of: Int64s  # by state: where its transitions begin; then where the last one ends
    target: Int64s
    contiguity: Int64s
    goes_after: Int64s  # a mask of transitions of the same state
    absences_of: Int64s
    absence_condition: Int64s
    absence_next_only: Int64s
    condition: Int64s  # by state
    until: Int64s  # by state: a condition, or -1
    least: Int64s
    most: Int64s
    accepting: Int64s
    program_of: (
        Int64s  # by condition: where its program begins; one without is decided by the row alone
    )
    operation: Int64s
    argument: Int64s
    aggregate: Int64s  # by register
    aggregate_state: Int64s
    aggregate_value: Int64s
    aggregate_float: Int64s
    within_us: int  # -1: without end
    skip: int
    skip_state: int


class MatcherRows(NamedTuple):
    """Rows by key; of each key first those that partial matches have, then new ones, in their order."""

    time_us: Int64s
    gates: Bytes  # [condition, row]: what the row alone says of the condition
    any_gate: Bytes
    whole: Places  # [value, row]
    floating: Any  # [value, row]
    null: Bytes  # [value, row]
    rows_of: Int64s  # by key, as above
    new_from: Int64s  # by key: its first new row
    entries_of: Int64s  # by key: which entries its partial matches are


class Work(NamedTuple):
    """What changes meanwhile: entries with their registers, and lists of entries."""

    entries: Places
    whole: Places  # [entry, register]
    floating: Any
    null: Bytes
    live: Int64s
    held: Int64s
    matches: Places  # [match, (entry, time when it was decided, row that decided it or -1)]
    numbers: Int64s
    stack_whole: Int64s
    stack_float: Float64s
    stack_null: Bytes
