"""Time within one lane, before the shuffle: what each record says, and what was known before it.

A lane clock takes the rows of a lane, table by table, and gives the events back with ``__lane`` and
``__reached``: the watermark that the records before them *in this lane* gave their partition, or
their producer. What earlier lanes and batches gave is added behind the shuffle, as the baseline of
the lane; for that, the clock tells at the end what the lane showed. Records that are punctuation
and nothing more stay behind here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels.arrivals import YEAR_1_S, YEAR_10000_S
from millstream.kernels.frames import LANE, REACHED, TIME
from millstream.kernels.log_order import lane_of
from millstream.kernels.producers import LaneStory, Stretch
from millstream.kernels.watermarks import UNSEEN, LaneTime, WatermarkRule

_MOVES = "__moves"
_ONLY = "__only"
_NAME = "__name"
_ENDS = "__ends"
_PART = "__part"  # the how manieth stay of its producer in a table
_STAY = "__stay"


@dataclass(frozen=True)
class Promise:
    """Between two tables of a lane: nothing before ``at_us`` comes in the partition any more."""

    at_us: int


class LaneClock(Protocol):
    """Follows the time of one lane."""

    def take(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Take the next rows (with ``__time``); give the events among them, judged."""
        ...

    def promise(self, at_us: int) -> None:
        """Take a promise for the whole partition."""
        ...

    def told(self) -> LaneTime:
        """Tell what the lane showed."""
        ...


def lane_clock(rule: WatermarkRule, source: int, partition: int, split: int) -> LaneClock:
    """Make the clock that a rule asks for."""
    number = lane_of(source, partition, split)
    if rule.marks.producer is None:
        return PartitionLaneClock(rule, partition, split, number)
    return ProducerLaneClock(rule, partition, split, number)


@dataclass
class PartitionLaneClock:
    """One watermark for the whole lane."""

    rule: WatermarkRule
    partition: int
    split: int
    number: int
    reached_us: int = UNSEEN

    def take(self, rows: pl.DataFrame) -> pl.DataFrame:
        after = _moves(self.rule).cum_max()
        before = pl.max_horizontal(
            after.shift(1, fill_value=self.reached_us), pl.lit(self.reached_us, pl.Int64)
        )
        lane = pl.lit(self.number, pl.Int64)
        only = self.rule.marks.punctuation_only
        extra = [] if only is None else [_is_true(only).alias(_ONLY)]
        rows = rows.with_columns(
            after.alias(_MOVES), before.alias(REACHED), lane.alias(LANE), *extra
        )
        self.reached_us = max(self.reached_us, rows[_MOVES][-1])
        if only is None:
            return rows.drop(_MOVES)
        return rows.filter(~pl.col(_ONLY)).drop(_MOVES, _ONLY)

    def promise(self, at_us: int) -> None:
        self.reached_us = max(self.reached_us, at_us)

    def told(self) -> LaneTime:
        reached_us = self.reached_us if self.reached_us > UNSEEN else None
        return LaneTime(self.partition, self.split, reached_us)


@dataclass
class ProducerLaneClock:
    """A watermark per producer, and the story from which the partition's can be told.

    Each stay of a producer (up to its end) is numbered, in the order in which stays begin, and is a
    lane of its own.
    """

    rule: WatermarkRule
    partition: int
    split: int
    number: int
    names: list[str | None] = field(default_factory=list)  # by stay
    reached_us: list[int] = field(default_factory=list)  # by stay, in this lane
    last: list[int] = field(default_factory=list)  # by stay
    stretches: list[Stretch] = field(default_factory=lambda: [Stretch()])
    staying: dict[str | None, int] = field(default_factory=dict)  # producer → its stay
    promised_us: int = UNSEEN
    rows_taken: int = 0

    def take(self, rows: pl.DataFrame) -> pl.DataFrame:
        said = rows.select(*self._marks())
        stays, first_rows = self._stays(said)
        known_us = np.array(self.reached_us, np.int64)[stays]
        said = said.with_columns(
            pl.Series(_STAY, stays), pl.Series("known", known_us)
        ).with_columns(
            pl.max_horizontal(
                pl.col(_MOVES).cum_max().shift(1, fill_value=UNSEEN).over(_STAY), pl.col("known")
            ).alias("before")
        )
        stretch_of = len(self.stretches) - 1 - len(first_rows)  # before the first new stay
        numbers = stretch_of + np.searchsorted(first_rows, np.arange(rows.height), side="right")
        self._tell(said.with_columns(pl.Series("stretch", numbers)))
        self.rows_taken += rows.height
        judged = rows.with_columns(
            pl.Series(LANE, self.number + stays),
            pl.Series(REACHED, np.maximum(said["before"].to_numpy(), self.promised_us)),
        )
        return judged.filter(~said[_ONLY]) if _ONLY in said.columns else judged

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

    def _stays(self, said: pl.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Find each row's stay, and the rows with which new stays begin."""
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
            stay = self.staying.get(name)
            if stay is None:
                stay = self.staying[name] = len(self.names)
                self.names.append(name)
                self.reached_us.append(UNSEEN)
                self.last.append(0)
                self.stretches.append(Stretch())
                first_rows.append(row)
            numbers.append(stay)
            if ends:
                del self.staying[name]
        parts = parts.with_columns(pl.Series(_STAY, numbers, pl.Int64))
        numbered = rows.join(
            parts.select(_NAME, _PART, _STAY),
            on=[_NAME, _PART],
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        return numbered[_STAY].to_numpy(), np.array(first_rows, np.int64)

    def _tell(self, said: pl.DataFrame) -> None:
        """Enter into the story how far each stay got in each stretch, and which stays ended."""
        rose = said.filter(pl.col(_MOVES) > pl.col("before"))
        got = rose.group_by("stretch", _STAY).agg(pl.col(_MOVES).max())
        for number, stay, reached_us in got.iter_rows():
            reached = self.stretches[number].reached
            reached[stay] = max(reached.get(stay, UNSEEN), reached_us)
            self.reached_us[stay] = max(self.reached_us[stay], reached_us)
        for number, stay in said.filter(_ENDS).select("stretch", _STAY).iter_rows():
            self.stretches[number].ended.append(stay)
        heard = said.with_row_index("row").group_by(_STAY).agg(pl.col("row").last())
        for stay, row in heard.iter_rows():
            self.last[stay] = self.rows_taken + row

    def promise(self, at_us: int) -> None:
        self.promised_us = max(self.promised_us, at_us)
        self.stretches[-1].promised_us = self.promised_us

    def told(self) -> LaneTime:
        story = LaneStory(tuple(self.names), tuple(self.stretches), tuple(self.last))
        return LaneTime(self.partition, self.split, None, story)


def _moves(rule: WatermarkRule) -> pl.Expr:
    """Give how far each record moves the watermark."""
    said: list[pl.Expr] = []
    if rule.delay_us is not None:
        said.append(pl.col(TIME) - rule.delay_us)
    if rule.marks.punctuation is not None:
        said.append(_microseconds(rule.marks.punctuation))
    if len(said) == 1 and not rule.marks.given():
        return said[0]  # the simple rule: there are no nulls, and nothing to compare
    return pl.max_horizontal(*said).fill_null(UNSEEN)


def _microseconds(time: pl.Expr) -> pl.Expr:
    """Give a promise in microseconds; one for a time outside of the years 1 to 9999 says nothing."""
    believable = time.dt.epoch("s").is_between(YEAR_1_S, YEAR_10000_S, closed="left")
    return pl.when(believable).then(time.dt.epoch("us"))


def _is_true(condition: pl.Expr) -> pl.Expr:
    return condition.fill_null(value=False)
