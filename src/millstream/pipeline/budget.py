"""Budgets: ``stream.budget(…)`` checked and made into a kernel."""

from __future__ import annotations

from dataclasses import replace
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
from millstream.pipeline.checks import require_free, type_of
from millstream.pipeline.expressions import Column, as_expression
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape, late_columns_of

Zone = str | pl.Expr


def build_budget(
    shape: StreamShape,
    by: tuple[str, ...],
    *,
    cost: Column,
    limit: Column,
    least: Column | None,
    zone: Zone,
    name: str | None,
) -> tuple[Budget, StreamShape]:
    """Check what is declared; return the kernel and the shape of its rows."""
    _check_order(shape)
    step = shape.names.unique(name or f"budget({', '.join(by)})")
    spending, ceiling = (as_expression(e, what=w) for e, w in ((cost, "cost"), (limit, "limit")))
    useful = None if least is None else as_expression(least, what="least")
    money = _money(shape.columns, spending, ceiling, useful, step)
    added: ColumnTypes = {
        BUDGET_DAY: pl.Date(),
        DECISION: pl.String(),
        SPENT: money.dtype,
        REMAINING: money.dtype,
        EVENT: pl.String(),
    }
    require_free(added, shape.columns, "budget gives its rows")
    late_columns = late_columns_of(shape, "budget")
    kernel = Budget(
        name=step,
        by=by,
        cost=spending,
        limit=ceiling,
        least=useful,
        zone=_zone(zone, shape.columns, step),
        money=money,
        key_types=tuple(shape.columns[column] for column in by),
        lateness_us=shape.lateness_us,
        side_output=late_columns is not None,
    )
    shape_out = replace(
        shape,
        columns={**shape.columns, **added},
        late_columns=late_columns,
    )
    return kernel, shape_out


def _check_order(shape: StreamShape) -> None:
    """Make sure that rows have an order of arrival, in which money is spent.

    Raises:
        ConfigError: they come from a window, or may be taken back.
    """
    if shape.mode in ("update", "retract"):
        raise ConfigError(
            "budget comes after rows that may be taken back: it spends in the order of arrival, and each row that "
            "is taken back would change all decisions after it. Decide on the events, before the first window: "
            'events.budget(…).window(…). Of a join, emit the rows without a partner "final".'
        )
    if shape.mode is not None:
        raise ConfigError(
            "budget comes after a window, whose rows have no order of arrival, in which it spends. Decide on the "
            "events, before the first window: events.budget(…).window(…)."
        )


def _money(
    columns: ColumnTypes, cost: pl.Expr, limit: pl.Expr, least: pl.Expr | None, step: str
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
                f"The {what} of {step!r} is of type {dtype}. Amounts must be exact: use "
                "integers of the smallest unit, or Decimals, such as "
                'pl.col("cost").cast(pl.Decimal(18, 6)).'
            )
    return Money(pl.Decimal(38, max(scales)) if scales else pl.Int64())


def _zone(zone: Zone, columns: ColumnTypes, step: str) -> pl.Expr:
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
