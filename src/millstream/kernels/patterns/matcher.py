"""Runs an automaton over the rows of keys: plain loops over arrays, which may be compiled.

It is written in the part of Python that numba compiles (:mod:`millstream.kernels.patterns.compiled`), and runs
without it, too, with the same result. The rule is that of :mod:`millstream.kernels.patterns.nfa`.

A partial match is an *entry*: the row that it took last, its state, and the entry before it. So partial matches
that begin alike share what they have in common, as do the versions in the buffer of Agrawal et al. Entry 0 has taken
nothing, and is where all begin. An entry's mask has a bit for each transition of its state that may still
be used. What happens to a key, in this order:

1.  Before a row, and at the end of the batch: partial matches end whose time is over, those that began first
    first. One that has a transition to the end is a match then.
2.  Each partial match is asked about the row, and then entry 0: what takes it is a new entry. One that
    nothing can follow any more ends.
3.  Matches are decided. Without a skip strategy, each counts. With one, those that began first go first; of
    these, those that were complete first; of these, at the first step at which they differ, that
    with the earlier row. One that leaves out others (``past_last``, ``to_first``, ``to_last``) waits while a partial match
    lives that began before it; a match that counts ends all matches and partial matches that it skips.
"""

from __future__ import annotations

import numpy as np

from millstream.kernels.patterns.programs import is_true
from millstream.kernels.patterns.row_tables import AnyRows, AnyTables, AnyWork
from millstream.kernels.patterns.tables import (
    ANY,
    BY_ROW,
    BY_TIME,
    COMPLETE,
    COUNT,
    DEPTH,
    ENTRIES,
    FIRST,
    FRESH,
    FULL,
    HELD,
    LAST,
    LIVE,
    LIVES,
    MASK,
    MATCHES,
    MIN,
    NEVER,
    OLDEST,
    PARENT,
    ROOT,
    ROW,
    ROWS,
    SKIP_NONE,
    SKIP_PAST_LAST,
    SKIP_TO_LAST,
    SKIP_TO_NEXT,
    STATE,
    STRICT,
    SUM,
    TOTAL,
    VALUES,
    Bytes,
    MatcherRows,
    Places,
    Tables,
    Work,
)


def match_keys(tables: Tables, rows: MatcherRows, work: Work, until_us: int) -> None:
    """Run the automaton over all keys. ``until_us``: no row of this time or before it follows."""
    for key in range(len(rows.new_from)):
        _load(tables, rows, work, key)
        for row in range(rows.new_from[key], rows.rows_of[key + 1]):
            _expire(tables, rows, work, rows.time_us[row] - 1)
            _take_row(tables, rows, work, row)
            if work.numbers[FULL]:
                return
        _expire(tables, rows, work, until_us)
        for number in range(work.numbers[LIVES]):
            work.entries[work.live[number], LIVE] = 1


def _load(tables: Tables, rows: MatcherRows, work: Work, key: int) -> None:
    """Take up the partial matches of a key, of which state has parents, rows, states and what is left to them."""
    entries, numbers = work.entries, work.numbers
    numbers[LIVES] = numbers[HELD] = 0
    numbers[OLDEST] = NEVER
    for entry in range(rows.entries_of[key], rows.entries_of[key + 1]):
        parent = entries[entry, PARENT]
        entries[entry, ROOT] = entries[parent, ROOT] if parent else entry
        entries[entry, DEPTH] = entries[parent, DEPTH] + 1
        fill_registers(tables, rows, work, entry)
        if entries[entry, COMPLETE]:
            work.held[numbers[HELD]] = entry
            numbers[HELD] += 1
        if entries[entry, LIVE]:
            work.live[numbers[LIVES]] = entry
            numbers[LIVES] += 1
            entries[entry, LIVE] = 0
            numbers[OLDEST] = min(numbers[OLDEST], began_us(rows, work, entry))


def began_us(rows: MatcherRows, work: Work, entry: int) -> int:
    """Return the time of the first row that an entry has."""
    time_us: int = rows.time_us[work.entries[work.entries[entry, ROOT], ROW]]
    return time_us


# ── 1. time ─────────────────────────────────────────────────────────────────────────────────


def _expire(tables: Tables, rows: MatcherRows, work: Work, until_us: int) -> None:
    """End the partial matches whose time is over when ``until_us`` has passed."""
    numbers = work.numbers
    if tables.within_us < 0:
        return
    while numbers[LIVES] and numbers[OLDEST] <= until_us - tables.within_us:
        began = numbers[OLDEST]
        for number in range(numbers[LIVES]):
            entry = work.live[number]
            if began_us(rows, work, entry) == began:
                if _waits_for_end(tables, work, entry):
                    _complete(tables, work, entry, BY_TIME, began + tables.within_us, -1)
                work.entries[entry, MASK] = 0
        _leave_out_ended(rows, work)
        _decide(tables, rows, work, began + tables.within_us, -1)


def _waits_for_end(tables: Tables, work: Work, entry: int) -> bool:
    state, mask = work.entries[entry, STATE], work.entries[entry, MASK]
    first, end = tables.transitions_of[state], tables.transitions_of[state + 1]
    for number in range(end - first):
        if mask >> number & 1 and tables.target[first + number] == len(tables.least):
            return True
    return False


def _leave_out_ended(rows: MatcherRows, work: Work) -> None:
    """Leave the entries without a transition out of those that live."""
    entries, live, numbers = work.entries, work.live, work.numbers
    kept = 0
    numbers[OLDEST] = NEVER
    for number in range(numbers[LIVES]):
        entry = live[number]
        if entries[entry, MASK]:
            live[kept] = entry
            kept += 1
            numbers[OLDEST] = min(numbers[OLDEST], began_us(rows, work, entry))
    numbers[LIVES] = kept


# ── 2. a row ────────────────────────────────────────────────────────────────────────────────


def _take_row(tables: Tables, rows: MatcherRows, work: Work, row: int) -> None:
    entries, live, numbers = work.entries, work.live, work.numbers
    count, born_from = numbers[LIVES], numbers[ENTRIES]
    asked = 0
    if not rows.any_gate[
        row
    ]:  # such a row matters to those alone whose next row it is: the last ones
        asked = count
        while asked and entries[live[asked - 1], FRESH]:
            asked -= 1
    ended = False
    for number in range(asked, count):
        entry = live[number]
        entries[entry, MASK] = _advance(tables, rows, work, entry, row)
        entries[entry, FRESH] = 0
        ended = ended or entries[entry, MASK] == 0
    if rows.any_gate[row]:
        _advance(tables, rows, work, 0, row)
    if numbers[FULL]:
        return
    for entry in range(born_from, numbers[ENTRIES]):
        if entries[entry, MASK]:
            live[numbers[LIVES]] = entry
            numbers[LIVES] += 1
            numbers[OLDEST] = min(numbers[OLDEST], began_us(rows, work, entry))
    if ended:
        _leave_out_ended(rows, work)
    _decide(tables, rows, work, rows.time_us[row], row)


def _advance(tables: Tables, rows: MatcherRows, work: Work, entry: int, row: int) -> int:
    """Let an entry take a row by each transition that there is; return the mask of those that are left."""
    state, mask = work.entries[entry, STATE], work.entries[entry, MASK]
    first, end = tables.transitions_of[state], tables.transitions_of[state + 1]
    takes = left = 0
    for number in range(end - first):
        if not mask >> number & 1:
            continue
        transition = first + number
        target, contiguity = tables.target[transition], tables.contiguity[transition]
        if _is_broken(tables, rows, work, transition, entry, row):
            continue
        if target == len(tables.least):  # the end takes nothing
            left |= 1 << number
            continue
        if target == state and _is_over(tables, rows, work, state, entry, row):
            continue
        if _fits(tables, rows, work, target, entry, row):
            takes |= 1 << number
            left |= int(contiguity == ANY) << number
        else:
            left |= int(contiguity != STRICT) << number
    return left & ~_take(tables, rows, work, entry, row, takes)


def _take(tables: Tables, rows: MatcherRows, work: Work, entry: int, row: int, takes: int) -> int:
    """Add what takes the row, but what another transition goes before; return the mask of these."""
    state = work.entries[entry, STATE]
    first, end = tables.transitions_of[state], tables.transitions_of[state + 1]
    targets = after = 0
    for number in range(end - first):
        if tables.goes_after[first + number] & takes:
            after |= 1 << number
        elif takes >> number & 1:
            target = tables.target[first + number]
            if not targets >> target & 1:  # by two ways, it is one match
                targets |= 1 << target
                _add(tables, rows, work, entry, row, target)
    return after


def _is_broken(
    tables: Tables, rows: MatcherRows, work: Work, transition: int, entry: int, row: int
) -> bool:
    for absence in range(tables.absences_of[transition], tables.absences_of[transition + 1]):
        if tables.absence_next_only[absence] and not work.entries[entry, FRESH]:
            continue
        if is_true(tables, rows, work, tables.absence_condition[absence], entry, row):
            return True
    return False


def _is_over(
    tables: Tables, rows: MatcherRows, work: Work, state: int, entry: int, row: int
) -> bool:
    until = tables.until[state]
    return bool(until >= 0) and is_true(tables, rows, work, until, entry, row)


def _fits(tables: Tables, rows: MatcherRows, work: Work, state: int, entry: int, row: int) -> bool:
    if not is_true(tables, rows, work, tables.condition[state], entry, row):
        return False
    return not _is_over(tables, rows, work, state, entry, row)


def _add(tables: Tables, rows: MatcherRows, work: Work, parent: int, row: int, state: int) -> None:
    """Add the entry of a partial match that takes a row, with what is known of its rows."""
    entries, numbers = work.entries, work.numbers
    entry = numbers[ENTRIES]
    if entry >= len(entries):
        numbers[FULL] = 1
        return
    numbers[ENTRIES] = entry + 1
    count = entries[parent, COUNT] + 1 if entries[parent, STATE] == state else 1
    entries[entry, PARENT] = parent
    entries[entry, ROW] = row
    entries[entry, STATE] = state
    entries[entry, COUNT] = count
    entries[entry, ROOT] = entries[parent, ROOT] if parent else entry
    entries[entry, DEPTH] = entries[parent, DEPTH] + 1
    entries[entry, FRESH] = 1
    entries[entry, COMPLETE] = entries[entry, LIVE] = 0
    first, end = tables.transitions_of[state], tables.transitions_of[state + 1]
    mask = 0
    for number in range(end - first):
        stays = tables.target[first + number] == state
        if (stays and count < tables.most[state]) or (not stays and count >= tables.least[state]):
            mask |= 1 << number
    entries[entry, MASK] = mask
    fill_registers(tables, rows, work, entry)
    if tables.accepting[state] and count >= tables.least[state]:
        _complete(tables, work, entry, BY_ROW, rows.time_us[row], row)


def fill_registers(tables: Tables, rows: MatcherRows, work: Work, entry: int) -> None:
    """Work out the aggregates of an entry's rows from those of the entry before it."""
    parent, row = work.entries[entry, PARENT], work.entries[entry, ROW]
    state = work.entries[entry, STATE]
    whole, floating, null = work.whole, work.floating, work.null
    for register in range(len(tables.aggregate)):
        whole[entry, register] = whole[parent, register]
        floating[entry, register] = floating[parent, register]
        null[entry, register] = null[parent, register]
        if tables.aggregate_state[register] != state:
            continue
        value = tables.aggregate_value[register]
        aggregate = tables.aggregate[register]
        if aggregate == ROWS:
            whole[entry, register] += 1
        elif aggregate == LAST or (aggregate == FIRST and _is_first(work, parent, state)):
            whole[entry, register] = rows.whole[value, row]
            floating[entry, register] = rows.floating[value, row]
            null[entry, register] = rows.null[value, row]
        elif aggregate != FIRST and not rows.null[value, row]:
            fold_value(tables, rows, work, entry, register, aggregate, value, row)


def _is_first(work: Work, parent: int, state: int) -> bool:
    return bool(work.entries[parent, STATE] != state)


def fold_value(
    tables: AnyTables,
    rows: AnyRows,
    work: AnyWork,
    entry: int,
    register: int,
    aggregate: int,
    value: int,
    row: int,
) -> None:
    """Add a value to a sum, total, minimum, maximum or number of values. A minimum is NaN if all values are."""
    whole, floating, null = work.whole, work.floating, work.null
    if aggregate == VALUES:
        whole[entry, register] += 1
    elif aggregate == SUM:
        whole[entry, register] += rows.whole[value, row]
        floating[entry, register] += rows.floating[value, row]
    elif null[entry, register]:
        whole[entry, register] = rows.whole[value, row]
        floating[entry, register] = rows.floating[value, row]
        null[entry, register] = 0
    elif aggregate == TOTAL:
        whole[entry, register] += rows.whole[value, row]
        floating[entry, register] += rows.floating[value, row]
    elif tables.aggregate_float[register]:
        was, now = floating[entry, register], rows.floating[value, row]
        if was != was or (now < was if aggregate == MIN else now > was):  # noqa: PLR0124 - NaN
            floating[entry, register] = now
    else:
        before, after = whole[entry, register], rows.whole[value, row]
        whole[entry, register] = min(before, after) if aggregate == MIN else max(before, after)


# ── 3. matches ──────────────────────────────────────────────────────────────────────────────


def _complete(tables: Tables, work: Work, entry: int, how: int, time_us: int, row: int) -> None:
    """Take note of a match: it counts at once where nothing is skipped, else it is held to be decided."""
    if tables.skip == SKIP_NONE:
        _emit(work, entry, time_us, row)
        return
    work.entries[entry, COMPLETE] = how
    work.held[work.numbers[HELD]] = entry
    work.numbers[HELD] += 1


def _emit(work: Work, entry: int, time_us: int, row: int) -> None:
    number = work.numbers[MATCHES]
    work.matches[number, 0] = entry
    work.matches[number, 1] = time_us
    work.matches[number, 2] = row
    work.numbers[MATCHES] = number + 1


def _decide(tables: Tables, rows: MatcherRows, work: Work, time_us: int, row: int) -> None:
    """Let the matches count that nothing can go before any more, and end what they skip."""
    entries, numbers = work.entries, work.numbers
    while numbers[HELD]:
        match = work.held[0]
        for number in range(1, numbers[HELD]):
            if _goes_before(work, work.held[number], match):
                match = work.held[number]
        began = entries[entries[match, ROOT], ROW]
        if tables.skip != SKIP_TO_NEXT:
            for number in range(numbers[LIVES]):
                if entries[entries[work.live[number], ROOT], ROW] < began:
                    return
        _emit(work, match, time_us, row)
        entries[match, COMPLETE] = 0
        first, until = _skipped(tables, work, match)
        _skip(rows, work, first, until)


def _goes_before(work: Work, one: int, other: int) -> bool:
    """Return whether a match goes before another of the same key: see the rule above."""
    entries = work.entries
    began, other_began = entries[entries[one, ROOT], ROW], entries[entries[other, ROOT], ROW]
    if began != other_began:
        return bool(began < other_began)
    ended = NEVER if entries[one, COMPLETE] == BY_TIME else entries[one, ROW]
    other_ended = NEVER if entries[other, COMPLETE] == BY_TIME else entries[other, ROW]
    if ended != other_ended:
        return bool(ended < other_ended)
    longer = entries[one, DEPTH] > entries[other, DEPTH]
    while entries[one, DEPTH] > entries[other, DEPTH]:
        one = entries[one, PARENT]
    while entries[other, DEPTH] > entries[one, DEPTH]:
        other = entries[other, PARENT]
    if one == other:  # the one has the rows of the other, and more
        return bool(longer)
    while entries[one, PARENT] != entries[other, PARENT]:
        one, other = entries[one, PARENT], entries[other, PARENT]
    if entries[one, ROW] != entries[other, ROW]:
        return bool(entries[one, ROW] < entries[other, ROW])
    return bool(entries[one, STATE] < entries[other, STATE])


def _skipped(tables: Tables, work: Work, match: int) -> tuple[int, int]:
    """Return which matches a match skips: those that begin with a row in ``[first, until)``."""
    entries = work.entries
    began = entries[entries[match, ROOT], ROW]
    if tables.skip == SKIP_TO_NEXT:
        return began, began + 1
    if tables.skip == SKIP_PAST_LAST:
        return began, entries[match, ROW] + 1
    until = began
    entry = match
    while entry:
        if entries[entry, STATE] == tables.skip_state:
            until = entries[entry, ROW]
            if tables.skip == SKIP_TO_LAST:
                return began, until
        entry = entries[entry, PARENT]
    return began, until


def _skip(rows: MatcherRows, work: Work, first: int, until: int) -> None:
    """End matches and partial matches that are skipped, and leave out the match that has counted."""
    entries, numbers = work.entries, work.numbers
    kept = 0
    for number in range(numbers[HELD]):
        entry = work.held[number]
        if entries[entry, COMPLETE] and first <= entries[entries[entry, ROOT], ROW] < until:
            entries[entry, COMPLETE] = 0
        if entries[entry, COMPLETE]:
            work.held[kept] = entry
            kept += 1
    numbers[HELD] = kept
    for number in range(numbers[LIVES]):
        entry = work.live[number]
        if first <= entries[entries[entry, ROOT], ROW] < until:
            entries[entry, MASK] = 0
    _leave_out_ended(rows, work)


def matched_rows(work: Work) -> Places:
    """Return the rows of all matches, as (number of the match, row, state), each match in the order of its rows."""
    count = work.numbers[MATCHES]
    total = 0
    for number in range(count):
        total += work.entries[work.matches[number, 0], DEPTH]
    found = np.empty((total, 3), np.int64)
    end = 0
    for number in range(count):
        entry = work.matches[number, 0]
        end += work.entries[entry, DEPTH]
        at = end
        while entry:
            at -= 1
            found[at, 0] = number
            found[at, 1] = work.entries[entry, ROW]
            found[at, 2] = work.entries[entry, STATE]
            entry = work.entries[entry, PARENT]
    return found


def mark_kept(work: Work) -> Bytes:
    """Return which entries partial matches and held matches have: these, and those before them."""
    kept = np.zeros(work.numbers[ENTRIES], np.uint8)
    for back in range(1, len(kept)):
        entry = len(kept) - back
        if work.entries[entry, LIVE] or work.entries[entry, COMPLETE]:
            kept[entry] = 1
        if kept[entry]:
            kept[work.entries[entry, PARENT]] = 1
    return kept
