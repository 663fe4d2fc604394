"""A stage on Spark: one transformWithState, whose processor runs the kernels bucket by bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from millstream.kernels.frames import FrameRow
from millstream.kernels.plan import StagePlan
from millstream.kernels.stage import run_stage
from millstream.spark.run_store import SparkRunStore
from millstream.spark.source import FRAME_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FrameOut = Row("port", "bucket", "frame")
_swept: set[tuple[Path, int, str]] = set()  # what this worker process has swept already


class StageProcessor(StatefulProcessor):
    """Translates between Spark's state calls and :func:`millstream.kernels.stage.run_stage`."""

    def __init__(
        self, stage: StagePlan, bucket_labels: tuple[int, ...], copies: Path, run: str
    ) -> None:
        self._stage = stage
        self._bucket_labels = bucket_labels
        self._copies = copies
        self._run = run

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._manifest = handle.getValueState("manifest", "manifest binary")
        self._parts = handle.getMapState("runs", "name string, part int", "bytes binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        bucket = int(key[0])
        frames = (FrameRow(row[0], row[1], bytes(row[2])) for row in rows)
        state = _SparkBucketState(self._manifest, self._parts, self._copies, bucket)
        state.sweep(self._run, self._stage)
        for row in run_stage(self._stage, bucket, self._bucket_labels, frames, state):
            yield _FrameOut(*row)

    def close(self) -> None:
        """Have nothing to close: opened copies serve the next batch."""


class _SparkBucketState:
    def __init__(self, manifest: Any, parts: Any, copies: Path, bucket: int) -> None:
        self._manifest = manifest
        self._parts = parts
        self._copies = copies
        self._bucket = bucket

    def manifest(self) -> bytes | None:
        stored = self._manifest.get()
        return None if stored is None else bytes(stored[0])

    def put_manifest(self, manifest: bytes) -> None:
        self._manifest.update((manifest,))

    def runs(self, port: int) -> SparkRunStore:
        return SparkRunStore(self._parts, self._copies, f"{port}-{self._bucket}-")

    def sweep(self, run: str, stage: StagePlan) -> None:
        """Once per worker, bucket and run of the app: remove what failed attempts left on disk."""
        mark = (self._copies, self._bucket, run)
        if mark in _swept or not self._copies.exists():
            return
        _swept.add(mark)
        stored = self.manifest()
        manifest = json.loads(stored) if stored else {}
        for port in stage.ports:
            runs = manifest.get(str(port), {}).get("runs", ())
            self.runs(port).sweep({entry[0] for entry in runs})


def add_stage(
    frames: DataFrame, stage: StagePlan, bucket_labels: tuple[int, ...], copies: Path, run: str
) -> DataFrame:
    """Put a stage behind the frames: a shuffle by bucket, then the operators."""
    processor = StageProcessor(stage, bucket_labels, copies, run)
    return frames.groupBy("bucket").transformWithState(
        statefulProcessor=processor,
        outputStructType=FRAME_SCHEMA,
        outputMode="Append",
        timeMode="None",
    )
