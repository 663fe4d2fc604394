"""Budgets: what each key may spend in a day is granted row by row, in the order of arrival.

A key has an entry for each of its days, which are those of the zone that its rows name. A row belongs
to the day of its event time, whenever it comes: a late row charges the day of its event time.

====================  ==========================================================================
a row                 is
====================  ==========================================================================
of a cost above zero  granted, and charged, if the day's spending stays within the limit that the
                      row states; otherwise refused, and nothing is charged
of no cost, or zero   granted
of a negative cost    a refund: granted, and subtracted from the day's spending
without a limit       granted, whatever is spent
too late              ``late``: its split had passed the end of the day, and the lateness, before it
====================  ==========================================================================

A day ends when it has ended everywhere, twelve hours after its end in UTC, so that lateness depends
on the date alone. *Arrival* is as in :mod:`millstream.kernels.pass_through`: results depend on the events
alone if all events of a key are in one partition.

A key's *budget status* is that of its newest day: exhausted while less remains than the least that is of
use, as the row states it. A row that changes it says so: ``exhausted``, or ``resumed`` (by a refund, a
raised limit, or a new day).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import polars as pl

from millstream.kernels import late
from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.pass_through import PassThroughOperator, in_arrival_order
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState

BUDGET_DAY, DECISION, SPENT, REMAINING, EVENT = (
    "budget_day",
    "decision",
    "spent",
    "remaining",
    "budget_event",
)
_DAY_US = 86_400_000_000
_MINUTE_US = 60_000_000
# 1973. Until 1972 Liberia's clocks were 44 minutes and 30 seconds behind.
_WHOLE_MINUTES_US = 3 * 365 * _DAY_US + _DAY_US
_LAST_ZONE_US = _DAY_US // 2  # a date ends last in the zone twelve hours behind UTC
_NO_LIMIT = 2**63 - 1
_COST, _LIMIT, _LEAST, _DAY = "__cost", "__limit", "__least", "__day"
_CHARGED = "__charged"  # Int64: what the day has spent after a row
_EXHAUSTED = "__exhausted"  # Boolean: whether too little remained after a row
_IS_ROW = "__is_row"  # Boolean: a row of the batch, not an entry
_AT = "__at"


@dataclass(frozen=True)
class Money:
    """The type of amounts: whole numbers, or Decimals, which are counted in their smallest unit."""

    dtype: pl.DataType

    @property
    def scale(self) -> int | None:
        return self.dtype.scale if isinstance(self.dtype, pl.Decimal) else None

    def units(self, amount: pl.Expr) -> pl.Expr:
        """Count an amount in units; one that does not fit fails."""
        if self.scale is None:
            return amount.cast(pl.Int64)
        return amount.cast(self.dtype).to_physical().cast(pl.Int64)

    def amount(self, units: pl.Series) -> pl.Series:
        """Return units back as amounts."""
        if self.scale is None:
            return units.cast(self.dtype)
        unit = pl.lit(Decimal(1).scaleb(-self.scale))
        return pl.select(units.cast(pl.Decimal(38, 0)) * unit).to_series().cast(self.dtype)


@dataclass(frozen=True)
class Budget(PassThroughOperator):
    """One operator of budgets; the lateness in microseconds.

    ``zone`` is a text for each row, the name of the zone that its day is counted in.
    """

    cost: pl.Expr
    limit: pl.Expr
    least: pl.Expr | None  # by default the smallest unit
    zone: pl.Expr
    money: Money
    key_types: tuple[pl.DataType, ...]

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - it has one input
        given = [e for e in (self.cost, self.limit, self.least, self.zone) if e is not None]
        read = {root for e in given for root in e.meta.root_names()}
        return {*self.by, *read}

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Work out the day, cost and limit of each row."""
        least = pl.lit(1, pl.Int64) if self.least is None else self.money.units(self.least)
        rows = rows.with_columns(
            self.money.units(self.cost).fill_null(0).alias(_COST),
            least.fill_null(1).clip(1).alias(_LEAST),
            self.money.units(self.limit).fill_null(_NO_LIMIT).alias(_LIMIT),
            self.zone.cast(pl.String).fill_null("UTC").alias(_DAY),
        )
        return Prepared(rows.with_columns(local_days(rows[TIME], rows[_DAY]).alias(_DAY)))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Decide on the batch's rows, in their order; update the entries of their keys."""
        result = OperatorResult(counts=Counter())
        tables = inputs.get(0, ())
        if not tables:
            return result
        arrivals = in_arrival_order(tables)
        seen_us, deadline_us = context.watermarks_seen(arrivals), self._expiry(arrivals[_DAY])
        rows = self.take_in_time(arrivals, seen_us, deadline_us, late.BUDGET, result)
        if result.late is not None:
            result.late = result.late.drop(_COST, _LIMIT, _LEAST, _DAY)
        if rows.height:
            rows = rows.with_columns(pl.Series(HASH, hash_columns(rows, self.by, context.seed)))
            result.rows = self._decided(state, rows, context.watermark_us)
        result.counts.update(emitted=rows.height)
        return result

    def _expiry(self, days: pl.Series) -> Int64s:
        """Return the watermark at which nothing more is charged to a day."""
        ends: Int64s = (days.to_physical().cast(pl.Int64).to_numpy() + 1) * _DAY_US
        return ends + _LAST_ZONE_US + self.lateness_us

    @property
    def _entry_schema(self) -> dict[str, pl.DataType]:
        """The columns of state: what a day of a key has spent, and whether that is all of it."""
        keys = dict(zip(self.by, self.key_types, strict=True))
        return {
            **keys,
            HASH: pl.UInt64(),
            _DAY: pl.Date(),
            _CHARGED: pl.Int64(),
            _EXHAUSTED: pl.Boolean(),
        }

    def _decided(self, state: OperatorState, rows: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        held = KeyedRows(state, "budgets", _CHARGED, signed=True)
        ledger = StateLedger(self.name, (held.runs,))
        hashes = sorted_distinct(rows[HASH].to_numpy())
        known = held.get(hashes)
        if known is None:
            known = pl.DataFrame(schema=self._entry_schema)
        decided = self._charged(known.select(self._entry_schema.keys()), rows)
        kept, over = self._kept(decided, watermark_us)
        held.put(hashes, kept, known)
        ledger.events_in = int(decided.filter(pl.col(_IS_ROW) & pl.col(DECISION))[_COST].sum())
        ledger.events_out = int(over[_CHARGED].sum())
        ledger.check()
        return self._rows(rows, decided)

    def _charged(self, known: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
        """Put entries and rows together, day by day of each key, and charge what is granted.

        Gives them in that order, each with what was spent after it and whether that was all; an
        entry, which goes before its day's rows, is charged with what it holds.
        """
        entries = known.with_columns(
            pl.col(_CHARGED).alias(_COST),
            pl.lit(_NO_LIMIT, pl.Int64).alias(_LIMIT),
            pl.lit(1, pl.Int64).alias(_LEAST),
            pl.lit(value=False).alias(_IS_ROW),
            pl.lit(-1, pl.Int64).alias(_AT),
        )
        came = rows.select(HASH, *self.by, _DAY, _COST, _LIMIT, _LEAST).with_columns(
            pl.lit(0, pl.Int64).alias(_CHARGED),
            pl.lit(value=False).alias(_EXHAUSTED),
            pl.lit(value=True).alias(_IS_ROW),
            pl.int_range(pl.len()).alias(_AT),
        )
        both = pl.concat([entries, came.select(entries.columns)]).sort(HASH, *self.by, _DAY, _AT)
        days = both.select(pl.struct(HASH, *self.by, _DAY).rle_id()).to_series().to_numpy()
        costs, limits = both[_COST].to_numpy(), both[_LIMIT].to_numpy()
        granted, charged = grant_costs(days, costs, limits)
        too_little = charged > limits - both[_LEAST].to_numpy()
        out = np.where(both[_IS_ROW].to_numpy(), too_little, both[_EXHAUSTED].to_numpy())
        return both.with_columns(
            pl.Series(_CHARGED, charged), pl.Series(_EXHAUSTED, out), pl.Series(DECISION, granted)
        )

    def _kept(self, decided: pl.DataFrame, watermark_us: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the daily entries after the batch, of open days and of each key's newest, and the others."""
        key = [HASH, *self.by]
        last = decided.group_by(*key, _DAY, maintain_order=True).agg(
            pl.col(_CHARGED, _EXHAUSTED).last()
        )
        newest = last.select((pl.col(_DAY) == pl.col(_DAY).max().over(key)).alias(_AT))[_AT]
        is_open = pl.Series(self._expiry(last[_DAY]) > watermark_us)
        kept = newest | is_open
        return last.filter(kept).select(self._entry_schema.keys()), last.filter(~kept)

    def _rows(self, rows: pl.DataFrame, decided: pl.DataFrame) -> pl.DataFrame:
        """Return the batch's rows, in their order, with the decisions."""
        events = self._events(decided)
        decided = decided.filter(_IS_ROW).select(_AT, _DAY, _LIMIT, _CHARGED, DECISION).sort(_AT)
        decided = decided.join(events, on=_AT, how="left", maintain_order="left")
        limits = decided[_LIMIT]
        remaining = pl.select(
            pl.when(limits != _NO_LIMIT).then(limits - decided[_CHARGED])
        ).to_series()
        return rows.drop(HASH, _COST, _LIMIT, _LEAST, _DAY).with_columns(
            decided[_DAY].alias(BUDGET_DAY),
            pl.select(
                pl.when(decided[DECISION]).then(pl.lit("granted")).otherwise(pl.lit("refused"))
            )
            .to_series()
            .alias(DECISION),
            self.money.amount(decided[_CHARGED]).alias(SPENT),
            self.money.amount(remaining).alias(REMAINING),
            decided[EVENT],
        )

    def _events(self, decided: pl.DataFrame) -> pl.DataFrame:
        """Find the rows that change a key's budget status, which is that of its newest day so far."""
        key = [HASH, *self.by]
        # Nothing changes where nothing is used up, before or after.
        in_turn = decided.filter(pl.col(_EXHAUSTED).any().over(HASH)).sort(*key, _AT, _DAY)
        day = pl.col(_DAY).to_physical()
        status = in_turn.filter(day == day.cum_max().over(key))
        was_out = pl.col(_EXHAUSTED).shift(1, fill_value=False).over(key)
        changed = status.filter(pl.col(_IS_ROW) & (pl.col(_EXHAUSTED) != was_out))
        word = pl.when(_EXHAUSTED).then(pl.lit("exhausted")).otherwise(pl.lit("resumed"))
        return changed.select(_AT, word.alias(EVENT))


def local_days(times_us: pl.Series, zones: pl.Series) -> pl.Series:
    """Return the date of each time (microseconds of UTC) in its own zone.

    A batch's times mostly lie close together, so dates are looked up minute by minute: since
    ``_WHOLE_MINUTES_US`` no zone's clocks change, and no day begins, within a minute.
    """
    low, high = times_us.min(), times_us.max()
    if isinstance(low, int) and isinstance(high, int) and low >= _WHOLE_MINUTES_US:
        first, last = low // _MINUTE_US, high // _MINUTE_US
        if last - first < len(times_us):
            minutes = pl.int_range(first, last + 1, eager=True) * _MINUTE_US
            return _days_of(zones, minutes, times_us // _MINUTE_US - first)
    return _days_of(zones, times_us, None)


def _days_of(zones: pl.Series, times_us: pl.Series, at: pl.Series | None) -> pl.Series:
    """Return the date in each zone of the time that is at its place of ``times_us``, or at ``at``."""
    instants = times_us.cast(pl.Datetime("us", "UTC"))
    days: pl.Series | None = None
    for zone in zones.unique(maintain_order=True).to_list() or ["UTC"]:
        there = instants.dt.convert_time_zone(zone).dt.date()
        there = there if at is None else there.gather(at)
        days = there if days is None else days.zip_with(zones != zone, there)
    assert days is not None
    return days


def grant_costs(
    groups: npt.NDArray[np.uint32], costs: Int64s, limits: Int64s
) -> tuple[Bools, Int64s]:
    """Grant costs one after the other within each group, while they stay within their limits.

    Groups are numbered from 0, and the rows of each are adjacent. Returns what was granted, and what was
    spent after each. Until the first refusal of a group that is a running sum; from there on, one by one.
    """
    granted = np.ones(len(costs), np.bool_)
    if not len(costs):
        return granted, costs.copy()
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] + 1))
    ends = np.append(starts[1:], len(costs))
    running = np.cumsum(costs)
    before = np.repeat(running[starts] - costs[starts], ends - starts)
    spent: Int64s = running - before
    beyond = np.flatnonzero((costs > 0) & (spent > limits))
    refused_in, first = np.unique(np.searchsorted(starts, beyond, side="right"), return_index=True)
    for group, at in zip(refused_in - 1, beyond[first], strict=True):
        rest = slice(int(at), int(ends[group]))
        total = int(spent[at - 1]) if at > starts[group] else 0
        granted[rest], spent[rest] = _one_by_one(total, costs[rest], limits[rest])
    return granted, spent


def _one_by_one(total: int, costs: Int64s, limits: Int64s) -> tuple[list[bool], list[int]]:
    """Go on where ``total`` is spent: which are granted, and what is spent after each."""
    granted: list[bool] = []
    spent: list[int] = []
    for cost, limit in zip(costs.tolist(), limits.tolist(), strict=True):
        fits = cost <= 0 or total + cost <= limit
        total += cost if fits else 0
        granted.append(fits)
        spent.append(total)
    return granted, spent
