"""Between frames and Spark's own rows: native steps, DataFrames taken in, streams given out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.errors import ConfigError
from millstream.kernels.arrivals import NO_TIME, epoch_us
from millstream.kernels.frames import (
    DIFF,
    DIFF_COLUMN,
    PORT_DEAD,
    TIME,
    FrameRow,
    arrow_table,
    decode_frame,
    encode_message,
    polars_table,
)
from millstream.kernels.keyhash import Buckets
from millstream.kernels.plan import FramePlan, NativePlan, Way
from millstream.kernels.rejects import Rejected, Rejects
from millstream.kernels.routing import Books, routes
from millstream.kernels.watermarks import UNSEEN, LaneTime, SourceTime, held_back
from millstream.spark.frame_files import FrameFiles
from millstream.spark.log_source import FRAME_SCHEMA
from millstream.spark.source import record_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# ── out ─────────────────────────────────────────────────────────────────────────────────────


def rows_of(frames: DataFrame, port: int, schema: pa.Schema, frame_files: FrameFiles) -> DataFrame:
    """Give the rows of one port as a DataFrame with typed columns.

    A column ``_diff`` of the schema says +1 for a row that is given, -1 for one taken back.
    """

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for frame in batch.column(0):
                table = decode_frame(frame_files.open(frame.as_py()))
                if DIFF in table.columns:
                    table = table.rename({DIFF: DIFF_COLUMN})
                elif DIFF_COLUMN in schema.names and DIFF_COLUMN not in table.columns:
                    table = table.with_columns(pl.lit(1, pl.Int8).alias(DIFF_COLUMN))
                plain = arrow_table(table.select(schema.names), pl.CompatLevel.oldest())
                yield from plain.cast(schema).to_batches()

    spark_schema = from_arrow_schema(schema)
    return frames.where(F.col("port") == port).select("frame").mapInArrow(unpack, spark_schema)


# ── through ─────────────────────────────────────────────────────────────────────────────────


def add_native(
    frames: DataFrame,
    native: NativePlan,
    bucket_labels: Buckets,
    frame_files: FrameFiles,
) -> DataFrame:
    """Run a native step on the rows of its port; what is for other ports goes by beside it.

    Spark plans the two ways apart, so what stands before a native step is read twice.
    """
    result = native.function(rows_of(frames, native.port, native.schema_in, frame_files))
    way = _WayIn(native.name, native.time, 0, native.edges, None, bucket_labels, frame_files)
    packed = result.select(*native.schema_out.names).mapInArrow(_packer(way), FRAME_SCHEMA)
    return frames.where(F.col("port") != native.port).unionByName(packed)


# ── in ──────────────────────────────────────────────────────────────────────────────────────


def streaming_schema(frame: Any) -> pa.Schema:
    """Give the Arrow schema of a streaming DataFrame.

    Raises:
        ConfigError: it is no DataFrame, or no streaming one, or has a type that polars has not.
    """
    if not hasattr(frame, "isStreaming"):
        raise ConfigError(
            f"from_spark is given {frame!r}. Give a streaming DataFrame: app.spark_session()"
            ".readStream…load()."
        )
    if not frame.isStreaming:
        raise ConfigError(
            "from_spark is given a batch DataFrame: a stream reads what comes, not what is there. "
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


def add_frame(
    frames: DataFrame, source: FramePlan, bucket_labels: Buckets, frame_files: FrameFiles
) -> DataFrame:
    """Put the rows of a DataFrame of the user's, and what they say of time, beside the frames."""
    way = _WayIn(
        source.name,
        source.time,
        source.delay_us,
        source.edges,
        source.time_ports,
        bucket_labels,
        frame_files,
    )
    rows = source.frame.select(*source.schema.names)
    packed = rows.mapInArrow(_packer(way), FRAME_SCHEMA)
    return frames.unionByName(packed)


# ── from rows to frames ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _WayIn:
    """Where Spark's rows go: what of a plan can travel to the workers.

    ``delay_us`` is how far their watermark stays behind them; ``time_ports`` is None where the rows come from a native step, which tells nothing of time.
    """

    name: str
    time: pl.Expr
    delay_us: int
    edges: tuple[Way, ...]
    time_ports: tuple[int, ...] | None
    bucket_labels: Buckets
    frame_files: FrameFiles


def _packer(way: _WayIn) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that takes a task's rows down the edges."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from record_batches(map(way.frame_files.put, _Packing(way).run(batches)))

    return pack


@dataclass
class _Packing:
    """Takes the rows of one task of Spark's down the edges; those of a source tell of time, too."""

    way: _WayIn
    books: Books = field(default_factory=Books)
    rejects: Rejects = field(default_factory=Rejects)
    dead: list[pl.DataFrame] = field(default_factory=list)
    time_us_max: int = UNSEEN

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[FrameRow]:
        """Yield the task's frames, then what it saw of time, then its books."""
        out = routes(self.way.edges, self.way.bucket_labels, self.books, self.rejects)
        for batch in batches:
            rows = self._timed(polars_table(pa.Table.from_batches([batch])))
            for route in out if rows.height else ():
                route.take(rows)
            self.dead += self.rejects.of_rows()
        home = self.way.bucket_labels[0]
        for route in out:
            yield from route.frames(home)
        if self.dead:
            yield self.books.frame(PORT_DEAD, home, pl.concat(self.dead))
        if self.time_us_max > UNSEEN:
            yield from self._time_rows()
        yield self.books.frame_row(home)

    def _timed(self, table: pl.DataFrame) -> pl.DataFrame:
        """Give rows their event time; put those aside that have none."""
        times = table.with_columns(self.way.time.alias(TIME))[TIME]
        table = table.hstack([epoch_us(times)])
        rows = table.drop_nulls(TIME)
        timeless = table.filter(pl.col(TIME).is_null())
        self.books.count(self.way.name, made=rows.height)
        if self.way.time_ports is not None:
            self.books.count(self.way.name, read=rows.height, emitted=rows.height)
        if timeless.height:
            self.books.count(self.way.name, read=timeless.height, dead=timeless.height)
            reasons = [NO_TIME] * timeless.height
            self.rejects.rejected.append(Rejected(self.way.name, timeless, reasons))
        if rows.height:
            self.time_us_max = max(self.time_us_max, int(rows[TIME].max()))  # type: ignore[arg-type]
        return rows

    def _time_rows(self) -> Iterator[FrameRow]:
        """Tell every bucket the watermark: all tasks of a DataFrame are one partition."""
        reached_us = held_back(self.time_us_max, self.way.delay_us)
        seen = SourceTime((LaneTime(0, 0, reached_us),), 1, frozenset())
        for port in self.way.time_ports or ():
            message = encode_message(
                {"to": port, "input": self.way.name, "source": seen.to_message()}
            )
            for label in self.way.bucket_labels:
                yield self.books.message(port, label, message)
