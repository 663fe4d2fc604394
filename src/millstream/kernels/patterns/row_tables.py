"""What the matcher of row patterns reads and changes, as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.kernels.arrays import Float64s, Int64s
from millstream.kernels.patterns.tables import Bytes, MatcherRows, Places, Tables, Work

ABSENT = -1  # instead of a row's place
# A search whose conditions look at what rows are matched to may take very many steps. It is given up if it takes more than so
# many, and more than so many for each row that it has looked at. What a pass over rows takes is far less.
STEPS_MAX = 200_000
STEPS_OF_ROW_MAX = 100
# Places in ``RowWork.numbers``.
(
    UNTIL_US,
    DECIDED_US,
    DECIDED_ROW,
    UNDECIDED,
    DEADLINE,
    STEPS,
    WAYS,
    MATCH,
    EXAMINED,
    FIRST_ROW,
    LIMIT,
    LIMIT_IS_END,
    STAMP,
    MATCHES,
    TAKEN,
    FULL,
    FAILED,
    FAILURES,
    AT_DEPTH,
    AT_PLACE,
    WASTED,
    LOOKED_AHEAD,
) = range(22)
NUMBERS = 22
# What is full.
DEPTH_FULL, OUTPUT_FULL = 1, 2
# What failed: rows are given up then, and matching goes on behind them.
NO_VARIABLE, SKIP_FIRST_ROW, STEPS_EXCEEDED = 1, 2, 3
# Columns of a key.
NEXT_START, MATCH_NUMBER, MATCHED_UNTIL = range(3)
# Columns of a match.
START, LENGTH, COUNTED, OFFSET, TIME_US, ROW = range(6)
MATCH_WIDTH = 6
EMPTY, UNMATCHED = 0, -1  # instead of the number of its rows
# Where matching goes on.
PAST_LAST_ROW, TO_NEXT_ROW, TO_FIRST, TO_LAST = range(4)
# Columns of a navigation.
NAV_REGISTER, NAV_SET, NAV_FIRST, NAV_LOGICAL, NAV_PHYSICAL, NAV_VALUE = range(6)
CLASSIFIER, NUMBER = (
    -1,
    -2,
)  # instead of a value's number: what a row is matched to, and the number of the match


class RowTables(NamedTuple):
    """A row pattern as arrays."""

    code: Int64s  # by instruction
    first: Int64s
    second: Int64s
    split_of: Int64s
    splits: int
    condition_of: Int64s  # by variable: -1, where it has none
    program_of: (
        Int64s  # by condition: where its program begins; one without is decided by the row alone
    )
    operation: Int64s
    argument: Int64s
    navigations_of: Int64s  # by condition
    navigation: Places
    sets: Int64s  # sets of variables, as bits
    aggregate: Int64s  # by register, of which navigations have those behind these
    aggregate_set: Int64s
    aggregate_value: Int64s
    aggregate_float: Int64s
    registers: int
    within_us: int  # -1: without end
    skip: int
    skip_set: int  # 0: no variable is skipped to
    context_free: bool
    shows_empty: bool
    shows_unmatched: bool
    rows_ahead: int
    # Of a pattern whose conditions say the same of a row wherever a match begins, what may follow each row; else without takes.
    variable_of: Int64s  # by take
    follows_of: Int64s  # by take, and then of the beginning: where those that may follow begin
    follows: Int64s  # takes
    ends: Bytes  # by take, and then of the beginning: whether a match may end there


class PatternRows(NamedTuple):
    """Rows by key, in their order: those that state had, then new ones."""

    time_us: Int64s
    gates: Bytes  # [condition, row]: what the row alone says of the condition
    may_begin: Bytes  # whether anything that is emitted may begin with the row
    whole: Places  # [value, row]
    floating: Any
    null: Bytes
    variable_rank: Int64s  # by variable: its name's rank among texts
    rows_of: Int64s  # by key: its first row; then where the last one ends


class RowWork(NamedTuple):
    """What changes meanwhile."""

    numbers: Int64s
    keys: Places  # [key, (where the next match may begin, number of the last match, where matched rows end)]
    stack: Places  # [number, (instruction, depth)]
    visited: Places  # [depth, split]: the stamp of the path that took it last
    stamps: Int64s  # by depth: of the path there
    label: Int64s  # by entry: what its row is matched to
    excluded: Int64s
    first_entry: (
        Places  # [entry, set]: the first entry whose row is matched to one of the set; 0: none
    )
    last_entry: Places
    whole: Places  # [entry, register]
    floating: Any
    null: Bytes
    matches: Places
    failures: Places  # [number, (first row that is given up, where they end, why)]
    taken: Places  # rows of matches, one match after the other: [number, (variable, whether it is excluded)]
    stack_whole: Int64s
    stack_float: Float64s
    stack_null: Bytes
    earliest: Int64s  # by row: where the shortest match that begins there ends, without regard to its time
    furthest: Int64s  # by row: the last row that a search from there looks at, likewise
    ahead: Places  # [take, (earliest, furthest of a row, of the one after it)]


# What conditions are asked with, of sequences as of row patterns: the fields that they read have the same names.
AnyTables = Tables | RowTables
AnyRows = MatcherRows | PatternRows
AnyWork = Work | RowWork
