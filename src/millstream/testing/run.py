"""Run a pipeline on given rows and look at what comes out.

``engine="kernel"`` runs the same plan and kernels in this process, without a JVM: hundreds of runs
in a second. ``engine="spark"`` writes the rows to a log in a temporary folder and runs the real
job. Both commit into a real view store, and both give the same answers.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.routing import LEDGER_EXITS, LEDGER_NOTES
from millstream.log.murmur2 import partition_of
from millstream.pipeline.app import App
from millstream.testing.kernel_engine import KernelEngine
from millstream.views.commit import DEAD_VIEW
from millstream.views.store import ViewStore

Engine = Literal["kernel", "spark"]


@dataclasses.dataclass(frozen=True)
class Tick:
    """Between rows: this much running time passes, with nothing to read. Moves idle partitions."""

    after: Duration

    @property
    def milliseconds(self) -> int:
        return to_us(self.after, what="Tick's after") // 1000


Row = Mapping[str, Any] | bytes | Any
Inputs = Mapping[str, Sequence[Row | Tick]]


class Result:
    """What came out of a run: the views, their changes, the dead records and the books.

    It lies in a temporary folder that goes with this object.
    """

    def __init__(self, app: str, folder: Path, views: Path) -> None:
        self._app = app
        self._store = ViewStore(views, readonly=True)
        self._clean_up = weakref.finalize(self, _clean_up, self._store, folder)

    def __getitem__(self, view: str) -> pl.DataFrame:
        """Give a view's rows, in the order of its key."""
        schema = next((s for s in self._store.views() if s.name == view), None)
        rows = self._store.scan(view)  # names the views there are, if it is none of them
        assert schema is not None
        return rows.sort(schema.key, nulls_last=False) if schema.key else rows

    def changes(self, view: str) -> pl.DataFrame:
        """Give a view's changes, in the order in which they were committed."""
        return self._store.changes(view)

    @property
    def dead(self) -> pl.DataFrame:
        """Records that could not be decoded: topic, partition, offset, reason, value."""
        return self[DEAD_VIEW]

    @property
    def ledger(self) -> pl.DataFrame:
        """The books, one row per batch and step: what was read, and by which exit it left."""
        lines = self._store.ledger(self._app)
        columns = ["batch_id", "step", "read", *LEDGER_EXITS, *LEDGER_NOTES]
        types = {name: pl.String if name == "step" else pl.Int64 for name in columns}
        return pl.DataFrame(lines, schema=types)

    @property
    def late(self) -> int:
        """How many events came too late, over all steps."""
        return int(self.ledger["late"].sum())


def _clean_up(store: ViewStore, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)


def run(
    app: App,
    inputs: Inputs,
    *,
    batches: int = 1,
    partitions: int | None = None,
    seed: int = 0,
    engine: Engine = "kernel",
) -> Result:
    """Run the app on rows and give what came out.

    Args:
        app: The pipeline. Its own log is not touched.
        inputs: Rows per topic, in order of arrival: mappings or dataclass instances (encoded as
            JSON), or bytes as they are. A :class:`Tick` between them lets running time pass.
        batches: Into how many batches the input is cut, at places chosen by ``seed``.
        partitions: How many partitions each topic has, instead of what the app declares.
        seed: Chooses the cuts, and the partitions of rows without a key.
        engine: ``"kernel"``: in process. ``"spark"``: the real job; takes no Ticks, and cuts
            batches of equal size.

    Raises:
        ConfigError: an input is for a topic that the app does not declare, or cannot be encoded.
    """
    for topic in inputs:
        if topic not in app.topics:
            known = ", ".join(app.topics) or "none"
            raise ConfigError(f"There is input for topic {topic!r}. The app's topics are {known}.")
    arrivals = {
        topic: _arrivals(app, topic, rows, partitions, seed) for topic, rows in inputs.items()
    }
    counts = {name: partitions or topic.partitions for name, topic in app.topics.items()}
    folder = Path(tempfile.mkdtemp(prefix="millstream-test-"))
    if engine == "kernel":
        plan = app.plan()
        views = folder / "views.db"
        KernelEngine(plan, views, counts, random.Random(seed)).run(arrivals, batches)  # noqa: S311
    elif engine == "spark":
        from millstream.testing.spark_engine import run_on_spark  # noqa: PLC0415 - loads pyspark

        views = run_on_spark(app, folder, counts, arrivals, batches)
    else:
        raise ConfigError(f'engine is {engine!r}. Choose "kernel" or "spark".')
    return Result(app.name, folder, views)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One record as it arrives: where it goes, and its value."""

    partition: int
    value: bytes


def _arrivals(
    app: App, topic: str, rows: Iterable[Row | Tick], partitions: int | None, seed: int
) -> list[Arrival | int]:
    """Encode rows and choose their partitions; a Tick becomes its milliseconds."""
    declared = app.topics[topic]
    count = partitions or declared.partitions
    dice = random.Random(f"{seed}/{topic}")  # noqa: S311 - a test's choice, to be repeated
    arrivals: list[Arrival | int] = []
    for row in rows:
        if isinstance(row, Tick):
            arrivals.append(row.milliseconds)
            continue
        values = _as_mapping(row)
        if declared.key is None or values is None or values.get(declared.key) is None:
            partition = dice.randrange(count)
        else:
            partition = partition_of(str(values[declared.key]).encode(), count)
        value = row if isinstance(row, bytes) else _encode(values, topic)
        arrivals.append(Arrival(partition, value))
    return arrivals


def _as_mapping(row: Row) -> Mapping[str, Any] | None:
    if isinstance(row, bytes):
        return None
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    if isinstance(row, Mapping):
        return row
    raise ConfigError(
        f"An input row is {row!r}. Give mappings, dataclass instances, bytes or testing.Tick."
    )


def _encode(values: Mapping[str, Any] | None, topic: str) -> bytes:
    try:
        return json.dumps(values, default=_plain, separators=(",", ":")).encode()
    except TypeError as error:
        raise ConfigError(f"An input row for {topic!r} cannot be JSON: {error}.") from error


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")
