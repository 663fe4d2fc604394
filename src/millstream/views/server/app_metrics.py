"""The figures of apps for Prometheus, from what their jobs commit with every batch, and from their logs.

What a job counts is kept in its state store, so that counters go on where they were when it starts again, and
are there while it is stopped. Lag is looked up in the log at the moment of the scrape: it grows also while the
app is down.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from millstream.client.address import log_folder
from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.errors import MillstreamError, RetriableError
from millstream.kernels.routing import LEDGER_EXITS
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.metrics.readings import Readings
from millstream.views.commit.ledger import count_late_once
from millstream.views.runs.control_files import active_runs
from millstream.views.runs.failure import last_failure
from millstream.views.schema import JOB
from millstream.views.server.catalog import ViewCatalog
from millstream.views.server.status import LedgerTotals, last_lags
from millstream.views.server.unread_records import first_timestamp_ms
from millstream.views.state_store.reader import StateStoreReader

_LEDGER_KINDS = ("topic", "dataframe", "step", "operator")
_OPERATIONS = ("puts", "gets", "lists", "deletes", "retries")


class PartitionLag(NamedTuple):
    """What an app has still to read of a partition. ``seconds`` is None where that cannot be known.

    So it is where the log or the records cannot be read, or the topic ends before the app's position: then it was
    deleted and created again, and none of it was read.
    """

    topic: str
    partition: int
    records: int
    seconds: float | None
    in_reach: bool = True  # False: the log is behind brokers, and not to be read from here

    @property
    def failed(self) -> bool:
        """Whether the age should be known, and is not."""
        return self.seconds is None and self.in_reach


@dataclass
class _KnownApp:
    store: StateStoreReader
    checkpoint_id: str | None
    ledger: LedgerTotals = field(default_factory=LedgerTotals)


@dataclass(frozen=True)
class _AppReading:
    """What is known of an app at one moment."""

    app: str
    status: Mapping[str, Any]
    graph: Mapping[str, Any]
    lags: tuple[PartitionLag, ...]
    now_s: float


class AppMetrics:
    """Reads the figures of the apps of a catalog. Thread-safe.

    Args:
        log: The log that the apps read: a folder, or ``kafka://``.
        apps: Returns the names of the apps; by default all.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        catalog: ViewCatalog,
        log: Path | str,
        *,
        apps: Callable[[], list[str]] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._log = log
        self._apps = catalog.apps if apps is None else apps
        self._wall_clock = wall_clock
        self._known: dict[str, _KnownApp] = {}
        self._reader: Reader | None = None
        self._lock = threading.RLock()

    def read(self, readings: Readings) -> None:
        """Add the figures of all apps.

        Raises:
            MillstreamError, OSError: those of an app, or the age of its unread records, cannot be read; the others are added.
        """
        failures: list[MillstreamError | OSError] = []
        for app in self._apps():
            try:
                with self._lock:
                    self._read_app(app, readings)
            except (MillstreamError, OSError) as error:  # also where it is being reset
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close what reads the log."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()

    def why_not_ready(self) -> str | None:
        """Return why the store of an app cannot be read, as a sentence; None if all can."""
        for app in self._apps():
            self._catalog.state_store(app).version()
        return None

    def why_stalled(self, app: str, within_s: float) -> str | None:
        """Return a sentence if records have waited for longer than this, and so long no batch was committed.

        Of records that cannot be read, it is taken that they have.
        """
        store = self._catalog.state_store(app)
        status = store.status(app)
        with self._lock:
            lags = list(self._lags(app, store, status))
        ages = [float("inf") if lag.seconds is None else lag.seconds for lag in lags]
        waiting = max(ages, default=0.0)
        since_s = self._wall_clock() - _seconds(status["at"]) if status else float("inf")
        if min(waiting, since_s) <= within_s:
            return None
        what = (
            f"The oldest unread record of {app} has waited for {waiting:.0f} s"
            if isfinite(waiting)
            else f"Unread records of {app} cannot be read"
        )
        if not status:
            return f"{what}, and no batch was committed."
        return f"{what}, and the last batch was committed {since_s:.0f} s ago: more than {within_s:g} s."

    def _read_app(self, app: str, readings: Readings) -> None:
        store = self._catalog.state_store(app)
        known = self._known.get(app)
        # An app that was reset has another checkpoint, also in a database that is the same as before.
        checkpoint_id = store.checkpoint_id(app, JOB)
        if known is None or known.store is not store or known.checkpoint_id != checkpoint_id:
            known = self._known[app] = _KnownApp(store, checkpoint_id)
            self.close()  # the log may be another one, too
        known.ledger.add(store.ledger(app, since=known.ledger.next_batch_id))
        status = store.status(app)
        graph = store.description(app, "graph") or {"nodes": [], "edges": []}
        lags = tuple(self._lags(app, store, status))
        reading = _AppReading(app, status, graph, lags, self._wall_clock())
        folder = self._catalog.folder(app)
        readings.add("app_running", float(bool(active_runs(folder))), app=app)
        readings.add("app_failed", float(last_failure(folder) is not None), app=app)
        _add_batches(readings, reading)
        _add_ledger(readings, reading, known.ledger)
        _add_sources(readings, reading)
        _add_steps(readings, reading)
        _add_views(readings, reading, store.newest_changes())
        unknown = [f"{lag.topic}/{lag.partition}" for lag in lags if lag.failed]
        if unknown:
            raise RetriableError(
                f"how old the unread records of {app} are is not known: {', '.join(unknown[:3])} cannot be read, or "
                "ends before what the app has read. `millstream doctor` looks at the log."
            )

    def _lags(
        self, app: str, store: StateStoreReader, status: Mapping[str, Any]
    ) -> Iterator[PartitionLag]:
        """Yield what the app has still to read, of every partition of its topics."""
        position = store.position(app)
        elsewhere = log_folder(self._log) is not None and store.log_brokers(app) is not None
        for topic in _topics_read(status, position):
            if elsewhere:
                yield from _last_known_lags(topic, status, in_reach=False)
                continue
            try:
                if self._reader is None:
                    self._reader = open_reader(self._log)
                bounds = self._reader.offsets(topic)
            except (MillstreamError, OSError):
                yield from _last_known_lags(topic, status)
                continue
            for number, (start, end) in enumerate(bounds):
                at = max(start, int(position.get(topic, {}).get(str(number), 0)))
                if at > end:
                    yield PartitionLag(topic, number, end - start, None)
                    continue
                waiting_s = self._waiting_s(self._reader, topic, number, at, end)
                yield PartitionLag(topic, number, max(0, end - at), waiting_s)

    def _waiting_s(
        self, reader: Reader, topic: str, partition: int, start: int, end: int
    ) -> float | None:
        """Return the age of the first record in [start, end); 0 if there is none, None if it is damaged."""
        if start >= end:
            return 0.0
        try:
            first_ms = first_timestamp_ms(reader, topic, partition, start, end)
        except (MillstreamError, OSError):
            return None
        return 0.0 if first_ms is None else max(0.0, self._wall_clock() - first_ms / 1000)


def _topics_read(status: Mapping[str, Any], position: Mapping[str, Any]) -> list[str]:
    """Return the topics that the program of the last batch reads: a position also has those of programs before it."""
    if "sources" not in status:
        return list(position)
    return list(dict.fromkeys(source["topic"] for source in status["sources"].values()))


def _times(reading: _AppReading) -> dict[str, Mapping[str, Any]]:
    """Return what the status says of the time of the steps that there are: it also has those of programs before."""
    steps = {node["step"] for node in reading.graph["nodes"]}
    times = reading.status.get("time", {})
    return {step: time for step, time in times.items() if step in steps}


def _last_known_lags(
    topic: str, status: Mapping[str, Any], *, in_reach: bool = True
) -> Iterator[PartitionLag]:
    """Yield the lags of the last batch, where the log cannot be read."""
    for number, records in last_lags(topic, status).items():
        yield PartitionLag(topic, number, records, None, in_reach)


def _add_batches(readings: Readings, reading: _AppReading) -> None:
    app, status = reading.app, reading.status
    readings.add("app_batches_total", status["batch_id"] + 1 if status else 0, app=app)
    if not status:
        return
    readings.add("app_last_batch_timestamp_seconds", _seconds(status["at"]), app=app)
    if "duration_ms" in status:
        readings.add("app_last_batch_duration_seconds", status["duration_ms"] / 1000, app=app)
    costs = status.get("costs", {})
    for phase, seconds in costs.get("phase_s", {}).items():
        readings.add("app_batch_phase_seconds_total", seconds, app=app, phase=phase)
    requests = costs.get("object_store", {})
    if not requests:
        return
    for name in _OPERATIONS:
        readings.add("app_object_requests_total", requests.get(name, 0), app=app, operation=name)
    for way in ("up", "down"):
        readings.add(
            "app_object_bytes_total", requests.get(f"bytes_{way}", 0), app=app, direction=way
        )
    readings.add("app_state_cache_hits_total", requests.get("cache_hits", 0), app=app)


def _add_ledger(readings: Readings, reading: _AppReading, ledger: LedgerTotals) -> None:
    late = count_late_once(reading.graph, ledger.by_step("late")) if reading.graph["nodes"] else 0
    readings.add("app_late_events_total", late, app=reading.app)
    # Steps count from 0 before their first batch, so that what its first one counts is an increase, too.
    named = [node["step"] for node in reading.graph["nodes"] if node["kind"] in _LEDGER_KINDS]
    for step in dict.fromkeys([*named, *ledger.total]):
        counts = ledger.total.get(step, Counter[str]())
        readings.add("step_read_rows_total", counts["read"], app=reading.app, step=step)
        for name in LEDGER_EXITS:
            readings.add(
                "step_exit_rows_total", counts[name], app=reading.app, step=step, exit=name
            )


def _add_sources(readings: Readings, reading: _AppReading) -> None:
    app = reading.app
    for lag in reading.lags:
        labels = {"app": app, "topic": lag.topic, "partition": lag.partition}
        readings.add("source_lag_records", lag.records, **labels)
        if lag.seconds is not None:
            readings.add("source_lag_seconds", lag.seconds, **labels)
    lowest, idle = _source_watermarks(reading)
    for (topic, partition), watermark_us in lowest.items():
        labels = {"app": app, "topic": topic, "partition": partition}
        if watermark_us > NO_WATERMARK:
            delay_s = reading.now_s - watermark_us / 1e6
            readings.add("source_watermark_delay_seconds", delay_s, **labels)
        readings.add("source_idle", float((topic, partition) in idle), **labels)


def _source_watermarks(
    reading: _AppReading,
) -> tuple[dict[tuple[str, int], int], set[tuple[str, int]]]:
    """Return the lowest watermark of each partition among the steps that have one, and the idle partitions."""
    sources = reading.status.get("sources", {})
    topics = {name: source["topic"] for name, source in sources.items()}
    lowest: dict[tuple[str, int], int] = {}
    idle: set[tuple[str, int]] = set()
    for operator in _times(reading).values():
        for name, clock in operator["clocks"].items():
            if name not in topics:
                continue
            for number, watermark_us in clock["partitions"].items():
                key = topics[name], int(number)
                lowest[key] = min(lowest.get(key, watermark_us), watermark_us)
            for number in clock["idle"]:
                key = topics[name], int(number)
                idle.add(key)
                lowest.setdefault(key, NO_WATERMARK)
    return lowest, idle


def _add_steps(readings: Readings, reading: _AppReading) -> None:
    app = reading.app
    for step, operator in _times(reading).items():
        if operator["watermark_us"] > NO_WATERMARK:
            delay_s = reading.now_s - operator["watermark_us"] / 1e6
            readings.add("step_watermark_delay_seconds", delay_s, app=app, step=step)
    for step, held in reading.status.get("state", {}).items():
        readings.add("step_state_bytes", held["bytes"], app=app, step=step)
        readings.add("step_state_rows", held["rows"], app=app, step=step)


def _add_views(readings: Readings, reading: _AppReading, changes: Mapping[str, int]) -> None:
    for view, newest in changes.items():
        readings.add("view_changes_total", newest, app=reading.app, view=view)
    for view, topics in topics_of_views(reading.graph).items():
        ages = [lag.seconds for lag in reading.lags if lag.topic in topics]
        known = [seconds for seconds in ages if seconds is not None]
        if known and len(known) == len(ages):  # the oldest may be the one that is not known
            readings.add("view_freshness_seconds", max(known), app=reading.app, view=view)


def topics_of_views(graph: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the topics that each view of a pipeline's graph is made of."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    before: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        before.setdefault(edge["to"], []).append(edge["from"])
    found: dict[str, set[str]] = {}
    for identity, node in nodes.items():
        if node["kind"] == "view":
            seen, waiting = {identity}, [identity]
            while waiting:
                new = set(before.get(waiting.pop(), ())) - seen
                seen |= new
                waiting += new
            sources = (nodes[each] for each in seen if each.startswith("source-"))
            found[node["name"]] = {each["does"] for each in sources if each["kind"] == "topic"}
    return found


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
