"""Runs a pipeline on given rows, and returns its outputs.

``engine="kernel"`` runs the same plan and kernels in this process, without a JVM: a batch takes some
tens of milliseconds. ``engine="spark"`` writes the rows to a log in a temporary folder and runs the real
job, and ``engine="local"`` does so without a JVM. All commit into a real view store, and have the same results.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl

from millstream.choices import choose, did_you_mean
from millstream.engine.stages.run_files import RunFiles
from millstream.errors import ConfigError
from millstream.kernels.decode.debezium_records import TransactionFormat
from millstream.kernels.patterns.partial_matches import PartialMatch
from millstream.kernels.plan import JobPlan
from millstream.kernels.routing import LEDGER_COUNTS, LEDGER_NOTES
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.memory_bucket import MemoryBucketState
from millstream.object_store.folder import FolderStore
from millstream.ops.partial_matches import OperatorPart, matches_in, operator_parts
from millstream.pipeline.app import App
from millstream.pipeline.app_run import runner_of
from millstream.testing.inputs import Inputs, items_of
from millstream.testing.job_engine import run_as_job
from millstream.testing.kernel_engine import KernelEngine
from millstream.testing.outputs import records, redirected, rows_of_dataset
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.schema import JOB
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore

Engine = Literal["kernel", "local", "spark"]
BucketStates = Mapping[tuple[int, int], MemoryBucketState]
"""By stage and bucket."""


class Result:
    """The outputs of a run: views and their changes, topics, datasets, dead letters, the ledger.

    They are in a temporary folder, which is deleted with this object.
    """

    def __init__(
        self, plan: JobPlan, folder: Path, views: Path, states: BucketStates | None = None
    ) -> None:
        self._plan = plan
        self._states = states
        self._app = plan.app
        self._folder = folder
        self._store = SqliteStateStore(views, readonly=True)
        self._clean_up = weakref.finalize(self, _clean_up, self._store, folder)

    def __getitem__(self, view: str) -> pl.DataFrame:
        """Return a view's rows, in the order of its key."""
        schema = next((s for s in self._store.views() if s.name == view), None)
        rows = self._store.scan(view)  # names the views there are, if it is none of them
        assert schema is not None
        return rows.sort(schema.key, nulls_last=False) if schema.key else rows

    @property
    def views(self) -> list[str]:
        """The names of the app's views."""
        return [s.name for s in self._store.views() if s.name != DEAD_LETTERS_VIEW]

    def changes(self, view: str) -> pl.DataFrame:
        """Return a view's changes, in the order in which they were committed."""
        return self._store.changes(view)

    def topic(self, name: str) -> pl.DataFrame:
        """Return the records of a topic that the app writes to, by partition and offset.

        Columns: partition, offset, key (as text), timestamp, and the fields of the JSON values, as
        JSON has them; or ``value`` where a column is the value. A field that has one of these names
        is called ``value.<name>``. Of a tombstone all fields are null.

        Raises:
            ConfigError: the app does not write to it; the message says to which it does.
        """
        return records(self._plan, self._folder, name)

    def dataset(self, name: str) -> pl.DataFrame:
        """Return the rows of a dataset that the app writes, named by the last part of its path.

        Raises:
            ConfigError: the app writes no such dataset; the message says which it does.
        """
        return rows_of_dataset(self._plan, self._folder, name)

    def partial_matches(self, step: str | None = None, **key: Any) -> list[PartialMatch]:
        """Return the partial matches of patterns at the end: their rows, what they wait for, when their time is over.

        Only of a step, or of keys with these values, if they are given.

        Raises:
            ConfigError: the app has no such pattern, or its key no such column.
        """
        return [*matches_in(self._plan, self._bucket_states(), step, key)]

    def _bucket_states(self) -> Iterator[OperatorPart]:
        if self._states is None:
            runs = RunFiles(FolderStore(self._folder / "apps" / self._app / "runs"), 0)
            yield from operator_parts(
                self._plan, self._store.state_manifests(self._app, JOB), lambda *_: runs
            )
            return
        manifests = {at: one.stored for at, one in self._states.items() if one.stored is not None}
        states = self._states
        yield from operator_parts(self._plan, manifests, lambda at, key: states[at].runs(key))

    @property
    def dead(self) -> pl.DataFrame:
        """The dead letters: topic, partition, offset, step, reason, and the original bytes."""
        return self[DEAD_LETTERS_VIEW]

    @property
    def ledger(self) -> pl.DataFrame:
        """The ledger, one row per batch and step, in the order of the graph.

        ``read`` is the sum of the exits emitted, held, late, dead, filtered and duplicate. ``rows_out``
        counts the rows that the step gave on; what comes next reads them.
        """
        lines = self._store.ledger(self._app)
        columns = ["batch_id", "step", *LEDGER_COUNTS, *LEDGER_NOTES]
        types = {name: pl.String if name == "step" else pl.Int64 for name in columns}
        return pl.DataFrame(lines, schema=types)

    @property
    def late(self) -> int:
        """The late events of each step, summed: an event that is late at two steps counts twice."""
        return int(self.ledger["late"].sum())

    @property
    def watermark(self) -> datetime | None:
        """The watermark at the end; None if some partition had no event."""
        watermark = self._store.status(self._app).get("watermark")
        return None if watermark is None else datetime.fromisoformat(watermark)

    @property
    def forgotten_producers(self) -> dict[str, int]:
        """How many producers of each source were forgotten because there were too many to follow."""
        forgotten: dict[str, int] = self._store.status(self._app).get("forgotten_producers", {})
        return forgotten


def _clean_up(store: StateStore, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)


def run(
    app: App,
    inputs: Inputs,
    *,
    batches: int = 1,
    partitions: int | None = None,
    seed: int = 0,
    crash: int = 0,
    engine: Engine = "kernel",
) -> Result:
    """Run the app on rows; return its outputs.

    Nothing outside of a temporary folder is touched: views that the app keeps in a database, topics
    and datasets are written there. Functions of ``foreach`` are called as they are.

    Args:
        app: The pipeline. Its own log is not touched.
        inputs: Rows per topic, in order of arrival: mappings or dataclass instances (encoded as
            JSON), or bytes as they are; :class:`Row` says more of one, such as when it arrives.
            Between them, :class:`Tick` lets time pass and :class:`Watermark` closes windows. The
            clock begins at the earliest arrival or Tick whose time is given; if there is none, at
            the time it is.
        batches: Into how many batches the input is cut, at places chosen by ``seed``.
        partitions: How many partitions each topic has, instead of what the app declares.
        seed: Chooses the cuts, the crashes, and the partitions of rows without a key.
        crash: How many times the run crashes, before the commit of a batch, after it, or when all
            sinks but the state store have it, and goes on with a new run, as after ``kill -9``: no
            output may depend on it.
        engine: ``"kernel"``: in process. ``"spark"``, ``"local"``: the real job, on that engine; takes neither
            Ticks nor Watermarks nor crashes.

    Raises:
        ConfigError: an input is for a topic that the app does not declare, or cannot be encoded; a
            number is too small.
    """
    choose("run's engine", engine, get_args(Engine))
    for what, number, least in (
        ("batches", batches, 1),
        ("partitions", 1 if partitions is None else partitions, 1),
        ("crash", crash, 0),
    ):
        if number < least:
            raise ConfigError(f"run's {what} is {number}. Give {least} or more.")
    for topic in inputs:
        if topic not in app.topics:
            known = ", ".join(app.topics) or "none"
            near = did_you_mean(topic, app.topics)
            raise ConfigError(
                f"There is input for topic {topic!r}. The app's topics are {known}.{near}"
            )
    counts = {
        # What says the order of transactions has one partition, however many their records have.
        name: 1 if isinstance(topic.values, TransactionFormat) else partitions or topic.partitions
        for name, topic in app.topics.items()
    }
    items = {
        topic: items_of(app.topics[topic], rows, counts[topic], seed)
        for topic, rows in inputs.items()
    }
    folder = Path(tempfile.mkdtemp(prefix="millstream-test-"))
    # The hash seed of keys comes from the test's seed: no output may depend on it.
    buckets = Buckets(app.buckets, random.Random(seed).getrandbits(63))  # noqa: S311
    plan = redirected(app.plan(buckets), folder)
    dice = random.Random(seed)  # noqa: S311 - a test's choice, to be repeated
    states: BucketStates | None = None
    if engine == "kernel":
        views = folder / "views.db"
        engine_run = KernelEngine(plan, views, counts, dice)
        engine_run.run(items, batches, crash)
        states = engine_run.states
    else:
        if crash:
            raise ConfigError(f'engine="{engine}" takes no crash. Use engine="kernel".')
        run_job = runner_of(engine)
        views = run_as_job(run_job, app, folder, counts, items, batches=batches, dice=dice)
    return Result(plan, folder, views, states)
