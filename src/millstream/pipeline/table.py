"""Tables: rows that change, maintained as their inputs change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import OnError
from millstream.kernels.joins.table_join import JoinKind
from millstream.kernels.steps import Step
from millstream.pipeline.collection import Collection
from millstream.pipeline.graph import OperatorNode
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.table_joins import On, build_table_join
from millstream.pipeline.versions import TableOrigin


@dataclass(frozen=True)
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

    def _with_step(
        self, step: Step, columns: ColumnTypes, on_error: OnError | None = None
    ) -> Table:
        made = super()._with_step(step, columns, on_error)
        if self.origin is None or made.primary_key is None:
            return replace(made, origin=None)
        return replace(made, origin=self.origin.after(made.node, self.primary_key))

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
        stay several rows. Its state holds the rows of both tables, as long as they are in them.

        Raises:
            ConfigError: a column is not there, or two that are compared differ in type.
        """
        if not isinstance(other, Table):
            raise ConfigError(
                f"join is given {other!r}. Give a table. To join a stream with a table, begin with the "
                "stream: stream.lookup(table, …)."
            )
        if other.app is not self.app:
            apps = f"{self.app.name!r} and {other.app.name!r}"
            raise ConfigError(f"join takes tables of one app; these are of {apps}.")
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
