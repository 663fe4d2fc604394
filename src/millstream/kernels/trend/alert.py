"""Alerts on the results of windows, with a hold and a recovery: the rows at which a key's state changes.

The states are those of :mod:`millstream.kernels.trend.alert_states`. Rows of a key are taken in the order of
their windows. A row that can still change is kept, and the states are followed through all such rows of its
key, from the state after the last window that is over: so a correction takes back an alert that it makes wrong,
and emits the one that is right.

State is in three families of sorted runs:

===========  ===================================================================================
``open``     the rows of windows that can still change: see :class:`OpenWindows`
``firing``   the keys that fire, after the windows that are over
``pending``  of other keys with a run: how long it is, and where its last window ends; in slots that
             are dropped whole when the window that would go on with it is over
===========  ===================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.changes import concat_present, consolidate, total_weight, with_diff
from millstream.kernels.frames import HASH, TIME, WEIGHT
from millstream.kernels.operator import BatchContext, OperatorResult, Prepared
from millstream.kernels.state.arrangement import Arrangement
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyhash import hash_columns
from millstream.kernels.state.ledger import StateLedger
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import EACH_ROW, SortedRuns
from millstream.kernels.trend.alert_states import (
    FIRING,
    RESOLVED,
    AlertState,
    WindowRow,
    transitions,
)
from millstream.kernels.trend.open_windows import (
    START,
    OpenWindows,
    Revision,
    WindowSlots,
    in_window_order,
    numbered_keys,
    window_rows,
)
from millstream.kernels.untimed_operator import UntimedOperator

ALERT = "alert"

_WHEN = "__when"
_RECOVER = "__recover"
_NUMBER = "__number"
_RUN = "__run"
_END = "__end"
_FIRING_FAMILY = "firing"
_PENDING_FAMILY = "pending"


@dataclass(frozen=True)
class Alert(UntimedOperator):
    """The operator of an alert. ``columns`` are those of its input, with their types."""

    name: str
    by: tuple[str, ...]
    columns: tuple[tuple[str, pl.DataType], ...]
    when: pl.Expr
    recover: pl.Expr
    for_windows: int
    slots: WindowSlots
    revision: Revision

    # ── before the shuffle ──────────────────────────────────────────────────────────────────

    def prepare(self, rows: pl.DataFrame, number: int = 0) -> Prepared:  # noqa: ARG002
        """Take columns and time, and find out of each row whether its conditions are true."""
        conditions = rows.select(
            self.when.fill_null(value=False).alias(_WHEN),
            self.recover.fill_null(value=False).alias(_RECOVER),
        )
        return Prepared(self.taken(rows).hstack(conditions))

    # ── after the shuffle ───────────────────────────────────────────────────────────────────

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Return the rows at which the state of a key changes, and those that no longer do."""
        result = OperatorResult(counts=Counter())
        kept = OpenWindows(state, self.slots, self.by)
        states = _KeyStates(self, state, context)
        ledger = StateLedger(self.name, (kept.runs, states.firing.runs, states.pending))
        rows = self._rows(inputs, context.seed)
        if rows is not None:
            result.counts.update(held=rows.height)
        if self.revision == "once":
            if rows is not None:
                made = states.follow(rows, keep=True).drop(START, HASH, WEIGHT)
                result.rows = made if made.height else None
        else:
            changes, made = self._revise(kept, states, rows)
            if made.height:
                result.rows = with_diff(made.drop(START, HASH))
            over = kept.take_over(changes, context.watermark_us)
            if over.height:
                states.follow(over, keep=True)
            ledger.events_in, ledger.events_out = total_weight(changes), total_weight(over)
        states.forget_runs()
        ledger.events_in += states.events_in
        ledger.events_out += states.events_out
        ledger.check()
        return result

    @property
    def _schema(self) -> dict[str, pl.DataType]:
        conditions = {_WHEN: pl.Boolean(), _RECOVER: pl.Boolean()}
        hidden = {TIME: pl.Int64(), START: pl.Int64(), WEIGHT: pl.Int64(), HASH: pl.UInt64()}
        return {**dict(self.columns), **conditions, **hidden}

    def _rows(self, inputs: Mapping[int, Sequence[pl.DataFrame]], seed: int) -> pl.DataFrame | None:
        tables = inputs.get(0, ())
        if not tables:
            return None
        rows = window_rows(tables, self.slots)
        rows = rows.hstack([pl.Series(HASH, hash_columns(rows, self.by, seed))])
        return in_window_order(rows.select(*(rows[name] for name in self._schema)))

    def _revise(
        self, kept: OpenWindows, states: _KeyStates, rows: pl.DataFrame | None
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the changes of the rows that can change, and those of the rows that are emitted."""
        if rows is None:
            none = pl.DataFrame(schema=self._schema)
            return none, none
        held = kept.look_up(rows)
        changes = kept.changes(rows, held, self.revision)
        after = in_window_order(consolidate(pl.concat([held, changes])))
        was = states.follow(in_window_order(held)).with_columns(-pl.col(WEIGHT))
        made = consolidate(pl.concat([was, states.follow(after)]))
        kept.add(changes)
        return changes, made


@dataclass
class _KeyStates:
    """The states of keys after the windows that are over.

    What is kept is counted: alerts that fire and are resolved, and runs.
    """

    operator: Alert
    state: OperatorState
    context: BatchContext
    events_in: int = 0
    events_out: int = 0

    @property
    def firing(self) -> Arrangement:
        return Arrangement(self.state, _FIRING_FAMILY)

    @property
    def pending(self) -> SortedRuns:
        return self.state.runs(_PENDING_FAMILY, EACH_ROW)

    def follow(self, rows: pl.DataFrame, *, keep: bool = False) -> pl.DataFrame:
        """Return the rows, in the order of windows, that change the state of their key, with the change.

        They are the next rows of their keys. ``keep``: the states after them are kept.
        """
        numbers, firsts = _key_numbers(rows, self.operator.by)
        before = self._states(rows[firsts])
        states = [AlertState(one.firing, one.run, one.end) for one in before]
        ends = rows[TIME] + 1
        decisive = zip(numbers, rows[START], ends, rows[_WHEN], rows[_RECOVER], strict=True)
        found = list(
            transitions((WindowRow(*row) for row in decisive), states, self.operator.for_windows)
        )
        if keep:
            self._keep(rows[firsts], before, states)
            self.events_in += found.count(FIRING)
            self.events_out += found.count(RESOLVED)
        made = rows.drop(_WHEN, _RECOVER)
        changed = pl.Series(ALERT, found, pl.String)
        columns = [name for name, _ in self.operator.columns]
        made = made[columns].hstack([changed, rows[TIME], rows[START], rows[WEIGHT], rows[HASH]])
        return made.filter(changed.is_not_null())

    def _states(self, firsts: pl.DataFrame) -> list[AlertState]:
        """Return the states of keys before their first rows."""
        keys = numbered_keys(firsts, self.operator.by)
        names = keys.columns
        numbered = keys.hstack([firsts[START].alias(_END), firsts[HASH]]).with_row_index(_NUMBER)
        states = [AlertState() for _ in range(keys.height)]
        firing = self.firing.look_up(sorted_distinct(firsts[HASH].to_numpy()))
        if firing is not None:
            for number in _matching(numbered, firing, names)[_NUMBER]:
                states[number].firing = True
        for slot, part in self.operator.slots.divide(firsts, firsts[START].to_numpy()):
            hashes = sorted_distinct(part[HASH].to_numpy())
            runs = concat_present(list(self.pending.look_up(slot, hashes)))
            if runs is not None:
                found = _matching(numbered, runs, [*names, _END])
                for number, run, end in found.select(_NUMBER, _RUN, _END).iter_rows():
                    states[number] = AlertState(states[number].firing, run, end)
        return states

    def _keep(
        self, firsts: pl.DataFrame, before: list[AlertState], after: list[AlertState]
    ) -> None:
        """Keep the states after the rows."""
        keys = numbered_keys(firsts, self.operator.by).hstack([firsts[HASH]])
        weights = np.array(
            [int(now.firing) - int(was.firing) for was, now in zip(before, after, strict=True)],
            np.int64,
        )
        changed = keys.hstack([pl.Series(WEIGHT, weights)]).filter(pl.col(WEIGHT) != 0)
        self.firing.add(changed)
        runs = keys.hstack(
            [
                pl.Series(_END, [one.end for one in after], pl.Int64),
                pl.Series(_RUN, [one.run for one in after], pl.Int64),
            ]
        ).filter(pl.col(_RUN) > 0)
        for slot, part in self.operator.slots.divide(runs, runs[_END].to_numpy()):
            if not self.operator.slots.is_over(slot, self.context.watermark_us):
                self.pending.add(slot, part, lambda held: held)
                self.events_in += part.height

    def forget_runs(self) -> None:
        """Drop the runs that no window can go on with any more."""
        for slot in sorted(self.pending.slots):
            if self.operator.slots.is_over(slot, self.context.watermark_us):
                self.events_out += self.pending.drop_slot(slot)


def _matching(rows: pl.DataFrame, held: pl.DataFrame, on: list[str]) -> pl.DataFrame:
    # With the hash: polars merges by a single column of floats that is sorted, and finds no NaN there.
    return rows.join(held, on=[*on, HASH], nulls_equal=True, maintain_order="left")


def _key_numbers(rows: pl.DataFrame, by: Sequence[str]) -> tuple[list[int], pl.Series]:
    """Return the number of each row's key, and where each key comes first."""
    keys = numbered_keys(rows, by)
    numbered = keys.with_row_index(_NUMBER)
    places = numbered.select(pl.col(_NUMBER).first().over(keys.columns)).to_series()
    firsts = places.unique(maintain_order=True)
    number = {place: count for count, place in enumerate(firsts.to_list())}
    return [number[place] for place in places.to_list()], firsts
