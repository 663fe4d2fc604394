"""From a node's rows to the frames of its outgoing edges: steps, partials, buckets, books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import polars as pl

from millstream.kernels.frames import (
    LANE,
    PORT_LEDGER,
    ROWS,
    FrameRow,
    encode_frame,
    encode_message,
)
from millstream.kernels.keyhash import buckets_of, hash_columns
from millstream.kernels.plan import Edge
from millstream.kernels.steps import apply_steps

SEEN = "__seen"  # Int64: the largest event time read in the lane before this row
_BUCKET = "__bucket"
LEDGER_EXITS = ("emitted", "held", "late", "dead", "filtered", "duplicate")


@dataclass
class Books:
    """What a task reports: counts per step (read = the sum of the exits), and where it stands.

    ``position`` is topic → partition → the offset after the last record read; ``watermarks`` is
    operator → microseconds.
    """

    lines: dict[str, Counter[str]] = field(default_factory=dict)
    position: dict[str, dict[str, int]] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0

    def count(self, step: str, **rows: int) -> None:
        """Add to a step's counts."""
        self.lines.setdefault(step, Counter()).update(rows)

    def frame_row(self, bucket: int) -> FrameRow:
        """Give the report as a row of the ledger port."""
        report = {
            "books": self.lines,
            "position": self.position,
            "watermarks": self.watermarks,
            "state_bytes": self.state_bytes,
        }
        return FrameRow(PORT_LEDGER, bucket, encode_message(report))


@dataclass
class EdgeRoute:
    """Takes the rows of one edge, table by table, and gives its frames at the end of the batch."""

    edge: Edge
    bucket_labels: tuple[int, ...]
    books: Books
    tables: list[pl.DataFrame] = field(default_factory=list)

    def take(self, rows: pl.DataFrame, *, delay_us: int = 0) -> None:
        """Take a table. With ``__seen`` in it, rows that are late within their lane are left out."""
        passed = apply_steps(self.edge.steps, rows)
        self.books.count(self.edge.step, read=rows.height, filtered=rows.height - passed.height)
        operator = self.edge.operator
        if operator is None:
            self.books.count(self.edge.step, emitted=passed.height)
            self._keep(passed)
            return
        passed = operator.assign(passed)
        if SEEN in passed.columns:
            in_time = passed.filter(operator.expiry() > pl.col(SEEN) - delay_us)
            self.books.count(self.edge.step, late=passed.height - in_time.height)
            passed = in_time
        if passed.height:
            self._keep(operator.prepare(passed))

    def _keep(self, table: pl.DataFrame) -> None:
        if table.height:
            self.tables.append(table)

    def frames(self, home_bucket: int) -> Iterator[FrameRow]:
        """Give the edge's frames: by bucket for an operator, all to ``home_bucket`` for a sink."""
        if not self.tables:
            return
        table = pl.concat(self.tables)
        operator = self.edge.operator
        if operator is None:
            yield FrameRow(
                self.edge.port, home_bucket, encode_frame(table.drop(SEEN, strict=False))
            )
            return
        if len(self.tables) > 1:
            table = self._merged(table)
        buckets = buckets_of(hash_columns(table, operator.by), len(self.bucket_labels))
        divided = table.hstack([pl.Series(_BUCKET, buckets)]).partition_by(
            _BUCKET, as_dict=True, include_key=False
        )
        for (bucket,), part in divided.items():
            yield FrameRow(self.edge.port, self.bucket_labels[int(bucket)], encode_frame(part))

    def _merged(self, partials: pl.DataFrame) -> pl.DataFrame:
        """Merge the partials of several tables, lane by lane."""
        operator = self.edge.operator
        assert operator is not None
        if LANE not in partials.columns:
            return operator.merge(partials)
        lanes = partials.partition_by(LANE, as_dict=True, include_key=False)
        return pl.concat(
            operator.merge(part).with_columns(pl.lit(lane, pl.Int32).alias(LANE))
            for (lane,), part in lanes.items()
        )


def routes(edges: Iterable[Edge], bucket_labels: tuple[int, ...], books: Books) -> list[EdgeRoute]:
    """Make one route per edge."""
    return [EdgeRoute(edge, bucket_labels, books) for edge in edges]


def rows_in(partials: pl.DataFrame) -> int:
    """How many events a table of partials stands for."""
    return int(partials[ROWS].sum())
