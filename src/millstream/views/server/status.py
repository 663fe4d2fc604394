"""The status of an app as plain values: running or not, position, late events, ledger, throughput.

Most of it is the status that the job commits with every batch. Here the ledger is added up, the end
offsets of the partitions are read from the log, and throughput comes from the times of the batches seen.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from millstream.errors import MillstreamError
from millstream.kernels.routing import LEDGER_COUNTS
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.log.reader import LogReader
from millstream.views.commit.ledger import count_late_once
from millstream.views.coverage import partial_note, spans_to_json
from millstream.views.runs.control_files import active_runs, stop_request_file
from millstream.views.runs.failure import last_failure
from millstream.views.server.unread_records import first_timestamp_ms
from millstream.views.state_store.reader import StateStoreReader

_SAMPLES = 300
_QUIET = timedelta(minutes=1)
_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class LedgerTotals:
    """The ledger of an app, added up batch by batch as it grows."""

    total: dict[str, Counter[str]] = field(default_factory=dict)
    last: dict[str, Counter[str]] = field(default_factory=dict)
    next_batch_id: int = 0

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the entries of further batches, in their order."""
        for line in lines:
            if line["batch_id"] >= self.next_batch_id:
                self.next_batch_id, self.last = line["batch_id"] + 1, {}
            counts = {name: line[name] for name in LEDGER_COUNTS}
            self.total.setdefault(line["step"], Counter()).update(counts)
            self.last.setdefault(line["step"], Counter()).update(counts)

    def by_step(self, count: str) -> dict[str, int]:
        """Return one count of each step."""
        return {step: line[count] for step, line in self.total.items()}

    def sum(self, count: str, steps: Sequence[str] | None = None) -> int:
        """Add up one count over all steps, or over some."""
        chosen = self.total if steps is None else steps
        return sum(self.total[step][count] for step in chosen if step in self.total)


class AppStatus:
    """Assembles the status of one app. Thread-safe."""

    def __init__(self, app: str, log: Path, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._log_folder = log
        self._log = LogReader(log)
        self._lock = threading.Lock()
        self._store: StateStoreReader | None = None
        self._ledger = LedgerTotals()
        # of each batch seen: when it was committed, and the records read in all
        self._samples: deque[tuple[str, int]] = deque(maxlen=_SAMPLES)

    def forget(self) -> None:
        """Start over with the next read, as when the file of a store was replaced."""
        with self._lock:
            self._store = None

    def read(self, store: StateStoreReader) -> dict[str, Any]:
        """Return the status as it is now. The store may be another one than in the last call."""
        with self._lock:
            if store is not self._store:
                self._store, self._ledger = store, LedgerTotals()
                self._samples.clear()
                self._log.close()  # the log may be another one, too
                self._log = LogReader(self._log_folder)
            status = store.status(self._app)
            self._ledger.add(store.ledger(self._app, since=self._ledger.next_batch_id))
            return self._assemble(status, store)

    def _assemble(self, status: Mapping[str, Any], store: StateStoreReader) -> dict[str, Any]:
        graph = store.description(self._app, "graph") or {"nodes": [], "edges": []}
        sources = [node["step"] for node in graph["nodes"] if node["id"].startswith("source-")]
        read = self._ledger.sum("read", sources or list(status.get("sources", {})))
        if status and (not self._samples or self._samples[-1][0] != status["at"]):
            self._samples.append((status["at"], read))
        brokers = store.log_brokers(self._app)
        position = store.position(self._app)
        partitions = list(self._partitions(status, position, in_folder=brokers is None))
        runs = active_runs(self._folder)
        failure = last_failure(self._folder)
        names = ("dead", "filtered", "duplicate")
        plain = ("batch_id", "at", "duration_ms", "behind_s", "watermark", "state_bytes")
        return {
            "app": self._app,
            "running": bool(runs),
            "runs": [{"run": r.run, "pid": r.pid, "since": _text(_moment(r.since))} for r in runs],
            "stopping": bool(runs) and stop_request_file(self._folder).exists(),
            "failure": None
            if failure is None
            else {**asdict(failure), "at": _text(_moment(failure.at))},
            **{name: status.get(name) for name in plain},
            "totals": {
                "read": read,
                "late": count_late_once(graph, self._ledger.by_step("late"))
                if graph["nodes"]
                else 0,
                **{name: self._ledger.sum(name) for name in names},
            },
            "brokers": brokers,
            "unread": sum(partition["unread"] or 0 for partition in partitions),
            "unread_since": self._unread_since(status, partitions) if runs else None,
            "partitions": partitions,
            "steps": list(_steps(status)),
            "gauges": status.get("gauges", {}),
            "forgotten_producers": status.get("forgotten_producers", {}),
            "ledger": {"last": _lines(self._ledger.last), "total": _lines(self._ledger.total)},
            "throughput": list(self._throughput(status)),
            "views": store.newest_changes(),
            "outputs": [
                {
                    "name": name,
                    "sink": sink,
                    "coverage": spans_to_json(one.spans),
                    "note": partial_note(one.spans),
                }
                for (name, sink), one in store.outputs(self._app).items()
            ],
        }

    def _throughput(self, status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield events per second between the batches seen; of a single batch, its own rate."""
        samples = list(self._samples)
        if len(samples) == 1 and status.get("duration_ms"):
            rate = status.get("read", 0) / status["duration_ms"] * 1000
            yield {"at": samples[0][0], "per_second": rate}
        for (before, read_before), (at, read) in pairwise(samples):
            seconds = (_time(at) - _time(before)).total_seconds()
            yield {"at": at, "per_second": (read - read_before) / max(seconds, 1e-3)}

    def _partitions(
        self, status: Mapping[str, Any], position: Mapping[str, Any], *, in_folder: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield what is read of each partition; of a log behind brokers, what was unread after the last batch."""
        topics = [source["topic"] for source in status.get("sources", {}).values()]
        for topic in dict.fromkeys([*topics, *position]):
            watermarks, idle = _watermarks_of(status, topic)
            lags = last_lags(topic, status)
            ends = self._ends(topic, lags) if in_folder else dict.fromkeys(lags)
            for number in sorted({*ends, *map(int, position.get(topic, {}))}):
                read = int(position.get(topic, {}).get(str(number), 0))
                end = ends.get(number)
                yield {
                    "topic": topic,
                    "partition": number,
                    "position": read,
                    "end": end,
                    "unread": _unread(read, end, None if in_folder else lags.get(number)),
                    "watermark": _watermark(watermarks.get(str(number), NO_WATERMARK)),
                    "idle": number in idle,
                }

    def _unread_since(
        self, status: Mapping[str, Any], partitions: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """Return the timestamp of the oldest record that waits; None where none does, or it is not known.

        The log is read for it only where no batch was committed for a minute: a job that is at work does not pay for it.
        """
        now = datetime.now(UTC)
        if status and now - _time(status["at"]) < _QUIET:
            return None
        found = []
        for one in partitions:
            with suppress(MillstreamError, OSError):
                if one["unread"] and one["end"] is not None:
                    found.append(
                        first_timestamp_ms(
                            self._log, one["topic"], one["partition"], one["position"], one["end"]
                        )
                    )
        known = [at_ms for at_ms in found if at_ms is not None]
        return _text(_moment(min(known) / 1000)) if known else None

    def _ends(self, topic: str, lags: Mapping[int, int]) -> Mapping[int, int | None]:
        """Return the end offset of each partition; None where the log cannot be read."""
        with suppress(MillstreamError, OSError):
            return dict(enumerate(end for _, end in self._log.offsets(topic)))
        return dict.fromkeys(lags)


def last_lags(topic: str, status: Mapping[str, Any]) -> dict[int, int]:
    """Return what was unread of each partition of a topic after the last batch."""
    names = {name.rpartition("/"): records for name, records in status.get("lag", {}).items()}
    return {int(number): records for (of, _, number), records in names.items() if of == topic}


def _unread(read: int, end: int | None, lag: int | None) -> int | None:
    return lag if end is None else max(0, end - read)


def _watermarks_of(
    status: Mapping[str, Any], topic: str
) -> tuple[Mapping[str, int], Sequence[int]]:
    """Return the watermark of each partition of a topic, and the idle partitions."""
    names = [name for name, source in status.get("sources", {}).items() if source["topic"] == topic]
    for operator in status.get("time", {}).values():
        for name in names:
            clock = operator["clocks"].get(name)
            if clock is not None:
                return clock["partitions"], clock["idle"]
    return {}, ()


def _steps(status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the watermark of each operator, and the late events of each step."""
    late, times = status.get("late", {}), status.get("time", {})
    for step in dict.fromkeys([*times, *late]):
        time, missed = times.get(step), late.get(step, {})
        yield {
            "step": step,
            "watermark": _watermark(time["watermark_us"]) if time else None,
            "since": time["since"] if time else None,
            "late": missed.get("events", 0),
            "late_by_us_max": missed.get("late_by_us_max", 0),
        }


def _lines(ledger: Mapping[str, Counter[str]]) -> list[dict[str, Any]]:
    return [
        {"step": step, **{name: counts[name] for name in LEDGER_COUNTS}}
        for step, counts in ledger.items()
    ]


def _watermark(at_us: int) -> str | None:
    return None if at_us <= NO_WATERMARK else _text(_START + timedelta(microseconds=at_us))


def _moment(seconds: float) -> datetime:
    return _START + timedelta(seconds=seconds)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
