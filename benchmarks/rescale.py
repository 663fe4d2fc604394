"""A rescale of large state: the time to its first commit, what it writes, and what later batches cost.

One operator keeps counts and sums by key in open windows, and emits each key that a batch touches. State of ``--gib`` is
loaded in ``--before`` buckets; then come batches of 20,000 random keys, the rescale to ``--after`` buckets, and
batches of the same kind. It is the job's own stages, state store and sinks, in this process, without Spark's planning
and without its start, which `restart.py` measures: both are the same with a rescale and without. With ``--fresh``
the same is loaded in the buckets ``--after`` from the start, to compare the later batches.

    python benchmarks/rescale.py [--gib 10] [--before 4] [--after 16] [--fresh] [--folder F]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from _measure import tree_cpu_s

import millstream as ms
from millstream.engine.frame_files import FrameFiles
from millstream.engine.job_metadata import JobMetadata, load_job_metadata
from millstream.engine.rescale import divide_state, rescale
from millstream.engine.stages import executor
from millstream.engine.stages.executor import StageExecutor
from millstream.engine.stages.journal_place import JournalPlace
from millstream.kernels.decode.archive_columns import ArchivedRecords
from millstream.kernels.ingest import Ingest, SplitInput
from millstream.kernels.state.keyhash import Buckets
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer
from millstream.views.sink import RunStart
from millstream.views.store_location import STATE_STORE_FILE

START = datetime(2026, 1, 1, tzinfo=UTC)
WINDOWS = 24
BATCH_KEYS = 20_000
LOAD_ROWS = 2_000_000


@dataclass
class Event:
    at: datetime
    k: int
    v: float


@dataclass
class Took:
    """What some work took: seconds, CPU seconds, and bytes of files that were written."""

    s: float
    cpu_s: float
    bytes_written: int


def discard(_rows: object, _context: object) -> None:
    """Do nothing with the rows."""


def declared(buckets: int) -> ms.App:
    app = ms.App("grown", log="unused", buckets=buckets)
    stream = app.topic("events", Event, partitions=1).stream(
        time="at", watermark=ms.watermark("2 days", idle=None)
    )
    windows = stream.window(ms.tumbling("1 hour"), by="k").emit("update")
    windows.agg(n=ms.count(), s=ms.sum("v"), most=ms.max("v")).foreach(discard)
    return app


class Source:
    """The events of batches, as columns: what a source's task gives of them."""

    def __init__(self, plan, folder: Path) -> None:
        self.plan = plan
        self.engine = KernelEngine(plan, folder, {"events": 1}, random.Random(1))
        self.offset = 0

    def batch(self, keys: np.ndarray, hours: np.ndarray) -> list:
        """Return the frames of one batch: a key with a time in an hour for each event."""
        first, self.offset = self.offset, self.offset + len(keys)
        times = hours * 3_600_000_000 + int(START.timestamp()) * 1_000_000
        fields = {
            "at": pa.array(times, pa.int64()).cast(pa.timestamp("us", "UTC")),
            "k": pa.array(keys, pa.int64()),
            "v": pa.array(keys * 0.5),
        }
        offsets = np.arange(first, self.offset)
        records = pa.record_batch(
            {"offset": pa.array(offsets), "timestamp": fields["at"].cast(pa.timestamp("ms", "UTC"))}
        )
        none = np.empty(0, np.int64)
        archived = ArchivedRecords(records, pa.table(fields), none, pa.array([], pa.binary()))
        split = SplitInput(0, 0, first, self.offset, [archived])
        source = self.plan.sources[0]
        return list(Ingest(source, self.plan.buckets).run([split], self.engine._planned(source)))  # noqa: SLF001


class App:
    """An app in a folder, whose batches are run here."""

    def __init__(self, folder: Path, declared_buckets: int) -> None:
        self.folder, self.app = folder, declared(declared_buckets)
        self.declared_buckets = declared_buckets
        self.offset, self.batch_id = 0, 0

    @contextmanager
    def run(self) -> Iterator[App]:
        """Begin a run: with the manifests of the buckets that are wanted."""
        first = JobMetadata(self.declared_buckets, 2, 2, 5)
        metadata = load_job_metadata("grown", self.folder / STATE_STORE_FILE) or first
        plan = self.app.job().compile(Buckets(metadata.bucket_count, 5))
        with open_committer(plan, self.folder / STATE_STORE_FILE, self.folder) as committer:
            next_id = committer.begin_run("main", "checkpoint", partitioning=metadata.partitioning)
            start = RunStart("grown", "main", committer.run, "checkpoint")
            journals = JournalPlace(self.folder / "runs")
            store = committer.state_store
            divide_state(store, start, plan, metadata, next_batch_id=next_id, journals=journals)
            self.source = Source(plan, self.folder)
            self.source.offset = self.offset
            self.plan, self.committer = plan, committer
            self.stages = StageExecutor(
                plan,
                self.folder / "runs",
                committer.run,
                FrameFiles(None),
                2,
                None,
                store.state_manifests("grown", "main"),
            )
            yield self
            self.offset = self.source.offset

    def batch(self, keys: np.ndarray, hours: np.ndarray) -> None:
        """Run and commit one batch."""
        frames = self.source.batch(keys, hours)
        rows, state = self.stages.run(self.batch_id, frames)
        self.committer.commit(self.batch_id, collect_results(self.plan, rows), {}, state)
        self.stages.on_commit()
        self.batch_id += 1

    @property
    def files(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self.folder / "runs").glob("*-*")}

    @property
    def named_bytes(self) -> int:
        """What the manifests are in all."""
        return sum(map(len, self.stages.manifests.values()))


@contextmanager
def timed(app: App, into: list[Took]) -> Iterator[None]:
    before, began, cpu_s = app.files, time.monotonic(), tree_cpu_s()
    yield
    took, cpu_s = time.monotonic() - began, tree_cpu_s() - cpu_s
    new = sum(size for name, size in app.files.items() if name not in before)
    into.append(Took(took, cpu_s, new))


def load(app: App, gib: float) -> int:
    """Load windows of so much state; return how many keys each has."""
    app.batch(np.arange(BATCH_KEYS * 5), np.zeros(BATCH_KEYS * 5, np.int64))
    row_bytes = sum(app.files.values()) / (BATCH_KEYS * 5)
    keys, dice = int(gib * 2**30 / row_bytes / WINDOWS), np.random.default_rng(1)
    for hour in range(WINDOWS):  # each in few large batches, so that loading folds little
        order = dice.permutation(keys)
        for start in range(0, keys, LOAD_ROWS):
            part = order[start : start + LOAD_ROWS]
            app.batch(part, np.full(len(part), hour))
    return keys


def small_batches(app: App, keys: int, count: int) -> list[Took]:
    dice, took = np.random.default_rng(app.batch_id), []
    for _ in range(count):
        wanted = dice.integers(0, keys, BATCH_KEYS), dice.integers(0, WINDOWS, BATCH_KEYS)
        with timed(app, took):
            app.batch(*wanted)
    return took


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    app = App(folder, options.after if options.fresh else options.before)
    with app.run():
        began, cpu_s = time.monotonic(), tree_cpu_s()
        keys = load(app, options.gib)
        loaded = {"load_s": time.monotonic() - began, "load_cpu_s": tree_cpu_s() - cpu_s}
        loaded["state_gib"] = sum(app.files.values()) / 2**30
        before, manifests = small_batches(app, keys, options.batches), app.named_bytes
    result: dict[str, object] = {"keys": keys * WINDOWS, **loaded}
    result["before"] = summary(before) | {"manifest_kib": manifests / 1024}
    if options.fresh:
        return result
    first: list[Took] = []
    began, cpu_s = time.monotonic(), tree_cpu_s()
    with timed(app, first):
        rescale("grown", folder, buckets=options.after)
        with app.run():
            ready = Took(time.monotonic() - began, tree_cpu_s() - cpu_s, 0)
            dice = np.random.default_rng(0)
            app.batch(dice.integers(0, keys, BATCH_KEYS), dice.integers(0, WINDOWS, BATCH_KEYS))
    with app.run():
        later = small_batches(app, keys, options.batches)
        result["until the first batch"] = vars(ready)
        result["first commit"] = vars(first[0])
        result["after"] = summary(later) | {"manifest_kib": app.named_bytes / 1024}
        result["after, one by one, cpu_ms"] = [round(each.cpu_s * 1000) for each in later]
    return result


def summary(took: list[Took]) -> dict[str, float]:
    cpu_ms = sorted(each.cpu_s * 1000 for each in took)
    return {
        "cpu_ms": statistics.median(cpu_ms),
        "cpu_ms_max": cpu_ms[-1],
        "ms": statistics.median(each.s * 1000 for each in took),
        "mib_written": statistics.median(each.bytes_written for each in took) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=10)
    parser.add_argument("--before", type=int, default=4)
    parser.add_argument("--after", type=int, default=16)
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    executor.DRIVER_BYTES_MAX = 1 << 40  # there are no executors: large batches are run here, too
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps(measure(folder, options), indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
