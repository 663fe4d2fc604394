"""Dead letters: what cannot be taken in, with its place in the log, the step, and the reason.

A record that cannot be decoded, or has no event time, is dead at its source. A row on which the
user's code fails is dead at that step: before the first shuffle the record's own bytes are kept,
behind one the row as it was, as JSON. Where a row no longer belongs to one record (it is the result
of a window, or came from Spark), topic is "" and partition and offset are -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.frames import LANE, ORDER
from millstream.kernels.isolation import Isolated, json_of
from millstream.kernels.keyhash import hash_columns
from millstream.kernels.watermarks import offset_in, partition_in, source_in

DEAD_SCHEMA = {
    "topic": pl.String,
    "partition": pl.Int64,
    "offset": pl.Int64,
    "step": pl.String,
    "number": pl.Int64,  # tells several dead rows of one record and step apart
    "reason": pl.String,
    "value": pl.Binary,
}
DEAD_KEY = ("topic", "partition", "offset", "step", "number")


@dataclass(frozen=True)
class Rejected:
    """Rows on which the user's code in a step failed."""

    step: str
    rows: pl.DataFrame
    reasons: list[str]


@dataclass
class Rejects:
    """Gathers what the routes of a task put aside."""

    rejected: list[Rejected] = field(default_factory=list)

    def add(self, step: str, done: Isolated[Any]) -> None:
        """Take the failing rows of one table."""
        if done.failing.height:
            self.rejected.append(Rejected(step, done.failing, done.reasons))

    def of_records(self, batch: pa.RecordBatch, topic: str, partition: int) -> list[pl.DataFrame]:
        """Give what was put aside of a batch of records as dead letters, and begin anew.

        The batch has the columns offset, in its order, and value.
        """
        taken, self.rejected = self.rejected, []
        there = batch.column("offset").to_numpy()
        letters: list[pl.DataFrame] = []
        for one in taken:
            offsets = offset_in(one.rows[ORDER].to_numpy())
            values = batch.column("value").take(pa.array(np.searchsorted(there, offsets)))
            place = {"topic": topic, "partition": partition, "offset": offsets}
            letters.append(dead_letters(place, one.step, one.reasons, pl.Series(values)))
        return letters

    def of_rows(self, topics: Sequence[str] = ()) -> list[pl.DataFrame]:
        """Give what was put aside as dead letters that hold the rows; begin anew.

        ``topics`` names the topic of each source, by its number.
        """
        taken, self.rejected = self.rejected, []
        return [_letter_of_rows(one, topics) for one in taken]


def dead_letters(
    place: Mapping[str, Any], step: str, reasons: Sequence[str], values: pl.Series
) -> pl.DataFrame:
    """Put dead letters together. ``place`` gives topic, partition and offset, for all or for each."""
    letters = pl.DataFrame({"reason": reasons, "value": values, **place, "step": step})
    number = pl.int_range(pl.len()).over("topic", "partition", "offset")
    return letters.select(
        *(
            (number if name == "number" else pl.col(name)).cast(dtype).alias(name)
            for name, dtype in DEAD_SCHEMA.items()
        )
    )


def _letter_of_rows(one: Rejected, topics: Sequence[str]) -> pl.DataFrame:
    values = pl.Series(json_of(one.rows))
    if {ORDER, LANE} <= set(one.rows.columns):
        order, lanes = one.rows[ORDER].to_numpy(), one.rows[LANE].to_numpy()
        place = {
            "topic": [topics[source] for source in source_in(lanes)],
            "partition": partition_in(order),
            "offset": offset_in(order),
        }
        return dead_letters(place, one.step, one.reasons, values)
    nowhere = {"topic": "", "partition": -1, "offset": -1}
    letters = dead_letters(nowhere, one.step, one.reasons, values)
    # 63 bits of the row's hash: the same row fails in the same way whenever it comes.
    hashes = hash_columns(letters, ("value",)) >> np.uint64(1)
    return letters.with_columns(number=pl.Series(hashes.astype(np.int64)))
