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
from millstream.spark.frame_files import FrameFiles
from millstream.spark.newest_run import require_newest
from millstream.spark.run_files import FileRunStore, RunFiles
from millstream.spark.run_store import SparkRunStore, copies_folder

_swept: set[tuple[Path, int, int]] = set()  # what this worker process has swept already


@dataclass(frozen=True)
class StageRunner:
    """A stage's plan, where its runs lie, and where large frames do.

    ``number`` is that of this run of the app. It is None for a stream that is given to Spark, whose runs
    lie in the state store; in ``runs`` each machine then has a folder for its copies.
    """

    stage: StagePlan
    bucket_labels: tuple[int, ...]
    runs: Path
    number: int | None
    frame_files: FrameFiles

    def run(
        self, bucket: int, rows: Iterable[Any], manifest: Any, parts: Any
    ) -> Iterator[FrameRow]:
        """Run one batch of one bucket; the states are Spark's handles."""
        if self.number is not None:
            require_newest(self.runs, self.number)
        folder = copies_folder(self.runs) if self.number is None else self.runs
        state = _SparkBucketState(manifest, parts, folder, bucket, self.number)
        state.sweep(self.stage)
        frames = self._frames(FrameRow(row[0], row[1], bytes(row[2])) for row in rows)
        made = run_stage(self.stage, bucket, self.bucket_labels, frames, state)
        yield from map(self.frame_files.put, made)

    def _frames(self, rows: Iterable[FrameRow]) -> Iterator[FrameRow]:
        """Open the frames that this stage takes; others pass as they came."""
        taken = {port for operator in self.stage.operators for port in operator.ports}
        for row in rows:
            yield self.frame_files.get(row) if row.port in taken else row


class _SparkBucketState:
    """A bucket's manifest in a value state of Spark's, with what is to be known of files behind it."""

    def __init__(self, manifest: Any, parts: Any, runs: Path, bucket: int, run: int | None) -> None:
        self._state = manifest
        self._parts = parts
        self._folder = runs
        self._bucket = bucket
        stored = manifest.get()
        self._manifest, _, left = (b"" if stored is None else bytes(stored[0])).partition(b"\n")
        self._files = None if run is None else RunFiles(runs, run, json.loads(left or b"{}"))

    def manifest(self) -> bytes | None:
        return self._manifest or None

    def put_manifest(self, manifest: bytes) -> None:
        if self._files is not None:
            self._files.settle()
            left = json.dumps(self._files.left, separators=(",", ":"))
            manifest = manifest + b"\n" + left.encode()
        self._state.update((manifest,))

    def runs(self, port: int) -> FileRunStore | SparkRunStore:
        prefix = f"{port}-{self._bucket}-"
        if self._files is None:
            return SparkRunStore(self._parts, self._folder, prefix)
        return FileRunStore(self._parts, self._files, prefix)

    def sweep(self, stage: StagePlan) -> None:
        """Once per worker, bucket and run of the app: remove what failed attempts left on disk."""
        mark = (self._folder, self._bucket, -1 if self._files is None else self._files.run)
        if mark in _swept or not self._folder.exists():
            return
        _swept.add(mark)
        manifest = json.loads(self._manifest) if self._manifest else {}
        for operator in stage.operators:
            self.runs(operator.port).sweep(run_names(manifest.get(str(operator.port))))
