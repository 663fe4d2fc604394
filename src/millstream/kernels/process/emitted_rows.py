"""The rows that the keys of a call have emitted and that hold, where a function over frames may take rows back.

Of each row a digest and its event time are kept with its key, in the order in which the rows were emitted. Equal rows
are taken back from the last on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.arrays import Int64s
from millstream.kernels.errors.user_code import UnusableRowError
from millstream.kernels.process.declarations import StateDeclaration
from millstream.kernels.state.row_digest import digest_rows

HELD_ROWS = "__held"  # the state of a key with these rows
HELD_STATE = StateDeclaration("list", pl.Struct({"row": pl.Int64(), "time": pl.Int64()}))

_KEY = ["number", "row"]


class EmittedRows:
    """The rows of the keys of one call, by the number of the key. ``column`` has those of each key before the call."""

    def __init__(self, column: pl.Series) -> None:
        lists = column.alias("held").to_frame().with_row_index("number")
        rows = lists.explode("held").drop_nulls("held").unnest("held")
        self._count = len(column)
        self._rows = rows.with_columns(pl.col("number").cast(pl.Int64))

    def add(
        self, output: str | None, columns: Sequence[pl.Series], numbers: Int64s, times: Int64s
    ) -> None:
        """Note rows that are emitted."""
        self._rows = self._rows.vstack(_named(output, columns, numbers).with_columns(time=times))

    def take_back(
        self, output: str | None, columns: Sequence[pl.Series], numbers: Int64s
    ) -> Int64s:
        """Forget rows that are taken back; return the event times that they were emitted with.

        Raises:
            UnusableRowError: one does not hold.
        """
        held = self._rows.with_row_index("place")
        last_first = pl.int_range(pl.len()).reverse().over(_KEY).alias("nth")
        asked = _named(output, columns, numbers)
        asked = asked.with_columns(pl.int_range(pl.len()).over(_KEY).alias("nth"))
        found = asked.join(
            held.with_columns(last_first), on=[*_KEY, "nth"], how="left", maintain_order="left"
        )
        missing = found["place"].is_null().arg_true()
        if len(missing):
            row = {column.name: column[int(missing[0])] for column in columns}
            raise UnusableRowError(
                f"{row} is taken back, which was not emitted for this key, or was taken back before"
            )
        stays = np.ones(held.height, np.bool_)
        stays[found["place"].to_numpy()] = False
        self._rows = self._rows.filter(pl.Series(stays))
        times: Int64s = found["time"].to_numpy()
        return times

    def column(self) -> pl.Series:
        """Return the rows that each key has now."""
        rows = self._rows.sort("number", maintain_order=True)
        counts = np.bincount(rows["number"].to_numpy(), minlength=self._count)
        ends = pa.array(np.concatenate(([0], np.cumsum(counts))))
        values = [rows[name].to_arrow() for name in ("row", "time")]
        structs = pa.StructArray.from_arrays(values, ["row", "time"])
        return pl.Series(HELD_ROWS, pa.LargeListArray.from_arrays(ends, structs))


def _named(output: str | None, columns: Sequence[pl.Series], numbers: Int64s) -> pl.DataFrame:
    of_output = pl.Series([output], dtype=pl.String).new_from_index(0, len(numbers))
    return pl.DataFrame({"number": numbers, "row": digest_rows([of_output, *columns])})
