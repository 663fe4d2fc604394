"""The function that Spark calls with each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.engine.batch_runner import BatchRunner
from millstream.kernels.frames import FrameRow
from millstream.spark.frame_blocks import FrameBlocks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class CommitSink(BatchRunner):
    """Spark calls it with every batch: it collects the rows, of which large frames may stay in ``blocks``.

    ``read_here`` returns the rows of a batch without Spark, if it is so small that this process reads it; else None.
    """

    blocks: FrameBlocks | None = None
    read_here: Callable[[int], Sequence[FrameRow] | None] = lambda _batch_id: None

    def __call__(self, frames: DataFrame, batch_id: int) -> None:
        self.run(batch_id, lambda: self._collect(frames, batch_id))

    def _collect(self, frames: DataFrame, batch_id: int) -> Sequence[FrameRow]:
        if self.blocks is not None:
            self.blocks.session = frames.sparkSession
        rows = self.read_here(batch_id)
        if rows is not None:
            return rows
        return collect(frames) if self.blocks is None else self.blocks.read(frames)


def collect(frames: DataFrame) -> Sequence[FrameRow]:
    """Collect the rows of a batch on the driver."""
    rows: list[Any] = frames.collect()
    return [FrameRow(row[0], row[1], bytes(row[2])) for row in rows]
