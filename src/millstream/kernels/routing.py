"""From a node's rows to the frames of its outgoing edges: steps, partials, buckets, books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import polars as pl

from millstream.kernels.frames import (
    PORT_LEDGER,
    REACHED,
    FrameRow,
    encode_frame,
    encode_message,
)
from millstream.kernels.keyhash import buckets_of, hash_columns
from millstream.kernels.plan import Edge
from millstream.kernels.steps import apply_steps

_BUCKET = "__bucket"
LEDGER_EXITS = ("emitted", "held", "late", "dead", "filtered", "duplicate")
# What a line tells besides, and what takes no part in its balance: ``windows_missed`` counts pairs of
# an event and a window that had expired for it. An event that missed some of its windows is held.
LEDGER_NOTES = ("windows_missed",)


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

    def take(self, rows: pl.DataFrame) -> None:
        """Take a table through the edge's steps, and prepare it for what takes it."""
        passed = apply_steps(self.edge.steps, rows)
        self.books.count(self.edge.step, read=rows.height, filtered=rows.height - passed.height)
        operator = self.edge.operator
        if operator is None:
            self.books.count(self.edge.step, emitted=passed.height)
            self._keep(passed)
        elif passed.height:
            prepared = operator.prepare(passed, self.edge.number)
            self.books.count(self.edge.step, late=prepared.late, **prepared.counts)
            self._keep(prepared.table)

    def _keep(self, table: pl.DataFrame) -> None:
        if table.height:
            self.tables.append(table)

    def frames(self, home_bucket: int) -> Iterator[FrameRow]:
        """Give the edge's frames: by bucket for an operator, all to ``home_bucket`` for a sink."""
        if not self.tables:
            return
        operator = self.edge.operator
        if operator is None:
            table = pl.concat(self.tables).drop(REACHED, strict=False)
            yield FrameRow(self.edge.port, home_bucket, encode_frame(table))
            return
        table = operator.pack(self.tables, self.edge.number)
        buckets = buckets_of(hash_columns(table, operator.by), len(self.bucket_labels))
        divided = table.hstack([pl.Series(_BUCKET, buckets)]).partition_by(
            _BUCKET, as_dict=True, include_key=False
        )
        for (bucket,), part in divided.items():
            yield FrameRow(self.edge.port, self.bucket_labels[int(bucket)], encode_frame(part))


def routes(edges: Iterable[Edge], bucket_labels: tuple[int, ...], books: Books) -> list[EdgeRoute]:
    """Make one route per edge."""
    return [EdgeRoute(edge, bucket_labels, books) for edge in edges]
