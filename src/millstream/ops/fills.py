"""What a deployment fills instead of reading the log for it: views of other views, views of tables, and steps behind tables.

All of it is of one position, that of the state store as it is, so it is made when the app is stopped, while the program is switched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl

from millstream.engine.table_run import TableRun
from millstream.kernels.adopted_state import StatePart
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.table_feed import Manifests, TableFeed
from millstream.kernels.table_inputs import part_below_tables
from millstream.object_store.place import StatePlace
from millstream.ops.previous_version import put_runs
from millstream.views.commit.committer import view_schemas
from millstream.views.coverage import STATE_STORE_VIEW, initial_coverage
from millstream.views.schema import JOB, ViewSchema
from millstream.views.state_store.part_change import ProgramChange
from millstream.views.state_store.program_switch import FilledView
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

FILLED_FOLDER = "filled"
_ROWS_PER_BATCH = 200_000


@dataclass(frozen=True)
class StepFills:
    """The steps that an edit fills of tables, and the views below them.

    ``plan`` is that of the new program, ``change`` what it changes, and ``folder`` where it may compute.
    """

    app: str
    plan: JobPlan
    change: ProgramChange
    log: Path | str
    folder: Path
    partitioning: Mapping[str, int]

    @property
    def views(self) -> frozenset[str]:
        """The views that are filled."""
        return self.change.step_filled_views

    @cached_property
    def tables(self) -> list[TableFeed]:
        """The tables of whose state they are filled."""
        return held_tables(self._part, self.change)

    @cached_property
    def _part(self) -> JobPlan:
        fills = self.change.step_fills
        tables = {table for fill in fills.values() for table in fill.tables}
        steps = {*fills, *(step for fill in fills.values() for step in fill.between)}
        return part_below_tables(self.plan, tables, steps, self.views)

    def compute(self, manifests: Manifests, runs: RunStore) -> None:
        """Compute them of the manifests of the app's state, and the runs that these name."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of another position
        if not self.change.step_fills:
            return
        self.folder.mkdir(parents=True)
        run = TableRun(self._part, self.tables, self.log, self.folder, self._store, _ROWS_PER_BATCH)
        run.run(manifests, runs, partitioning=self.partitioning)

    def state(self, target: Path | StatePlace, run: int) -> StatePart:
        """Put the runs of state that were computed where those of the app are; return the state."""
        if not self.change.step_fills:
            return StatePart({}, {})
        with open_state_store(self._store, readonly=True) as store:
            computed = store.state_manifests(self.app, JOB)
        moved = put_runs(self.folder / "runs", computed, target, run)
        return StatePart(computed, {key: key for key in self.change.step_fills}, moved)

    def rows(self, view: str) -> pl.DataFrame:
        """Return the rows of a view that was computed."""
        with open_state_store(self._store, readonly=True) as store:
            return store.scan(view)

    def filled(self) -> Iterator[FilledView]:
        """Yield the views with all their rows, which are whole, as the tables are."""
        schemas: dict[str, ViewSchema] = {one.name: one for one in view_schemas(self.plan)}
        coverage = initial_coverage(self.plan)
        for view in sorted(self.views):
            yield FilledView(schemas[view], self.rows(view), coverage[view, STATE_STORE_VIEW])

    @property
    def _store(self) -> Path:
        return self.folder / STATE_STORE_FILE


def held_tables(plan: JobPlan, change: ProgramChange) -> list[TableFeed]:
    """Return the tables of whose state steps are filled, as they stand in a plan."""
    tables = {table for fill in change.step_fills.values() for table in fill.tables}
    return [
        TableFeed(operator, change.kept[operator.key])
        for stage in plan.stages
        for operator in stage.operators
        if operator.key in tables
    ]
