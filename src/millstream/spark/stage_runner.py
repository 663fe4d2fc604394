"""Runs a stage's kernels over one bucket of a batch, with its state in Spark's state store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.kernels.frames import FrameRow
from millstream.kernels.operator import run_names
from millstream.kernels.plan import StagePlan
from millstream.kernels.stage import run_stage
from millstream.spark.run_store import SparkRunStore, copies_folder

_swept: set[tuple[Path, int, str]] = set()  # what this worker process has swept already


@dataclass(frozen=True)
class StageRunner:
    """A stage's plan, and where machines keep copies of its runs. ``run_name`` names this run of the app."""

    stage: StagePlan
    bucket_labels: tuple[int, ...]
    copies: Path
    run_name: str

    def run(
        self, bucket: int, rows: Iterable[Any], manifest: Any, parts: Any
    ) -> Iterator[FrameRow]:
        """Run one batch of one bucket; the states are Spark's handles."""
        copies = copies_folder(self.copies, self.run_name)
        state = _SparkBucketState(manifest, parts, copies, bucket)
        state.sweep(self.run_name, self.stage)
        frames = (FrameRow(row[0], row[1], bytes(row[2])) for row in rows)
        yield from run_stage(self.stage, bucket, self.bucket_labels, frames, state)


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
        for operator in stage.operators:
            retained = run_names(manifest.get(str(operator.port)))
            self.runs(operator.port).sweep(retained)
