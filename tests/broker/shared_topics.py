"""Topics that tasks write, for the tests of them: a job with outputs, its runs, crashes and what it should have written."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import polars as pl
from task_attempts import Attempts

from millstream.client import connect
from millstream.kernels.frames import (
    DIFF,
    ORDER,
    PORT_LEDGER,
    TIME,
    FrameRow,
    encode_frame,
    encode_message,
)
from millstream.kernels.plan import JobPlan, SinkPlan, TopicSinkSpec
from millstream.kernels.state.keyhash import Buckets
from millstream.spark.output_tasks import OutputTasks
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import collect_results
from millstream.views.commit.open_committer import open_committer

SCHEMA = {"k": pl.String(), "v": pl.Int64()}
VALUE = ("k", "v")
START_US = 1_000_000 * int(time.time())  # young enough not to be compacted
HIDDEN = {TIME: pl.Int64(), ORDER: pl.Int64()}


def sinks_of(prefix, partitions, outputs):
    """Give the plans of outputs, by name: "keyed", "unkeyed", "compacted" or "bytes"."""
    for port, name in enumerate(outputs, start=8):
        cleanup = "compact" if name == "compacted" else "delete"
        key = None if name == "unkeyed" else "k"
        value = "k" if name == "bytes" else VALUE
        spec = TopicSinkSpec(f"{prefix}-{name}", key, value, partitions, cleanup)
        yield SinkPlan(name, port, (), tuple(SCHEMA.items()), spec)


def random_frames(generator, sinks, frames=5, rows=9, keys=7):
    """Make the frames of a batch: all outputs get the same rows, some of them without a key where that may be."""
    orders = list(range(frames * rows))
    generator.shuffle(orders)
    out, sent = [], dict.fromkeys((str(sink.port) for sink in sinks), 0)
    for _ in range(frames):
        own = [orders.pop() for _ in range(generator.randrange(1, rows + 1))]
        names = [generator.choice([*map(str, range(keys)), "ö" * 300]) for _ in own]
        times = [START_US + 1000 * generator.randrange(20) for _ in own]
        diffs = [generator.choice([1, 1, 1, -1]) for _ in own]
        for sink in sinks:
            nulls = sink.name == "keyed"
            kept = [None if nulls and generator.random() < 0.2 else name for name in names]
            columns = {"k": kept, "v": own, TIME: times, ORDER: own}
            table = pl.DataFrame(columns, schema={**SCHEMA, **HIDDEN})
            if sink.name in ("compacted", "bytes"):
                table = table.with_columns(pl.Series(DIFF, diffs, dtype=pl.Int64))
            out.append(FrameRow(sink.port, 0, encode_frame(table)))
            sent[str(sink.port)] += table.height
    return [*out, FrameRow(PORT_LEDGER, 0, encode_message({"steps": {}, "sent": sent}))]


class TopicJob:
    """A job whose outputs are topics behind ``address``, in the hands of tasks that Spark repeats."""

    def __init__(self, folder, address, prefix, *, seed=0, partitions=4, outputs=("keyed",)):
        self.folder, self.address, self.prefix = folder, address, prefix
        self.outputs = outputs
        self.generator = random.Random(seed)
        sinks = tuple(sinks_of(prefix, partitions, outputs))
        self.plan = JobPlan(prefix, (), (), (), sinks, Buckets(4, 77))
        self.dies_at, self.steps = None, 0
        self.opened = ExitStack()
        self.woken = []
        self.notices = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.close()

    def step(self):
        self.steps += 1
        if self.steps == self.dies_at:
            raise SimulatedCrash(f"at step {self.steps}")

    def start(self, *, tasks_write=True):
        """Begin a run, as after a crash: what an earlier one had running goes on at some time."""
        with connect(self.address) as log:
            for sink in self.plan.sinks:
                if sink.spec.cleanup == "compact":  # not before the test looks
                    settings = {"min.compaction.lag.ms": "3600000"}
                    log.create_topic(
                        sink.spec.topic,
                        partitions=sink.spec.partitions,
                        cleanup="compact",
                        settings=settings,
                        exist_ok=True,
                    )
        self.committer = self.opened.enter_context(
            open_committer(
                self.plan,
                self.folder / f"{self.prefix}.db",
                self.address,
                self.notices.append,
                tasks_write=tasks_write,
            )
        )
        self.next = self.committer.begin_run("main", "one")
        self.tasks = Attempts(self.generator, self.step)
        self.woken.append(self.tasks)
        (self.sink,) = self.committer.sinks
        self.outputs_in_tasks = OutputTasks(
            self.plan, self.tasks, self.committer.stager, self.notices.append
        )
        return self

    def batch(self, number):
        """Make the frames of a batch; the same ones each time."""
        return random_frames(random.Random(number), self.plan.sinks)

    def run(self, number, rows=None):
        """Commit a batch as a run does: in tasks, if the run has them."""
        rows = self.batch(number) if rows is None else rows
        left, staged = self.outputs_in_tasks.stage(number, rows)
        self.staged = staged
        return self.committer.commit(number, collect_results(self.plan, left, staged), {})

    def written(self, output):
        """Return what readers see of an output's topic: the records of each partition, in order."""
        return written(self.address, f"{self.prefix}-{output}")


def written(address, topic, columns=("key", "value", "timestamp", "headers")):
    with connect(address) as log:
        return [
            [
                tuple(repr(row[name]) if name == "headers" else row[name] for name in columns)
                for row in log.read(topic, number, columns=columns).to_pylist()
            ]
            for number in range(len(log.offsets(topic)))
        ]
