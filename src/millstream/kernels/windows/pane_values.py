"""The values of panes: from the partials that each adds to the rows to emit.

A *firing* is one pane of a window and key with the events since the pane before. The value of a pane
is the merge of all firings up to it: a prefix scan over the firings of each key, in as many rounds as
the logarithm of the most panes that a key has in the batch (Hillis and Steele, "Data Parallel
Algorithms", CACM 29(12), 1986). Of every key the value of the last pane is kept, so that a retraction
equals the row that it retracts to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from millstream.kernels.aggregates.count import Count
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.columns import constant
from millstream.kernels.frames import DIFF, HASH, REPLACED, ROWS, WEIGHT, WINDOW
from millstream.kernels.state.hash_order import (
    last_of_each,
    latest_per_key,
    positions_in,
    sort_by_window_and_hash,
)
from millstream.kernels.trigger import EmitStrategy

RANK = "__rank"  # Int64: the order of the firings of a key within a batch
KIND = "__kind"  # String: early, on_time or late
LAST = "__last"  # Boolean: no pane can follow
EMITTED = "__emitted"  # Int64: how many panes of the key have come out
_AT = "__at"
_PLACE = "__place"
_SAYS = "__says"
_BACK = "__back"
PANE_COLUMNS = ("pane_kind", "pane_index", "pane_first", "pane_last")
PANE_TYPES: dict[str, pl.DataType] = dict(
    zip(PANE_COLUMNS, (pl.String(), pl.Int64(), pl.Boolean(), pl.Boolean()), strict=True)
)


@dataclass(frozen=True)
class PaneValues:
    """Turns firings into panes."""

    aggregation: Aggregation
    emission: EmitStrategy

    @property
    def key(self) -> list[str]:
        return [WINDOW, *self.aggregation.by]

    @property
    def accumulates(self) -> bool:
        """Whether a pane gives the value so far."""
        return self.emission.mode != "discard" and not self.emission.once

    @property
    def numbers_panes(self) -> bool:
        """Whether it is kept how many panes of a window and key have come out."""
        return self.emission.panes or self.emission.once

    @property
    def keeps_previous(self) -> bool:
        """Whether panes depend on those before."""
        return self.accumulates or self.numbers_panes or not self.emission.suppress_unchanged

    @property
    def counted(self) -> str | None:
        """The column by which what is kept is counted: events, or panes where only these are known."""
        if self.accumulates:
            return ROWS
        return EMITTED if self.numbers_panes else None

    @property
    def compares(self) -> bool:
        """Whether a pane is compared with the one before; not needed if every event changes it."""
        counted = any(
            isinstance(a, Count) and a.condition is None for _, a in self.aggregation.aggregates
        )
        told_anyway = counted or not self.emission.suppress_unchanged
        plain = self.emission.mode == "update" and not self.emission.panes
        return not (plain and told_anyway and not self.aggregation.weighted)

    @property
    def stored_columns(self) -> list[str]:
        """The columns of what is kept of a window and key."""
        partials = self.aggregation.partials if self.accumulates else []
        return [*self.key, HASH, *partials, *([EMITTED, KIND] if self.numbers_panes else [])]

    def latest(self, kept: pl.DataFrame) -> pl.DataFrame:
        """Return the newest of what was kept, oldest first, of each window and key."""
        return latest_per_key(kept, self.key)

    def panes(
        self, firings: Sequence[pl.DataFrame], known: pl.DataFrame | None
    ) -> tuple[pl.DataFrame, pl.DataFrame | None]:
        """Return the panes in the order of windows, keys and firings, after what was known of each key.

        ``known`` is what was kept, oldest first, and may have other keys. The rows that stand for it
        have a null rank. Give also, by itself, what was known of the keys that fire.
        """
        fired = pl.concat(firings)
        fired = self._placed(fired, alone=fired[RANK].n_unique() == 1)
        before = self._before(fired, known)
        partials = self.aggregation.partials
        values = self._scanned(fired, before) if self.accumulates else self._zeros_filled(fired)
        own = [name for name in fired.columns if name not in partials]
        panes = fired[own].hstack(values[partials])
        if before is None or not self.compares:
            emitted = constant(None, panes.height, pl.Int64)
            return panes.hstack([emitted.alias(EMITTED)]), before
        return pl.concat([before, panes], how="diagonal").sort(_AT, _PLACE), before

    def _placed(self, fired: pl.DataFrame, *, alone: bool) -> pl.DataFrame:
        """Order firings by window and key, number the keys, and the firings of each from 1."""
        if alone:
            ones = pl.ones(fired.height, pl.Int64, eager=True).alias(_PLACE)
            return sort_by_window_and_hash(fired).with_row_index(_AT).hstack([ones])
        ordered = fired.sort(WINDOW, HASH, *self.aggregation.by, RANK)
        another = pl.any_horizontal(pl.col(k).ne_missing(pl.col(k).shift(1)) for k in self.key)
        begins = ordered.select(another).to_series().to_numpy().copy()
        begins[:1] = True
        number = np.arange(len(begins))
        place = number - np.maximum.accumulate(np.where(begins, number, 0)) + 1
        at = (np.cumsum(begins) - 1).astype(np.uint32)
        return ordered.with_columns(pl.Series(_AT, at), pl.Series(_PLACE, place))

    def _before(self, fired: pl.DataFrame, known: pl.DataFrame | None) -> pl.DataFrame | None:
        """Return the newest of what is known of each key that fires, at place 0."""
        if known is None:
            return None
        keys = fired.filter(pl.col(_PLACE) == 1)
        places = positions_in(keys, known, self.key)
        if places is None:
            at = keys.select(*self.key, _AT)
            met = known.join(at, on=self.key, nulls_equal=True, maintain_order="left")
            latest = met.unique(_AT, keep="last", maintain_order=True)
        else:
            met_at = np.flatnonzero(places >= 0)
            found, last = last_of_each(places[met_at])
            latest = known[met_at[last]].hstack([keys[_AT].gather(found)])
        return latest.with_columns(pl.lit(0, pl.Int64).alias(_PLACE)) if latest.height else None

    def _scanned(self, fired: pl.DataFrame, before: pl.DataFrame | None) -> pl.DataFrame:
        """Merge, for each firing, its partial and all partials before it."""
        columns = [_AT, _PLACE, *self.aggregation.partials]
        values = fired[columns].filter(pl.col(ROWS) > 0)
        if before is not None:
            values = pl.concat([before[columns], values])
            values = values[np.argsort(values[_AT].to_numpy(), kind="stable")]
        values = values.with_columns(pl.col(_AT).set_sorted())
        longest, step = int(fired[_PLACE].max()), 1  # type: ignore[arg-type]
        if longest == 1:
            merged = values if before is None else self.aggregation.merge(values, _AT)
            return merged.sort(_AT)
        sizes = fired.group_by(_AT).agg(pl.col(_PLACE).max().alias(RANK))
        while step <= longest:
            moved = values.with_columns(pl.col(_PLACE) + step)
            moved = moved.join(sizes, on=_AT).filter(pl.col(_PLACE) <= pl.col(RANK)).drop(RANK)
            if moved.height:
                values = self.aggregation.merge(pl.concat([moved, values]), _AT, _PLACE)
                values = values.select(columns)
            step *= 2
        return values.filter(pl.col(_PLACE) > 0).sort(_AT, _PLACE)

    def _zeros_filled(self, fired: pl.DataFrame) -> pl.DataFrame:
        """Give an empty pane the value of no events."""
        empty = pl.col(ROWS) == 0
        columns = [_AT, _PLACE, *self.aggregation.partials]
        values = fired.filter(~empty).select(columns)
        if values.height == fired.height:
            return values
        zeros = (
            fired.filter(empty)
            .select(_AT, _PLACE)
            .join(self.aggregation.empty_partials, how="cross")
        )
        return pl.concat([values, zeros.select(columns)]).sort(_AT, _PLACE)

    # ── rows ────────────────────────────────────────────────────────────────────────────────

    def mark_emitted(
        self, panes: pl.DataFrame, results: pl.DataFrame, *, also: Sequence[str] = ()
    ) -> pl.DataFrame:
        """Return for each pane whether it is emitted, and whether the one before is retracted.

        ``results`` are the results of the panes, row by row; ``also`` names columns of theirs that change,
        besides those of the aggregates.
        """
        follows = (pl.col(_AT) == pl.col(_AT).shift(1)).fill_null(value=False)
        is_pane = pl.col(RANK).is_not_null()
        there = pl.col(WEIGHT) != 0 if self.aggregation.weighted else pl.lit(True)
        before = (
            follows & there.shift(1, fill_value=False) if self.aggregation.weighted else follows
        )
        if self.emission.suppress_unchanged and self.compares:
            changed = results.select(
                pl.any_horizontal(
                    pl.col(name).ne_missing(pl.col(name).shift(1))
                    for name in (*self.aggregation.names, *also)
                )
            ).to_series()
            says = is_pane & there & (~before | pl.lit(changed))
        else:
            says = is_pane & there
        back = is_pane & before & (says | ~there if self.emission.mode == "retract" else ~there)
        return self._numbered(panes.with_columns(says.alias(_SAYS), back.alias(_BACK)))

    def mark_emitted_parts(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Return for each pane of new events alone whether it is emitted; rows of earlier panes are empty.

        Only the number of earlier panes is kept, not their values.
        """
        is_pane = pl.col(RANK).is_not_null()
        says = is_pane & (pl.col(ROWS) > 0) if self.emission.suppress_unchanged else is_pane
        judged = panes.with_columns(says.alias(_SAYS), pl.lit(value=False).alias(_BACK))
        return self._numbered(judged).filter(is_pane)

    def _numbered(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Count the emitted panes, and return the kind of the last one."""
        if not self.numbers_panes:
            return panes
        was = pl.col(RANK).is_null()
        counted = pl.when(was).then(EMITTED).otherwise(pl.col(_SAYS)).cast(pl.Int64).alias(EMITTED)
        kind = pl.when(was | pl.col(_SAYS)).then(KIND).alias(KIND)
        return panes.with_columns(counted, kind).with_columns(
            pl.col(EMITTED).cum_sum().over(_AT), pl.col(KIND).forward_fill().over(_AT)
        )

    @property
    def has_diff(self) -> bool:
        """Whether retractions are emitted."""
        return self.emission.mode == "retract" or self.aggregation.weighted

    def pane_columns(self, panes: pl.DataFrame) -> list[pl.Series]:
        """Return the columns that say which pane a row is."""
        if not self.emission.panes:
            return []
        index = panes[EMITTED] - 1
        values = (panes[KIND], index, index == 0, panes[LAST].fill_null(value=False))
        return [v.alias(name) for name, v in zip(PANE_COLUMNS, values, strict=True)]

    def rows(self, panes: pl.DataFrame, results: pl.DataFrame) -> pl.DataFrame:
        """Return the rows to emit: a retraction is before the row that replaces it."""
        new = results.filter(panes[_SAYS])
        if not self.has_diff:
            return new
        place = pl.int_range(pl.len(), dtype=pl.Int64).alias(_PLACE)
        numbered = results.with_columns(place)
        new = numbered.filter(panes[_SAYS]).with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        old = numbered.with_columns(pl.all().exclude(_PLACE).shift(1)).filter(panes[_BACK])
        old = old.with_columns(pl.lit(-1, pl.Int8).alias(DIFF))
        if self.emission.marks_replaced:
            new = new.with_columns(pl.lit(value=False).alias(REPLACED))
            old = old.with_columns(panes.filter(_BACK)[_SAYS].alias(REPLACED))
        return pl.concat([old, new]).sort(_PLACE, DIFF).drop(_PLACE)

    def events_added(self, panes: pl.DataFrame, events: int) -> int:
        """Count the events that panes add to the kept ones, given how many events are new in them."""
        if self.accumulates:
            return events
        return int(panes[_SAYS].sum()) if self.numbers_panes else 0

    def to_store(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Return what is to be kept of each window and key."""
        return self.last_of_each_key(panes)[self.stored_columns]

    def last_of_each_key(self, panes: pl.DataFrame) -> pl.DataFrame:
        """Return the last pane of each window and key."""
        last_of_key = pl.col(_AT) != pl.col(_AT).shift(-1)
        return panes.filter(last_of_key.fill_null(value=True))
