"""What most operators are: they emit rows of their own, in any order, and ask for no batch."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from millstream.kernels.frames import in_one_chunk
from millstream.kernels.state.layout import StateLayout


class OperatorBase:
    """The defaults of an operator: see :class:`millstream.kernels.operator.Operator`."""

    @property
    def transparent(self) -> bool:
        return False

    @property
    def ordered(self) -> bool:
        return False

    @property
    def heartbeat_ms(self) -> int | None:
        return None

    @property
    def layout(self) -> StateLayout:
        return StateLayout()

    @property
    def queried_as_emitted(self) -> bool:
        return True

    def output_watermark(self, watermark_us: int) -> int:
        return watermark_us

    def pack(self, tables: Sequence[pl.DataFrame], number: int = 0) -> pl.DataFrame:  # noqa: ARG002
        return in_one_chunk(tables)
