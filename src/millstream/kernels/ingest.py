"""A source's part of a batch: records in, frames out, all before the shuffle.

One task reads some splits (ranges of offsets of partitions). For each it decodes the fields that the
plan needs, takes the event time, sends bad records to the dead letters, advances the split's clock and
sends the events down the source's edges. Then it sends the state of the clocks to every bucket of every
operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from millstream.errors import CorruptionError, UserCodeError
from millstream.kernels.arrays import Int64s
from millstream.kernels.columns import filter_rows
from millstream.kernels.decode import Decoded
from millstream.kernels.decode.archive_columns import ArchivedRecords
from millstream.kernels.decode.records import RecordDecoder
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.errors.dead_letters import FullRecordReader, dead_letter_rows
from millstream.kernels.errors.user_code import error_reason
from millstream.kernels.frames import (
    ARRIVED,
    DELETED,
    EXTRA,
    KIND,
    ORDER,
    PORT_DEAD_LETTERS,
    TIME,
    FrameRow,
    encode_message,
    polars_table,
)
from millstream.kernels.plan import SourcePlan
from millstream.kernels.routing import RowRouter, TaskLedger, make_routers
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.time.arrival_times import (
    ArrivalTimes,
    epoch_us,
    invalid_event_times,
)
from millstream.kernels.time.log_order import log_order_of
from millstream.kernels.time.split_clocks import PartitionPunctuation, SplitClock, make_split_clock
from millstream.kernels.time.watermarks import SourceTime, SplitTime

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class RecordCount:
    """Adds up how many records the log's batch headers count in a split."""

    records: int = 0

    def __call__(self, records: int) -> None:
        self.records += records


@dataclass(frozen=True)
class SplitInput:
    """One split of one partition's records in a batch.

    It holds the offsets ``[start_offset, end_offset)``; ``batches`` have columns offset, timestamp (ms, UTC)
    and value, in offset order, and key or headers if the source wants them; between them there may be
    punctuation, and archived records. ``arrived_ms`` is the largest timestamp before the split, where the
    event time is the time of arrival. ``details`` reads the columns of dead letters that the batches lack.
    ``counter`` has, after reading, the number of records by the log's batch headers.
    """

    partition: int
    split: int
    start_offset: int
    end_offset: int
    batches: Iterable[pa.RecordBatch | ArchivedRecords | PartitionPunctuation]
    arrived_ms: int = 0
    details: FullRecordReader | None = None
    counter: RecordCount | None = None

    def check(self, read: int) -> None:
        """Make sure that the number of records read is that of the log.

        Raises:
            CorruptionError: it differs; the batch must not be committed.
        """
        if self.counter is not None and self.counter.records != read:
            raise CorruptionError(
                f"The ledger does not balance: by the log there are {self.counter.records} records at "
                f"offsets [{self.start_offset}, {self.end_offset}) of partition {self.partition}, and "
                f"{read} were read. Nothing of this batch was committed. Please report this; the log "
                "still holds every event."
            )


@dataclass
class Ingest:
    """Runs the splits of one task through a source's edges."""

    source: SourcePlan
    buckets: Buckets
    ledger: TaskLedger = field(default_factory=TaskLedger)
    dead_letters: list[pl.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = RecordDecoder(self.source.values, self.source.fields, self.source.table_key)

    def run(self, splits: Iterable[SplitInput], planned: SourceTime) -> Iterator[FrameRow]:
        """Yield the task's frames, then its messages about time, then its ledger.

        ``planned`` is the planner's part of the batch's time; the splits' part is added to it.
        """
        self._decoder.several_partitions = planned.partition_count > 1
        dead_letters = DeadLetterCollector()
        out = make_routers(self.source.edges, self.buckets, self.ledger, dead_letters)
        times: list[SplitTime] = []
        for split in splits:
            with self.ledger.working(self.source.name):
                split_time, read = self._split(split, out, dead_letters)
            split.check(read)
            times.append(split_time)
            ranges = self.ledger.ranges.setdefault(self.source.name, {})
            ranges.setdefault(str(split.partition), []).append(
                (split.start_offset, split.end_offset, read)
            )
        for route in out:
            yield from route.frames(0)
        if self.dead_letters:
            yield from self.ledger.frames(PORT_DEAD_LETTERS, 0, pl.concat(self.dead_letters))
        yield from self._time_messages(replace(planned, splits=tuple(times)))
        yield self.ledger.report_row(0)

    def _split(
        self, split: SplitInput, out: Sequence[RowRouter], dead_letters: DeadLetterCollector
    ) -> tuple[SplitTime, int]:
        """Send a split's events down the edges; return its time, and the number of its records."""
        read = 0
        clock = make_split_clock(self.source.rule, self.source.number, split.partition, split.split)
        arrivals = ArrivalTimes(split.arrived_ms, monotonic=self.source.rule.settle_us is not None)
        for batch in split.batches:
            if isinstance(batch, PartitionPunctuation):
                clock.punctuate(batch.until_us)
                continue
            records = batch.records if isinstance(batch, ArchivedRecords) else batch
            read += records.num_rows
            self._note_arrival(records, split.partition)
            rows = self._rows(
                records, self._decoder.decode(batch, split.partition), split, arrivals
            )
            events = self._with_watermarks(clock, rows) if rows.height else rows
            own, emitted = _records_in(rows), _records_in(events)
            self.ledger.count(
                self.source.name,
                filtered=own - emitted,
                emitted=emitted,
                rows_out=events.height,
            )
            if events.height:
                latest_us = int(events[TIME].max())  # type: ignore[arg-type]
                self.ledger.note_event_time(self.source.topic, split.partition, latest_us)
                for route in out:
                    route.take(events)
                self.dead_letters += dead_letters.drain_with_records(
                    records, self.source.topic, split.partition, split.details
                )
        return clock.summary(), read

    def _note_arrival(self, batch: pa.RecordBatch, partition: int) -> None:
        if batch.num_rows:
            arrived_ms = batch.column("timestamp")[batch.num_rows - 1].value
            self.ledger.arrived_ms.setdefault(self.source.topic, {})[str(partition)] = arrived_ms

    def _with_watermarks(self, clock: SplitClock, rows: pl.DataFrame) -> pl.DataFrame:
        try:
            return clock.observe(rows)
        except pl.exceptions.PolarsError as error:
            raise self._failed("watermark", error) from error

    def _failed(self, what: str, error: Exception) -> UserCodeError:
        return UserCodeError(
            f"the {what} of {self.source.name!r} failed: {error_reason(error)}.",
            step=self.source.name,
        )

    def _rows(
        self, batch: pa.RecordBatch, decoded: Decoded, split: SplitInput, arrivals: ArrivalTimes
    ) -> pl.DataFrame:
        """Return the rows of one batch with their time; collect the dead letters."""
        table = polars_table(decoded.table)
        dead, good = decoded.errors, decoded.good
        arrived_us = arrivals.of_batch(batch)[good]
        timed = self._timed(table, arrived_us)
        # The log order identifies rows that fail in a step; edges drop it where it is not needed.
        timed = timed.hstack([self._order(batch, good, split.partition)])
        if self.source.arrived:
            timed = timed.hstack([pl.Series(ARRIVED, arrived_us)])
        timeless = self._invalid_times(timed, arrived_us)
        if timeless:
            own = timed[EXTRA].not_() if EXTRA in timed.columns else None
            dead = sorted(
                dead + [(int(good[at]), why) for at, why in timeless if own is None or own[at]]
            )
            timed = _without(timed, [at for at, _ in timeless], arrived_us)
        self.ledger.count(self.source.name, read=batch.num_rows, dead=len(dead))
        if dead and self.source.bad != "skip":
            self.dead_letters.append(self._dead_letter_rows(batch, split, dead))
        return timed

    def _timed(self, table: pl.DataFrame, arrived_us: Int64s) -> pl.DataFrame:
        """Add the event time."""
        if self.source.time is None:
            return table.hstack([pl.Series(TIME, arrived_us)])
        try:
            times = table.with_columns(self.source.time.alias(TIME))[TIME]
        except pl.exceptions.PolarsError as error:
            raise self._failed("time", error) from error
        event_times = epoch_us(times)
        if DELETED in table.columns:
            # A deletion has no columns but its key, so its time is that of its record.
            without = table[DELETED] & times.is_null()
            event_times = event_times.zip_with(~without, pl.Series(TIME, arrived_us))
        return table.hstack([event_times])

    def _invalid_times(self, timed: pl.DataFrame, arrived_us: Int64s) -> list[tuple[int, str]]:
        """Find the rows without a valid event time, with the reason."""
        try:
            return invalid_event_times(timed, arrived_us, self.source.rule)
        except pl.exceptions.PolarsError as error:
            raise self._failed("watermark", error) from error

    def _order(self, batch: pa.RecordBatch, good: Positions, partition: int) -> pl.Series:
        offsets = batch.column("offset").to_numpy()[good]
        last = int(offsets[-1]) if len(offsets) else 0
        # Refused, if the last has none; so all before it have one.
        at_last = log_order_of(self.source.topic_number, partition, last)
        return pl.Series(ORDER, offsets + (at_last - last))

    def _dead_letter_rows(
        self, batch: pa.RecordBatch, split: SplitInput, dead: list[tuple[int, str]]
    ) -> pl.DataFrame:
        return dead_letter_rows(
            batch,
            dead,
            topic=self.source.topic,
            partition=split.partition,
            step=self.source.name,
            details=split.details,
        )

    def _time_messages(self, seen: SourceTime) -> Iterator[FrameRow]:
        for port in self.source.time_ports:
            message = encode_message(
                {"to": port, "input": self.source.name, "source": seen.to_message()}
            )
            for bucket in self.buckets.numbers:
                yield self.ledger.time_message(port, bucket, message)


def _records_in(rows: pl.DataFrame) -> int:
    """Return how many records rows stand for: a record may have become several, or a dead one still have one."""
    return rows.height - (int(rows[EXTRA].sum()) if EXTRA in rows.columns else 0)


def _without(rows: pl.DataFrame, dead: Sequence[int], arrived_us: Int64s) -> pl.DataFrame:
    """Leave rows out that have no time; of captured changes it goes on that they are missing."""
    gone = np.zeros(rows.height, np.bool_)
    gone[dead] = True
    if KIND not in rows.columns:
        return filter_rows(rows, ~gone)
    there = pl.Series(~gone)
    spoilt = pl.Series(["spoil"]).new_from_index(0, rows.height)
    return rows.with_columns(
        rows[KIND].zip_with(there, spoilt).alias(KIND),
        rows[EXTRA] | ~there,
        rows[TIME].zip_with(there, pl.Series(arrived_us)).alias(TIME),
    )
