"""The operator of SQL's row patterns: the rows of a key are matched in their order, and matches are emitted when they are final.

Rows wait as those of sequences do (:mod:`millstream.kernels.patterns.pattern_operator`). Of each key, matches are found one
after the other, as the standard says: from the row where the next one may begin, the first path by preference
(:mod:`millstream.kernels.patterns.row_matcher`). A match is emitted with the time at which it was decided: when no path that is preferred
to it can take a row that may still come. So the watermark of the output is W - L.

A row that is more than ``within`` before or after the first row of a match is not there for it: the match cannot take
it, ``PREV`` and ``NEXT`` do not see it, and ``^`` and ``$`` are where no such row is. So a key is decided once W > its
first row's time + ``within`` + L, and what is before can be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal

import numpy as np
import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import constant
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import HASH, RELEASED, RELEASED_TIE, TIME, WEIGHT, to_datetimes
from millstream.kernels.joins.versions import TIE
from millstream.kernels.operator import NOT_DEFINING, BatchContext, OperatorResult
from millstream.kernels.patterns import row_tables as t
from millstream.kernels.patterns.compiled import match_row_patterns
from millstream.kernels.patterns.keyed_matches import Known
from millstream.kernels.patterns.local_conditions import RowValues, local_conditions, truths
from millstream.kernels.patterns.measures import MATCH_END, MATCH_START
from millstream.kernels.patterns.partial_matches import (
    PartialMatch,
    ShownRows,
    known_by_key,
    to_end,
    to_time,
)
from millstream.kernels.patterns.pattern_operator import (
    PatternBatch,
    PatternOperator,
    gate_arrays,
    gate_column,
    value_arrays,
    value_column,
)
from millstream.kernels.patterns.row_conditions import RowConditions
from millstream.kernels.patterns.row_keys import RowPatternBatch
from millstream.kernels.patterns.row_measures import FoundMatches, RowMeasures
from millstream.kernels.patterns.row_pattern import (
    AT_END,
    AT_START,
    DONE,
    JUMP,
    SPLIT,
    TAKE,
    Anchor,
    Instruction,
    PatternNode,
    compile_pattern,
    first_variables,
    followers_of,
    nodes,
    rows_before,
    rows_least,
    sets_of,
)
from millstream.kernels.patterns.tables import MAX, MIN, TOTAL, Bytes, Places
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState

SkipTo = Literal["past_last_row", "to_next_row", "to_first", "to_last"]
_SKIPS: dict[SkipTo, int] = {
    "past_last_row": t.PAST_LAST_ROW,
    "to_next_row": t.TO_NEXT_ROW,
    "to_first": t.TO_FIRST,
    "to_last": t.TO_LAST,
}
_DEPTH_FIRST = 256
_ROWS_MAX = 50_000_000  # of all matches of a bucket's batch, and of one match
_FOLLOWERS_MAX = 20_000


@dataclass(frozen=True)
class RowPatternMatch(PatternOperator):
    """The operator of a row pattern. Durations in microseconds.

    ``variables`` are those of the pattern, ``conditions`` those that have one, ``subsets`` what names of several stand for. ``skip_to``
    is the variable, or subset, of *to_first* and *to_last*.
    """

    name: str
    by: tuple[str, ...]
    pattern: PatternNode
    variables: tuple[str, ...]
    conditions: tuple[tuple[str, pl.Expr], ...]
    subsets: tuple[tuple[str, tuple[str, ...]], ...]
    within_us: int | None
    skip: SkipTo
    skip_to: str | None
    measures: RowMeasures
    columns: tuple[tuple[str, pl.DataType], ...]
    lateness_us: int
    side_output: bool
    code: UserCode = field(metadata=NOT_DEFINING)

    @cached_property
    def compiled(self) -> RowConditions:
        """The conditions as gates and programs."""
        sets = sets_of(self.variables, self.subsets)
        compiled = RowConditions(sets, dict(self.columns), variables=self.variables)
        for variable, condition in self.conditions:
            compiled.add_variable(variable, condition)
        return compiled

    @cached_property
    def local(self) -> tuple[bool, ...]:
        """Which conditions say the same of a row wherever a match begins."""
        names = [variable for variable, _ in self.conditions]
        return local_conditions(self.compiled, names, rows_before(self.pattern))

    @cached_property
    def tables(self) -> t.RowTables:
        """The pattern as arrays."""
        return _tables(self)

    @property
    def measured_columns(self) -> Sequence[str]:
        return self.measures.columns_read

    @property
    def needs_all_rows(self) -> bool:
        return True

    @property
    def numbers_matches(self) -> bool:
        """Whether a measure or condition asks for the number of a match, so that it is kept for each key."""
        measured = any(one.kind == "match_number" for one in self.measures.references.values())
        return measured or any(one.value == t.NUMBER for one in self.compiled.navigations)

    @cached_property
    def rows_behind(self) -> int:
        """How many rows before the first one of a match are looked at."""
        before = rows_before(self.pattern)
        found = [one.physical for one in self.measures.references.values()]
        for (variable, _), numbers in zip(
            self.conditions, self.compiled.navigations_of, strict=True
        ):
            for one in (self.compiled.navigations[number] for number in numbers):
                is_own = (
                    not one.is_first and not one.logical and one.variables == self.compiled.every
                )
                found.append(one.physical + (before[variable] if is_own else 0))
        anchored = any(isinstance(node, Anchor) and node.at == "^" for node in nodes(self.pattern))
        return max([0, int(anchored), *(-rows for rows in found)])

    def batch(self, state: OperatorState, context: BatchContext) -> PatternBatch:
        return _RowPatternBatch(self, state, context)

    def partial_matches_of(self, known: Known, until_us: int) -> Iterator[PartialMatch]:
        for one in known_by_key(known, self.by):
            assert one.rows is not None
            batch = RowPatternBatch.of(one, one.rows.clear().drop("__number"), self.by)
            with np.errstate(over="ignore", invalid="ignore"):
                work = _run(self, batch, until_us)
            start = int(work.keys[0, t.NEXT_START])
            if (
                start < batch.rows.height
            ):  # else there are rows that conditions of later ones look at
                yield self._partial_match(batch, work, start)

    def _partial_match(self, batch: RowPatternBatch, work: t.RowWork, start: int) -> PartialMatch:
        shown = ShownRows.of(batch.rows, self.by, [name for name, _ in self.columns])
        depth = int(work.numbers[t.AT_DEPTH])
        rows = tuple(
            shown.bound(start + place, self.variables[work.label[place + 1]])
            for place in range(depth)
        )
        began_us = shown.time_us(start)
        waits, complete = self._waits_for(work, shown_rows=batch.rows.height - start)
        ends = to_end(began_us, self.within_us)
        key = shown.key(start)
        return PartialMatch(self.name, key, to_time(began_us), rows, waits, ends, complete)

    def _waits_for(self, work: t.RowWork, shown_rows: int) -> tuple[tuple[str, ...], bool]:
        """Return in words what a search waits for, the preferred first, and whether what it has may be a match as it is."""
        tables, depth = self.tables, int(work.numbers[t.AT_DEPTH])
        if tables.code[work.numbers[t.AT_PLACE]] == DONE:
            return ("the rows after it that measures look at",), True
        if depth < shown_rows:
            name = self.variables[tables.first[work.numbers[t.AT_PLACE]]]
            return (f"the rows that the condition of {name!r} looks at",), False
        ways = work.stack[: work.numbers[t.WAYS]]  # what is preferred is at the end
        places = [int(place) for place, taken in ways if taken == depth]
        return _ways_on(self, [*places, int(work.numbers[t.AT_PLACE])], depth)

    @property
    def skips_rows(self) -> bool:
        """Whether nothing is emitted of a row that no match with rows begins with."""
        mode = self.measures.rows_per_match
        if mode == "all_with_unmatched":
            return False
        has_rows = rows_least(self.pattern) > 0
        return has_rows or (mode == "all_omit_empty" and not self.numbers_matches)

    def may_begin(self, rows: pl.DataFrame) -> pl.Series:
        """Return which rows something that is emitted may begin with, by what they say alone."""
        every = constant(True, rows.height, pl.Boolean)
        if not self.skips_rows:
            return every
        firsts = first_variables(self.pattern)
        numbers = {variable: at for at, (variable, _) in enumerate(self.conditions)}
        if any(
            name not in numbers or self.compiled.gates[numbers[name]] is None for name in firsts
        ):
            return every
        none = constant(False, rows.height, pl.Boolean)
        return reduce(or_, (rows[gate_column(numbers[name])] for name in sorted(firsts)), none)


@dataclass
class _RowPatternBatch(PatternBatch):
    operator: RowPatternMatch

    def candidates(self, due: pl.DataFrame | None, known: Known) -> pl.DataFrame | None:
        """Return the rows that must be looked at: all, where rows before one matter."""
        if self.operator.rows_behind or not self.operator.skips_rows:
            return due if due is not None and due.height else None
        return super().candidates(due, known)

    def match(
        self, new: pl.DataFrame | None, known: Known, touched: Hashes, result: OperatorResult
    ) -> None:
        if new is None:
            if known.rows is None:  # nothing but the numbers of matches
                return
            new = known.rows.clear().drop("__number")
        else:
            new = new.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
        batch = RowPatternBatch.of(known, new, self.operator.by)
        operator = self.operator
        work = _run(operator, batch, self.until_us)
        kept = batch.kept(
            work.keys,
            operator.rows_behind,
            operator.within_us,
            self.until_us,
            numbered=operator.numbers_matches,
        )
        self.matches.write(touched, known, kept)
        self.count(kept, known)
        self._set_timers(batch, work)
        result.rows = self._rows(batch, work, result)
        result.failed += _given_up(operator, batch, work)

    def _set_timers(self, batch: RowPatternBatch, work: t.RowWork) -> None:
        """Set a timer for each key of which this batch has found another place where a match may begin."""
        if self.timers is None:
            return
        assert self.operator.within_us is not None
        keys, start = batch.starts(work.keys)
        is_new = (work.keys[keys, t.NEXT_START] != batch.keys[keys, t.NEXT_START]) | (
            start >= batch.new_from[keys]
        )
        rows = batch.rows[start[is_new]]
        times = rows[TIME].to_numpy() + self.operator.within_us
        later = times > self.until_us
        self.timers.add(times[later], rows[HASH].to_numpy()[later])

    def _rows(
        self, batch: RowPatternBatch, work: t.RowWork, result: OperatorResult
    ) -> pl.DataFrame | None:
        """Return what is emitted, in the order in which it was decided."""
        operator = self.operator
        matches = work.matches[: work.numbers[t.MATCHES]]
        if not len(matches):
            return None
        taken = work.taken[: work.numbers[t.TAKEN]]
        found = FoundMatches(
            batch.rows, batch.group, batch.rows_of, matches, taken, operator.within_us
        )
        made, match = operator.measures.of(operator.by, found, operator.code)
        result.failed = made.failed
        if not len(match):
            return None
        times = pl.Series(TIME, matches[match, t.TIME_US])
        tie = batch.rows[TIE][matches[match, t.ROW]].alias(RELEASED_TIE)
        table = made.table.hstack([times, times.alias(RELEASED), tie])
        return table.sort(RELEASED, RELEASED_TIE, maintain_order=True)


def _ways_on(
    operator: RowPatternMatch, places: list[int], depth: int
) -> tuple[tuple[str, ...], bool]:
    """Return in words what may come next at some instructions, and whether it may be the end; the last one is preferred."""
    tables, found, seen = operator.tables, dict[str, None](), set[int]()
    while places:
        place = places.pop()
        if place in seen:
            continue
        seen.add(place)
        code = tables.code[place]
        if code == DONE:
            return (*found, "otherwise it is a match as it is"), True
        if code == TAKE:
            found[f"a row of {operator.variables[tables.first[place]]!r}"] = None
        elif code == AT_END:
            found["that no row follows"] = None
        elif code in (JUMP, SPLIT):
            after = (
                [tables.first[place]]
                if code == JUMP
                else [tables.second[place], tables.first[place]]
            )
            places += map(int, after)
        elif code == AT_START and depth == 0:
            places.append(place + 1)
    return tuple(found), False


def _run(operator: RowPatternMatch, batch: RowPatternBatch, until_us: int) -> t.RowWork:
    """Run the matcher, with more room where it had too little."""
    rows = _rows_of(operator, batch)
    longest = int(np.diff(batch.rows_of).max(initial=0)) + 2
    depth, taken = min(_DEPTH_FIRST, longest), 1024 + 2 * batch.rows.height
    while True:
        work = _new_work(operator.tables, batch.keys, depth, taken)
        work = work._replace(
            failures=np.zeros((batch.rows.height, 3), np.int64),
            earliest=np.zeros(batch.rows.height, np.int64),
            furthest=np.zeros(batch.rows.height, np.int64),
        )
        match_row_patterns(operator.tables, rows, work, until_us)
        full = work.numbers[t.FULL]
        if not full:
            return work
        if taken >= _ROWS_MAX or depth >= _ROWS_MAX:
            raise UserCodeError(
                f"The matches of step {operator.name!r} have more than {_ROWS_MAX:,} rows in a batch. Give a "
                'shorter within, or after_match="past last row" instead of "to next row".',
                step=operator.name,
            )
        depth, taken = (4 * depth, taken) if full == t.DEPTH_FULL else (depth, 4 * taken)


def _rows_of(operator: RowPatternMatch, batch: RowPatternBatch) -> t.PatternRows:
    rows = batch.rows
    whole, floating, null = value_arrays(operator.compiled, rows)
    ranks = np.zeros(len(operator.variables), np.int64)
    if any(one.value == t.CLASSIFIER for one in operator.compiled.navigations):
        whole, ranks = _ranked(operator, rows, whole)
    may_begin: Bytes = operator.may_begin(rows).to_numpy().astype(np.uint8)
    gates, values = gate_arrays(operator.compiled, rows), RowValues(whole, floating, null)
    for condition, is_local in enumerate(operator.local):
        if is_local and operator.compiled.programs[condition]:
            gates[condition] &= truths(operator.compiled, condition, values)
    return t.PatternRows(
        rows[TIME].to_numpy(),
        gates,
        may_begin,
        whole,
        floating,
        null,
        ranks,
        batch.rows_of,
    )


def _given_up(
    operator: RowPatternMatch, batch: RowPatternBatch, work: t.RowWork
) -> tuple[FailedRows, ...]:
    """Return the dead letters of rows that were given up: one for each search, with its key, and the times of its rows.

    Raises:
        UserCodeError: there are some, and they are to stop the job.
    """
    failures = work.failures[: work.numbers[t.FAILURES]]
    if not len(failures):
        return ()
    first, end, why = failures.T
    table = batch.rows[first].select(operator.by)
    table = table.with_columns(
        to_datetimes(batch.rows[TIME][first]).alias(MATCH_START),
        to_datetimes(batch.rows[TIME][end - 1]).alias(MATCH_END),
    )
    reasons = [
        _reason(operator, table.row(number, named=True), int(end[number] - first[number]), int(one))
        for number, one in enumerate(why)
    ]
    if operator.code.on_error == "stop":
        raise UserCodeError(f"Step {operator.name!r}: {reasons[0]}", step=operator.name)
    return (FailedRows(operator.name, table, reasons),)


def _reason(operator: RowPatternMatch, given_up: Mapping[str, Any], rows: int, why: int) -> str:
    key = ", ".join(f"{name}={given_up[name]!r}" for name in operator.by)
    text = {
        t.NO_VARIABLE: f"has no row of {operator.skip_to!r}, which after_match skips to. Skip to a variable that every "
        'match has, or "past last row".',
        t.SKIP_FIRST_ROW: f"begins with the row of {operator.skip_to!r} that after_match skips to, so the same match would "
        'be found for ever. Skip to a variable that is not the first row, or "to next row".',
        t.STEPS_EXCEEDED: f"takes more than {t.STEPS_MAX:,} steps to be found, and more than {t.STEPS_OF_ROW_MAX} for each row. Repeat fewer variables that fit the same rows, or "
        "look in conditions at the row and those before it (prev) rather than at rows of a variable.",
    }[why]
    return (
        f"the match that begins at {given_up[MATCH_START]}{f', of the key {key},' if key else ''} {text} No match is looked "
        f"for in {rows:,} rows, up to {given_up[MATCH_END]}; the next may begin behind them"
    )


def _ranked(operator: RowPatternMatch, rows: pl.DataFrame, whole: Int64s) -> tuple[Int64s, Int64s]:
    """Return texts as their ranks, among which the names of variables have theirs."""
    texts = [at for at, value in enumerate(operator.compiled.values) if value.kind == "text"]
    parts = [rows[value_column(at)].alias("text") for at in texts]
    every = pl.concat([*parts, pl.Series("text", operator.variables, dtype=pl.String)])
    ranks = every.rank("dense").fill_null(0).cast(pl.Int64).to_numpy()
    of_rows = len(texts) * rows.height
    if texts:
        whole[texts] = ranks[:of_rows].reshape(len(texts), rows.height)
    return whole, ranks[of_rows:]


def _tables(operator: RowPatternMatch) -> t.RowTables:
    compiled = operator.compiled
    program: tuple[Instruction, ...] = compile_pattern(operator.pattern, operator.variables)
    programs = [
        [] if is_local else one
        for one, is_local in zip(compiled.programs_with_registers(), operator.local, strict=True)
    ]
    looks_at_match = not all(operator.local)
    followers = None if looks_at_match else followers_of(program, _FOLLOWERS_MAX)
    takes, after, ends = followers or ((), (), ())
    numbers = {variable: at for at, (variable, _) in enumerate(operator.conditions)}
    navigations = compiled.navigation_rows()
    mode = operator.measures.rows_per_match
    sets = sets_of(operator.variables, operator.subsets)
    ahead = [one.physical for one in operator.measures.references.values() if not one.classifier]
    return t.RowTables(
        code=_whole(one.code for one in program),
        first=_whole(one.first for one in program),
        second=_whole(one.second for one in program),
        split_of=_whole(one.place for one in program),
        splits=1 + max(one.place for one in program),
        condition_of=_whole(numbers.get(name, -1) for name in operator.variables),
        program_of=_starts(len(one) for one in programs),
        operation=_whole(operation for one in programs for operation, _ in one),
        argument=_whole(argument for one in programs for _, argument in one),
        navigations_of=_starts(len(one) for one in compiled.navigations_of),
        navigation=np.array(navigations, np.int64).reshape(len(navigations), 6),
        sets=_whole(compiled.sets() if looks_at_match else ()),
        aggregate=_whole(one.aggregate for one in compiled.registers),
        aggregate_set=_whole(one.state for one in compiled.registers),
        aggregate_value=_whole(one.value for one in compiled.registers),
        aggregate_float=_whole(one.is_float for one in compiled.registers),
        registers=len(compiled.registers) + len(compiled.navigations),
        within_us=-1 if operator.within_us is None else operator.within_us,
        skip=_SKIPS[operator.skip],
        skip_set=0 if operator.skip_to is None else sets[operator.skip_to],
        context_free=compiled.context_free,
        shows_empty=mode != "all_omit_empty",
        shows_unmatched=mode == "all_with_unmatched",
        rows_ahead=max([0, *ahead]),
        variable_of=_whole(program[place].first for place in takes),
        follows_of=_starts(map(len, after)),
        follows=_whole(take for takes in after for take in takes),
        ends=np.array(ends, np.uint8),
    )


def _new_work(tables: t.RowTables, keys: Places, depth: int, taken: int) -> t.RowWork:
    """Return room for matches of so many rows, and for so many rows of all matches."""
    entries, stack = depth + 2, len(tables.operation) + 1
    work = t.RowWork(
        numbers=np.zeros(t.NUMBERS, np.int64),
        keys=keys.copy(),
        stack=np.zeros((4 * entries + tables.splits, 2), np.int64),
        visited=np.zeros((entries, tables.splits), np.int64),
        stamps=np.zeros(entries, np.int64),
        label=np.zeros(entries, np.int64),
        excluded=np.zeros(entries, np.int64),
        first_entry=np.zeros((entries, len(tables.sets)), np.int64),
        last_entry=np.zeros((entries, len(tables.sets)), np.int64),
        whole=np.zeros((entries, tables.registers), np.int64),
        floating=np.zeros((entries, tables.registers), np.float64),
        null=np.zeros((entries, tables.registers), np.uint8),
        matches=np.zeros((taken, t.MATCH_WIDTH), np.int64),
        failures=np.zeros((0, 3), np.int64),
        taken=np.zeros((taken, 2), np.int64),
        stack_whole=np.zeros(stack, np.int64),
        stack_float=np.zeros(stack, np.float64),
        stack_null=np.zeros(stack, np.uint8),
        earliest=np.zeros(0, np.int64),
        furthest=np.zeros(0, np.int64),
        ahead=np.zeros((len(tables.variable_of), 4), np.int64),
    )
    for register, aggregate in enumerate(tables.aggregate):
        work.null[0, register] = aggregate in (TOTAL, MIN, MAX)
    return work


def _whole(values: Iterable[int]) -> Int64s:
    return np.fromiter(values, np.int64)


def _starts(lengths: Iterable[int]) -> Int64s:
    return np.cumsum([0, *lengths], dtype=np.int64)
