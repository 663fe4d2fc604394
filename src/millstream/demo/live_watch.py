"""What the live part of the demo sees of its pipeline, from outside: appends, commits, alarms, and how fresh all is.

The feed's thread says what it has appended; the rest is read from the app's state store, as any program could.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_pipeline import APP
from millstream.demo.ads_run import DemoComparison
from millstream.demo.live_events import SPEED, BotVisit, LiveInput
from millstream.demo.live_pipeline import CLICK_ALARMS
from millstream.demo.live_story import LiveStory
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.reader import state_store_path
from millstream.views.state_store.sqlite_store import SqliteStateStore

_EXITS = ("late", "duplicate", "dead")
_ORIGIN = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class _Append:
    """Records that became durable at a time, and the ends of all partitions then."""

    at_s: float
    rows: int
    ends: tuple[int, ...]


@dataclass
class LiveWatch:
    """Compares what has been appended with what has been committed."""

    log: Path
    given: LiveInput
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ends: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    _waiting: deque[_Append] = field(default_factory=deque)
    _ages: list[tuple[float, int]] = field(default_factory=list)
    _begun: bool = False
    _bots: deque[BotVisit] = field(init=False)
    _at_work: dict[str, float] = field(default_factory=dict)
    _arrived: list[tuple[str, float]] = field(default_factory=list)
    _caught_s: list[float] = field(default_factory=list)
    _killed_at_s: float | None = None
    _before_kill: tuple[int, ...] = ()
    _recovered_s: list[float] = field(default_factory=list)
    _position: tuple[int, ...] = (0,) * PARTITIONS
    _alarms: set[tuple[datetime, str]] = field(default_factory=set)
    _store: SqliteStateStore | None = None

    def __post_init__(self) -> None:
        self._bots = deque(self.given.bots)

    def note_append(self, rows: pl.DataFrame) -> None:
        """Take in what the feed has appended: rows of ``DisorderedRecords.order``. Called by its thread."""
        with self._lock:
            for partition, count in rows["partition"].value_counts().iter_rows():
                self._ends[partition] += count
            now = self.clock()
            self._waiting.append(_Append(now, rows.height, tuple(self._ends)))
            newest_us = int(rows["arrival_us"][-1])
            if newest_us > self.given.end_us:  # the last heartbeats: no event has come
                return
            while self._bots and self._bots[0].start_us < newest_us:
                self._arrived.append((self._bots.popleft().client, now))

    def begin(self) -> None:
        """Count how fresh things are from now on: before, the pipeline was being started."""
        with self._lock:
            self._begun = True

    def note_kill(self) -> None:
        """Note that the pipeline was killed. What it had committed is no sign that the next one is at work."""
        store = self._opened()
        assert store is not None
        self._position = _position_in(store)
        with self._lock:
            self._killed_at_s, self._before_kill = self.clock(), tuple(self._ends)

    @property
    def has_committed(self) -> bool:
        """Whether a batch has been committed."""
        return any(self._position)

    @property
    def is_caught_up(self) -> bool:
        """Whether all that was appended is in the views."""
        with self._lock:
            return self._position == tuple(self._ends)

    @property
    def is_recovering(self) -> bool:
        """Whether a kill has not been made up for."""
        return self._killed_at_s is not None

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def look(self) -> Iterator[str]:
        """Take in what has been committed; yield what is worth telling."""
        store = self._opened()
        if store is None:
            return
        position = _position_in(store)
        is_new, self._position = position != self._position, position
        now = self.clock()
        with self._lock:
            self._take_fresh(now)
            arrived, self._arrived = self._arrived, []
        for client, at_s in arrived:
            self._at_work[client] = at_s
            yield f"a bot begins to click the ads of {client}"
        if is_new:
            yield from self._new_alarms(store, now)
        if is_new and self._killed_at_s is not None and _reached(position, self._before_kill):
            took_s = now - self._killed_at_s
            self._killed_at_s = None
            self._recovered_s.append(took_s)
            yield f"it goes on: what had arrived until the kill is in the views, {took_s:.1f} s after it"

    def _opened(self) -> SqliteStateStore | None:
        if self._store is None:
            with suppress(ConfigError):  # the pipeline has not created it yet
                self._store = SqliteStateStore(state_store_path(self.log, APP), readonly=True)
        return self._store

    def _take_fresh(self, now: float) -> None:
        while self._waiting and _reached(self._position, self._waiting[0].ends):
            append = self._waiting.popleft()
            if self._begun:
                self._ages.append((now - append.at_s, append.rows))

    def _new_alarms(self, store: SqliteStateStore, now: float) -> Iterator[str]:
        try:
            rows = store.scan(CLICK_ALARMS).sort("window_start", "client")
        except UnknownViewError:
            return
        for row in rows.iter_rows(named=True):
            key = (row["window_start"], row["client"])
            if key in self._alarms:
                continue
            self._alarms.add(key)
            began = self._at_work.pop(row["client"], None)
            if began is not None:  # later minutes of the same visit are no news
                self._caught_s.append(now - began)
                yield (
                    f"alarm: {row['client']}, {row['clicked']} clicks on {row['shown']} impressions in "
                    f"the minute of {row['window_start']:%H:%M}; the bot came {now - began:.1f} s ago"
                )

    def line(self) -> str:
        """Return where things are, in one line."""
        with self._lock:
            arrived = sum(self._ends)
            oldest = self._waiting[0].at_s if self._waiting else None
        behind = "" if oldest is None else f", {self.clock() - oldest:.1f} s behind"
        return f"{arrived:,} records, {sum(self._position):,} of them in the views{behind}"

    def story(self, seconds: float, comparison: DemoComparison, *, interrupted: bool) -> LiveStory:
        """Return the figures of a run that lasted so long."""
        store = self._opened()
        assert store is not None
        ledger = store.ledger(APP)
        batches = store.last_batch_id(APP)
        return LiveStory(
            seconds=seconds,
            event_time=timedelta(seconds=seconds * SPEED),
            records=sum(self._ends),
            left_out={name: sum(int(line[name]) for line in ledger) for name in _EXITS},
            batches=0 if batches is None else batches + 1,
            ages=tuple(self._ages),
            recovered_s=tuple(self._recovered_s),
            alarms=len(self._alarms),
            caught_s=tuple(self._caught_s),
            comparison=comparison,
            interrupted=interrupted,
        )


def _position_in(store: SqliteStateStore) -> tuple[int, ...]:
    stored = store.position(APP).get(TOPIC, {})
    return tuple(int(stored.get(str(number), 0)) for number in range(PARTITIONS))


def _reached(position: Sequence[int], ends: Sequence[int]) -> bool:
    return all(there >= end for there, end in zip(position, ends, strict=True))
