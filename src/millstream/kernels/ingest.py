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

from millstream.kernels.dead import Rejects, dead_letters
from millstream.kernels.decode import JsonDecoder
from millstream.kernels.frames import (
    LANE,
    ORDER,
    PORT_DEAD,
    PORT_TIME,
    REACHED,
    TIME,
    FrameRow,
    encode_frame,
    encode_message,
    polars_table,
)
from millstream.kernels.plan import SourcePlan
from millstream.kernels.routing import Books, routes
from millstream.kernels.watermarks import (
    UNSEEN,
    LaneTime,
    SourceTime,
    lane_of,
    order_of,
)

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Lane:
    """One split of one partition's records in a batch.

    It ends before ``end_offset``; ``batches`` have columns offset, timestamp (ms, UTC) and value, in offset order.
    """

    partition: int
    split: int
    end_offset: int
    batches: Iterable[pa.RecordBatch]


@dataclass
class Ingest:
    """Runs the lanes of one task through a source's edges."""

    source: SourcePlan
    bucket_labels: tuple[int, ...]
    books: Books = field(default_factory=Books)
    dead: list[pl.DataFrame] = field(default_factory=list)

    def run(
        self, lanes: Iterable[Lane], partition_count: int, idle: frozenset[int], clock_ms: int
    ) -> Iterator[FrameRow]:
        """Yield the task's frames, then what it saw of time, then its books."""
        rejects = Rejects()
        out = routes(self.source.edges, self.bucket_labels, self.books, rejects)
        times: list[LaneTime] = []
        for lane in lanes:
            time_us_max = UNSEEN
            for batch in lane.batches:
                self._note_arrival(batch, lane.partition)
                rows = self._rows(batch, lane)
                if rows.height:
                    rows = _with_reached(rows, time_us_max, self.source.rule.delay_us)
                    time_us_max = max(time_us_max, int(rows[TIME].max()))  # type: ignore[arg-type]
                    for route in out:
                        route.take(rows)
                    self.dead += rejects.of_records(batch, self.source.topic, lane.partition)
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
        yield from self._time_rows(SourceTime(tuple(times), partition_count, idle, clock_ms))
        yield self.books.frame_row(home)

    def _note_arrival(self, batch: pa.RecordBatch, partition: int) -> None:
        if batch.num_rows:
            arrived_ms = batch.column("timestamp")[batch.num_rows - 1].value
            self.books.arrived_ms.setdefault(self.source.topic, {})[str(partition)] = arrived_ms

    def _rows(self, batch: pa.RecordBatch, lane: Lane) -> pl.DataFrame:
        """Decode one batch into rows with time and lane; put the dead ones aside."""
        decoded = JsonDecoder(self.source.fields).decode(batch.column("value"))
        table = polars_table(decoded.table)
        dead, good = decoded.dead, decoded.good
        timed = table.with_columns(self._time(batch, good).alias(TIME))
        # Rows that fail in a step are told by their place; edges drop it where it is not needed.
        timed = timed.hstack([self._order(batch, good, lane.partition)])
        if timed[TIME].null_count():
            timeless = timed[TIME].is_null().to_numpy()
            dead = sorted(dead + [(int(at), "no event time") for at in good[timeless]])
            timed = timed.filter(~pl.Series(timeless))
        self.books.count(
            self.source.name,
            read=batch.num_rows,
            dead=len(dead),
            emitted=timed.height,
            made=timed.height,
        )
        if dead:
            self.dead.append(self._dead_rows(batch, lane.partition, dead))
        return timed.with_columns(pl.lit(self._lane_number(lane), pl.Int64).alias(LANE))

    def _lane_number(self, lane: Lane) -> int:
        return lane_of(self.source.number, lane.partition, lane.split)

    def _order(self, batch: pa.RecordBatch, good: Positions, partition: int) -> pl.Series:
        offsets = batch.column("offset").to_numpy()[good]
        return pl.Series(ORDER, offsets + order_of(partition, 0))

    def _time(self, batch: pa.RecordBatch, good: Positions) -> pl.Expr:
        if self.source.time is not None:
            return self.source.time.dt.epoch("us")
        stamps = batch.column("timestamp").take(pa.array(good)).cast(pa.int64())
        return pl.lit(pl.Series(stamps) * 1000)

    def _dead_rows(
        self, batch: pa.RecordBatch, partition: int, dead: list[tuple[int, str]]
    ) -> pl.DataFrame:
        positions = pa.array([at for at, _ in dead])
        place = {
            "topic": self.source.topic,
            "partition": partition,
            "offset": pl.Series(batch.column("offset").take(positions)),
        }
        values = pl.Series(batch.column("value").take(positions))
        return dead_letters(place, self.source.name, [reason for _, reason in dead], values)

    def _time_rows(self, seen: SourceTime) -> Iterator[FrameRow]:
        for port in self.source.time_ports:
            message = encode_message(
                {"to": port, "input": self.source.name, "source": seen.to_message()}
            )
            for label in self.bucket_labels:
                yield FrameRow(PORT_TIME, label, message)


def _with_reached(rows: pl.DataFrame, time_us_max: int, delay_us: int) -> pl.DataFrame:
    before = pl.col(TIME).cum_max().shift(1, fill_value=time_us_max)
    seen = pl.max_horizontal(before, pl.lit(time_us_max, pl.Int64))
    return rows.with_columns((seen - delay_us).alias(REACHED))
