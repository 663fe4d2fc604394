"""Runs a part of a plan over the rows of tables that are held, in this process: for steps that are filled of a table's state.

Each batch is given some rows of the tables, all as additions, so steps and views come to what they would have come to by all that
the tables have given out. What is made is in a store and a folder of its own. It is of one position, that of the manifests, so it is made anew
each time: a folder that an interrupted run has left is to be removed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.engine.frame_files import FrameFiles
from millstream.engine.stages.executor import StageExecutor
from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.table_feed import Manifests, TableFeed
from millstream.views.commit.committer import BatchCommitter, collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.schema import JOB
from millstream.views.store_location import StoreLocation

_CHECKPOINT_ID = "table-run"  # there is no checkpoint that could be another one


@dataclass(frozen=True)
class TableRun:
    """Runs ``plan``, which has no source, over the rows of ``tables``. ``folder`` has its runs of state, ``store`` all else."""

    plan: JobPlan
    tables: Sequence[TableFeed]
    log: Path | str
    folder: Path
    store: StoreLocation
    rows_per_batch: int

    def run(self, manifests: Manifests, runs: RunStore, *, partitioning: Mapping[str, int]) -> None:
        """Run batches until all rows that the ``manifests`` and ``runs`` of the tables have are processed.

        Raises:
            UserCodeError: failing rows are to stop the app.
            CorruptionError: a run of state is missing, or damaged.
        """
        with open_committer(self.plan, self.store, self.log) as committer:
            committer.begin_run(JOB, _CHECKPOINT_ID, partitioning=partitioning)
            stages = self._stages(committer)
            for batch_id, rows in enumerate(self._batches(manifests, runs)):
                given, state = stages.run(batch_id, rows)
                committer.commit(batch_id, collect_results(self.plan, given), {}, state)
                stages.on_commit()
            stages.close()

    def _batches(self, manifests: Manifests, runs: RunStore) -> Iterator[list[FrameRow]]:
        """Yield what each batch is given: the first the time besides, so that steps have it also if a table is empty."""
        batch = [row for table in self.tables for row in table.times(manifests)]
        count = 0
        for table in self.tables:
            parts = table.rows(manifests, runs, self.plan.buckets, self.rows_per_batch)
            for rows, frames in parts:
                batch += frames
                count += rows
                if count >= self.rows_per_batch:
                    yield batch
                    batch, count = [], 0
        if batch:
            yield batch

    def _stages(self, committer: BatchCommitter) -> StageExecutor:
        return StageExecutor(
            self.plan,
            self.folder / "runs",
            committer.run,
            FrameFiles(None),
            partitions=1,
            tasks=None,
            manifests={},
        )
