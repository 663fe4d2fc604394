"""What Spark takes for itself: a Python source and stateful Python stages that do next to nothing.

The session, the shape of the query and its sink are those of ours: a source that a Python worker
reads, stages with a value of state for each of four keys, and a sink that collects. So what a batch
takes here is the floor for whoever builds stages in Python on Spark in the plain way.
"""

# ruff: noqa: ARG002, N802, N803 - the methods and their arguments are Spark's

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _measure import Meter
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

SCHEMA = "port int, bucket int, frame binary"
_KEYS = 4


class BareReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Gives so many batches of one row per key."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> Any:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"at": min(start["at"] + 1, self.batches)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(end["at"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int, bytes]]:
        for key in range(_KEYS):
            yield (8, key, b"")


class BareSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return BareReader(int(self.options["batches"]))


class BareStage(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.held = handle.getValueState("held", "held binary")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.held.update((b"",))
        for row in rows:
            yield Row(port=row[0], bucket=row[1], frame=row[2])

    def close(self) -> None:
        pass


def bare(folder: Path, stages: int, batches: int, cores: int) -> Meter:
    """Run the query; give the moments at which its batches ended, with the CPU used."""
    from millstream.spark.runtime.session import start_session, stop_session

    spark = start_session("bare", folder=folder / "bare", cores=cores)
    spark.dataSource.register(BareSource)
    frames = spark.readStream.format("bare").option("batches", batches).load()
    for _ in range(stages):
        frames = frames.groupBy("bucket").transformWithState(BareStage(), SCHEMA, "Append", "None")
    meter = Meter()

    def take(frame: Any, _batch_id: int) -> None:
        frame.collect()
        meter.mark()

    writer = frames.writeStream.foreachBatch(take).outputMode("append")
    writer = writer.option("checkpointLocation", str(folder / f"bare-checkpoint{stages}"))
    writer.trigger(availableNow=True).start().awaitTermination()
    stop_session(spark)
    return meter
