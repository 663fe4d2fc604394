"""Where a table comes from: its versions, for what needs them instead of the changes of the table.

A table comes as signed changes: the row that was, and the row that is. A join as of a time needs all versions of
a row, in any order. So a table made directly of a stream remembers the stream, and the steps since; the path of
its versions is built when a join asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.steps import Drop, Filter, Rename, Select, Step, WithColumns
from millstream.kernels.tables.version_steps import ApplyToVersions, FilterVersions, MarkDeletions
from millstream.pipeline.graph import GraphNode, StepNode
from millstream.pipeline.schema import ColumnTypes
from millstream.pipeline.shape import StepNames

KeyNames = tuple[tuple[str, str], ...]
"""The columns of a key: the name of each before a step, and after it."""

_ONE_TO_ONE = (Filter, WithColumns, Select, Rename, Drop)


@dataclass(frozen=True)
class TableOrigin:
    """The stream that a table is made of, and the steps since.

    ``node`` gives the rows, ``columns`` are theirs. ``deleted`` is true of a row that deletes its key.
    ``code`` says what rows lead to on which that fails. ``by_offset``: of two rows of a key that counts which is later in the log. ``lateness_us`` is the stream's.
    ``ttl_us`` says for how long after its time a version is valid at most. ``steps`` are the table's steps, each with the columns of the
    key: before it, and after it.
    """

    node: GraphNode
    columns: ColumnTypes
    deleted: pl.Expr | None
    by_offset: bool
    lateness_us: int
    code: UserCode
    ttl_us: int | None = None
    steps: tuple[tuple[StepNode, KeyNames], ...] = ()

    def after(
        self, node: GraphNode, key: tuple[str, ...] | None, key_after: tuple[str, ...] | None
    ) -> TableOrigin | None:
        """Return the origin of the table behind a step; None where its versions are not known.

        ``key`` is the key of the rows before the step, and ``key_after`` the same columns behind it.
        """
        if key is None or key_after is None:
            return None
        if not isinstance(node, StepNode) or not isinstance(node.step, _ONE_TO_ONE):
            return None
        names = tuple(zip(key, key_after, strict=True))
        return replace(self, steps=(*self.steps, (node, names)))

    def versions(self, names: StepNames) -> GraphNode:
        """Build the path of the table's versions: rows, of which ``__deleted`` ones are deletions."""
        node = self.node
        if self.deleted is not None:
            step = MarkDeletions(names.unique("deletions of versions"), self.deleted)
            columns = tuple(self.columns.items())
            node = StepNode(node, step, columns, replace(self.code, step=step.name))
        for declared, key in self.steps:
            name = names.unique(f"{declared.step.name} of versions")
            made = _of_versions(declared.step, name, key)
            code = replace(declared.code, step=name)
            node = StepNode(node, made, declared.schema_out, code)
        return node


def _of_versions(step: Step, name: str, key: KeyNames) -> Step:
    if isinstance(step, Filter):
        return FilterVersions(name, step.conditions)
    if isinstance(step, (Rename, Drop)):
        return replace(step, name=name)
    assert isinstance(step, (WithColumns, Select))
    return ApplyToVersions(name, replace(step, name=""), key)
