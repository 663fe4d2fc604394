"""Deduplication: ``stream.dedup(…)`` with its checks, and ``ms.bloom(…)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from millstream.choices import choose
from millstream.durations import Duration, format_us, to_us
from millstream.errors import ConfigError
from millstream.kernels.dedup.bloom_generations import BloomRule
from millstream.kernels.dedup.bloom_loss import generation_count
from millstream.kernels.dedup.operator import Dedup
from millstream.kernels.dedup.signed_dedup import SignedDedup
from millstream.kernels.late import LATE_COLUMNS
from millstream.kernels.steps import Filter
from millstream.pipeline.checks import require_free
from millstream.pipeline.expressions import column_named
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape

NullIds = Literal["pass", "drop"]
LateIds = Literal["drop", "side"]
GENERATIONS_MAX = 256
_EXACT_US_MAX = 31 * 86_400_000_000  # a month: a longer one is refused with its cost
_ID_BYTES = 24  # 128 bits of hash and the time


@dataclass(frozen=True)
class Bloom:
    """Rotating Bloom filters, as :func:`bloom` declares them."""

    fpr: float
    rotate_us: int
    expect: int
    exact_check: bool

    def rule(self, within_us: int, lateness_us: int, buckets: int) -> BloomRule:
        """Return the filters of one bucket.

        The rate is shared out among all generations that can be asked; the ids among generations
        and buckets, with room for four standard deviations of their uneven spread.
        """
        if not 0 < self.rotate_us <= within_us:
            raise ConfigError(
                f"bloom's rotate is {format_us(self.rotate_us)}, and dedup's within is "
                f"{format_us(within_us)}. Give a rotate above zero that is not longer than within."
            )
        generations = generation_count(within_us + lateness_us, self.rotate_us)
        if generations > GENERATIONS_MAX:
            raise ConfigError(
                f"bloom's rotate is {format_us(self.rotate_us)}, which makes {generations} "
                f"generations; at most {GENERATIONS_MAX} are allowed. Give a longer rotate."
            )
        share = self.expect * self.rotate_us / within_us / buckets
        ids = max(1, math.ceil(share + 4 * math.sqrt(share)))
        rate = self.fpr / generations
        return BloomRule(self.rotate_us, ids, rate, self.exact_check, buckets)


def bloom(*, fpr: float, rotate: Duration, expect: int, exact_check: bool = False) -> Bloom:
    """Remember ids in Bloom filters: a few bits each, at the price of a few events lost.

    Args:
        fpr: The false-positive rate: the share of new events that may be taken for repeats, and are
            lost. It holds for all generations together, while no more ids come than expected.
        rotate: How much event time one generation of filters takes. Shorter generations let old
            ids go sooner; more of them cost a little more memory and time.
        expect: How many different ids to expect within one ``within`` of dedup. When more come,
            filters are added, and the rate that is reported rises.
        exact_check: Look up what the filters have in an exact store, too. No event is lost, the
            result is that of dedup without filters, and the filters only save look-ups.

    Example::

        events.stream(time="at").dedup(
            "event_id", within="7 days",
            bloom=ms.bloom(fpr=1e-4, rotate="12 hours", expect=200_000_000),
        )

    ``millstream bloom`` works out what a rate costs in memory, and in events lost.
    """
    if not (isinstance(fpr, (int, float)) and 0 < fpr <= 0.5):
        raise ConfigError(f"bloom's fpr is {fpr!r}. Give a rate above 0, up to 0.5, such as 1e-4.")
    if not (isinstance(expect, int) and expect >= 1):
        raise ConfigError(
            f"bloom's expect is {expect!r}. Give the number of different ids to expect within "
            "dedup's within, as a whole number of at least 1."
        )
    return Bloom(float(fpr), to_us(rotate, what="bloom's rotate"), expect, exact_check)


def build_dedup(
    shape: StreamShape,
    columns: tuple[str, ...],
    *,
    within: Duration,
    null: NullIds,
    late: LateIds | None,
    bloom: Bloom | None,
    unbounded: bool,
    name: str | None,
    buckets: int,
) -> tuple[Filter | None, Dedup | SignedDedup, StreamShape]:
    """Check what is declared; return the step before (for ``null="drop"``), the kernel and its shape."""
    if shape.mode == "discard":
        raise ConfigError(
            'dedup comes after emit("discard"), whose rows are parts that add up. Deduplicate the events '
            'before the window, or emit "final", "update" or "retract" there.'
        )
    if shape.no_windows:
        raise ConfigError(f"dedup comes after {shape.no_windows}")
    shape = shape.as_changes()
    if late is None:
        late = "side" if shape.late_policy == "side" else "drop"
    _check_choices(columns, null, late)
    if late == "side":
        require_free(LATE_COLUMNS, shape.columns, "dedup gives late rows")
    if bloom is not None and not isinstance(bloom, Bloom):
        raise ConfigError(f"dedup's bloom is {bloom!r}. Make one with ms.bloom(fpr=…, …).")
    within_us = to_us(within, what="dedup's within")
    signed = shape.mode == "retract"
    if bloom is not None and signed:
        raise ConfigError(
            "dedup has bloom= and comes after rows that may be taken back: a filter cannot forget an id. Leave "
            "bloom out: dedup then keeps the ids exactly, for as long as within says."
        )
    if not unbounded and (bloom is None or bloom.exact_check):
        _check_bounded(within_us)
    step_name = shape.names.unique(name or f"dedup({', '.join(columns)})")
    has_id = tuple(column_named(column).is_not_null() for column in columns)
    without_null = Filter(shape.names.unique(f"{step_name} of no null"), has_id)
    first = without_null if null == "drop" else None
    late_columns = {**shape.columns, **LATE_COLUMNS} if late == "side" else None
    if signed:
        places = {column: str(place) for place, column in enumerate(shape.columns)}
        changes = SignedDedup(
            step_name,
            tuple(shape.columns.items()),
            tuple(places[column] for column in columns),
            within_us,
            shape.lateness_us,
            late == "side",
        )
        return first, changes, _shape_of_changes(shape, late_columns)
    kernel = Dedup(
        name=step_name,
        by=columns,
        types=tuple(str(shape.columns[column]) for column in columns),
        within_us=within_us,
        lateness_us=shape.lateness_us,
        side_output=late == "side",
        bloom=None if bloom is None else bloom.rule(within_us, shape.lateness_us, buckets),
    )
    return first, kernel, replace(shape, late_columns=late_columns)


def _shape_of_changes(shape: StreamShape, late_columns: ColumnTypes | None) -> StreamShape:
    """Return the shape of what is left of rows that may be taken back: some of them."""
    return replace(
        shape,
        lateness_us=0,
        late_policy="drop",
        late_columns=late_columns,
        stable=(),
        takes_back=True,
    )


def _check_bounded(within_us: int) -> None:
    if within_us > _EXACT_US_MAX:
        seconds = within_us / 1e6
        raise ConfigError(
            f"dedup keeps every id of the last {format_us(within_us)}, at {_ID_BYTES} bytes each: "
            f"of 100 new ids a second that is {seconds * 100 * _ID_BYTES / 1e9:,.0f} GB of state. "
            "Give a shorter within, remember ids in filters (bloom=ms.bloom(…)), or say that this "
            "much may be kept: unbounded=True."
        )


def _check_choices(columns: Sequence[str], null: str, late: str) -> None:
    if not columns:
        raise ConfigError('dedup names no column. Say what the id is: dedup("event_id", …).')
    choose("dedup's null", null, get_args(NullIds))
    choose("dedup's late", late, get_args(LateIds))
