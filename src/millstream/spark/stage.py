"""A stage as one of Spark's stateful operators, for streams that are given to Spark (`to_spark()`).

The query is the user's there, and so is the checkpoint. The processor runs the kernels bucket by bucket.
A job that is run by us goes through its stages otherwise (`stages.py`).

Spark loads the processor in a process of its own only to ask which state it keeps. So this module
is light and the processor carries its plan packed; :mod:`millstream.spark.stage_runner` is loaded,
and the plan unpacked, where rows come in.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from millstream.spark.log_source import FRAME_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millstream.spark.stage_runner import StageRunner

_FrameOut = Row("port", "bucket", "frame")

# The columns of state. Given as text, each would be sent to the JVM to be parsed, in every batch.
_MANIFEST = StructType([StructField("manifest", BinaryType())])
_PART = StructType([StructField("name", StringType()), StructField("part", IntegerType())])
_BYTES = StructType([StructField("bytes", BinaryType())])


class StageProcessor(StatefulProcessor):
    """Hands the rows of a bucket to a :class:`StageRunner`, and what comes out to Spark."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._runner: StageRunner | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._manifest = handle.getValueState("manifest", _MANIFEST)
        self._parts = handle.getMapState("runs", _PART, _BYTES)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        if self._runner is None:
            self._runner = pickle.loads(self._packed)  # noqa: S301 - made by add_stage, in this job
        for row in self._runner.run(int(key[0]), rows, self._manifest, self._parts):
            yield _FrameOut(row.port, row.bucket, bytes(row.frame))

    def close(self) -> None:
        """Have nothing to close: opened copies serve the next batch."""


def add_stage(frames: DataFrame, runner: StageRunner, partitions: int) -> DataFrame:
    """Put a stage behind the frames: a shuffle by bucket, then the operators.

    ``partitions`` is the number of Spark partitions that state is in. Where it is one, nothing is
    shuffled: one task takes a batch from the source through all stages. That costs a large batch
    the cores that would have read it together; a small one took a fifth less time.
    """
    from pyspark import cloudpickle  # noqa: PLC0415 - see the module

    if partitions == 1:
        frames = frames.coalesce(1)
    packed: bytes = cloudpickle.dumps(runner)  # type: ignore[no-untyped-call]
    return frames.groupBy("bucket").transformWithState(
        statefulProcessor=StageProcessor(packed),
        outputStructType=FRAME_SCHEMA,
        outputMode="Append",
        timeMode="None",
    )
