"""Joins of two streams within an interval of time, with their checks."""

from __future__ import annotations

from typing import get_args

from millstream.choices import choose
from millstream.durations import Duration, format_us, to_signed_us
from millstream.errors import ConfigError
from millstream.kernels.joins.interval_join import IntervalJoin, IntervalJoinKind, UnmatchedEmit
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.joins.signed_interval_join import SignedIntervalJoin
from millstream.pipeline.checks import SPAN_US_MAX
from millstream.pipeline.shape import EqualRows, StreamShape
from millstream.pipeline.table_joins import JoinKeys, On, join_keys, joined_columns

Within = tuple[Duration, Duration]

_WITHIN = (
    "Give the earliest and the latest time of the other stream's row, seen from this one's: "
    'within=("0 seconds", "30 minutes") is from the same time to 30 minutes later, '
    'within=("-5 minutes", "5 minutes") is 5 minutes to both sides.'
)


def build_interval_join(
    left: StreamShape,
    right: StreamShape,
    on: On,
    *,
    within: Within,
    how: IntervalJoinKind,
    emit: UnmatchedEmit,
    nulls_equal: bool,
    suffix: str,
    name: str | None,
) -> tuple[IntervalJoin, StreamShape]:
    """Build the operator of a join of two streams, and the shape of its rows."""
    choose("join's how", how, get_args(IntervalJoinKind))
    choose("join's emit", emit, get_args(UnmatchedEmit))
    if how == "inner" and emit == "eager":
        raise ConfigError(
            'join has how="inner" and emit="eager". An inner join emits each pair as soon as both rows are '
            'there, and no others: leave emit out, or choose how="left", "right" or "full".'
        )
    for which, shape in (("stream", left), ("other stream", right)):
        _check_input(which, shape)
    left, right = left.as_changes(), right.as_changes()
    signed = "retract" in (left.mode, right.mode)
    lower_us, upper_us = _bounds(within)
    keys = join_keys(on, left, right, "join")
    columns = joined_columns(left, right, keys, suffix, "join")
    operator = SignedIntervalJoin if signed else IntervalJoin
    kernel = operator(
        name=left.names.unique(name or f"{how} join on {', '.join(keys.left)}"),
        how=how,
        columns=columns,
        lower_us=lower_us,
        upper_us=upper_us,
        left_lateness_us=left.lateness_us,
        right_lateness_us=right.lateness_us,
        emit=emit,
        nulls_equal=nulls_equal,
    )
    shape = StreamShape(
        columns.types,
        key=_key(left, keys),
        mode="retract" if signed or emit == "eager" else None,
        window_key=(),
        row_keys=_row_keys(left, right, keys, columns) if signed else (),
        equal_rows=_equal_rows(left, right),
        stable=_stable(columns, how) if emit == "eager" and not signed else (),
        takes_back=signed,
        names=left.names,
    )
    return kernel, shape


def _stable(columns: JoinedColumns, how: IntervalJoinKind) -> tuple[str, ...]:
    """Return the columns that a row without a partner and the pair that replaces it have in common."""
    sides = {"left": (columns.left,), "right": (columns.right,)}.get(how, ())
    return tuple(name for side in sides for name in side.names)


def _equal_rows(left: StreamShape, right: StreamShape) -> EqualRows | None:
    """Return how pairs may be equal: as the rows of either side may."""
    both = {left.equal_rows, right.equal_rows}
    return "apart" if "apart" in both else "together" if "together" in both else None


def _row_keys(
    left: StreamShape, right: StreamShape, keys: JoinKeys, columns: JoinedColumns
) -> tuple[tuple[str, ...], ...]:
    """Return the columns that identify a joined row: what identifies its left row and its right row."""
    if not left.row_keys or not right.row_keys:
        return ()
    names = {name: renamed for name, renamed, _ in columns.right.columns}
    names |= dict(zip(keys.right, keys.left, strict=True))
    of_right = (names[column] for column in right.row_keys[0])
    return (tuple(dict.fromkeys((*left.row_keys[0], *of_right))),)


def _key(left: StreamShape, keys: JoinKeys) -> tuple[str, ...]:
    """Return the key of the joined rows: the left one's, where every row has it."""
    return left.key if left.mode is None and set(left.key) <= set(keys.left) else ()


def _check_input(which: str, shape: StreamShape) -> None:
    """Make sure that a stream only ever gets more rows, and that its late rows are left out."""
    if shape.is_late:
        raise ConfigError(
            f"join's {which} are late rows, whose time has passed: no watermark says until when a partner may "
            "come. View them, or send them to a topic."
        )
    if shape.mode == "discard":
        raise ConfigError(
            f'join\'s {which} comes after emit("discard"), whose rows are parts that add up: a part of one window would '
            'be paired with each part of the other. Emit "final", "update" or "retract" there.'
        )
    if shape.no_windows:
        raise ConfigError(f"join's {which} comes after {shape.no_windows}")
    if shape.late_policy != "drop":
        raise ConfigError(
            f'join\'s {which} is read with late="{shape.late_policy}", and a join has no side output and corrects '
            'nothing. Read what is joined with late="drop": topic.stream(…, late="drop"); its late rows are '
            "counted in the ledger, and the topic may be read a second time for other steps."
        )


def _bounds(within: Within) -> tuple[int, int]:
    """Return the interval in microseconds.

    Raises:
        ConfigError: it is not two durations, or the first one is later.
    """
    if not isinstance(within, (tuple, list)) or len(within) != 2:
        raise ConfigError(f"join's within is {within!r}. {_WITHIN}")
    lower_us, upper_us = (to_signed_us(bound, what="join's within") for bound in within)
    if lower_us > upper_us:
        raise ConfigError(
            f"join's within is from {format_us(lower_us)} to {format_us(upper_us)}, which is no time at all. "
            f"{_WITHIN}"
        )
    if max(-lower_us, upper_us) > SPAN_US_MAX:
        raise ConfigError(
            f"join's within is from {format_us(lower_us)} to {format_us(upper_us)}. Give at most 36,525 days, to "
            "both sides; to join with everything, make one of the streams a table."
        )
    return lower_us, upper_us
