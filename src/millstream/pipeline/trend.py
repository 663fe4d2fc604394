"""Comparisons of windows with earlier ones, and alerts: checked where they are declared, and built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zoneinfo import ZoneInfo

import polars as pl

from millstream.choices import did_you_mean
from millstream.durations import format_us
from millstream.errors import ConfigError
from millstream.kernels.row_keys import row_key_after
from millstream.kernels.trend.alert import ALERT, Alert
from millstream.kernels.trend.compare import Compare
from millstream.kernels.trend.local_time import DAY_US, LocalSpan
from millstream.kernels.trend.open_windows import ComparedWindow, Revision, WindowSlots
from millstream.kernels.windows.assigners import Cumulating, Tumbling
from millstream.kernels.windows.calendar_windows import Calendar
from millstream.kernels.windows.window_operator import WindowOperator
from millstream.pipeline.checks import require_column, require_free, type_of, whole_number
from millstream.pipeline.expressions import Column, as_expression, names_given
from millstream.pipeline.graph import GraphNode, LateNode, OperatorNode, StepNode
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape

_SPAN = re.compile(r"\s*(\d+)\s*([a-zA-Z]+)\s*")
_DAYS = {"day": 1, "week": 7}
_MONTHS = {"month": 1, "quarter": 3, "year": 12}
_YEARS_MAX = 10
_REVISIONS: dict[str, Revision] = {"final": "once", "update": "replaced", "retract": "signed"}


@dataclass(frozen=True)
class WindowResults:
    """What the rows of a stream are results of: windows side by side, or cumulating, by some columns.

    ``early``: rows can come before their window has ended. ``slots`` and ``revision`` say how long a row can
    change, and how that comes.
    """

    by: tuple[str, ...]
    slots: WindowSlots
    revision: Revision
    early: bool

    @property
    def window(self) -> ComparedWindow:
        return self.slots.window


def window_results(node: GraphNode, shape: StreamShape, what: str) -> WindowResults:
    """Find the windows whose results a node's rows are.

    Raises:
        ConfigError: they are not, or they are parts of results, or a step after the windows may have made
            rows of one key and window equal.
    """
    steps: list[StepNode] = []
    while isinstance(node, StepNode) or (
        isinstance(node, OperatorNode) and isinstance(node.kernel, Compare)
    ):
        if isinstance(node, StepNode):
            steps.append(node)
            node = node.parent
        else:
            node = node.inputs[0]
    kernel = node.kernel if isinstance(node, OperatorNode) else None
    kinds = (Tumbling, Calendar, Cumulating)
    if not isinstance(kernel, WindowOperator) or not isinstance(kernel.window, kinds):
        raise ConfigError(
            f"{what} comes after {_said(node)}. It takes the results of windows that lie side by side, or of "
            "cumulating ones: window(ms.tumbling(…)), ms.calendar(…) or ms.cumulating(…), and agg; between them "
            "and it there may be "
            "filters, with_columns, select, rename, drop and compare."
        )
    if shape.mode not in _REVISIONS:
        raise ConfigError(
            f'{what} comes after emit("{shape.mode}"), whose rows are parts of a window\'s result. Emit '
            '"final", "update" or "retract" there.'
        )
    identity = (kernel.window.window_key[-1], *kernel.by)
    key: tuple[str, ...] | None = identity
    for step in reversed(steps):
        key = row_key_after(step.step, key)
        if key is None:
            raise ConfigError(
                f"{what} comes after {step.step.name!r}, which leaves a column out, or makes it anew, by which "
                f"results are told apart: {', '.join(identity)}. Do that after {what}."
            )
    assert key is not None
    return WindowResults(
        key[1:],
        WindowSlots(kernel.window, kernel.expires_after_us if shape.mode != "final" else 0),
        _REVISIONS[shape.mode],
        kernel.emission.early is not None,
    )


def _said(node: GraphNode) -> str:
    if isinstance(node, OperatorNode):
        return repr(node.kernel.name)
    return "late rows" if isinstance(node, LateNode) else "rows that no window has made"


# ── compare ─────────────────────────────────────────────────────────────────────────────────


def build_compare(
    node: GraphNode,
    shape: StreamShape,
    columns: str | Sequence[str],
    *,
    to: str,
    zone: str | None,
    name: str | None,
) -> tuple[Compare, StreamShape]:
    """Build the operator that compares windows with earlier ones, and the shape of its rows."""
    results = window_results(node, shape, "compare")
    if results.early:
        raise ConfigError(
            f'compare comes after emit("{shape.mode}") with early rows: a part of a window would be compared '
            "with a whole one, and event time does not say how far it has got. To compare each part with the same "
            "part of the earlier window, use window(ms.cumulating(size, step)); for whole windows, say "
            f'emit("{shape.mode}", early=None), or emit("final").'
        )
    names = names_given(columns, "compare")
    if not names:
        raise ConfigError(
            'compare names no column. Say what is compared: compare("n", to="1 week").'
        )
    added: ColumnTypes = {}
    compared: list[tuple[str, str, str]] = []
    for column in names:
        require_column(column, shape.columns, "compare")
        dtype = shape.columns[column]
        if not dtype.is_numeric():
            raise ConfigError(
                f"compare names {column!r}, a {dtype}. It compares numbers: make one first, with "
                "with_columns."
            )
        own = (column, f"{column}_before", f"{column}_ratio")
        require_free(own[1:], {**shape.columns, **added}, "compare gives its rows")
        added |= {own[1]: dtype, own[2]: pl.Float64()}
        compared.append(own)
    kernel = Compare(
        shape.names.unique(name or f"compare({', '.join(names)}) to {to} before"),
        results.by,
        tuple(shape.columns.items()),
        tuple(compared),
        _local_span(to, results.window, zone),
        results.slots,
        results.revision,
    )
    return kernel, _shape_after(shape, added, results)


def _shape_after(shape: StreamShape, added: ColumnTypes, results: WindowResults) -> StreamShape:
    """Return the shape of rows with more columns: those that can change are taken back first."""
    return replace(
        shape,
        columns={**shape.columns, **added},
        mode="final" if results.revision == "once" else "retract",
        late_columns=None,
    )


def _local_span(to: str, window: ComparedWindow, zone: str | None) -> LocalSpan:
    found = _SPAN.fullmatch(to) if isinstance(to, str) else None
    count, said = (int(found[1]), found[2].lower()) if found else (0, "")
    unit = said.removesuffix("s")
    days, months = count * _DAYS.get(unit, 0), count * _MONTHS.get(unit, 0)
    if not 0 < days * 12 + months * 365 <= _YEARS_MAX * 12 * 365:
        near = did_you_mean(unit, (*_DAYS, *_MONTHS)) if unit else ""
        raise ConfigError(
            f"compare's to is {to!r}. Give days, weeks, months, quarters or years, up to {_YEARS_MAX} "
            f'years: "1 day", "1 week", "4 weeks", "1 month".{near}'
        )
    span = LocalSpan(days, months, _zone(window, zone), _by_date(window))
    if not _can_meet(span, window):
        raise ConfigError(
            f"compare goes back {to}, and no window of {_size(window)} begins at the same local time then. "
            "Give a whole number of windows, or windows that divide a day."
        )
    return span


def _by_date(window: ComparedWindow) -> bool:
    return isinstance(window, Calendar) and window.unit != "minute"


def _can_meet(span: LocalSpan, window: ComparedWindow) -> bool:
    """Return whether windows begin at the same local times so much earlier."""
    if not isinstance(window, Calendar):
        return (span.days or 1) * DAY_US % window.size_us == 0
    if window.unit == "week":
        return not span.months and span.days % 7 == 0
    if window.unit == "month":
        return bool(span.months) and span.months % window.count == 0
    return True


def _size(window: ComparedWindow) -> str:
    return str(window) if isinstance(window, Calendar) else format_us(window.size_us)


def _zone(window: ComparedWindow, zone: str | None) -> str:
    own = window.tz if isinstance(window, Calendar) else None
    if zone is None:
        return own or "UTC"
    try:
        ZoneInfo(zone)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(
            f'compare\'s zone is {zone!r}, which is no time zone. Give a name such as "Europe/Berlin".'
        ) from error
    if own not in (None, zone):
        raise ConfigError(
            f"compare's zone is {zone!r}, and the windows are those of {own!r}. Leave zone out: it is that of "
            "calendar windows."
        )
    return zone


# ── alert ───────────────────────────────────────────────────────────────────────────────────


def build_alert(
    node: GraphNode,
    shape: StreamShape,
    *,
    when: Column,
    recover: Column,
    for_windows: int,
    name: str | None,
) -> tuple[Alert, StreamShape]:
    """Build the operator of an alert, and the shape of its rows."""
    results = window_results(node, shape, "alert")
    conditions = (
        _condition(when, shape.columns, "alert's when"),
        _condition(recover, shape.columns, "alert's recover"),
    )
    added: ColumnTypes = {ALERT: pl.String()}
    require_free(added, shape.columns, "alert gives its rows")
    kernel = Alert(
        shape.names.unique(name or "alert"),
        results.by,
        tuple(shape.columns.items()),
        *conditions,
        whole_number(for_windows, 1, 1_000_000, "alert's for_windows"),
        results.slots,
        results.revision,
    )
    # A row of an alert may be taken back without another in its place.
    return kernel, replace(_shape_after(shape, added, results), stable=())


def _condition(condition: Column, columns: ColumnTypes, what: str) -> pl.Expr:
    expression = as_expression(condition, what=what)
    dtype = type_of(expression, columns, what)
    if dtype != pl.Boolean:
        raise ConfigError(
            f'{what} is of type {dtype}. Give a condition, such as pl.col("n_ratio") > 1.3.'
        )
    return expression
