"""Windows over a stream: how they emit, what they aggregate, and the types of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from types import EllipsisType
from typing import Any, get_args

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.aggregation import Aggregation
from millstream.kernels.frames import WINDOW, visible
from millstream.kernels.operator import Operator
from millstream.kernels.trigger import EachBatch, EmitStrategy, Mode, Once, Trigger
from millstream.kernels.windows.assigners import WindowAssigner
from millstream.kernels.windows.count_windows import CountWindow
from millstream.kernels.windows.final import FinalWindowOperator
from millstream.kernels.windows.pane_values import PANE_COLUMNS, PANE_TYPES
from millstream.kernels.windows.panes import PaneWindowOperator
from millstream.kernels.windows.window_operator import WindowOperator
from millstream.pipeline.aggregate_types import check_aggregates
from millstream.pipeline.event_windows import aggregate_event_windows
from millstream.pipeline.expressions import is_pattern
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape, windowed_shape
from millstream.pipeline.window_columns import WINDOW_COLUMNS, typed_aggregation
from millstream.pipeline.windows import EventWindow, TriggerSpec, parse_trigger


def emit_strategy(
    shape: StreamShape,
    window: WindowAssigner | EventWindow,
    mode: Mode,
    *,
    early: TriggerSpec | Once | EllipsisType,
    late: TriggerSpec | EllipsisType,
    suppress_unchanged: bool,
    panes: bool,
) -> EmitStrategy:
    """Check what :meth:`Windowed.emit` was given; ``...`` stands for what was not given."""
    choose("emit", mode, get_args(Mode))
    if mode == "final" and not isinstance(early, EllipsisType) and early is not None:
        raise ConfigError(
            f'emit("final") has early={early!r}, but a final row comes once, at the end. Choose '
            '"update", "discard" or "retract" for early rows.'
        )
    late_rows = not (late is None or isinstance(late, EllipsisType))
    if mode == "final" and shape.late_policy != "correct" and (panes or late_rows):
        raise ConfigError(
            'emit("final") gives one row per window, so it has no late rows and no panes. Read '
            'the stream with late="correct", or choose "update", "discard" or "retract".'
        )
    if late is None and shape.late_policy == "correct":
        raise ConfigError(
            'emit has late=None over a stream with late="correct": nothing would correct. Leave '
            "one of them out."
        )
    if mode == "discard" and shape.mode == "retract" and not isinstance(window, CountWindow):
        raise ConfigError(
            'emit("discard") comes after rows of which some take others back: those cannot be '
            'emitted as parts. Choose "final", "update" or "retract".'
        )
    early_trigger: Trigger | None = None if mode == "final" else EachBatch()
    late_trigger: Trigger | None = EachBatch()
    if isinstance(early, Once):
        _check_once(shape, late)
        early_trigger, late = early.trigger, None
    elif not isinstance(early, EllipsisType):
        early_trigger = parse_trigger(early, "emit's early")
    if not isinstance(late, EllipsisType):
        late_trigger = parse_trigger(late, "emit's late")
    return EmitStrategy(
        mode=mode,
        early=early_trigger,
        late=late_trigger,
        late_policy=shape.late_policy,
        suppress_unchanged=suppress_unchanged,
        panes=panes,
        once=isinstance(early, Once),
    )


def window_name(window: WindowAssigner | EventWindow, by: tuple[str, ...]) -> str:
    """Return the name of a step of windows that was given none."""
    return f"{window} by {', '.join(by)}".removesuffix(" by ")


def plain_names(
    shape: StreamShape, by: tuple[str, ...], aggregates: Mapping[str, Aggregate]
) -> dict[str, str]:
    """Return other names, for the time being, for columns ``by`` and aggregates that polars takes for patterns.

    Raises:
        ConfigError: an aggregate has such a name, or rows that are too late would have the other one.
    """
    check_aggregates(dict(aggregates), by)
    found = [name for name in (*by, *aggregates) if is_pattern(name)]
    if found and shape.late_policy == "side":
        what, instead = (
            ("window's by", 'Rename it first: rename({"old": "new"})')
            if found[0] in by
            else ("agg", "Choose another name")
        )
        raise ConfigError(
            f"{what} has {found[0]!r}, which looks like a pattern of names, over a stream with "
            f'late="side", whose late rows have all columns. {instead}.'
        )
    taken = {*shape.columns, *aggregates}
    free = (name for number in count(1) if (name := f"by {number}") not in taken)
    return dict(zip(found, free, strict=False))


def _check_once(shape: StreamShape, late: TriggerSpec | EllipsisType) -> None:
    """Make sure that nothing is asked of a window after the one pane that closes it."""
    if not isinstance(late, EllipsisType) and late is not None:
        raise ConfigError(
            f"emit has early=ms.once(…) and late={late!r}, but a window that fires once is closed then. Leave "
            "late out; or give the trigger without ms.once."
        )
    if shape.mode == "retract":
        raise ConfigError(
            "emit has early=ms.once(…) after rows of which some take others back: what a closed window has could "
            'not be taken back. Emit "final" above; or give the trigger without ms.once.'
        )
    if shape.late_policy == "correct":
        raise ConfigError(
            'emit has early=ms.once(…) over a stream with late="correct": nothing would correct. Leave one '
            "of them out."
        )


def aggregate_windows(
    shape: StreamShape,
    window: WindowAssigner | EventWindow,
    by: tuple[str, ...],
    aggregates: dict[str, Aggregate],
    *,
    name: str,
    emission: EmitStrategy,
) -> tuple[Operator, StreamShape]:
    """Build the operator that aggregates windows; return it and the shape of its rows."""
    panes = PANE_COLUMNS if emission.panes else ()
    check_aggregates(aggregates, (*WINDOW_COLUMNS, *by, *panes))
    emission = replace(emission, late_policy=shape.late_policy)
    if isinstance(window, EventWindow):
        return aggregate_event_windows(shape, window, by, aggregates, name=name, emission=emission)
    aggregation = Aggregation(by, tuple(aggregates.items()), shape.mode == "retract")
    once = emission.mode == "final" and emission.late_policy != "correct"
    untyped = (FinalWindowOperator if once else PaneWindowOperator)(
        name=shape.names.unique(name),
        window=window,
        aggregation=aggregation,
        emission=emission,
        lateness_us=shape.lateness_us,
    )
    kernel, columns = _typed(untyped, shape.columns)
    # The windows of a cumulating one share their start; of all others, start and end say the same.
    labels = WINDOW_COLUMNS if len(window.window_key) == 1 else WINDOW_COLUMNS[1:]
    shape_out = windowed_shape(
        shape,
        emission,
        columns,
        by,
        window.window_key,
        row_keys=tuple((label, *by) for label in labels),
        stable=() if aggregation.weighted else (*WINDOW_COLUMNS, *by),
        timed=labels,
    )
    return kernel, shape_out


def _typed(kernel: WindowOperator, columns: ColumnTypes) -> tuple[Any, ColumnTypes]:
    """Find the types of partials and results by running the aggregates on no rows."""
    aggregation, rows = typed_aggregation(kernel.name, kernel.aggregation, columns)
    kernel = replace(kernel, aggregation=aggregation)
    merged = aggregation.merge(aggregation.reduce(rows, WINDOW), WINDOW, *kernel.by)
    results = kernel.result_rows(merged)
    result_columns = {name: results.schema[name] for name in visible(results.columns)}
    if kernel.emission.panes:
        result_columns |= PANE_TYPES
    return kernel, result_columns
