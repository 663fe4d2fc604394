"""The tables of an app, and what a statement reads of them: views of one commit, and topics up to its position.

Views are read in one transaction of the state store, with the position that they reflect. A topic that the app reads has its
records up to that position; another one, those that there are by now, which the position then says as well. So two statements
may differ, and the tables of one never do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.errors import DeadlineError, OffsetOutOfRangeError, TopicRecreatedError
from millstream.sql_queries.sql_table import Snapshot, SqlTable, view_tables
from millstream.sql_queries.topic_table import TopicColumns, check_size, read_topic
from millstream.views.coverage import partial_note
from millstream.views.position import (
    check_partitions,
    check_topics,
    checked_position,
    is_reached,
)
from millstream.views.query import QueryResult
from millstream.views.questions.deadline import Deadline
from millstream.views.state_store.reader import ViewsSnapshot
from millstream.views.state_store.store import StateStore
from millstream.views.state_store.view_table import column_names
from millstream.views.store_location import StoreLocation, open_state_store, state_store_exists

RECORDS_MAX = 5_000_000
_ATTEMPTS = 3
_KEPT_BYTES_MAX = 1 << 30
_UNDECLARED = TopicColumns()


@dataclass(frozen=True)
class SqlScope:
    """What can be asked: an app (None: none has run), where its state store and its log are, and topics that it declares.

    ``since_ms``: of topics only the records of so long ago or less, by their timestamps. ``records_max``: the largest topic that is
    read.
    """

    app: str | None
    store: StoreLocation | None
    log: Path | str
    topics: Mapping[str, TopicColumns] = field(default_factory=dict)
    since_ms: int | None = None
    records_max: int = RECORDS_MAX


@dataclass(frozen=True)
class _KeptView:
    """The rows of a view as they were read last, by the mark of the store; ``used`` says when they were wanted last."""

    mark: tuple[Any, ...]
    rows: pa.Table
    result: QueryResult
    used: float


class AppTables:
    """Reads the tables of an app. Thread-safe; sessions share one, and with it the rows of views that have not changed."""

    def __init__(self, scope: SqlScope) -> None:
        self.scope = scope
        self._log: Reader = open_reader(scope.log)
        self._store: StateStore | None = None
        self._lock = threading.Lock()
        self._kept: dict[str, _KeptView] = {}

    def close(self) -> None:
        """Close the log and the state store."""
        self._log.close()
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def read(
        self,
        wanted: Container[str],
        deadline: Deadline,
        at_least: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Return all tables, and the rows of those that are wanted, by their names.

        Raises:
            ConfigError: ``at_least`` is no position, or has a topic that the app does not read.
            DeadlineError: the time is over, or ``at_least`` was not reached in it.
            SqlError: a topic is too large.
        """
        at_least = checked_position(at_least)
        for attempt in range(_ATTEMPTS):
            try:
                return self._snapshot(wanted, deadline, at_least)
            except OffsetOutOfRangeError:  # retention was at work: the topic begins later now
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _snapshot(
        self, wanted: Container[str], deadline: Deadline, at_least: Mapping[str, Any] | None
    ) -> Snapshot:
        with self._lock:
            known = dict(self._kept)  # others put newer rows there meanwhile, of another commit
        views = self._views(wanted, deadline, at_least, known)
        rows: dict[SqlTable, pa.Table] = {}
        notes: list[str] = []
        position = dict(views.position)
        tables = view_tables(views.schemas)
        for table in tables:
            if table.source in views.marks:
                kept = self._kept_view(table.source, views, known)
                rows[table] = kept.rows.rename_columns([name for name, _ in table.columns])
                notes += _view_notes(kept.result, views)
        topics = self._topic_tables()
        for table in topics:
            if table.name in wanted:
                log = self._pinned(table.source, views)
                ranges, ends = self._ranges(log, table.source, views)
                position[table.source] = {**position.get(table.source, {}), **ends}
                rows[table] = self._topic_rows(log, table.source, ranges, deadline)
        return Snapshot((*tables, *topics), rows, views.batch_id, position, tuple(notes))

    # Views.

    def _views(
        self,
        wanted: Container[str],
        deadline: Deadline,
        at_least: Mapping[str, Any] | None,
        known: Mapping[str, _KeptView],
    ) -> ViewsSnapshot:
        store, app = self._opened(), self.scope.app
        if store is None or app is None:
            if at_least:
                raise DeadlineError(
                    f"The position {dict(at_least)} was not reached: no app has run. Run it, or leave the position out."
                )
            return ViewsSnapshot((), {}, {}, None, {}, {})
        if at_least:
            self._wait(store, app, at_least, deadline)
        return store.snapshot(app, wanted, {view: kept.mark for view, kept in known.items()})

    def _wait(
        self, store: StateStore, app: str, at_least: Mapping[str, Any], deadline: Deadline
    ) -> None:
        now = store.snapshot(app, (), {})
        if is_reached(now.position, at_least):
            return
        if now.topics_read:  # a store of an earlier version does not say
            check_topics(at_least, app, now.topics_read.union(now.position))
        check_partitions(at_least, now.position, lambda topic: len(self._log.offsets(topic)))
        if not store.wait_for(app, position=at_least, timeout_s=max(0.0, deadline.left_s)):
            raise DeadlineError(
                f"The app {app!r} did not reach {dict(at_least)} within {deadline.seconds:g} s; it is at "
                f"{store.position(app)}. Ask again, or give it longer."
            )

    def _opened(self) -> StateStore | None:
        """Return the state store; None as long as the app has not run."""
        with self._lock:
            location = self.scope.store
            if self._store is None and location is not None and state_store_exists(location):
                self._store = open_state_store(location, readonly=True)
            return self._store

    def _kept_view(
        self, view: str, views: ViewsSnapshot, known: Mapping[str, _KeptView]
    ) -> _KeptView:
        mark, used = views.marks[view], time.monotonic()
        if view in views.rows:
            result = views.rows[view]
            empty = replace(result, rows=result.rows.clear())
            kept = _KeptView(mark, _to_arrow(result), empty, used)
        else:
            kept = replace(known[view], used=used)
        with self._lock:
            self._kept[view] = kept
            self._drop_unused()
        return kept

    def _drop_unused(self) -> None:
        """Let the rows of views go that were not wanted for longest, so that what is kept stays within its limit."""
        oldest = sorted(self._kept.items(), key=lambda one: one[1].used)
        held = sum(kept.rows.nbytes for kept in self._kept.values())
        for view, kept in oldest[:-1]:
            if held <= _KEPT_BYTES_MAX:
                return
            held -= kept.rows.nbytes
            del self._kept[view]

    # Topics.

    def _topic_tables(self) -> tuple[SqlTable, ...]:
        topics = sorted(self._log.topics())
        names = column_names(tuple(topics))
        return tuple(
            self._columns(topic).table(topic, name)
            for topic, name in zip(topics, names, strict=True)
        )

    def _columns(self, topic: str) -> TopicColumns:
        return self.scope.topics.get(topic, _UNDECLARED)

    def _ranges(
        self, log: Reader, topic: str, views: ViewsSnapshot
    ) -> tuple[dict[int, tuple[int, int]], dict[str, int]]:
        """Return what is read of a topic by partition, as [start, end), and the ends as a position has them."""
        bounds = log.offsets(topic)
        reached = views.position.get(topic, {} if topic in views.topics_read else None)
        ranges, ends = {}, {}
        for partition, (start, end) in enumerate(bounds):
            stop = end
            if reached is not None:
                # A partition of which nothing was read yet is not in the position.
                stop = min(int(reached.get(str(partition), start)), end)
            ranges[partition] = (min(self._start(log, topic, partition, start), stop), stop)
            ends[str(partition)] = stop
        check_size(topic, ranges, self.scope.records_max)
        return ranges, ends

    def _start(self, log: Reader, topic: str, partition: int, start: int) -> int:
        if self.scope.since_ms is None:
            return start
        since_ms = int(time.time() * 1000) - self.scope.since_ms
        return max(start, log.offset_for_time(topic, partition, since_ms))

    def _pinned(self, topic: str, views: ViewsSnapshot) -> Reader:
        """Return the log with the topic as it is now: all of its rows are of this one, whatever is made under its name."""
        topic_id = self._log.topic_id(topic)
        known = views.topic_ids.get(topic)
        read = topic in views.position or topic in views.topics_read
        if read and known is not None and known != topic_id:
            raise TopicRecreatedError(
                f"The topic {topic!r} was deleted and created again after the app {self.scope.app!r} had read it, so the "
                "app's position means nothing in it. Reset the app, or ask without this topic."
            )
        return self._log.pinned({topic: topic_id})

    def _topic_rows(
        self, log: Reader, topic: str, ranges: Mapping[int, tuple[int, int]], deadline: Deadline
    ) -> pa.Table:
        def check() -> None:
            deadline.check(f"the topic {topic!r} was being read")

        return read_topic(log, topic, self._columns(topic), ranges, check)


def _to_arrow(result: QueryResult) -> pa.Table:
    # By number: names may be anything, and are given later.
    columns: Sequence[pa.ChunkedArray] = result.rows.to_arrow().columns
    return pa.table(columns, names=[str(number) for number in range(len(columns))])


def _view_notes(result: QueryResult, views: ViewsSnapshot) -> list[str]:
    notes = []
    view = result.schema.name
    if (note := partial_note(result.coverage)) is not None:
        notes.append(f"The view {view!r} is incomplete: it {note}.")
    position = dict(views.positions[view])
    if position != views.position:
        notes.append(f"The view {view!r} is as of another position: {position}.")
    return notes
