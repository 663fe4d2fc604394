"""Joins of a stream with what a table was: as of the time of each row, and when each row arrived."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import get_args

from millstream.choices import choose
from millstream.durations import Duration
from millstream.errors import ConfigError
from millstream.kernels.joins.asof_join import AsofJoin, AsofKind, LateVersions
from millstream.kernels.joins.asof_match import Direction
from millstream.kernels.joins.join_input import JoinedColumns
from millstream.kernels.joins.lookup import Lookup
from millstream.kernels.joins.signed_lookup import SignedLookup
from millstream.kernels.static_lookup import StaticLookup
from millstream.kernels.tables.static_rows import StaticRows
from millstream.pipeline.checks import span_us
from millstream.pipeline.final_rows import may_change, timed_changes, when_final
from millstream.pipeline.graph import GraphNode, OperatorNode
from millstream.pipeline.shape import StreamShape, check_events, late_columns_of
from millstream.pipeline.table_joins import On, join_keys, joined_columns
from millstream.pipeline.versions import TableOrigin

_LATE: tuple[LateVersions, ...] = get_args(LateVersions)


@dataclass(frozen=True)
class RightInput:
    """The right input of a join: a stream, or a table with its origin, if that is known."""

    node: GraphNode
    shape: StreamShape
    origin: TableOrigin | None = None


@dataclass(frozen=True)
class AsofOptions:
    """How an as-of join matches, as the caller said it: see :meth:`millstream.Stream.join_asof`."""

    how: AsofKind
    direction: Direction
    tolerance: Duration | None
    allow_equal: bool
    nulls_equal: bool
    late: LateVersions | None
    lateness: Duration | None


def build_asof_join(
    left_node: GraphNode,
    left: StreamShape,
    right: RightInput,
    on: On,
    options: AsofOptions,
    *,
    suffix: str,
    name: str | None,
) -> tuple[OperatorNode, StreamShape]:
    """Build the operator with its inputs, and the shape of its rows.

    Rows that may be taken back are joined when they are final: the join waits for the same watermark.
    """
    what = "join_asof"
    check_events(left, what)
    keys = join_keys(on, left, right.shape, what)
    left_node, left = when_final(left_node, left, keys.left, what)
    right = _final_right(right, options, keys.right)
    choose(f"{what}'s how", options.how, get_args(AsofKind))
    choose(f"{what}'s direction", options.direction, get_args(Direction))
    tolerance_us = _tolerance_us(options)
    node, lateness_us = right.node, right.shape.lateness_us
    late, corrected_us = _late_versions(options, is_table=right.shape.is_table)
    columns = _columns(left, right, on, suffix, what)
    if right.shape.is_table:
        node, lateness_us = _versions(left, right, columns, options)
        tolerance_us = _within_ttl(tolerance_us, right.origin)
    elif right.shape.late_policy == "side":
        raise ConfigError(
            'join_asof\'s right input is read with late="side", and only late rows of the left one are in a side '
            'output. Read it with late="drop": those that are late are counted; or say late="keep" or '
            '"correct" of the join, which use them.'
        )
    late_columns = late_columns_of(left, what)
    said = ", ".join(columns.left.on)
    kernel = AsofJoin(
        left.names.unique(name or f"as-of join on {said}"),
        options.how,
        columns,
        options.direction,
        tolerance_us,
        options.allow_equal,
        options.nulls_equal and not right.shape.is_table,  # the key of a table is never null
        (left.lateness_us, lateness_us),
        late_columns is not None,
        late,
        corrected_us,
    )
    shape = replace(
        left,
        columns=columns.types,
        lateness_us=0,
        late_policy="drop",
        late_columns=late_columns,
    )
    if late == "correct":
        shape = _corrected(shape, left, options.how)
    return OperatorNode((left_node, node), kernel), shape


def _final_right(right: RightInput, options: AsofOptions, by: tuple[str, ...]) -> RightInput:
    """Return the right input, of which rows that may be taken back come when they are final."""
    if right.shape.is_table:  # its versions are asked for, and not how it changes
        return right
    what = "join_asof's right input"
    check_events(right.shape, what)
    node, shape = when_final(right.node, right.shape, by, what)
    if node is not right.node and options.late not in (None, "drop"):
        raise ConfigError(
            f'join_asof has late="{options.late}", and rows of its right input may be taken back. Which of them '
            "hold is decided when the watermark has passed them, and later changes are left out: leave late "
            "out; or wait for them, with a lateness where the stream is read."
        )
    return RightInput(node, shape)


def _late_versions(options: AsofOptions, *, is_table: bool) -> tuple[LateVersions, int]:
    """Return what becomes of late versions, and for how long they correct rows that came out."""
    late = choose("join_asof's late", options.late or ("keep" if is_table else "drop"), _LATE)
    if options.late not in (None, "drop") and options.direction != "backward":
        raise ConfigError(
            f'join_asof has late="{late}" and direction="{options.direction}". Late rows count only for '
            'direction="backward": leave late out.'
        )
    if late != "correct":
        if options.lateness is not None:
            raise ConfigError(
                f'join_asof has a lateness and late="{late}". It says how long results are corrected: '
                'late="correct". How long a row may be late is said where its stream is read.'
            )
        return late, 0
    corrected_us = (
        0 if options.lateness is None else span_us(options.lateness, "join_asof's lateness")
    )
    if not corrected_us:
        raise ConfigError(
            'join_asof has late="correct" and no lateness, so nothing would be corrected. Say how long '
            'corrections go on: lateness="1 day".'
        )
    return late, corrected_us


def _corrected(shape: StreamShape, left: StreamShape, how: AsofKind) -> StreamShape:
    """Return the shape of rows that are taken back and put right: of a left join, those of one left row."""
    return replace(
        shape,
        mode="retract",
        window_key=() if left.mode is None else left.window_key,
        stable=tuple(left.columns) if how == "left" else (),
    )


def build_lookup(
    left: StreamShape,
    right: RightInput,
    on: On,
    *,
    how: AsofKind,
    nulls_equal: bool,
    suffix: str,
    name: str | None,
) -> tuple[Lookup, GraphNode, StreamShape]:
    """Build the operator, the node of its right input, and the shape of its rows."""
    what = "lookup"
    check_events(left, what)
    signed = may_change(left)
    if signed:
        left = timed_changes(left, what)
    choose(f"{what}'s how", how, get_args(AsofKind))
    columns = _columns(left, right, on, suffix, what)
    # Where rows expire, the changes of the table say when; its versions do not.
    origin = None if right.origin is None or right.origin.ttl_us is not None else right.origin
    _check_key(right.shape, columns, what, whole=origin is not None)
    node = right.node if origin is None else origin.versions(left.names)
    said = ", ".join(columns.left.on)
    kernel = Lookup(
        left.names.unique(name or f"look-up by {said}"),
        how,
        columns,
        signed=origin is None,
        by_offset=origin is not None and origin.by_offset,
        nulls_equal=nulls_equal and origin is None,  # else its key is never null
    )
    shape = replace(left, columns=columns.types, late_columns=None)
    if signed:
        of_kernel = {f.name: getattr(kernel, f.name) for f in fields(kernel)}
        kernel = SignedLookup(**of_kernel, lateness_us=left.lateness_us)
        shape = replace(shape, stable=(), takes_back=True)
    return kernel, node, shape


def static_lookup(kernel: Lookup, table: StaticRows) -> StaticLookup:
    """Return the step that does without state what a look-up does with a table of given rows."""
    return StaticLookup(kernel.name, kernel.how, kernel.columns, kernel.nulls_equal, table)


def _tolerance_us(options: AsofOptions) -> int | None:
    if options.tolerance is not None:
        return span_us(options.tolerance, "join_asof's tolerance")
    if options.direction != "backward":
        raise ConfigError(
            f'join_asof has direction="{options.direction}" and no tolerance, so a row would wait for a '
            'later one without end. Say how far away a match may be: tolerance="1 minute".'
        )
    return None


def _within_ttl(tolerance_us: int | None, origin: TableOrigin | None) -> int | None:
    """Return how far a version may be before a row: no farther than it is kept in its table."""
    ttl_us = None if origin is None else origin.ttl_us
    return min((us for us in (tolerance_us, ttl_us) if us is not None), default=None)


def _columns(left: StreamShape, right: RightInput, on: On, suffix: str, what: str) -> JoinedColumns:
    keys = join_keys(on, left, right.shape, what)
    return joined_columns(left, right.shape, keys, suffix, what)


def _versions(
    left: StreamShape, right: RightInput, columns: JoinedColumns, options: AsofOptions
) -> tuple[GraphNode, int]:
    """Return the node of the table's versions, and the lateness that they are allowed."""
    if options.direction != "backward":
        raise ConfigError(
            f'join_asof has direction="{options.direction}" and a table. A table has a row for each time, '
            'the one that is valid then: say direction="backward", or join a stream.'
        )
    if right.origin is None:
        raise ConfigError(
            "join_asof is given a table whose versions are not known: it is derived from others, changes by whole "
            "transactions, or a step left its key out or made other rows. Join the table that is made of the topic "
            "or stream, and do the rest after the join; or look up the latest row: lookup(…)."
        )
    _check_key(right.shape, columns, "join_asof", whole=True)
    return right.origin.versions(left.names), right.origin.lateness_us


def _check_key(shape: StreamShape, columns: JoinedColumns, what: str, *, whole: bool) -> None:
    """Make sure that at most one row of the table matches; ``whole``: and that the key is all of ``on``."""
    primary, on = shape.primary_key, columns.right.on
    if primary is None:
        raise ConfigError(
            f"{what} is given a table whose rows may be equal: a step left its key out, or made it anew. Keep "
            "the key in the table."
        )
    missing = [name for name in primary if name not in on]
    if missing:
        raise ConfigError(
            f"{what} compares {', '.join(on)}, and the table's rows are identified by {', '.join(primary)}: "
            f"several may match. Compare {', '.join(missing)}, too, or make a table with the key that you "
            "compare."
        )
    others = [name for name in on if name not in primary]
    if others and whole:
        raise ConfigError(
            f"{what} compares {', '.join(others)} besides the table's key, {', '.join(primary)}. Compare the "
            "key alone, and the rest after the join: filter(…)."
        )
