"""Lateness: when an event is late, and the columns of the side output.

An event has a *deadline*: the watermark up to which its operator still takes it. :func:`is_late` compares
it with the watermark that the event saw: that of its partition before it, or of its producer where producers
are distinguished; for rows of another operator, this operator's own before the batch. So the
decision depends on the records before the event, and not on batch boundaries. Each operator computes its
own deadlines; all compare them here. ``L`` is the allowed lateness.

==========  ==================================  ===================  ==================  ===============
operator    deadline                            late when the        ``late_by`` counts  ``late_reason``
                                                watermark is         from
==========  ==================================  ===================  ==================  ===============
dedup       time + L                            above it             the deadline        below_watermark
joins       time + L of the row's input         above it             the deadline        below_watermark
patterns    time + L                            above it             the deadline        below_watermark
process     time + L                            above it             the deadline        below_watermark
searches    time + L                            above it             the deadline        below_watermark
budgets     end of the day everywhere + L       at or above it       the deadline        expired_day
windows     end of the event's last window + L  at or above it       the event's time    expired_window
sliding     time + size + L                     above it             the event's time    expired_window
sessions    end of the event's own session + L  above it             the event's time    expired_window
==========  ==================================  ===================  ==================  ===============

The end of a window or day is outside of it, so a watermark at the end has passed all of it. The other
deadlines are times at which an event still counts. A version of an as-of join that corrects what came out
is late after that much more, and one that is late may count for later rows: see
:mod:`millstream.kernels.joins.asof_join`. The end of a session here is the last microsecond at
which an event joins it. A session takes an event that is late in this way if another open session covers
it: see ``_admit_late`` in :mod:`millstream.kernels.sessions.batch`. Count windows take every event;
over rows that may be taken back their deadline is the time + L, as that of joins.

An event that missed only some of its windows is held, not late. Window operators count the windows that an
event missed with ``count_ended`` of their assigner: those that end at or before the watermark it saw, less L.
When these are all of its windows, the watermark has reached the deadline above, and the event is late.

The step's largest ``late_by_us`` in the ledger counts from the deadline, for every operator that reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, overload

import polars as pl

from millstream.kernels.arrays import Bools, Int64s
from millstream.kernels.frames import to_datetimes

LATE_BY = "late_by"
LATE_REASON = "late_reason"
LATE_COLUMNS: Mapping[str, pl.DataType] = {LATE_BY: pl.Duration("us"), LATE_REASON: pl.String()}
"""The columns that a side output adds to its rows."""
LATE_WINDOW_COLUMNS: Mapping[str, pl.DataType] = {
    **LATE_COLUMNS,
    "window_start": pl.Datetime("us", "UTC"),
    "window_end": pl.Datetime("us", "UTC"),
}
"""The columns that the side output of a window adds."""


@dataclass(frozen=True)
class LatenessRule:
    """How an operator compares a watermark with a deadline.

    ``reason`` is the ``late_reason`` of late rows. ``at_deadline``: an event is late already when the
    watermark has come exactly to the deadline.
    """

    reason: str
    at_deadline: bool


DEDUP = LatenessRule("below_watermark", at_deadline=False)
JOIN = LatenessRule("below_watermark", at_deadline=False)
COUNT_WINDOW = LatenessRule("below_watermark", at_deadline=False)
BUDGET = LatenessRule("expired_day", at_deadline=True)
WINDOW = LatenessRule("expired_window", at_deadline=True)
SLIDING = LatenessRule("expired_window", at_deadline=False)
SESSION = LatenessRule("expired_window", at_deadline=False)


@overload
def is_late(seen_us: pl.Expr, deadline_us: pl.Expr, rule: LatenessRule) -> pl.Expr: ...
@overload
def is_late(seen_us: pl.Series, deadline_us: pl.Series, rule: LatenessRule) -> pl.Series: ...
@overload
def is_late(seen_us: Int64s, deadline_us: Int64s, rule: LatenessRule) -> Bools: ...
def is_late(
    seen_us: pl.Expr | pl.Series | Int64s,
    deadline_us: pl.Expr | pl.Series | Int64s,
    rule: LatenessRule,
) -> pl.Expr | pl.Series | Bools:
    """Return for each event whether it is late, given the watermark that it saw and its deadline."""
    return seen_us >= deadline_us if rule.at_deadline else seen_us > deadline_us


class LateSplit(NamedTuple):
    """Rows divided by lateness; ``late_us`` says by how much each late one missed its deadline."""

    in_time: pl.DataFrame
    late: pl.DataFrame
    late_us: Int64s

    @property
    def late_by_us(self) -> int:
        """The most by which a row missed; 0 if none did."""
        return int(self.late_us.max(initial=0))


def split_late(
    rows: pl.DataFrame, seen_us: Int64s, deadline_us: Int64s, rule: LatenessRule
) -> LateSplit:
    """Divide rows into those in time and those that are late; nothing is copied where none is."""
    late = is_late(seen_us, deadline_us, rule)
    if not late.any():
        return LateSplit(rows, rows.clear(), seen_us[:0])
    return LateSplit(rows.filter(~late), rows.filter(late), (seen_us - deadline_us)[late])


def side_output(
    rows: pl.DataFrame,
    late_by_us: Int64s,
    rule: LatenessRule,
    windows_us: tuple[Int64s, Int64s] | None = None,
) -> pl.DataFrame:
    """Add to late rows why and by how much they are late, and for which window: its start and end."""
    spans = zip(("window_start", "window_end"), windows_us or (), strict=False)
    return rows.with_columns(
        pl.Series(LATE_BY, late_by_us, pl.Duration("us")),
        pl.lit(rule.reason).alias(LATE_REASON),
        *(to_datetimes(pl.Series(name, times_us)) for name, times_us in spans),
    )
