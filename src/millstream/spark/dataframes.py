"""Between frames and Spark's own rows: native steps, DataFrames as sources, streams as DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.engine.frame_files import FrameFiles
from millstream.engine.source.planner import record_batches
from millstream.errors import ConfigError
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector, FailedRows
from millstream.kernels.frames import (
    PORT_DEAD_LETTERS,
    TIME,
    FrameRow,
    arrow_table,
    decode_frame,
    encode_message,
    polars_table,
)
from millstream.kernels.plan import DataFramePlan, NativePlan, PlanEdge
from millstream.kernels.routing import TaskLedger, make_routers
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.time.arrival_times import NO_TIME, epoch_us
from millstream.kernels.time.watermarks import (
    NO_WATERMARK,
    SourceTime,
    SplitTime,
    delayed_watermark,
)
from millstream.spark.data_source import FRAME_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# ── out ─────────────────────────────────────────────────────────────────────────────────────


def to_dataframe(
    frames: DataFrame, port: int, schema: pa.Schema, frame_files: FrameFiles
) -> DataFrame:
    """Return the rows of one port as a DataFrame with typed columns."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for frame in batch.column(0):
                table = decode_frame(frame_files.open(frame.as_py()))
                plain = arrow_table(table.select(schema.names), pl.CompatLevel.oldest())
                yield from plain.cast(schema).to_batches()

    spark_schema = from_arrow_schema(schema)
    return frames.where(F.col("port") == port).select("frame").mapInArrow(unpack, spark_schema)


# ── through ─────────────────────────────────────────────────────────────────────────────────


def add_native_step(
    frames: DataFrame,
    native: NativePlan,
    buckets: Buckets,
    frame_files: FrameFiles,
) -> DataFrame:
    """Run a native step on the rows of its port; rows of other ports bypass it.

    Spark plans the two branches separately, so what is upstream of a native step is read twice.
    """
    result = native.function(to_dataframe(frames, native.port, native.schema_in, frame_files))
    edges = _InputEdges(native.name, native.time, 0, native.edges, None, buckets, frame_files)
    packed = result.select(*native.schema_out.names).mapInArrow(_frame_builder(edges), FRAME_SCHEMA)
    return frames.where(F.col("port") != native.port).unionByName(packed)


# ── in ──────────────────────────────────────────────────────────────────────────────────────


def streaming_schema(frame: Any) -> pa.Schema:
    """Return the Arrow schema of a streaming DataFrame.

    Raises:
        ConfigError: it is not a streaming DataFrame, or has a type that polars lacks.
    """
    if not hasattr(frame, "isStreaming"):
        raise ConfigError(
            f"from_spark is given {frame!r}. Give a streaming DataFrame: app.spark_session()"
            ".readStream…load()."
        )
    if not frame.isStreaming:
        raise ConfigError(
            "from_spark is given a batch DataFrame, which has no new rows to read. "
            "Read it with readStream, or send its rows to a topic once."
        )
    try:
        schema = frame.sparkSession.createDataFrame([], frame.schema).toArrow().schema
        polars_table(schema.empty_table())
    except Exception as error:  # PySpark and polars each have errors of their own for this
        raise ConfigError(
            f"from_spark is given columns of types that it cannot take: {error}. Cast them first, "
            "such as a map or an interval to a string."
        ) from error
    return schema


def add_dataframe(
    frames: DataFrame, source: DataFramePlan, buckets: Buckets, frame_files: FrameFiles
) -> DataFrame:
    """Add the rows of a DataFrame of the user's, and their watermark, to the frames."""
    edges = _InputEdges(
        source.name,
        source.time,
        source.delay_us,
        source.edges,
        source.time_ports,
        buckets,
        frame_files,
    )
    rows = source.frame.select(*source.schema.names)
    packed = rows.mapInArrow(_frame_builder(edges), FRAME_SCHEMA)
    return frames.unionByName(packed)


# ── from rows to frames ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _InputEdges:
    """Where Spark's rows go: the part of a plan that is sent to the workers.

    ``delay_us`` is the delay of their watermark; ``time_ports`` is None for the rows of a native step, which
    has no watermark of its own.
    """

    name: str
    time: pl.Expr
    delay_us: int
    edges: tuple[PlanEdge, ...]
    time_ports: tuple[int, ...] | None
    buckets: Buckets
    frame_files: FrameFiles


def _frame_builder(
    edges: _InputEdges,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that routes a task's rows along the edges."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from record_batches(map(edges.frame_files.put, _FrameBuilder(edges).run(batches)))

    return pack


@dataclass
class _FrameBuilder:
    """Routes the rows of one task of Spark's along the edges, and reports the watermark of a source."""

    edges: _InputEdges
    ledger: TaskLedger = field(default_factory=TaskLedger)
    dead_letters: DeadLetterCollector = field(default_factory=DeadLetterCollector)
    dead_rows: list[pl.DataFrame] = field(default_factory=list)
    time_us_max: int = NO_WATERMARK

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[FrameRow]:
        """Yield the task's frames, then its messages about time, then its report for the ledger."""
        routers = make_routers(self.edges.edges, self.edges.buckets, self.ledger, self.dead_letters)
        for batch in batches:
            rows = self._with_event_time(polars_table(pa.Table.from_batches([batch])))
            for router in routers if rows.height else ():
                router.take(rows)
            self.dead_rows += self.dead_letters.drain_rows()
        for router in routers:
            yield from router.frames(0)
        if self.dead_rows:
            yield from self.ledger.frames(PORT_DEAD_LETTERS, 0, pl.concat(self.dead_rows))
        if self.time_us_max > NO_WATERMARK:
            yield from self._time_rows()
        yield self.ledger.report_row(0)

    def _with_event_time(self, table: pl.DataFrame) -> pl.DataFrame:
        """Add the event time to rows; rows without one become dead letters."""
        times = table.with_columns(self.edges.time.alias(TIME))[TIME]
        table = table.hstack([epoch_us(times)])
        rows = table.drop_nulls(TIME)
        timeless = table.filter(pl.col(TIME).is_null())
        self.ledger.count(self.edges.name, rows_out=rows.height)
        if self.edges.time_ports is not None:
            self.ledger.count(self.edges.name, read=rows.height, emitted=rows.height)
        if timeless.height:
            self.ledger.count(self.edges.name, read=timeless.height, dead=timeless.height)
            reasons = [NO_TIME] * timeless.height
            self.dead_letters.failed.append(FailedRows(self.edges.name, timeless, reasons))
        if rows.height:
            self.time_us_max = max(self.time_us_max, int(rows[TIME].max()))  # type: ignore[arg-type]
        return rows

    def _time_rows(self) -> Iterator[FrameRow]:
        """Yield the watermark for every bucket: all tasks of a DataFrame are one partition."""
        watermark_us = delayed_watermark(self.time_us_max, self.edges.delay_us)
        seen = SourceTime((SplitTime(0, 0, watermark_us),), 1, frozenset())
        for port in self.edges.time_ports or ():
            message = encode_message(
                {"to": port, "input": self.edges.name, "source": seen.to_message()}
            )
            for bucket in self.edges.buckets.numbers:
                yield self.ledger.time_message(port, bucket, message)
