"""The panes of sessions: when one fires, what it emits, and what it retracts.

Panes follow :mod:`millstream.kernels.trigger`, with these rules for merging:

* The on-time pane fires when W has passed all that can still join the session. A session
  that grows beyond W afterwards is in its early phase again, and has another on-time pane at its new end.
* Merged sessions keep the rows that each of them has emitted. In ``retract`` the next pane retracts all
  of them, in the order of their starts, immediately before its own row. ``update``, and ``final`` where
  it is corrected, replace the row of the same session, and retract the others: the rows of
  sessions that were merged away, and that of a session which an earlier event made begin earlier.
  ``discard`` retracts nothing: its parts add up.
* A retraction must still be in time for downstream operators. So if a session has changed its
  span since it emitted a row, a pane fires at the latest when that row expires, whatever the
  early and late panes are.
* Pane indexes begin again at 0 when sessions that had panes merge.
* With ``late`` None a session closes with its on-time pane: the lateness is zero.
* With ``once`` a session is closed by its first pane, and goes on as a session without panes: events join it,
  make it longer and merge it with others, and all that it gets is left out. So a session that has not fired is closed
  when it merges with one that has, as Beam's ``AfterPane`` and ``AfterProcessingTime`` are finished in a merged window
  if they are in any of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from millstream.kernels.aggregation import Aggregation
from millstream.kernels.columns import constant
from millstream.kernels.frames import DIFF, HASH, REPLACED, TIME
from millstream.kernels.sessions.spans import END, EXPIRED_END, START, TILL
from millstream.kernels.trigger import AfterCount, AfterTime, EachBatch, EmitStrategy, Trigger

NEW_EVENTS = "__new_events"  # Int64: events that no pane has
PANES = "__panes"  # Int64: panes so far
DONE = "__done"  # Boolean: the on-time pane has been, or there was nothing for it
DUE = "__due"  # Int64, nullable: running time at which a pane fires
EMITTED_ROWS = "__emitted_rows"  # List(Struct): rows of panes that are not retracted
EMITTED_START = "__emitted_start"  # Int64, nullable: the earliest start among these
EMITTED_END = "__emitted_end"  # Int64, nullable: the earliest end among these
OVERLAPS = "overlaps_closed"
_AT = "__at"
_RANK = "__rank"


@dataclass
class EmittedPanes:
    """The rows of the panes of a batch, in order, and the number of events that are new in them."""

    rows: list[pl.DataFrame] = field(default_factory=list)
    events: int = 0


@dataclass(frozen=True)
class SessionPanes:
    """How sessions emit. ``empty`` is the partial of no events, ``result_schema`` what comes out.

    ``window_key`` are the columns that distinguish the sessions of a key; an event may still join a
    session that ended ``joins_after_end_us`` before it.
    """

    emission: EmitStrategy
    aggregation: Aggregation
    lateness_us: int
    window_key: tuple[str, ...] = ("window_start",)
    joins_after_end_us: int = 0
    result_schema: tuple[tuple[str, pl.DataType], ...] = ()
    empty: pl.DataFrame = field(default_factory=pl.DataFrame, compare=False)

    @property
    def only_final(self) -> bool:
        """Whether a session gives one row, when it expires, and nothing before."""
        return self.emission.mode == "final" and self.emission.late_policy != "correct"

    @property
    def fires_by_count(self) -> bool:
        """Whether panes fire by count, so that events must be taken one by one."""
        firings = (self.emission.early, self.emission.late)
        return not self.only_final and any(isinstance(firing, AfterCount) for firing in firings)

    @property
    def emits_parts(self) -> bool:
        """Whether a pane has new events alone, which are not kept once they are emitted."""
        return self.emission.mode == "discard" or self.emission.once

    @property
    def retracts(self) -> bool:
        """Whether the rows that come out have ``__diff``."""
        return not self.emits_parts and not self.only_final

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """The columns that a session's state has for its panes."""
        if self.only_final:
            return {}
        columns: dict[str, pl.DataType] = {
            NEW_EVENTS: pl.Int64(),
            PANES: pl.Int64(),
            DONE: pl.Boolean(),
            DUE: pl.Int64(),
        }
        if self.retracts:
            columns |= {
                EMITTED_ROWS: pl.List(pl.Struct(dict(self._emitted_schema))),
                EMITTED_START: pl.Int64(),
                EMITTED_END: pl.Int64(),
            }
        return columns

    @property
    def _emitted_schema(self) -> list[tuple[str, pl.DataType]]:
        own = {DIFF, *self.aggregation.by}
        return [(name, dtype) for name, dtype in self.result_schema if name not in own]

    def merge_columns(self) -> list[pl.Expr]:
        """Expressions over sessions that become one, for the columns of :attr:`schema`."""
        if self.only_final:
            return []
        panes, had_panes = pl.col(PANES).max(), pl.col(PANES) > 0
        if not self.emission.once:
            panes = pl.when(had_panes.sum() > 1).then(0).otherwise(panes)
        emitted = [
            pl.col(EMITTED_ROWS).explode(empty_as_null=False),
            pl.col(EMITTED_START, EMITTED_END).min(),
        ]
        return [
            pl.col(NEW_EVENTS).sum(),
            panes.alias(PANES),
            pl.col(DONE).any(),
            pl.col(DUE).min(),
            *(emitted if self.retracts else ()),
        ]

    def initial_columns(self, rows: str) -> list[pl.Expr]:
        """Expressions for the columns of :attr:`schema` of sessions that have had no pane."""
        begun = {
            NEW_EVENTS: pl.col(rows),
            PANES: pl.lit(0, pl.Int64),
            DONE: pl.lit(value=False),
            DUE: pl.lit(None, pl.Int64),
            EMITTED_ROWS: pl.lit([], pl.List(pl.Struct(dict(self._emitted_schema)))),
            EMITTED_START: pl.lit(None, pl.Int64),
            EMITTED_END: pl.lit(None, pl.Int64),
        }
        return [begun[name].alias(name) for name in self.schema]

    # ── firing ──────────────────────────────────────────────────────────────────────────────

    def fire_on_time(self, sessions: pl.DataFrame, now: pl.Expr, out: EmittedPanes) -> pl.DataFrame:
        """Fire the on-time panes of sessions that are complete; put what comes out on ``out``."""
        complete = pl.col(TILL) < now
        sessions = self.reopen(sessions, now)
        fires = complete & ~pl.col(DONE)
        sessions = self._fire(sessions, fires, now, out)
        return sessions.with_columns((pl.col(DONE) | complete).alias(DONE))

    def reopen(self, sessions: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Have sessions that have grown beyond ``now`` wait for another on-time pane."""
        return sessions.with_columns(pl.col(DONE) & (pl.col(TILL) < now))

    def fire_others(
        self,
        sessions: pl.DataFrame,
        now: pl.Expr,
        clock_ms: int,
        out: EmittedPanes,
        *,
        at_end: bool,
    ) -> pl.DataFrame:
        """Fire early and late panes; ``at_end``: the batch has nothing more for these sessions."""
        complete = pl.col(TILL) < now
        sessions = sessions.with_columns(
            pl.when(complete)
            .then(self._due(self.emission.late, clock_ms))
            .otherwise(self._due(self.emission.early, clock_ms))
            .alias(DUE),
            complete.alias(DONE),
        )
        early = self._fires(self.emission.early, clock_ms, at_end=at_end)
        late = self._fires(self.emission.late, clock_ms, at_end=at_end)
        if self.emission.late is not None and at_end:
            late |= pl.col(TILL) + self.lateness_us < now
        fires = (pl.col(NEW_EVENTS) > 0) & pl.when(complete).then(late).otherwise(early)
        return self._fire(sessions, fires, now, out)

    def fire_due_retractions(
        self, sessions: pl.DataFrame, now: pl.Expr, out: EmittedPanes, *, complete: bool
    ) -> pl.DataFrame:
        """Fire where emitted rows must be retracted by ``now``, at the watermark at which each is due.

        Call it for sessions that were not ``complete`` then before :meth:`fire_on_time`, and for
        those that were after it: so the panes are the same however far ``now`` has moved at once.
        """
        if not self.retracts:
            return sessions
        owed = self.retraction_due()
        fires = (owed <= now) & ((pl.col(TILL) < owed) == complete)
        return self._fire(sessions, fires.fill_null(value=False), owed, out)

    def retraction_due(self) -> pl.Expr:
        """Return the watermark by which emitted rows of a session must be retracted, if they must."""
        changed = (pl.col(EMITTED_ROWS).list.len() > 1) | (pl.col(EMITTED_START) != pl.col(START))
        if self.emission.mode == "retract" or "window_end" in self.window_key:
            changed |= pl.col(EMITTED_END) != pl.col(END)
        over = pl.col(EMITTED_END) + self.joins_after_end_us + self.lateness_us
        return pl.when(changed).then(over)

    def _due(self, firing: Trigger | None, clock_ms: int) -> pl.Expr:
        if not isinstance(firing, AfterTime):
            return pl.lit(None, pl.Int64)
        first = pl.col(DUE).fill_null(clock_ms + firing.delay_ms)
        return pl.when(pl.col(NEW_EVENTS) > 0).then(first)

    def _fires(self, firing: Trigger | None, clock_ms: int, *, at_end: bool) -> pl.Expr:
        if isinstance(firing, AfterCount):
            return pl.col(NEW_EVENTS) >= firing.count
        if isinstance(firing, AfterTime):
            return (pl.col(DUE) <= clock_ms).fill_null(value=False) & at_end
        return pl.lit(at_end and isinstance(firing, EachBatch))

    def _fire(
        self, sessions: pl.DataFrame, fires: pl.Expr, now: pl.Expr, out: EmittedPanes
    ) -> pl.DataFrame:
        if self.emission.once:
            fires &= pl.col(PANES) == 0
        split = sessions.with_columns(fires.alias(_AT))
        firing = split.filter(_AT).drop(_AT)
        if not firing.height:
            return sessions
        firing = firing.sort(START, END, HASH)
        results = self.result_rows(firing, now)
        unchanged = self._unchanged(firing, results)
        out.events += int(firing[NEW_EVENTS].sum())
        out.rows.append(self._emitted(firing.filter(~unchanged), results.filter(~unchanged)))
        fired = firing.with_columns(
            pl.lit(0, pl.Int64).alias(NEW_EVENTS),
            pl.lit(None, pl.Int64).alias(DUE),
            pl.col(PANES) + (~unchanged).cast(pl.Int64),
            *(self._emitted_columns(results, unchanged) if self.retracts else ()),
        )
        if self.emits_parts:
            fired = fired.with_columns(self._no_events())
        return pl.concat([split.filter(~pl.col(_AT)).drop(_AT), fired.select(sessions.columns)])

    def _no_events(self) -> list[pl.Expr]:
        """Return the partials of no events."""
        return [pl.lit(self.empty[name]).first().alias(name) for name in self.aggregation.partials]

    def without_late_comers(self, sessions: pl.DataFrame) -> tuple[pl.DataFrame, int]:
        """Leave out what is new in sessions that have fired once; return how many events that is, too."""
        closed = (pl.col(PANES) > 0) & (pl.col(NEW_EVENTS) > 0)
        left_out = int(sessions.filter(closed)[NEW_EVENTS].sum())
        if not left_out:
            return sessions, 0
        emptied = [pl.lit(0, pl.Int64).alias(NEW_EVENTS), *self._no_events()]
        open_ones = sessions.filter(~closed)
        return pl.concat([open_ones, sessions.filter(closed).with_columns(emptied)]), left_out

    def _emitted_columns(self, results: pl.DataFrame, unchanged: pl.Series) -> list[pl.Expr]:
        now = pl.lit(_as_emitted(results, self.schema[EMITTED_ROWS]))
        rows = pl.when(unchanged).then(pl.col(EMITTED_ROWS)).otherwise(now).alias(EMITTED_ROWS)
        return [rows, pl.col(START).alias(EMITTED_START), pl.col(END).alias(EMITTED_END)]

    def _unchanged(self, firing: pl.DataFrame, results: pl.DataFrame) -> pl.Series:
        """Return which panes are suppressed, because they are unchanged."""
        if not self.emission.suppress_unchanged:
            return constant(False, firing.height, pl.Boolean)
        if self.emits_parts:
            return firing[NEW_EVENTS] == 0
        plain = [name for name, _ in self._emitted_schema if not name.startswith("pane_")]
        before = firing[EMITTED_ROWS]
        fields = before.list.first().struct.unnest()
        same = before.list.len() == 1
        for name in plain:
            same &= fields[name].alias("0").eq_missing(results[name].alias("0"))
        return same

    def _emitted(self, firing: pl.DataFrame, results: pl.DataFrame) -> pl.DataFrame:
        """Put new rows after those that they retract."""
        if not self.retracts:
            return self._added(results) if self.emission.mode == "retract" else results
        numbered = firing.select(
            pl.int_range(pl.len()).alias(_AT), *self.aggregation.by, EMITTED_ROWS
        )
        earlier = (
            numbered.filter(pl.col(EMITTED_ROWS).list.len() > 0)
            .explode(EMITTED_ROWS)
            .unnest(EMITTED_ROWS)
        )
        results = results.with_columns(pl.int_range(pl.len()).alias(_AT))
        same = [_AT, *self.window_key]  # a row of the same window key is replaced
        if self.emission.mode != "retract":
            earlier = earlier.join(results.select(same), on=same, how="anti")
        retracted = earlier.with_columns(pl.lit(-1, pl.Int8).alias(DIFF), pl.lit(0).alias(_RANK))
        retracted = retracted.with_columns((pl.col("window_end").dt.epoch("us") - 1).alias(TIME))
        rows = [
            retracted,
            results.with_columns(pl.lit(1, pl.Int8).alias(DIFF), pl.lit(1).alias(_RANK)),
        ]
        ordered = pl.concat(rows, how="diagonal").sort(_AT, _RANK, "window_start", "window_end")
        own = [*results.drop(_AT).columns, DIFF]
        if not self.emission.marks_replaced:
            return ordered[own]  # by names, not in a select, for which "^a.*$" is a pattern
        new = results.select(
            *same, pl.lit(-1, pl.Int8).alias(DIFF), pl.lit(value=True).alias(REPLACED)
        )
        marked = ordered.join(new, on=[*same, DIFF], how="left", maintain_order="left")
        return marked[own].hstack([marked[REPLACED].fill_null(value=False)])

    def _added(self, results: pl.DataFrame) -> pl.DataFrame:
        """Say of rows that they are added, where none takes another back."""
        added = results.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        if not self.emission.marks_replaced:
            return added
        return added.with_columns(pl.lit(value=False).alias(REPLACED))

    def result_rows(self, sessions: pl.DataFrame, now: pl.Expr) -> pl.DataFrame:
        """Turn sessions into result rows, whose time is their last microsecond."""
        return sessions.select(
            pl.from_epoch(START, "us").dt.replace_time_zone("UTC").alias("window_start"),
            pl.from_epoch(END, "us").dt.replace_time_zone("UTC").alias("window_end"),
            *self.aggregation.by,
            *self.aggregation.results,
            (pl.col(EXPIRED_END) >= pl.col(START)).fill_null(value=False).alias(OVERLAPS),
            *(self._pane_columns(now) if self.emission.panes else ()),
            (pl.col(END) - 1).alias(TIME),
        )

    def _pane_columns(self, now: pl.Expr) -> Sequence[pl.Expr]:
        if self.only_final:
            return [
                pl.lit("on_time").alias("pane_kind"),
                pl.lit(0, pl.Int64).alias("pane_index"),
                pl.lit(value=True).alias("pane_first"),
                pl.lit(value=True).alias("pane_last"),
            ]
        complete = pl.col(TILL) < now
        early, on_time = ~complete, complete & ~pl.col(DONE)
        kind = pl.when(on_time).then(pl.lit("on_time")).otherwise(pl.lit("late"))
        kind = pl.when(early).then(pl.lit("early")).otherwise(kind)
        alone = self.lateness_us == 0 or self.emission.late is None
        last = pl.when(on_time).then(pl.lit(alone)).otherwise(pl.col(TILL) + self.lateness_us < now)
        if self.emission.once:
            last = pl.lit(value=True)
        return [
            kind.alias("pane_kind"),
            pl.col(PANES).alias("pane_index"),
            (pl.col(PANES) == 0).alias("pane_first"),
            last.alias("pane_last"),
        ]


def _as_emitted(results: pl.DataFrame, dtype: pl.DataType) -> pl.Series:
    """Return each emitted row as a list of one, to be retracted later."""
    assert isinstance(dtype, pl.List)
    assert isinstance(dtype.inner, pl.Struct)
    names = [entry.name for entry in dtype.inner.fields]
    rows = results[names].to_struct(EMITTED_ROWS)
    return rows.reshape((-1, 1)).arr.to_list().cast(dtype)
