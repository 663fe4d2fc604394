"""Tables: rows that change, maintained as their inputs change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.aggregates.protocol import Aggregate
from millstream.kernels.errors.user_code import OnError
from millstream.kernels.joins.table_join import JoinKind
from millstream.kernels.steps import Step
from millstream.kernels.tables.row_order import Ties
from millstream.kernels.tables.set_operations import SetRule
from millstream.pipeline.collection import Collection
from millstream.pipeline.graph import GraphNode, OperatorNode, UnionNode
from millstream.pipeline.group_by import build_group_by, derived_table, group_columns
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StreamShape
from millstream.pipeline.table_joins import On, build_table_join
from millstream.pipeline.table_operators import (
    OrderBy,
    build_distinct,
    build_set_operation,
    build_top,
    check_same_columns,
)
from millstream.pipeline.versions import TableOrigin


@dataclass(frozen=True, repr=False)
class Table(Collection):
    """A table: rows with named, typed columns, most with a primary key. See its methods, the operators.

    A table changes as its topics do. What is derived from it changes with it: a view always has the rows that
    the same expression would give over all that was read so far.
    """

    origin: TableOrigin | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def primary_key(self) -> tuple[str, ...] | None:
        """The columns that identify a row; None where rows may be equal."""
        return self.shape.primary_key

    def _below(self, node: GraphNode, shape: StreamShape) -> Table:
        return replace(self, node=node, shape=shape, origin=None)

    def _with_step(
        self, step: Step, columns: ColumnTypes, on_error: OnError | None = None
    ) -> Table:
        made = super()._with_step(step, columns, on_error)
        if self.origin is None:
            return made
        origin = self.origin.after(made.node, self.primary_key, made.primary_key)
        return replace(made, origin=origin)

    def join(
        self,
        other: Table,
        on: On,
        *,
        how: JoinKind = "inner",
        where: pl.Expr | None = None,
        nulls_equal: bool = False,
        suffix: str = "_right",
        name: str | None = None,
    ) -> Table:
        """Join two tables by equal columns; the result is a table, and changes as they do.

        Args:
            other: A table of the same app; it may be this one.
            on: The columns that are equal: a name, several, or a mapping of names of this table to
                names of the other.
            how: ``"inner"``: pairs of rows. ``"left"``, ``"right"``, ``"full"``: also the rows of this
                table, the other, or both, that have no partner; the other side's columns are null.
                ``"semi"``, ``"anti"``: the rows of this table that have a partner, or none, once each.
            where: What else must be true of a pair, as an expression over the columns of the result
                (of a semi- or anti-join: of what a pair would have).
            nulls_equal: Null is equal to null. By default it is equal to nothing, as in SQL.
            suffix: What is added to the name of a column of the other table that this one has, too.
            name: The step's name.

        The result has the columns of this table, then those of the other but for its ``on``. Equal rows
        stay several rows. Its state holds the rows of both tables, as long as they are in them. So it grows with
        them, and only what takes their rows out bounds it: deletions, or a ``ttl`` where the table is made.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type.
        """
        if not isinstance(other, Table):
            raise ConfigError(
                f"join is given {other!r}. Give a table. To join a stream with a table, begin with the "
                "stream: stream.lookup(table, …)."
            )
        self.app.require_same(other.app, "join takes tables")
        kernel, shape = build_table_join(
            self.shape,
            other.shape,
            on,
            how=how,
            where=where,
            nulls_equal=nulls_equal,
            suffix=suffix,
            name=name,
        )
        return Table(self.app, OperatorNode((self.node, other.node), kernel), shape)

    # ── groups ──────────────────────────────────────────────────────────────────────────────

    def group_by(self, *columns: str, name: str | None = None) -> Grouped:
        """Divide the rows by the values of columns: ``table.group_by("city").agg(n=ms.count())``.

        See :meth:`Grouped.agg`. Null is a value like any other.
        """
        return Grouped(self, group_columns(self.shape, columns), name)

    def top(
        self,
        n: int,
        by: OrderBy,
        *,
        per: str | Sequence[str] = (),
        ties: Ties = "row_number",
        rank: str | None = None,
        name: str | None = None,
    ) -> Table:
        """Keep the rows whose rank is at most ``n``, in all or in each group of ``per``.

        ::

            newest = timeline.top(10, by="posted_at", per="user", rank="place")

        Args:
            n: The greatest rank to keep.
            by: What orders rows: a column, the greatest value first, or several, each alone or with its
                direction: ``[("price", "desc"), ("id", "asc")]``. What is not a number is behind
                all numbers, and null behind that, in both directions.
            per: The columns that make groups; by default all rows are one.
            ties: Rows that are equal in ``by``: with ``"row_number"`` the table's primary key decides (or all
                columns, if it has none), so a group has ``n`` rows at most. ``"rank"`` gives
                them the same rank and leaves out the next ones; ``"dense_rank"`` leaves none out.
            rank: The name of a column with the rank, from 1; by default there is none.
            name: The step's name.

        A row that stays, and keeps its rank if that is shown, is not emitted again. Its state holds all
        rows of the table, and a batch reads the groups that it touches.

        Raises:
            ConfigError: a column is not there, or has a type that has no order.
        """
        kernel, shape = build_top(self.shape, n, by=by, per=per, ties=ties, rank=rank, name=name)
        return Table(self.app, OperatorNode((self.node,), kernel), shape)

    # ── set operations ──────────────────────────────────────────────────────────────────────

    def distinct(self, *columns: str, name: str | None = None) -> Table:
        """Keep each row once: of the given columns, or of all if none is given.

        They are the key of the result. As in all set operations here, null is equal to null. A row has the
        least event time of the rows that are equal to it.
        """
        kernel, shape = build_distinct(self.shape, columns, name)
        return Table(self.app, OperatorNode((self.node,), kernel), shape)

    def union(self, *others: Table, all: bool = False, name: str | None = None) -> Table:  # noqa: A002 - SQL's word
        """Put tables with the same columns together; the order of columns is free.

        Args:
            others: Tables of the same app.
            all: Keep equal rows as several rows, as SQL's ``UNION ALL``: rows pass as they are, and no state is
                kept. By default each is one row, and all columns are the key.
            name: The step's name.

        Raises:
            ConfigError: there is no other table, or one differs in its columns or their types.
        """
        if not others:
            raise ConfigError("union has one table. Give the others: a.union(b, c).")
        tables = (self, *(self._checked(other, "union") for other in others))
        if not all:
            return self._set_operation(tables, "union", bag=False, name=name)
        check_same_columns([table.shape for table in tables], "union")
        nodes = tuple(table.node for table in tables)
        if len(set(nodes)) < len(nodes):
            raise ConfigError(
                "union(all=True) has the same table twice. Give each once, or make one a table of its own: "
                "table.filter(pl.lit(True))."
            )
        return Table(
            self.app, UnionNode(nodes), derived_table(self.shape, self.shape.columns, None)
        )

    def except_(self, other: Table, *, all: bool = False, name: str | None = None) -> Table:  # noqa: A002 - SQL's word
        """Keep the rows that the other table does not have, compared by all columns.

        Args:
            other: A table of the same app, with the same columns and types.
            all: Of rows that are here a times and there b times keep ``max(a - b, 0)``, as SQL's ``EXCEPT
                ALL``. By default a row is there once if the other table does not have it.
            name: The step's name.

        A row has the least event time of the rows of this table that are equal to it.

        Raises:
            ConfigError: the tables differ in their columns or their types.
        """
        tables = (self, self._checked(other, "except_"))
        return self._set_operation(tables, "except", bag=all, name=name)

    def intersect(self, other: Table, *, all: bool = False, name: str | None = None) -> Table:  # noqa: A002 - SQL's word
        """Keep the rows that both tables have, compared by all columns.

        Args:
            other: A table of the same app, with the same columns and types.
            all: Of rows that are here a times and there b times keep ``min(a, b)``, as SQL's ``INTERSECT ALL``.
                By default a row is there once.
            name: The step's name.

        A row has the least event time of the rows of this table that are equal to it.

        Raises:
            ConfigError: the tables differ in their columns or their types.
        """
        tables = (self, self._checked(other, "intersect"))
        return self._set_operation(tables, "intersect", bag=all, name=name)

    def _set_operation(
        self, tables: Sequence[Table], rule: SetRule, *, bag: bool, name: str | None
    ) -> Table:
        shapes = [table.shape for table in tables]
        kernel, shape = build_set_operation(shapes, rule, bag=bag, name=name)
        nodes = tuple(table.node for table in tables)
        return Table(self.app, OperatorNode(nodes, kernel), shape)

    def _checked(self, other: object, what: str) -> Table:
        """Return another table of the app."""
        if not isinstance(other, Table):
            raise ConfigError(
                f"{what} is given {other!r}. Give a table; of a stream make one: stream.table(key=…)."
            )
        self.app.require_same(other.app, f"{what} takes tables")
        return other


@dataclass(frozen=True, repr=False)
class Grouped:
    """Rows divided by the values of columns; say with :meth:`agg` what is computed of each group."""

    rows: Collection
    columns: tuple[str, ...]
    name: str | None = None

    def agg(self, **aggregates: Aggregate) -> Table:
        """Aggregate each group: ``agg(n=ms.count(), paid=ms.sum("price"))``.

        The result is a table with the columns of the groups, which are its primary key, and the aggregates. It has
        a row for each group that has rows: when the last one goes, the group's row goes. No row is
        late. A row's event time is the greatest of its group's rows.

        Its state has a row for each group. If rows can be taken back it also has their times, and some
        aggregates keep the values of a group: ``min``, ``max``, ``distinct``, ``quantile``, ``list``.

        Raises:
            ConfigError: an aggregate does not fit the column, or cannot take rows back.
        """
        kernel, shape = build_group_by(self.rows.shape, self.columns, aggregates, self.name)
        return Table(self.rows.app, OperatorNode((self.rows.node,), kernel), shape)
