"""Runs a stage's kernels over one bucket of a batch, with its state in Spark's state store.

For streams that are given to Spark: the query is then the user's, and so is the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.kernels.frames import FrameRow
from millstream.kernels.keyhash import Buckets
from millstream.kernels.operator import run_names
from millstream.kernels.plan import StagePlan
from millstream.kernels.stage import run_stage
from millstream.spark.run_store import SparkRunStore, copies_folder

_swept: set[tuple[Path, int]] = set()  # what this worker process has swept already


@dataclass(frozen=True)
class StageRunner:
    """A stage's plan, and in which folder each machine has copies of its runs."""

    stage: StagePlan
    bucket_labels: Buckets
    copies: Path

    def run(
        self, bucket: int, rows: Iterable[Any], manifest: Any, parts: Any
    ) -> Iterator[FrameRow]:
        """Run one batch of one bucket; the states are Spark's handles."""
        state = _SparkBucketState(manifest, parts, copies_folder(self.copies), bucket)
        state.sweep(self.stage)
        frames = (FrameRow(row[0], row[1], bytes(row[2])) for row in rows)
        yield from run_stage(self.stage, bucket, self.bucket_labels, frames, state)


class _SparkBucketState:
    """A bucket's manifest in a value state of Spark's, and its runs in a map state."""

    def __init__(self, manifest: Any, parts: Any, copies: Path, bucket: int) -> None:
        self._state = manifest
        self._parts = parts
        self._copies = copies
        self._bucket = bucket
        stored = manifest.get()
        self._manifest = b"" if stored is None else bytes(stored[0])

    def manifest(self) -> bytes | None:
        return self._manifest or None

    def put_manifest(self, manifest: bytes) -> None:
        self._state.update((manifest,))

    def runs(self, key: str) -> SparkRunStore:
        return SparkRunStore(self._parts, self._copies, f"{key}-{self._bucket}-")

    def sweep(self, stage: StagePlan) -> None:
        """Once per worker and bucket: remove the copies that failed attempts left on disk."""
        mark = (self._copies, self._bucket)
        if mark in _swept or not self._copies.exists():
            return
        _swept.add(mark)
        manifest = json.loads(self._manifest) if self._manifest else {}
        for operator in stage.operators:
            self.runs(operator.key).sweep(run_names(manifest.get(operator.key)))
