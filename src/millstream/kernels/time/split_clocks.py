"""Event time within one split, before the shuffle: the watermark that each event saw.

A split clock takes the rows of a split, table by table, and returns the events with ``__split`` and
``__watermark``: the watermark that their partition, or their producer, had from the records before them
*in this split*. It does not decide whether they are late: see :mod:`millstream.kernels.late`. At the end
it returns a summary. From the summaries, :mod:`millstream.kernels.time.watermarks` computes after the
shuffle the watermark of each split before its first row. Records that are only punctuation go no further.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.frames import SPLIT, TIME, WATERMARK_SEEN
from millstream.kernels.time.arrival_times import YEAR_1_S, YEAR_10000_S
from millstream.kernels.time.log_order import split_number
from millstream.kernels.time.producers import HistoryInterval, ProducerHistory
from millstream.kernels.time.watermarks import NO_WATERMARK, SplitTime, WatermarkRule

_MOVES = "__moves"
_ONLY = "__only"
_NAME = "__name"
_ENDS = "__ends"
_PART = "__part"  # the ordinal of the session of its producer in a table
_SESSION = "__session"


@dataclass(frozen=True)
class PartitionPunctuation:
    """Between two tables of a split: nothing before ``until_us`` comes in the partition any more."""

    until_us: int


class SplitClock(Protocol):
    """Follows the time of one split."""

    def observe(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Take the next rows (with ``__time``); return the events with the watermark that each saw."""
        ...

    def punctuate(self, at_us: int) -> None:
        """Apply a punctuation for the whole partition."""
        ...

    def summary(self) -> SplitTime:
        """Return the time of the split as a whole."""
        ...


def make_split_clock(rule: WatermarkRule, source: int, partition: int, split: int) -> SplitClock:
    """Make the clock that a rule asks for."""
    number = split_number(source, partition, split)
    if rule.marks.producer is None:
        return PartitionSplitClock(rule, partition, split, number)
    return ProducerSplitClock(rule, partition, split, number)


@dataclass
class PartitionSplitClock:
    """One watermark for the whole split."""

    rule: WatermarkRule
    partition: int
    split: int
    number: int
    watermark_us: int = NO_WATERMARK

    def observe(self, rows: pl.DataFrame) -> pl.DataFrame:
        after = _moves(self.rule).cum_max()
        before = pl.max_horizontal(
            after.shift(1, fill_value=self.watermark_us), pl.lit(self.watermark_us, pl.Int64)
        )
        split = pl.lit(self.number, pl.Int64)
        only = self.rule.marks.punctuation_only
        extra = [] if only is None else [_is_true(only).alias(_ONLY)]
        rows = rows.with_columns(
            after.alias(_MOVES), before.alias(WATERMARK_SEEN), split.alias(SPLIT), *extra
        )
        self.watermark_us = max(self.watermark_us, rows[_MOVES][-1])
        if only is None:
            return rows.drop(_MOVES)
        return rows.filter(~pl.col(_ONLY)).drop(_MOVES, _ONLY)

    def punctuate(self, at_us: int) -> None:
        self.watermark_us = max(self.watermark_us, at_us)

    def summary(self) -> SplitTime:
        reached_us = self.watermark_us if self.watermark_us > NO_WATERMARK else None
        return SplitTime(self.partition, self.split, reached_us)


@dataclass
class ProducerSplitClock:
    """A watermark per producer, and the history from which the partition's watermark is replayed.

    Each session of a producer (up to its end) is numbered, in the order in which sessions begin, and is a
    split of its own.
    """

    rule: WatermarkRule
    partition: int
    split: int
    number: int
    names: list[str | None] = field(default_factory=list)  # by session
    watermarks_us: list[int] = field(default_factory=list)  # by session, in this split
    last: list[int] = field(default_factory=list)  # by session
    intervals: list[HistoryInterval] = field(default_factory=lambda: [HistoryInterval()])
    open_sessions: dict[str | None, int] = field(default_factory=dict)  # producer → its session
    punctuation_us: int = NO_WATERMARK
    rows_taken: int = 0

    def observe(self, rows: pl.DataFrame) -> pl.DataFrame:
        said = rows.select(*self._marks())
        sessions, first_rows = self._producer_sessions(said)
        known_us = np.array(self.watermarks_us, np.int64)[sessions]
        said = said.with_columns(
            pl.Series(_SESSION, sessions), pl.Series("known", known_us)
        ).with_columns(
            pl.max_horizontal(
                pl.col(_MOVES).cum_max().shift(1, fill_value=NO_WATERMARK).over(_SESSION),
                pl.col("known"),
            ).alias("before")
        )
        interval_of = len(self.intervals) - 1 - len(first_rows)  # before the first new session
        numbers = interval_of + np.searchsorted(first_rows, np.arange(rows.height), side="right")
        self._record_history(said.with_columns(pl.Series("interval", numbers)))
        self.rows_taken += rows.height
        events = rows.with_columns(
            pl.Series(SPLIT, self.number + sessions),
            pl.Series(WATERMARK_SEEN, np.maximum(said["before"].to_numpy(), self.punctuation_us)),
        )
        return events.filter(~said[_ONLY]) if _ONLY in said.columns else events

    def _marks(self) -> list[pl.Expr]:
        marks = self.rule.marks
        assert marks.producer is not None
        given = [
            marks.producer.cast(pl.String).alias(_NAME),
            _moves(self.rule).alias(_MOVES),
            pl.lit(False).alias(_ENDS) if marks.ends is None else _is_true(marks.ends).alias(_ENDS),
        ]
        if marks.punctuation_only is not None:
            given.append(_is_true(marks.punctuation_only).alias(_ONLY))
        return given

    def _producer_sessions(self, said: pl.DataFrame) -> tuple[Int64s, Int64s]:
        """Find each row's session, and the rows with which new sessions begin."""
        ended = pl.col(_ENDS).cast(pl.Int64)
        rows = said.select(
            _NAME, _ENDS, (ended.cum_sum() - ended).over(_NAME).alias(_PART)
        ).with_row_index("row")
        parts = (
            rows.group_by(_NAME, _PART, maintain_order=True)
            .agg(pl.col("row").first().cast(pl.Int64), pl.col(_ENDS).last())
            .sort("row")
        )
        numbers: list[int] = []
        first_rows: list[int] = []
        for name, _, row, ends in parts.iter_rows():
            session = self.open_sessions.get(name)
            if session is None:
                session = self.open_sessions[name] = len(self.names)
                self.names.append(name)
                self.watermarks_us.append(NO_WATERMARK)
                self.last.append(0)
                self.intervals.append(HistoryInterval())
                first_rows.append(row)
            numbers.append(session)
            if ends:
                del self.open_sessions[name]
        parts = parts.with_columns(pl.Series(_SESSION, numbers, pl.Int64))
        numbered = rows.join(
            parts.select(_NAME, _PART, _SESSION),
            on=[_NAME, _PART],
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        return numbered[_SESSION].to_numpy(), np.array(first_rows, np.int64)

    def _record_history(self, said: pl.DataFrame) -> None:
        """Enter into the history how far each session got in each interval, and which sessions ended."""
        rose = said.filter(pl.col(_MOVES) > pl.col("before"))
        got = rose.group_by("interval", _SESSION).agg(pl.col(_MOVES).max())
        for number, session, reached_us in got.iter_rows():
            reached = self.intervals[number].watermarks_us
            reached[session] = max(reached.get(session, NO_WATERMARK), reached_us)
            self.watermarks_us[session] = max(self.watermarks_us[session], reached_us)
        for number, session in said.filter(_ENDS).select("interval", _SESSION).iter_rows():
            self.intervals[number].ended.append(session)
        heard = said.with_row_index("row").group_by(_SESSION).agg(pl.col("row").last())
        for session, row in heard.iter_rows():
            self.last[session] = self.rows_taken + row

    def punctuate(self, at_us: int) -> None:
        self.punctuation_us = max(self.punctuation_us, at_us)
        self.intervals[-1].punctuation_us = self.punctuation_us

    def summary(self) -> SplitTime:
        history = ProducerHistory(tuple(self.names), tuple(self.intervals), tuple(self.last))
        return SplitTime(self.partition, self.split, None, history)


def _moves(rule: WatermarkRule) -> pl.Expr:
    """Return how far each record moves the watermark."""
    said: list[pl.Expr] = []
    if rule.delay_us is not None:
        said.append(pl.col(TIME) - rule.delay_us)
    if rule.marks.punctuation is not None:
        said.append(_microseconds(rule.marks.punctuation))
    if len(said) == 1 and not rule.marks.present():
        return said[0]  # the simple rule: there are no nulls, and nothing to compare
    return pl.max_horizontal(*said).fill_null(NO_WATERMARK)


def _microseconds(time: pl.Expr) -> pl.Expr:
    """Return a punctuation in microseconds; one outside of the years 1 to 9999 is ignored."""
    believable = time.dt.epoch("s").is_between(YEAR_1_S, YEAR_10000_S, closed="left")
    return pl.when(believable).then(time.dt.epoch("us"))


def _is_true(condition: pl.Expr) -> pl.Expr:
    return condition.fill_null(value=False)
