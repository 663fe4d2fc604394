"""The words of budgets: what ``stream.budget(…)`` takes, checked, as a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.budget import (
    BUDGET_DAY,
    DECISION,
    EVENT,
    REMAINING,
    SPENT,
    Budget,
    Money,
)
from millstream.pipeline.checks import type_of
from millstream.pipeline.functions import Column, as_expression
from millstream.pipeline.schema import Columns

if TYPE_CHECKING:
    from millstream.pipeline.streams import Stream

Zone = str | pl.Expr


def budgeted(
    stream: Stream,
    by: tuple[str, ...],
    *,
    cost: Column,
    limit: Column,
    least: Column | None,
    zone: Zone,
    name: str | None,
) -> tuple[Budget, Columns]:
    """Check what is declared; give the kernel and the columns of its rows."""
    if stream.mode is not None:
        raise ConfigError(
            "budget comes after a window, whose rows may replace one another. Decide on the events "
            "before the first window."
        )
    step = stream.app.unique_name(name or f"budget({', '.join(by)})")
    spending, ceiling = (as_expression(e, what=w) for e, w in ((cost, "cost"), (limit, "limit")))
    useful = None if least is None else as_expression(least, what="least")
    money = _money(stream.columns, spending, ceiling, useful, step)
    added: Columns = {
        BUDGET_DAY: pl.Date(),
        DECISION: pl.String(),
        SPENT: money.dtype,
        REMAINING: money.dtype,
        EVENT: pl.String(),
    }
    _check_free(stream.columns, added)
    kernel = Budget(
        name=step,
        by=by,
        cost=spending,
        limit=ceiling,
        least=useful,
        zone=_zone(zone, stream.columns, step),
        money=money,
        key_types=tuple(stream.columns[column] for column in by),
        lateness_us=stream.lateness_us,
        side=stream.late_policy == "side",
    )
    return kernel, {**stream.columns, **added}


def _money(
    columns: Columns, cost: pl.Expr, limit: pl.Expr, least: pl.Expr | None, step: str
) -> Money:
    """Find what amounts are counted in: whole numbers, or the smallest unit of any Decimal."""
    scales: list[int] = []
    for what, amount in (("cost", cost), ("limit", limit), ("least", least)):
        if amount is None:
            continue
        dtype = type_of(amount, columns, f"the {what} of {step!r}")
        if isinstance(dtype, pl.Decimal):
            scales.append(dtype.scale)
        elif not dtype.is_integer():
            raise ConfigError(
                f"The {what} of {step!r} is of type {dtype}. Amounts of money are exact: give whole "
                "numbers of the smallest unit, or Decimals, such as "
                'pl.col("cost").cast(pl.Decimal(18, 6)).'
            )
    return Money(pl.Decimal(38, max(scales)) if scales else pl.Int64())


def _zone(zone: Zone, columns: Columns, step: str) -> pl.Expr:
    if isinstance(zone, pl.Expr):
        dtype = type_of(zone, columns, f"the zone of {step!r}")
        if dtype != pl.String:
            raise ConfigError(
                f"The zone of {step!r} is of type {dtype}. Give names of time zones, such as "
                '"Europe/Berlin", or a column that has them.'
            )
        return zone
    try:
        ZoneInfo(zone)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"The zone of {step!r} is {zone!r}, which is no time zone. Give a name such as "
            '"Europe/Berlin", or pl.col("zone") for a column that has the names.'
        ) from error
    return pl.lit(zone)


def _check_free(columns: Columns, added: Sequence[str] | Columns) -> None:
    for column in added:
        if column in columns:
            raise ConfigError(
                f"budget gives its rows a column {column!r}, and the stream has one of that name. "
                "Rename it first."
            )
