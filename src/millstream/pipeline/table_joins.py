"""What joins of two inputs have in common where they are declared: keys, names of columns, types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import polars as pl

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.joins.join_input import JoinedColumns, JoinInput, key_names
from millstream.kernels.joins.table_join import JoinKind, TableJoin
from millstream.kernels.steps import Filter
from millstream.pipeline.checks import columns_after
from millstream.pipeline.expressions import as_expression, names_given
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape

On = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class JoinKeys:
    """The columns that are compared: pairs of one of the left input and one of the right."""

    left: tuple[str, ...]
    right: tuple[str, ...]


def join_keys(on: On, left: StreamShape, right: StreamShape, what: str) -> JoinKeys:
    """Return the columns that ``on`` names, which have one type on both sides.

    Raises:
        ConfigError: a column is not there, cannot be a key, or has another type than the one that it is
            compared with.
    """
    pairs = dict(on) if isinstance(on, Mapping) else {n: n for n in names_given(on, f"{what}'s on")}
    if not pairs:
        raise ConfigError(
            f'{what} compares no columns. Name those that are to be equal: on="id", or '
            'on={"left_column": "right_column"}.'
        )
    keys = JoinKeys(
        left.key_columns(tuple(pairs), f"{what}'s on"),
        right.key_columns(tuple(pairs.values()), f"{what}'s on"),
    )
    for one, other in pairs.items():
        ours, theirs = left.columns[one], right.columns[other]
        if ours != theirs:
            raise ConfigError(
                f"{what} compares {one!r}, a {ours}, with {other!r}, a {theirs}. Cast one of them first: "
                f"with_columns(pl.col({other!r}).cast(pl.{ours}))."
            )
    return keys


def joined_columns(
    left: StreamShape,
    right: StreamShape,
    keys: JoinKeys,
    suffix: str,
    what: str,
    *,
    of_both: bool = True,
) -> JoinedColumns:
    """Return the columns of joined rows: those of the left, and those of the right that are no keys.

    A right column with the name of a left one gets the suffix.

    Raises:
        ConfigError: a name would be there twice all the same.
    """
    taken = set(left.columns)
    names: dict[str, str] = {}
    for name in right.columns:
        if name in keys.right:
            continue
        renamed = f"{name}{suffix}" if name in taken else name
        if renamed in taken or renamed in names.values():
            raise ConfigError(
                f"{what} would have two columns {renamed!r}. Rename one, or give another suffix=."
            )
        names[name] = renamed
    types = tuple(left.columns[name] for name in keys.left)
    return JoinedColumns(
        JoinInput(keys.left, types, tuple((n, n, dtype) for n, dtype in left.columns.items())),
        JoinInput(keys.right, types, tuple((n, names[n], right.columns[n]) for n in names)),
        tuple(zip(keys.left, key_names(len(keys.left)), strict=True)),
        of_both,
    )


def check_condition(condition: pl.Expr | None, columns: ColumnTypes, what: str) -> pl.Expr | None:
    """Make sure that a condition is true or false for each pair of rows."""
    if condition is None:
        return None
    expression = as_expression(condition, what=f"{what}'s where")
    columns_after(Filter(f"{what}'s where", (expression,)), columns)
    return expression


def build_table_join(
    left: StreamShape,
    right: StreamShape,
    on: On,
    *,
    how: JoinKind,
    where: pl.Expr | None,
    nulls_equal: bool,
    suffix: str,
    name: str | None,
) -> tuple[TableJoin, StreamShape]:
    """Build the operator of a join of two tables, and the shape of its rows."""
    choose("join's how", how, get_args(JoinKind))
    keys = join_keys(on, left, right, "join")
    of_both = how not in ("semi", "anti")
    columns = joined_columns(left, right, keys, suffix, "join", of_both=of_both)
    paired = {n: t for _, n, t in (*columns.left.columns, *columns.right.columns)}
    condition = check_condition(where, paired, "join")
    if not of_both and condition is None:
        columns = JoinedColumns(
            columns.left,
            JoinInput(columns.right.on, columns.right.key_types, ()),
            columns.key_columns,
            of_both,
        )
    said = ", ".join(keys.left)
    renamed = {n: new for n, new, _ in columns.right.columns}
    renamed |= dict(zip(keys.right, keys.left, strict=True))
    key, not_null = _primary_key(
        left, right, keys, renamed, how, conditional=condition is not None, nulls_equal=nulls_equal
    )
    step = left.names.unique(name or f"{how} join on {said}")
    append_only = left.append_only, right.append_only
    kernel = TableJoin(step, how, columns, nulls_equal, condition, append_only)
    shape = StreamShape(
        columns.types,
        mode="retract",
        window_key=(),
        primary_key=key,
        key_not_null=not_null,
        is_table=True,
        append_only=how == "inner" and all(append_only),
        names=left.names,
    )
    return kernel, shape


PrimaryKey = tuple[tuple[str, ...] | None, bool]
"""The columns that identify a row, and whether they are never null."""


def _primary_key(
    left: StreamShape,
    right: StreamShape,
    keys: JoinKeys,
    renamed: Mapping[str, str],
    how: JoinKind,
    *,
    conditional: bool,
    nulls_equal: bool,
) -> PrimaryKey:
    """Return the columns of the result that identify a row.

    A row has at most one partner where the partner's key is compared as a whole. Then the own key is enough,
    unless partners that have no row of ours are in the result, too.
    """
    if how in ("semi", "anti"):
        return left.primary_key, left.key_not_null
    if left.primary_key is None or right.primary_key is None:
        return None, False
    ours, theirs = left.primary_key, tuple(renamed[column] for column in right.primary_key)
    if set(right.primary_key) <= set(keys.right) and how in ("inner", "left"):
        return ours, left.key_not_null
    if set(left.primary_key) <= set(keys.left) and how in ("inner", "right"):
        return theirs, right.key_not_null
    both = tuple(dict.fromkeys((*ours, *theirs)))
    if how == "full" and not _sides_differ(
        left, right, keys, both, conditional=conditional, nulls_equal=nulls_equal
    ):
        return None, False
    return both, how == "inner" and left.key_not_null and right.key_not_null


def _sides_differ(
    left: StreamShape,
    right: StreamShape,
    keys: JoinKeys,
    both: tuple[str, ...],
    *,
    conditional: bool,
    nulls_equal: bool,
) -> bool:
    """Return whether a left row and a right row, each without a partner, differ in the columns of both keys.

    They do if one side has a key column that the other side's rows have as null. Else they do only if rows that
    agree in these columns are partners: all that is compared is among them, and not null, or null is equal
    to null.
    """
    of_left = set(left.primary_key or ()) - set(keys.left)
    of_right = set(right.primary_key or ()) - set(keys.right)
    if (of_left and left.key_not_null) or (of_right and right.key_not_null):
        return True
    never_null = (set(keys.left) <= set(left.primary_key or ()) and left.key_not_null) or (
        set(keys.right) <= set(right.primary_key or ()) and right.key_not_null
    )
    return not conditional and set(keys.left) <= set(both) and (nulls_equal or never_null)
