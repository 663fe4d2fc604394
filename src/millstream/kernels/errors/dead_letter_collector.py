"""Collects the rows on which the user's code fails, and makes dead letters of them.

A dead letter names the step and the reason. Before the first shuffle it keeps the record's own bytes; after
it, the row as JSON. Where a row no longer belongs to one record (it is the result of a window, or came from
Spark), topic is "" and partition and offset are -1. Records that cannot be decoded, or have no event time,
do not pass through here: `ingest.py` makes dead letters of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.errors.dead_letters import (
    FullRecordReader,
    dead_letter_rows,
    with_all_columns,
)
from millstream.kernels.errors.user_code import UserCodeResult, rows_as_json
from millstream.kernels.frames import DIFF, ORDER, SPLIT
from millstream.kernels.state.keyhash import digest_columns
from millstream.kernels.time.log_order import offset_in, partition_in, topic_in


@dataclass(frozen=True)
class FailedRows:
    """Rows on which the user's code in a step failed."""

    step: str
    rows: pl.DataFrame
    reasons: list[str]


@dataclass
class DeadLetterCollector:
    """Collects the failing rows of a task's routers."""

    failed: list[FailedRows] = field(default_factory=list)

    def add(self, step: str, done: UserCodeResult[Any]) -> None:
        """Take the failing rows of one table.

        The retraction of a row fails as the row did, which has its letter.
        """
        rows, reasons = done.failing, done.reasons
        if DIFF in rows.columns:
            added = (rows[DIFF] > 0).to_list()
            rows, reasons = rows.filter(added), list(compress(reasons, added))
        if rows.height:
            self.failed.append(FailedRows(step, rows, reasons))

    def drain_with_records(
        self, batch: pa.RecordBatch, topic: str, partition: int, details: FullRecordReader | None
    ) -> list[pl.DataFrame]:
        """Return the failed rows of a batch of records as dead letters with the records' bytes; start over.

        The batch has the columns offset, in its order, timestamp, and value or none.
        """
        taken, self.failed = self.failed, []
        there = batch.column("offset").to_numpy()
        letters: list[pl.DataFrame] = []
        for one in taken:
            at = np.searchsorted(there, offset_in(one.rows[ORDER].to_numpy()))
            dead = list(zip(at.tolist(), one.reasons, strict=True))
            letters.append(
                dead_letter_rows(
                    batch, dead, topic=topic, partition=partition, step=one.step, details=details
                )
            )
        return letters

    def drain_rows(self, topics: Sequence[str] = ()) -> list[pl.DataFrame]:
        """Return the failed rows as dead letters that hold the rows as JSON; start over.

        ``topics`` names all topics that are read, by number.
        """
        taken, self.failed = self.failed, []
        return [_letter_of_rows(one, topics) for one in taken]


def _letter_of_rows(one: FailedRows, topics: Sequence[str]) -> pl.DataFrame:
    letters = pl.DataFrame(
        {"reason": one.reasons, "value": rows_as_json(one.rows), "step": one.step}
    )
    letters = letters.with_columns(pl.col("value").cast(pl.Binary))
    if {ORDER, SPLIT} <= set(one.rows.columns):
        order = one.rows[ORDER].to_numpy()
        return with_all_columns(
            letters.with_columns(
                topic=pl.Series([topics[topic] for topic in topic_in(order)]),
                partition=pl.Series(partition_in(order)),
                offset=pl.Series(offset_in(order)),
            )
        )
    # 63 bits of the row's hash: the same row fails in the same way whenever it comes.
    hashes = digest_columns(letters, ("value",)) >> np.uint64(1)
    number = pl.Series(hashes.astype(np.int64))
    return with_all_columns(
        letters.with_columns(
            topic=pl.lit(""), partition=pl.lit(-1), offset=pl.lit(-1), number=number
        )
    )
