"""Runs the program of a row pattern over the rows of keys: plain loops over arrays, which may be compiled.

It is written in the part of Python that numba compiles (:mod:`millstream.kernels.patterns.compiled`), and runs
without it, too, with the same result. Of each key, in this order, for the row where the next match may begin:

1.  The first path by preference is looked for (:func:`_search`). It is looked for in the rows that are known. Where it depends on
    a row that is not known yet, nothing is decided: the key waits, and the search begins anew with the next rows.
2.  A row that is later than ``within`` after the first, or as much before it, is not there. So when ``within`` is over, all is decided.
3.  Where a search takes too many steps, the rows that it has looked at are given up. So are those of a match that cannot be skipped
    as declared. Matching goes on behind them.
4.  A match is emitted with what decided it: the last row that was looked at, or the end of ``within`` where it mattered that
    no further row is there. It is then skipped as declared.

Entry d of a path is the d-th row that it takes; entry 0 has none. What entries have is overwritten where the search
goes back. A split that was taken before with the same rows before it, matched alike, leads to what was tried already. Where no
condition looks at what rows are matched to, rows need not be matched alike for that (``context_free``), so a search takes at
most the length of the program times that of the match.

Where conditions say the same of a row wherever a match begins, searches that find nothing try the same rows over and over. When
they have taken as many steps as a pass over the key's rows takes, that pass is made, from the last row back to the first: what
is known of a row follows from what is known of the next one (:func:`_look_ahead`). It tells of each row where the shortest match
that begins there ends, and how far a search would look. So rows that begin no match are left out without a search from there on.
"""

from __future__ import annotations

from millstream.kernels.arrays import Int64s
from millstream.kernels.patterns.matcher import fold_value
from millstream.kernels.patterns.programs import is_true
from millstream.kernels.patterns.row_pattern import AT_START, DONE, JUMP, SPLIT, TAKE
from millstream.kernels.patterns.row_tables import (
    ABSENT,
    AT_DEPTH,
    AT_PLACE,
    CLASSIFIER,
    COUNTED,
    DEADLINE,
    DECIDED_ROW,
    DECIDED_US,
    DEPTH_FULL,
    EMPTY,
    EXAMINED,
    FAILED,
    FAILURES,
    FIRST_ROW,
    FULL,
    LENGTH,
    LIMIT,
    LIMIT_IS_END,
    LOOKED_AHEAD,
    MATCH,
    MATCH_NUMBER,
    MATCHED_UNTIL,
    MATCHES,
    NAV_FIRST,
    NAV_LOGICAL,
    NAV_PHYSICAL,
    NAV_REGISTER,
    NAV_SET,
    NAV_VALUE,
    NEXT_START,
    NO_VARIABLE,
    NUMBER,
    OFFSET,
    OUTPUT_FULL,
    ROW,
    SKIP_FIRST_ROW,
    STAMP,
    START,
    STEPS,
    STEPS_EXCEEDED,
    STEPS_MAX,
    STEPS_OF_ROW_MAX,
    TAKEN,
    TIME_US,
    TO_FIRST,
    TO_NEXT_ROW,
    UNDECIDED,
    UNMATCHED,
    UNTIL_US,
    WASTED,
    WAYS,
    PatternRows,
    RowTables,
    RowWork,
)
from millstream.kernels.patterns.tables import NEVER, ROWS, Places

NO_MATCH = -1
AHEAD_COST = 1  # how many steps a pass may cost by what it looks at


def match_row_patterns(tables: RowTables, rows: PatternRows, work: RowWork, until_us: int) -> None:
    """Match all keys. ``until_us``: no row of this time or before it follows."""
    work.numbers[UNTIL_US] = until_us
    for key in range(len(rows.rows_of) - 1):
        _match_key(tables, rows, work, key)
        if work.numbers[FULL]:
            return


def _match_key(tables: RowTables, rows: PatternRows, work: RowWork, key: int) -> None:
    numbers, keys = work.numbers, work.keys
    numbers[DECIDED_US] = -(2**63)
    numbers[DECIDED_ROW] = -1
    numbers[WASTED] = numbers[LOOKED_AHEAD] = 0
    numbers[FIRST_ROW] = rows.rows_of[key]
    start, end = keys[key, NEXT_START], rows.rows_of[key + 1]
    while start < end:
        if not rows.may_begin[start]:
            start += 1
            continue
        length = _attempt(tables, rows, work, key, start)
        if numbers[UNDECIDED] or numbers[FULL]:
            break
        _decide(tables, rows, work, start)
        if numbers[FAILED]:
            start = _give_up(work, start, numbers[EXAMINED] + 1)
        elif length == NO_MATCH:
            if tables.shows_unmatched and start >= keys[key, MATCHED_UNTIL]:
                _emit(work, start, NO_MATCH, 0)
            start += 1
        else:
            start = _matched(tables, work, key, start, length)
        if numbers[FULL]:
            break
    keys[key, NEXT_START] = start


def _attempt(tables: RowTables, rows: PatternRows, work: RowWork, key: int, start: int) -> int:
    """Return how many rows the match that begins here has, or ``NO_MATCH``; see also what is undecided."""
    numbers = work.numbers
    numbers[UNDECIDED] = numbers[DEADLINE] = numbers[STEPS] = numbers[FAILED] = 0
    numbers[MATCH] = work.keys[key, MATCH_NUMBER] + 1
    numbers[EXAMINED] = start
    _set_limits(tables, rows, work, key, start)
    if numbers[LOOKED_AHEAD] and _begins_none(work, start):
        return NO_MATCH
    length = _search(tables, rows, work, start)
    undone = numbers[UNDECIDED] or numbers[FULL]
    if length == NO_MATCH and len(tables.variable_of) and not undone:
        _count_wasted(tables, rows, work, key, start)
    if length > 0:  # measures may look at rows behind the last one
        for step in range(1, tables.rows_ahead + 1):
            _row_at(work, start + length - 1 + step)
    return length


def _set_limits(tables: RowTables, rows: PatternRows, work: RowWork, key: int, start: int) -> None:
    """Find which rows are there for a match that begins here: those in ``[FIRST_ROW, LIMIT)``."""
    numbers = work.numbers
    first, limit = numbers[FIRST_ROW], rows.rows_of[key + 1]  # a later start sees no earlier rows
    numbers[LIMIT], numbers[LIMIT_IS_END] = limit, 0
    if tables.within_us < 0:
        return
    began = rows.time_us[start]
    numbers[LIMIT_IS_END] = numbers[UNTIL_US] >= began + tables.within_us
    while first < start and began - rows.time_us[first] > tables.within_us:
        first += 1
    numbers[FIRST_ROW] = first
    if rows.time_us[limit - 1] - began > tables.within_us:
        low, high = start, limit - 1  # the row at low is there, that at high is not
        while high - low > 1:
            middle = (low + high) // 2
            if rows.time_us[middle] - began > tables.within_us:
                high = middle
            else:
                low = middle
        numbers[LIMIT], numbers[LIMIT_IS_END] = high, 1


def _count_wasted(
    tables: RowTables, rows: PatternRows, work: RowWork, key: int, start: int
) -> None:
    """Count the steps of a search that has found nothing; look ahead once they cost as much as that."""
    numbers = work.numbers
    numbers[WASTED] += numbers[STEPS]
    left = rows.rows_of[key + 1] - start
    cost = AHEAD_COST * left * (len(tables.follows) + len(tables.ends))
    if not numbers[LOOKED_AHEAD] and numbers[WASTED] > cost:
        _look_ahead(tables, rows, work, start, rows.rows_of[key + 1])
        numbers[LOOKED_AHEAD] = 1


def _look_ahead(tables: RowTables, rows: PatternRows, work: RowWork, start: int, end: int) -> None:
    """Find for each row in ``[start, end)`` where the shortest match from there ends, and how far searches look."""
    ahead, takes = work.ahead, len(tables.variable_of)
    for take in range(takes):
        ahead[take, 2], ahead[take, 3] = NEVER, end
    for row in range(end - 1, start - 1, -1):
        for take in range(takes):
            condition = tables.condition_of[tables.variable_of[take]]
            ahead[take, 0], ahead[take, 1] = NEVER, row
            if condition < 0 or rows.gates[condition, row]:
                ahead[take, 0], ahead[take, 1] = _reached(tables, ahead, take, row, row + 1, 2)
        work.earliest[row], work.furthest[row] = _reached(tables, ahead, takes, row, row, 0)
        for take in range(takes):
            ahead[take, 2], ahead[take, 3] = ahead[take, 0], ahead[take, 1]


def _reached(
    tables: RowTables, ahead: Places, take: int, row: int, behind: int, column: int
) -> tuple[int, int]:
    """Return where a match ends at the earliest, and how far is looked, behind a take that leads to the row ``behind``."""
    earliest, furthest = NEVER, row
    if tables.ends[take]:
        earliest = behind
    for place in range(tables.follows_of[take], tables.follows_of[take + 1]):
        following = tables.follows[place]
        earliest = min(earliest, ahead[following, column])
        furthest = max(furthest, ahead[following, column + 1])
    return earliest, furthest


def _begins_none(work: RowWork, start: int) -> bool:
    """Return whether no match begins with a row; take note of what a search would have looked at to find that."""
    numbers = work.numbers
    limit, furthest = numbers[LIMIT], work.furthest[start]
    if work.earliest[start] <= limit:
        return False
    if furthest >= limit and not numbers[LIMIT_IS_END]:
        return False  # it waits for a row: the search says for which
    numbers[DEADLINE] = furthest >= limit
    numbers[EXAMINED] = min(furthest, limit - 1)
    return True


def _row_at(work: RowWork, row: int) -> int:
    """Return a row's place, or ``ABSENT``; take note of what was looked at, and of what is not known."""
    numbers = work.numbers
    if row < numbers[FIRST_ROW]:
        return ABSENT
    if row < numbers[LIMIT]:
        numbers[EXAMINED] = max(numbers[EXAMINED], row)
        return row
    if numbers[LIMIT_IS_END]:
        numbers[DEADLINE] = 1
    else:
        numbers[UNDECIDED] = 1
    return ABSENT


def _search(tables: RowTables, rows: PatternRows, work: RowWork, start: int) -> int:
    """Return how many rows the first path by preference takes, or ``NO_MATCH``."""
    numbers = work.numbers
    numbers[STAMP] += 1
    work.stamps[0] = numbers[STAMP]
    place = depth = 0
    numbers[WAYS] = 0
    while tables.code[place] != DONE:
        numbers[STEPS] += 1
        if numbers[STEPS] > STEPS_MAX and _is_given_up(tables, work, start):
            numbers[FAILED] = STEPS_EXCEEDED
            return NO_MATCH
        follows, took = _step(tables, rows, work, start, depth, place)
        if numbers[UNDECIDED] or numbers[FULL]:
            numbers[AT_DEPTH], numbers[AT_PLACE] = depth, place
            return NO_MATCH
        if follows != ABSENT:
            place, depth = follows, depth + took
        elif numbers[WAYS]:
            numbers[WAYS] -= 1
            place, depth = work.stack[numbers[WAYS], 0], work.stack[numbers[WAYS], 1]
        else:
            return NO_MATCH
    numbers[AT_DEPTH], numbers[AT_PLACE] = depth, place
    return depth


def _is_given_up(tables: RowTables, work: RowWork, start: int) -> bool:
    """Return whether a search that has taken very many steps has taken more than its rows explain."""
    rows = work.numbers[EXAMINED] - start + 1
    return not tables.context_free and bool(work.numbers[STEPS] > STEPS_OF_ROW_MAX * rows)


def _step(
    tables: RowTables, rows: PatternRows, work: RowWork, start: int, depth: int, place: int
) -> tuple[int, int]:
    """Return which instruction follows one, or ``ABSENT``, and how many rows it takes."""
    code = tables.code[place]
    if code == TAKE:
        if _take(tables, rows, work, start, depth, place):
            return place + 1, 1
        return ABSENT, 0
    if code == SPLIT:
        return _split(tables, work, depth, place), 0
    if code == JUMP:
        return int(tables.first[place]), 0
    if code == AT_START:
        fits = depth == 0 and _row_at(work, start - 1) == ABSENT
    else:
        fits = _row_at(work, start + depth) == ABSENT
    return (place + 1 if fits else ABSENT), 0


def _split(tables: RowTables, work: RowWork, depth: int, place: int) -> int:
    """Take the first way, and remember the second; none, if both were tried."""
    split, top = tables.split_of[place], work.numbers[WAYS]
    if work.visited[depth, split] == work.stamps[depth]:
        return ABSENT
    if top >= len(work.stack):
        work.numbers[FULL] = DEPTH_FULL
        return ABSENT
    work.visited[depth, split] = work.stamps[depth]
    work.stack[top, 0], work.stack[top, 1] = tables.second[place], depth
    work.numbers[WAYS] = top + 1
    return int(tables.first[place])


def _take(
    tables: RowTables, rows: PatternRows, work: RowWork, start: int, depth: int, place: int
) -> bool:
    """Match the next row to a variable, if it fits."""
    row = _row_at(work, start + depth)
    if row == ABSENT:
        return False
    entry, variable = depth + 1, tables.first[place]
    if entry + 1 >= len(work.label):
        work.numbers[FULL] = DEPTH_FULL
        return False
    condition = tables.condition_of[variable]
    if condition >= 0 and not rows.gates[condition, row]:
        return False
    work.label[entry] = variable
    work.excluded[entry] = tables.second[place]
    _fill_entry(tables, rows, work, entry, row)
    if condition >= 0 and tables.program_of[condition] < tables.program_of[condition + 1]:
        for navigation in range(
            tables.navigations_of[condition], tables.navigations_of[condition + 1]
        ):
            _navigate(tables, rows, work, start, entry, navigation)
        if work.numbers[UNDECIDED] or not is_true(tables, rows, work, condition, entry, row):
            return False
    if not tables.context_free:
        work.numbers[STAMP] += 1
    work.stamps[entry] = work.numbers[STAMP]
    return True


def _fill_entry(tables: RowTables, rows: PatternRows, work: RowWork, entry: int, row: int) -> None:
    """Work out what an entry's rows have together: the first and last ones of sets of variables, and aggregates."""
    bit = 1 << work.label[entry]
    for number in range(len(tables.sets)):
        is_in = tables.sets[number] & bit
        before = work.first_entry[entry - 1, number]
        work.first_entry[entry, number] = entry if is_in and not before else before
        work.last_entry[entry, number] = entry if is_in else work.last_entry[entry - 1, number]
    whole, floating, null = work.whole, work.floating, work.null
    for register in range(len(tables.aggregate)):
        whole[entry, register] = whole[entry - 1, register]
        floating[entry, register] = floating[entry - 1, register]
        null[entry, register] = null[entry - 1, register]
        if not tables.aggregate_set[register] & bit:
            continue
        aggregate, value = tables.aggregate[register], tables.aggregate_value[register]
        if aggregate == ROWS:
            whole[entry, register] += 1
        elif not rows.null[value, row]:
            fold_value(tables, rows, work, entry, register, aggregate, value, row)


def _navigate(
    tables: RowTables, rows: PatternRows, work: RowWork, start: int, entry: int, navigation: int
) -> None:
    """Put the value of a row that a condition looks at into its register."""
    given = tables.navigation[navigation]
    register, value = given[NAV_REGISTER], given[NAV_VALUE]
    whole, floating, null = work.whole, work.floating, work.null
    whole[entry, register] = 0
    floating[entry, register] = 0.0
    null[entry, register] = 1
    if value == NUMBER:
        whole[entry, register] = work.numbers[MATCH]
        null[entry, register] = 0
        return
    found = _logical_entry(tables, work, entry, given)
    if not found:
        return
    row = start + found - 1 + given[NAV_PHYSICAL]
    if value == CLASSIFIER:
        if start <= row < start + entry:
            whole[entry, register] = rows.variable_rank[work.label[row - start + 1]]
            null[entry, register] = 0
        return
    row = _row_at(work, row)
    if row != ABSENT:
        whole[entry, register] = rows.whole[value, row]
        floating[entry, register] = rows.floating[value, row]
        null[entry, register] = rows.null[value, row]


def _logical_entry(tables: RowTables, work: RowWork, entry: int, given: Int64s) -> int:
    """Return the entry that a navigation's logical steps lead to; 0 if there is none."""
    number, left = given[NAV_SET], given[NAV_LOGICAL]
    wanted = tables.sets[number]
    if given[NAV_FIRST]:
        found, step = work.first_entry[entry, number], 1
    else:
        found, step = work.last_entry[entry, number], -1
    while left and 0 < found <= entry:
        found += step
        if 0 < found <= entry and wanted >> work.label[found] & 1:
            left -= 1
    return int(found) if 0 < found <= entry else 0


# ── matches ─────────────────────────────────────────────────────────────────────────────────


def _decide(tables: RowTables, rows: PatternRows, work: RowWork, start: int) -> None:
    """Take note of what decided: never something before what decided the match before."""
    numbers = work.numbers
    row = numbers[EXAMINED]
    time_us = rows.time_us[row]
    if numbers[DEADLINE]:
        row, time_us = start, rows.time_us[start] + tables.within_us
    if time_us > numbers[DECIDED_US]:
        numbers[DECIDED_US], numbers[DECIDED_ROW] = time_us, row
    elif time_us == numbers[DECIDED_US]:
        numbers[DECIDED_ROW] = max(numbers[DECIDED_ROW], row)


def _matched(tables: RowTables, work: RowWork, key: int, start: int, length: int) -> int:
    """Emit a match; return where the next one may begin."""
    keys = work.keys
    follows = _next_start(tables, work, start, length)
    if work.numbers[FAILED]:
        return _give_up(work, start, start + length)
    keys[key, MATCH_NUMBER] += 1
    if length:
        _emit(work, start, length, keys[key, MATCH_NUMBER])
        keys[key, MATCHED_UNTIL] = max(keys[key, MATCHED_UNTIL], start + length)
    elif tables.shows_empty:
        _emit(work, start, EMPTY, keys[key, MATCH_NUMBER])
    return follows


def _next_start(tables: RowTables, work: RowWork, start: int, length: int) -> int:
    """Return the row that matching goes on with; it is not to be the first row of a match, or none."""
    if not length or tables.skip == TO_NEXT_ROW:
        return start + 1
    if tables.skip_set == 0:
        return start + length
    found = 0
    for entry in range(1, length + 1):
        if tables.skip_set >> work.label[entry] & 1 and (tables.skip != TO_FIRST or not found):
            found = entry
    if found <= 1:
        work.numbers[FAILED] = SKIP_FIRST_ROW if found else NO_VARIABLE
        return start
    return start + found - 1


def _give_up(work: RowWork, start: int, end: int) -> int:
    """Note that no match is looked for among some rows; return where the next one may begin."""
    number = work.numbers[FAILURES]
    work.failures[number, 0] = start
    work.failures[number, 1] = end
    work.failures[number, 2] = work.numbers[FAILED]
    work.numbers[FAILURES] = number + 1
    return end


def _emit(work: RowWork, start: int, length: int, number: int) -> None:
    numbers = work.numbers
    match, taken = numbers[MATCHES], numbers[TAKEN]
    if match >= len(work.matches) or taken + max(length, 0) > len(work.taken):
        numbers[FULL] = OUTPUT_FULL
        return
    work.matches[match, START] = start
    work.matches[match, LENGTH] = UNMATCHED if length == NO_MATCH else length
    work.matches[match, COUNTED] = number
    work.matches[match, OFFSET] = taken
    work.matches[match, TIME_US] = numbers[DECIDED_US]
    work.matches[match, ROW] = numbers[DECIDED_ROW]
    for entry in range(1, length + 1):
        work.taken[taken + entry - 1, 0] = work.label[entry]
        work.taken[taken + entry - 1, 1] = work.excluded[entry]
    numbers[MATCHES] = match + 1
    numbers[TAKEN] = taken + max(length, 0)
