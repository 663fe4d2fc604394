"""Rows of an output that tasks have written where its sink is, for the driver to commit.

On a cluster, a large output does not go through the driver. Tasks *stage* its rows: they write them where
the sink is, under a name that their attempt has made up, and tell the driver this name. The sink's commit, with
its fence, then takes over what the named attempts have staged. What nobody names does not count:

==========================================  ==========================================================
what happens                                what it leaves, and what becomes of it
==========================================  ==========================================================
1. a task fails and is tried again, or      rows under names that the driver was not told: they do not
   Spark runs it twice (speculation)        count, and are removed as in row 5
2. a task goes on after the batch, as on    the same
   a machine that was cut off for a while
3. the driver dies before the sink commits  the same; the next run repeats the batch, and stages again
4. the driver dies after that, before the   a sink that is ahead by one batch, as in `views/sink.py`: it
   state store commits                      refuses what the repeated batch stages
5. a run, or for databases also a batch,    it removes all that was staged and that no commit has taken;
   begins                                   what row 2 brings after that is removed by the next one
6. a run that was replaced goes on          its tasks stage, and its commit is refused by the fence
7. staged rows are lost before the commit,  the commit counts them and is refused; then the driver writes
   as of a database that crashed            the batch's rows itself
==========================================  ==========================================================

Records of topics have no names of their attempts': they belong to a transaction, and all attempts send the same
(:class:`PartitionStager`; `client/kafka/shared/sender.py` has their table).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl


@dataclass(frozen=True)
class StagedRows:
    """The rows of one output in one batch: how many, and what the tasks that staged them returned."""

    rows: int
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class StagedChange:
    """What one batch does to one view, staged: as :class:`millstream.views.schema.ViewChange`."""

    view: str
    staged: StagedRows


class Stager(Protocol):
    """Stages rows of one output in one batch. It is pickled, and used in tasks.

    ``key`` names the columns by which rows replace or cancel one another: those that agree in them come in one
    call, in the order of the batch. None: any division will do.
    """

    @property
    def key(self) -> tuple[str, ...] | None: ...

    def is_reachable(self) -> bool:
        """Return whether this process can write where the sink is."""

    def stage(self, rows: pl.DataFrame) -> Any:
        """Stage rows, with our columns, durably as far as the commit needs; return what its sink gets."""


class PartitionStager(ABC):
    """Stages rows of one output in one batch where each row has a partition there. It is pickled, and used in tasks.

    All rows of a partition come in one call, in the order of the batch. What is staged has no name of its attempt's:
    attempts of a partition stage the same rows, and what one has staged is not staged again.
    """

    @abstractmethod
    def partitions_of(self, rows: pl.DataFrame, number: int) -> pl.Series:
        """Return the partition of each row of a frame; ``number`` is the frame's place in the batch."""

    @abstractmethod
    def stage(self, partition: int, rows: pl.DataFrame) -> Any:
        """Stage the rows of a partition, with our columns; return what its sink gets.

        Raises:
            CannotStageError: they can't be written from this process.
        """


class CannotStageError(Exception):
    """Rows can't be staged from this process, and the driver has to write those of the batch; the text says why."""
