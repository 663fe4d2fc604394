"""The base of operators that take nothing for late: what they emit is as late as what came in."""

from __future__ import annotations

import polars as pl

from millstream.kernels.frames import DIFF, TIME
from millstream.kernels.operator_base import OperatorBase


class UntimedOperator(OperatorBase):
    """What such operators have in common. ``columns`` are those that they read, with their types."""

    columns: tuple[tuple[str, pl.DataType], ...]

    def columns_read(self, number: int) -> set[str]:  # noqa: ARG002 - all inputs have the same
        return {name for name, _ in self.columns}

    def taken(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the columns, the time, and the sign if rows have one."""
        hidden = [name for name in (TIME, DIFF) if name in rows.columns]
        return rows[[name for name, _ in self.columns] + hidden]
