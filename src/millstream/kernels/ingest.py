"""A source's part of a batch: records in, frames out, all before the shuffle.

One task reads some lanes (splits of partitions). For each it decodes the fields that the plan
needs, takes the event time, sets dead records aside, sends the rows down the source's edges and
notes the largest time seen; then it tells every bucket of every operator what it saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.kernels.dead_records import Details, dead_rows
from millstream.kernels.decode.records import RecordDecoder
from millstream.kernels.frames import (
    LANE,
    PORT_DEAD,
    PORT_TIME,
    TIME,
    FrameRow,
    encode_frame,
    encode_message,
    polars_table,
)
from millstream.kernels.plan import SourcePlan
from millstream.kernels.routing import SEEN, Books, routes
from millstream.kernels.watermarks import UNSEEN, LaneTime, SourceTime, lane_of


@dataclass(frozen=True)
class Lane:
    """One split of one partition's records in a batch.

    It ends before ``end_offset``; ``batches`` have columns offset, timestamp (ms, UTC) and value, in
    offset order, and key or headers if the source wants them. ``details`` reads the keys and headers
    of records that turn out to be dead.
    """

    partition: int
    split: int
    end_offset: int
    batches: Iterable[pa.RecordBatch]
    details: Details | None = None


@dataclass
class Ingest:
    """Runs the lanes of one task through a source's edges."""

    source: SourcePlan
    bucket_labels: tuple[int, ...]
    books: Books = field(default_factory=Books)
    dead: list[pl.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = RecordDecoder(self.source.values, self.source.fields)

    def run(
        self, lanes: Iterable[Lane], partition_count: int, idle: frozenset[int]
    ) -> Iterator[FrameRow]:
        """Yield the task's frames, then what it saw of time, then its books."""
        out = routes(self.source.edges, self.bucket_labels, self.books)
        times: list[LaneTime] = []
        for lane in lanes:
            time_us_max = UNSEEN
            for batch in lane.batches:
                rows = self._rows(batch, lane)
                if rows.height:
                    rows = _with_seen(rows, time_us_max)
                    time_us_max = max(time_us_max, int(rows[TIME].max()))  # type: ignore[arg-type]
                    for route in out:
                        route.take(rows, delay_us=self.source.rule.delay_us)
            self.books.position.setdefault(self.source.topic, {})[str(lane.partition)] = (
                lane.end_offset
            )
            seen = time_us_max if time_us_max > UNSEEN else None
            times.append(LaneTime(lane.partition, lane.split, seen))
        home = self.bucket_labels[0]
        for route in out:
            yield from route.frames(home)
        if self.dead:
            yield FrameRow(PORT_DEAD, home, encode_frame(pl.concat(self.dead)))
        yield from self._time_rows(SourceTime(tuple(times), partition_count, idle))
        yield self.books.frame_row(home)

    def _rows(self, batch: pa.RecordBatch, lane: Lane) -> pl.DataFrame:
        """Decode one batch into rows with time and lane; put the dead ones aside."""
        decoded = self._decoder.decode(batch, lane.partition)
        table = polars_table(decoded.table)
        dead, good = decoded.dead, decoded.good
        timed = table.with_columns(self._time(batch, good).alias(TIME))
        if timed[TIME].null_count():
            timeless = timed[TIME].is_null().to_numpy()
            dead = sorted(dead + [(int(at), "no event time") for at in good[timeless]])
            timed = timed.filter(~pl.Series(timeless))
        self.books.count(
            self.source.name, read=batch.num_rows, dead=len(dead), emitted=timed.height
        )
        if dead and self.source.bad != "skip":
            self.dead.append(self._dead_rows(batch, lane, dead))
        lane_number = lane_of(lane.partition, lane.split)
        return timed.with_columns(pl.lit(lane_number, pl.Int32).alias(LANE))

    def _time(
        self, batch: pa.RecordBatch, good: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> pl.Expr:
        if self.source.time is not None:
            return self.source.time.dt.epoch("us")
        stamps = batch.column("timestamp").take(pa.array(good)).cast(pa.int64())
        return pl.lit(pl.Series(stamps) * 1000)

    def _dead_rows(
        self, batch: pa.RecordBatch, lane: Lane, dead: list[tuple[int, str]]
    ) -> pl.DataFrame:
        return dead_rows(
            batch,
            dead,
            topic=self.source.topic,
            partition=lane.partition,
            step=self.source.name,
            details=lane.details,
        )

    def _time_rows(self, seen: SourceTime) -> Iterator[FrameRow]:
        for port in self.source.time_ports:
            message = encode_message(
                {"to": port, "input": self.source.name, "source": seen.to_message()}
            )
            for label in self.bucket_labels:
                yield FrameRow(PORT_TIME, label, message)


def _with_seen(rows: pl.DataFrame, time_us_max: int) -> pl.DataFrame:
    before = pl.col(TIME).cum_max().shift(1, fill_value=time_us_max)
    return rows.with_columns(pl.max_horizontal(before, pl.lit(time_us_max, pl.Int64)).alias(SEEN))
