"""Maintenance of the log by its owner: closes old segments, removes, compacts, aborts expired transactions.

A pass goes over every partition in turn and takes the commit lock only briefly, so appends continue
meanwhile. `retention.py`, `compaction/cleaner.py` and `transactions.py` decide what it does. It can be
killed at any point: the next opening finishes or discards what was begun. A broker has more to maintain,
and does it every second: `broker/maintenance.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from millstream.errors import CorruptionError, RetriableError, UnknownTopicError
from millstream.log.compaction.cleaner import compact_partition
from millstream.log.control import ControlDb
from millstream.log.exclusive import ExclusiveLog
from millstream.log.groups import offsets_by_partition
from millstream.log.partition import Partition
from millstream.log.producers import PRODUCER_EXPIRES_MS
from millstream.log.reader import LogReader
from millstream.log.retention import (
    BoundedClock,
    PartitionContents,
    RetentionRisk,
    first_safe_offset,
    risks,
    start_after_pass,
)
from millstream.log.transactions import TransactionCoordinator
from millstream.log.unread import count_unread

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MaintenanceReport:
    """What one pass did; ``deferred`` names what is left for the next one, and why."""

    rolled: int = 0
    segments_removed: int = 0
    segments_compacted: int = 0
    transactions_aborted: int = 0
    producers_forgotten: int = 0
    deferred: list[str] = field(default_factory=list)
    risks: list[RetentionRisk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MaintenanceHealth:
    """The health of the background passes: how many deferred something, and why the last one did."""

    passes_failed: int = 0
    last_failure: tuple[str, ...] = ()


class MaintainedLog(ExclusiveLog, Protocol):
    """The calls of :class:`millstream.log.writer.LogWriter` that maintenance uses."""

    folder: Path
    control: ControlDb
    transactions: TransactionCoordinator

    @property
    def failure(self) -> BaseException | None: ...

    def running_ms(self) -> int: ...

    def partitions(self) -> list[Partition]: ...

    def move_log_start(self, partition: Partition, offset: int) -> None: ...

    def remove_deleted_topics(self) -> None: ...

    def run_maintenance(self) -> MaintenanceReport: ...


class LogMaintenance:
    """Runs the maintenance of one log.

    Args:
        every_s: How often, from a thread of its own; None: only when :meth:`run_pass` is called.
    """

    def __init__(self, writer: MaintainedLog, *, every_s: float | None) -> None:
        self._writer = writer
        self._every_s = every_s
        self._pass_lock = threading.Lock()
        self._stopped = threading.Event()
        self._clock: BoundedClock | None = None
        self._callbacks: list[Callable[[RetentionRisk], None]] = []
        self._reported: set[tuple[str, str, int, bool]] = set()
        self.health = MaintenanceHealth()
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(
                target=self._run, name="millstream-maintenance", daemon=True
            )
            self._thread.start()

    def on_risk(self, callback: Callable[[RetentionRisk], None]) -> None:
        """Call ``callback`` when a group is first at risk of losing records, and when it has lost some."""
        self._callbacks.append(callback)

    def stop(self) -> None:
        """Let the running pass end, and do no other."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run_pass(self, now_ms: int, *, running_ms: int | None = None) -> MaintenanceReport:
        """Do one pass; return what was done.

        Raises:
            SyncFailedError: the disk failed; open the folder again.
        """
        running = self._writer.running_ms() if running_ms is None else running_ms
        report = MaintenanceReport()
        with self._pass_lock:
            self._clock = self._clock or BoundedClock(now_ms, running)
            now_ms = self._clock.read(now_ms, running)
            with _deferring("transactions", report):
                report.transactions_aborted = self._writer.transactions.expire()
            for partition in self._writer.partitions():
                if self._stopped.is_set():
                    break
                self._maintain(partition, now_ms, report)
            with _deferring("deleted topics", report):
                self._writer.remove_deleted_topics()
            before_ms = now_ms - PRODUCER_EXPIRES_MS
            with _deferring("unused producers", report):
                report.producers_forgotten = self._writer.transactions.forget_idle(before_ms)
            report.risks = self.risks(now_ms)
            self._notify(report.risks)
        return report

    def risks(self, now_ms: int) -> list[RetentionRisk]:
        """Return the groups that lost records or are about to."""
        holdings: list[PartitionContents] = []
        for partition in self._writer.partitions():

            def look(partition: Partition = partition) -> None:
                if not partition.closed:
                    holdings.append(partition.contents())

            # One at a time, and nothing is computed meanwhile: appends wait for this.
            self._writer.exclusively(look)
        ends = {one.name: end for one in holdings if (end := first_safe_offset(one, now_ms)) > 0}
        if not ends:
            return []
        found = risks(offsets_by_partition(self._writer.control, ends), holdings, now_ms)
        with closing(LogReader(self._writer.folder)) as reader:
            return [risk for risk in found if risk.records_lost or _has_records(reader, risk)]

    def _maintain(self, partition: Partition, now_ms: int, report: MaintenanceReport) -> None:
        writer = self._writer
        rolled: list[bool] = []
        start: list[int] = []

        def look() -> None:
            if not partition.closed:
                with _deferring(partition.folder, report):
                    rolled.append(partition.roll_if_old(now_ms))
                partition.producers.forget_idle(now_ms - PRODUCER_EXPIRES_MS)
                start.append(start_after_pass(partition.contents(), now_ms))

        with _deferring(partition.folder, report):
            writer.exclusively(look)
            report.rolled += sum(rolled)
            if start and (start[0] > partition.log_start or partition.has_below_start):
                before = len(partition.sealed)
                writer.move_log_start(partition, start[0])
                report.segments_removed += before - len(partition.sealed)
                if partition.has_below_start:
                    report.deferred.append(f"{partition.folder}: a segment could not be removed")
            if partition.config.compacts and not partition.closed:
                report.segments_compacted += compact_partition(
                    writer, partition, now_ms, stopped=self._stopped.is_set
                )

    def _notify(self, found: list[RetentionRisk]) -> None:
        """Report each risk once when it begins, and once more when records are lost."""
        now = {(one.group, one.topic, one.partition, one.records_lost > 0) for one in found}
        for one in found:
            key = (one.group, one.topic, one.partition, one.records_lost > 0)
            if key in self._reported:
                continue
            _log.warning("%s", one)
            for callback in self._callbacks:
                try:
                    callback(one)
                except Exception:  # noqa: BLE001 - a callback is user code; the log must continue
                    _log.exception("the callback for a retention risk failed")
        self._reported = now

    def _run(self) -> None:
        assert self._every_s is not None
        while not self._stopped.wait(self._every_s):
            try:
                self._record_health(self._writer.run_maintenance().deferred)
            except RetriableError as error:
                _log.warning("maintenance will be retried: %s", error)
                self._record_health([str(error)])
            except Exception as error:  # noqa: BLE001 - see below
                # Whatever it is, the next pass may succeed; if the thread ended here, the disk would fill up.
                if self._writer.failure is not None:
                    _log.error("maintenance stopped with the log: %s", error)
                    self._record_health([str(error)])
                    return
                _log.exception("a pass of maintenance failed, and will be retried")
                self._record_health([f"{type(error).__name__}: {error}"])

    def _record_health(self, why: list[str]) -> None:
        self.health = MaintenanceHealth(self.health.passes_failed + bool(why), tuple(why))


@contextmanager
def _deferring(what: object, report: MaintenanceReport) -> Iterator[None]:
    """Defer a failed step to the next pass; the others continue, as they may make room."""
    try:
        yield
    except (RetriableError, OSError) as error:
        report.deferred.append(f"{what}: {error}")
        _log.warning("maintenance deferred %s: %s", what, error)


def _has_records(reader: LogReader, risk: RetentionRisk) -> bool:
    """Whether any of the offsets at risk is a record: markers of transactions are not lost to anyone.

    Offsets that cannot be read count as records, so that the group is reported.
    """
    start = max(risk.committed_offset, risk.log_start)
    end = start + risk.records_at_risk
    try:
        return count_unread(reader, risk.topic, risk.partition, start, end) > 0
    except UnknownTopicError:  # deleted since: nothing of it is at risk
        return False
    except CorruptionError:
        return True
