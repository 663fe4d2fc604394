"""The interface of a stateful step: rows in, rows out, state in one bucket of keys.

An operator is a frozen value that travels with the plan. It is called twice in a batch, and is a
pure function both times: ``prepare`` before the shuffle, once for each table of input rows, and
``process`` after the shuffle, once for each bucket, with the bucket's rows and its state.
Nothing here depends on Spark; operators are run by :mod:`millstream.kernels.stage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import polars as pl

from millstream.kernels.arrays import Int64s
from millstream.kernels.errors.dead_letter_collector import FailedRows
from millstream.kernels.frames import SPLIT, WATERMARK_SEEN
from millstream.kernels.state.layout import StateLayout
from millstream.kernels.state.operator_state import OperatorState

NOT_DEFINING: Mapping[str, Any] = {"defining": False}
"""Metadata of a kernel's field that is no part of its definition: state that it has made stays valid."""


@dataclass(frozen=True)
class Prepared:
    """What of a table of rows goes through the shuffle, and how many of its rows were late.

    ``counts`` are other counts for the ledger: exits, and notes.
    ``late_by_us`` is the most by which one of them missed, where that is known.
    """

    table: pl.DataFrame
    late: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    late_by_us: int = 0


@dataclass(frozen=True)
class BatchContext:
    """The time of a batch, for one operator in one bucket. Event time in microseconds.

    ``watermark_before_us`` and ``watermark_us`` are the operator's watermark before and after the batch;
    ``split_watermarks_us`` gives the watermark that was in force in each split before its first row, and
    ``clock_ms`` is the running time of the job, and ``seed`` that of its hashes of keys. ``bucket`` is one of
    ``bucket_count``. ``wall_ms`` is the time of day just before the planner looked for the batch's end, which
    never goes back; 0 where only DataFrames are read.
    """

    watermark_before_us: int
    watermark_us: int
    split_watermarks_us: Mapping[int, int] = field(default_factory=dict)
    clock_ms: int = 0
    seed: int = 0
    bucket: int = 0
    bucket_count: int = 1
    wall_ms: int = 0

    def watermarks_seen(self, rows: pl.DataFrame) -> Int64s:
        """Give, for each row, the watermark that was in force in its split before the row.

        That is what earlier batches had shown, or what this batch read before it (``__watermark``),
        whichever is later. Rows without a split came from another operator: for them it is the
        operator's own.
        """
        if SPLIT in rows.columns:
            earlier = self._split_watermarks(rows[SPLIT].to_numpy())
        else:
            earlier = np.full(rows.height, self.watermark_before_us, np.int64)
        return (
            np.maximum(earlier, rows[WATERMARK_SEEN].to_numpy())
            if WATERMARK_SEEN in rows.columns
            else earlier
        )

    def _split_watermarks(self, splits: Int64s) -> Int64s:
        if len(splits) and splits.min() == splits.max():  # the rows of one task
            return np.full(
                len(splits), self.split_watermarks_us.get(int(splits[0]), self.watermark_before_us)
            )
        there, at = np.unique(splits, return_inverse=True)
        known = [
            self.split_watermarks_us.get(int(split), self.watermark_before_us) for split in there
        ]
        return np.array(known, np.int64)[at]


@dataclass
class OperatorResult:
    """The output of an operator for one batch of one bucket.

    ``rows`` go down its edges and ``late`` down the edges of its side output; ``counts`` say by
    which exit the events that came in left (see ``LEDGER_EXITS``), and must add up to them.
    ``gauges`` are numbers to report besides the ledger: of a rate (``…_rate``) the largest over all buckets, and of what is counted the sum;
    ``late_by_us`` is the most by which a late event missed, where that is known. ``failed`` are rows that
    become dead letters, those of other columns apart.
    """

    rows: pl.DataFrame | None = None
    late: pl.DataFrame | None = None
    counts: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)
    late_by_us: int = 0
    failed: tuple[FailedRows, ...] = ()


class Operator(Protocol):
    """One stateful step. Its inputs are numbered from 0."""

    @property
    def name(self) -> str: ...

    @property
    def by(self) -> tuple[str, ...]:
        """The columns whose values choose the bucket; what :meth:`prepare` gives has them."""
        ...

    @property
    def transparent(self) -> bool:
        """Whether it emits, in the batch of their arrival, only rows of its first input.

        They may get more columns. Such rows keep their split and the watermark that was in force before
        them, so the next operator decides on their lateness as if they came straight from the source;
        rows that are taken back with what they were given lose both, and the next operator goes by its own watermark.
        Of other inputs neither rows nor time are passed on: no watermark waits for them.
        """
        ...

    @property
    def ordered(self) -> bool:
        """Whether it reads ``__order``, the place of a row in its partition."""
        ...

    @property
    def heartbeat_ms(self) -> int | None:
        """How often it needs a batch, in running time, even without input; None: never."""
        ...

    @property
    def layout(self) -> StateLayout:
        """What a rescale has to know of its state: see :class:`StateLayout`."""
        ...

    def columns_read(self, number: int) -> set[str]:
        """Name the columns of an input that it reads itself."""
        ...

    def prepare(self, rows: pl.DataFrame, number: int) -> Prepared:
        """Take rows of an input before the shuffle: leave out what is late, reduce what can be.

        The rows have ``__time``, and if they come straight from a source ``__split`` and
        ``__watermark``, the watermark that their partition had reached before them.
        """
        ...

    def pack(self, tables: Sequence[pl.DataFrame], number: int) -> pl.DataFrame:
        """Put what :meth:`prepare` gave for several tables together."""
        ...

    def process(
        self,
        state: OperatorState,
        inputs: Mapping[int, Sequence[pl.DataFrame]],
        context: BatchContext,
    ) -> OperatorResult:
        """Process the rows after the shuffle, by input; return the output, and update the state."""
        ...

    def output_watermark(self, watermark_us: int) -> int:
        """Return the watermark of the output, given that of the input."""
        ...
