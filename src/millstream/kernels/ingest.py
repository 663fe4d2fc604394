"""A source's part of a batch: records in, frames out, all before the shuffle.

One task reads some lanes (splits of partitions). For each it decodes the fields that the plan
needs, takes the event time, sets dead records aside, follows the lane's clock and sends the events
down the source's edges; then it tells every bucket of every operator what the clocks showed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.errors import CorruptionError, UserCodeError
from millstream.kernels.arrivals import Arrivals, Microseconds, epoch_us, unbelievable
from millstream.kernels.dead_records import Details, dead_rows
from millstream.kernels.decode import Decoded
from millstream.kernels.decode.archived import ArchivedRecords
from millstream.kernels.decode.records import RecordDecoder
from millstream.kernels.frames import (
    ORDER,
    PORT_DEAD,
    TIME,
    FrameRow,
    encode_message,
    polars_table,
)
from millstream.kernels.isolation import reason_of
from millstream.kernels.keyhash import Buckets
from millstream.kernels.lane_clocks import LaneClock, Promise, lane_clock
from millstream.kernels.log_order import order_of
from millstream.kernels.plan import SourcePlan
from millstream.kernels.rejects import Rejects
from millstream.kernels.routing import Books, Route, routes
from millstream.kernels.watermarks import LaneTime, SourceTime

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class Tally:
    """Adds up how many records a lane has by the log; it is called with some at a time."""

    records: int = 0

    def __call__(self, records: int) -> None:
        self.records += records


@dataclass(frozen=True)
class Lane:
    """One split of one partition's records in a batch.

    It holds the offsets ``[start_offset, end_offset)``; ``batches`` have columns offset, timestamp (ms, UTC) and value, in
    offset order, and key or headers if the source wants them; between them there may be promises, and
    records that were decoded earlier. ``arrived_ms`` is the largest timestamp before the lane, where
    the event time is the time of arrival. ``details`` reads what the batches lack of records that
    turn out to be dead. ``tally`` has, once they have been read, how many records there are by the log.
    """

    partition: int
    split: int
    start_offset: int
    end_offset: int
    batches: Iterable[pa.RecordBatch | ArchivedRecords | Promise]
    arrived_ms: int = 0
    details: Details | None = None
    tally: Tally | None = None

    def check(self, read: int) -> None:
        """Make sure that as many records were read as there are.

        Raises:
            CorruptionError: more or fewer were; the batch must not be committed.
        """
        if self.tally is not None and self.tally.records != read:
            raise CorruptionError(
                f"The ledger does not balance: by the log there are {self.tally.records} records at "
                f"offsets [{self.start_offset}, {self.end_offset}) of partition {self.partition}, and "
                f"{read} were read. Nothing of this batch was committed. Please report this; the log "
                "still holds every event."
            )


@dataclass
class Ingest:
    """Runs the lanes of one task through a source's edges."""

    source: SourcePlan
    bucket_labels: Buckets
    books: Books = field(default_factory=Books)
    dead: list[pl.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = RecordDecoder(self.source.values, self.source.fields)

    def run(self, lanes: Iterable[Lane], planned: SourceTime) -> Iterator[FrameRow]:
        """Yield the task's frames, then what it saw of time, then its books.

        ``planned`` is what the planner says of the batch's time; the lanes' part is added to it.
        """
        rejects = Rejects()
        out = routes(self.source.edges, self.bucket_labels, self.books, rejects)
        times: list[LaneTime] = []
        for lane in lanes:
            lane_time, read = self._lane(lane, out, rejects)
            lane.check(read)
            times.append(lane_time)
            ranges = self.books.ranges.setdefault(self.source.name, {})
            ranges.setdefault(str(lane.partition), []).append(
                (lane.start_offset, lane.end_offset, read)
            )
        home = self.bucket_labels[0]
        for route in out:
            yield from route.frames(home)
        if self.dead:
            yield self.books.frame(PORT_DEAD, home, pl.concat(self.dead))
        yield from self._time_rows(replace(planned, lanes=tuple(times)))
        yield self.books.frame_row(home)

    def _lane(self, lane: Lane, out: Sequence[Route], rejects: Rejects) -> tuple[LaneTime, int]:
        """Send a lane's events down the edges; give what it showed of time, and its records' number."""
        read = 0
        clock = lane_clock(self.source.rule, self.source.number, lane.partition, lane.split)
        arrivals = Arrivals(lane.arrived_ms, rising=self.source.rule.settle_us is not None)
        for batch in lane.batches:
            if isinstance(batch, Promise):
                clock.promise(batch.at_us)
                continue
            records = batch.records if isinstance(batch, ArchivedRecords) else batch
            read += records.num_rows
            self._note_arrival(records, lane.partition)
            rows = self._rows(records, self._decoder.decode(batch, lane.partition), lane, arrivals)
            events = self._judged(clock, rows) if rows.height else rows
            self.books.count(
                self.source.name,
                filtered=rows.height - events.height,
                emitted=events.height,
                made=events.height,
            )
            if events.height:
                latest_us = int(events[TIME].max())  # type: ignore[arg-type]
                self.books.saw(self.source.topic, lane.partition, latest_us)
                for route in out:
                    route.take(events)
                self.dead += rejects.of_records(
                    records, self.source.topic, lane.partition, lane.details
                )
        return clock.told(), read

    def _note_arrival(self, batch: pa.RecordBatch, partition: int) -> None:
        if batch.num_rows:
            arrived_ms = batch.column("timestamp")[batch.num_rows - 1].value
            self.books.arrived_ms.setdefault(self.source.topic, {})[str(partition)] = arrived_ms

    def _judged(self, clock: LaneClock, rows: pl.DataFrame) -> pl.DataFrame:
        try:
            return clock.take(rows)
        except pl.exceptions.PolarsError as error:
            raise self._failed("watermark", error) from error

    def _failed(self, what: str, error: Exception) -> UserCodeError:
        return UserCodeError(
            f"the {what} of {self.source.name!r} failed: {reason_of(error)}.",
            step=self.source.name,
        )

    def _rows(
        self, batch: pa.RecordBatch, decoded: Decoded, lane: Lane, arrivals: Arrivals
    ) -> pl.DataFrame:
        """Give the rows of one batch with their time; put the dead ones aside."""
        table = polars_table(decoded.table)
        dead, good = decoded.dead, decoded.good
        arrived_us = arrivals.take(batch)[good]
        timed = self._timed(table, arrived_us)
        # Rows that fail in a step are told by their place; edges drop it where it is not needed.
        timed = timed.hstack([self._order(batch, good, lane.partition)])
        timeless = self._without_time(timed, arrived_us)
        if timeless:
            dead = sorted(dead + [(int(good[at]), reason) for at, reason in timeless])
            keep = np.ones(timed.height, np.bool_)
            keep[[at for at, _ in timeless]] = False
            timed = timed.filter(pl.Series(keep))
        self.books.count(self.source.name, read=batch.num_rows, dead=len(dead))
        if dead and self.source.bad != "skip":
            self.dead.append(self._dead_rows(batch, lane, dead))
        return timed

    def _timed(self, table: pl.DataFrame, arrived_us: Microseconds) -> pl.DataFrame:
        """Add the event time."""
        if self.source.time is None:
            return table.hstack([pl.Series(TIME, arrived_us)])
        try:
            times = table.with_columns(self.source.time.alias(TIME))[TIME]
        except pl.exceptions.PolarsError as error:
            raise self._failed("time", error) from error
        return table.hstack([epoch_us(times)])

    def _without_time(self, timed: pl.DataFrame, arrived_us: Microseconds) -> list[tuple[int, str]]:
        """Find the rows that have no time to be believed; say why."""
        try:
            return unbelievable(timed, arrived_us, self.source.rule)
        except pl.exceptions.PolarsError as error:
            raise self._failed("watermark", error) from error

    def _order(self, batch: pa.RecordBatch, good: Positions, partition: int) -> pl.Series:
        offsets = batch.column("offset").to_numpy()[good]
        last = int(offsets[-1]) if len(offsets) else 0
        # Refused, if the last has none; so all before it have one.
        at_last = order_of(self.source.topic_number, partition, last)
        return pl.Series(ORDER, offsets + (at_last - last))

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
                yield self.books.message(port, label, message)
