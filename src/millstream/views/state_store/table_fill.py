"""Views of a table that are filled from the table's own state, so that the log is not read for them.

The state of a table with a key is what it has given out: the latest row of each key, of a captured table the database's, of groups their
aggregates. So a view below filters and expressions over it is what they make of that state, at its position, as if it had been
written from the beginning. The state does not say whether it was computed of all records; a view with rows of the table that has been
whole since the beginning does.

Of other steps the state is not what they have given out: a window has partials of which some were not, a join its inputs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import polars as pl

from millstream.kernels.frames import visible
from millstream.kernels.given_out import HeldTable
from millstream.kernels.plan import StepEdge
from millstream.kernels.row_keys import row_key_after
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import RunStore
from millstream.views.coverage import OutputCoverage, is_complete
from millstream.views.schema import ViewSchema
from millstream.views.state_store.program_paths import ProgramPaths
from millstream.views.state_store.program_switch import FilledView
from millstream.views.state_store.view_fill import RowKey, ViewPath, rows_after

_ROWS_MAX = 200_000  # of a table's state that are looked at at once


@dataclass(frozen=True)
class TableFill:
    """A view that is filled from the state of a ``table``, through the stateless steps ``edges``.

    ``step`` is the key of the table in the program, and ``stored`` the key under which its state is.
    """

    schema: ViewSchema
    definition: str
    step: str
    stored: str
    table: HeldTable
    edges: tuple[StepEdge, ...]

    def rows(self, manifests: Mapping[tuple[int, int], bytes], runs: RunStore) -> pl.DataFrame:
        """Return all rows of the view, of the manifests of the app's state and what they name.

        Raises:
            UserCodeError: failing rows are to stop the app, or too many fail.
            CorruptionError: a run of state is missing, or damaged.
        """
        messages = (json.loads(one).get(self.stored) for one in manifests.values())
        states = (OperatorState.from_message(one, runs) for one in messages if one is not None)
        parts = (part for state in states for part in self.table.given_out(state, _ROWS_MAX))
        made = [rows_after(self.edges, part[visible(part.columns)], self.schema) for part in parts]
        return pl.concat(made) if made else pl.DataFrame(schema=self.schema.dtypes)

    def filled(self, manifests: Mapping[tuple[int, int], bytes], runs: RunStore) -> FilledView:
        """Return the view with all its rows, which is whole. No run may commit meanwhile."""
        return FilledView(self.schema, self.rows(manifests, runs), OutputCoverage(self.definition))


def find_table_fill(
    schema: ViewSchema, definition: str, path: ViewPath, stored: str
) -> TableFill | None:
    """Return how a view is filled from the table above it; None if its rows do not stand for rows of the table."""
    if path.table is None or not path.table.row_key:
        return None
    key: RowKey | None = path.table.row_key
    for edge in path.edges:
        key = row_key_after(edge.step, key)
    if key is None or {*key} not in [{*one} for one in path.row_keys]:
        return None
    return TableFill(schema, definition, path.step, stored, path.table, path.edges)


def whole_steps(paths: ProgramPaths, outputs: Iterable[OutputCoverage]) -> Collection[str]:
    """Return the steps that were computed of all records, as a view with rows of them says that is whole."""
    whole = (json.loads(one.definition) for one in outputs if is_complete(one.spans))
    return {key for definition in whole for key in paths.steps_of(definition)}
