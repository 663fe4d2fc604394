"""Between frames and Spark's own rows: native steps, and streams given out as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.kernels.frames import TIME, decode_frame, polars_table
from millstream.kernels.plan import NativePlan
from millstream.kernels.routing import Books, routes
from millstream.spark.log_source import FRAME_SCHEMA
from millstream.spark.source import record_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def rows_of(frames: DataFrame, port: int, schema: pa.Schema) -> DataFrame:
    """Give the rows of one port as a DataFrame with typed columns."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for frame in batch.column(0):
                table = decode_frame(frame.as_py()).select(schema.names)
                plain = table.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)
                yield from plain.to_batches()

    spark_schema = from_arrow_schema(schema)
    return frames.where(F.col("port") == port).select("frame").mapInArrow(unpack, spark_schema)


def add_native(frames: DataFrame, native: NativePlan, bucket_labels: tuple[int, ...]) -> DataFrame:
    """Run a native step on the rows of its port; what is for other ports goes by beside it.

    Spark plans the two ways apart, so what stands before a native step is read twice.
    """
    result = native.function(rows_of(frames, native.port, native.schema_in))
    columns = native.schema_out.names

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        books = Books()
        out = routes(native.edges, bucket_labels, books)
        for batch in batches:
            table = polars_table(pa.Table.from_batches([batch]))
            rows = table.with_columns(native.time.dt.epoch("us").alias(TIME))
            for route in out:
                route.take(rows)
        home = bucket_labels[0]
        framed = [row for route in out for row in route.frames(home)]
        yield from record_batches(iter([*framed, books.frame_row(home)]))

    packed = result.select(*columns).mapInArrow(pack, FRAME_SCHEMA)
    return frames.where(F.col("port") != native.port).unionByName(packed)
