"""A lane decides and appends the commands of one partition: those of all threads that wait, as one batch.

A lane gets commands from a queue (see ``command_queue``), and for all of them it

1. reads on to the end of the partition, and brings index and cached aggregates up to it;
2. decides each command, in order, on the state that the ones before it leave;
3. has all events appended as one batch, if the partition still ends where it was read to; else it goes back to 1
   with all of them, as what was decided rests on what others have changed;
4. updates index and cache, and gives each command its result. Refusals are results too: they are given only
   when the events that they rest on are in the log.

So a hot stream costs one sync for all threads that wait, and no update is lost: step 3 is the comparison, and
it is made where appends are ordered (see ``partition_log``, which also says what a crash leaves). The lane yields at
step 3: the queue makes it for all its lanes at once.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy

from millstream.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    EndMovedError,
    FencedError,
    MillstreamError,
    VersionConflictError,
)
from millstream.log.encoding import SimpleRecord, check_record_size
from millstream.sourcing.aggregate import AggregateCache, FoldedStream, Folding, copy_of
from millstream.sourcing.command_queue import (
    PendingCommand,
    check_not_deciding,
    deciding,
    fail,
    interrupted,
)
from millstream.sourcing.decider import DeciderLike, is_frozen
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.partition_log import Append, PartitionLog, events_deleted
from millstream.sourcing.stored_event import RawEvent, about_of, encode_event
from millstream.sourcing.stream_index import EventRun, LastEvent, StreamIndex

GROUP_MAX = 500  # commands in one batch
GROUP_BYTES = 8 << 20  # in one batch; the command that passes it is the last one
CONFLICT_TIMEOUT_S = 30.0
COPIES_AFTER_CONFLICT = 100  # groups before which states are copied, once another writer was first
_log = logging.getLogger(__name__)


class _Draft:
    """What a group of commands would append, and the aggregates as they would be."""

    def __init__(self) -> None:
        self.aggregates: dict[str, FoldedStream] = {}
        self.versions_before: dict[str, int] = {}
        self.copies: dict[
            str, FoldedStream
        ] = {}  # as they were read, of states that could be changed
        self.frozen: set[str] = set()  # streams whose states, as they were read, could not be
        self.appending: list[PendingCommand] = []
        self.records: list[SimpleRecord] = []
        self.size = 0
        self.by_command: dict[tuple[str, str], PendingCommand] = {}
        self.repeats: list[tuple[PendingCommand, PendingCommand]] = []
        self.handled: list[PendingCommand] = []


class Lane:
    """The commands of one partition. Thread-safe.

    Args:
        clock_ms: Milliseconds since 1970.
        partition_of: The partition of a stream, to find streams that are in a wrong one.
    """

    def __init__(
        self,
        log: PartitionLog,
        index: StreamIndex,
        folding: Folding,
        decider: DeciderLike,
        events: EventTypes,
        *,
        clock_ms: Callable[[], int],
        partition_of: Callable[[str], int],
        cache_max: int,
    ) -> None:
        self.log, self.index, self.folding = log, index, folding
        self._decider, self._events = decider, events
        self._clock_ms, self._partition_of = clock_ms, partition_of
        self._cache = AggregateCache(cache_max)
        self._lock = threading.Lock()
        self._end = -1  # what was read; -1 before the index was compared with the log
        self._certain = True  # the end is not below what this lane has appended
        self._copies_left = 0
        self._failure: FencedError | None = None
        self._forgets = events.forgets()

    def catch_up(self) -> int:
        """Bring the index up to the end of the partition; return that end."""
        with deciding(), self._lock:
            self._catch_up(looks=True)
            return self._end

    def current(self, stream_id: str) -> FoldedStream:
        """Return the aggregate of a stream as it is now."""
        with deciding():
            with self._lock:
                self._catch_up(looks=True)
                found = self._cache.get(stream_id)
                if found is not None and is_frozen(found.state):
                    return FoldedStream(found.version, found.state, found.timestamp_ms)
            return self.folding.load(stream_id)

    def forget_states(self) -> int:
        """Drop every cached aggregate and every snapshot; return how many snapshots there were."""
        check_not_deciding()
        with self._lock:
            self._forgets = self._events.forgets()
            self._cache.clear()
            return self.index.drop_snapshots()

    def close(self) -> None:
        """Flush the index, and release the partition."""
        with self._lock:
            self._follow_forgetting()
            self.index.close()
            self.log.close()

    # -- a group of commands ------------------------------------------------------------------

    def handle(self, commands: list[PendingCommand]) -> Generator[Append | None, int, None]:
        """Give each of these commands its result; yield what is to be appended, or None to look again later.

        Whoever runs this sends the offset of the first record, or throws what the append raised. The lane is held
        until it has ended. What fails in it is what its commands get, and an interrupt ends it, too.
        """
        with self._lock:
            while commands:
                group = commands[:GROUP_MAX]
                try:
                    self._check_not_fenced()
                    count = yield from self._handle_group(group)
                    del commands[:count]
                except ConfigError as error:
                    if (
                        len(group) > 1
                    ):  # one of them, such as an event that is too large, fails alone
                        yield from self._handle_each(group)
                    else:
                        fail(group, error)
                    del commands[: len(group)]
                except MillstreamError as error:
                    if isinstance(error, FencedError):
                        self._failure = error
                    fail(group, error)
                    del commands[: len(group)]
                except Exception as error:  # noqa: BLE001 - such as one of SQLite: it concerns no other lane
                    fail(commands, interrupted(error))
                    return
                except BaseException as error:
                    fail(commands, interrupted(error))
                    raise

    def _check_not_fenced(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _handle_each(self, group: Sequence[PendingCommand]) -> Generator[Append | None, int, None]:
        for one in group:
            one.checks_repeats = True
            try:
                yield from self._handle_group([one])
            except MillstreamError as error:
                fail([one], error)
            except Exception as error:  # noqa: BLE001 - as in ``handle``
                fail([one], interrupted(error))

    def _handle_group(self, group: Sequence[PendingCommand]) -> Generator[Append | None, int, int]:
        """Handle as many commands as one batch should have; return how many these are."""
        until_s = time.monotonic() + CONFLICT_TIMEOUT_S
        if self.log.acquire():
            self._certain = False  # others may have appended until now
        while True:
            self._catch_up()
            if self._load_missing(group):
                self._catch_up()  # a long fold gives others time: what they appended is added to it
                self._copies_left = max(self._copies_left, 1)
            draft = _Draft()
            try:
                self._decide_all(group, draft)
                offset = self._end
                if draft.records:
                    self._certain = False
                    offset = yield Append(self.log, draft.records, self._end)
                self._accept(draft, offset)
            except EndMovedError as error:
                self._restore_changed(draft)
                self._copies_left = COPIES_AFTER_CONFLICT
                if not self._can_be_read(error, until_s):
                    yield None
            except BaseException:
                # States may have been changed in place, and what was appended is read from the log.
                self._cache.drop(draft.aggregates)
                raise
            else:
                self._copies_left = max(self._copies_left - 1, 0)
                return len(draft.handled)

    def _load_missing(self, group: Sequence[PendingCommand]) -> bool:
        """Fold the aggregates of these commands that are not cached; return whether there were any."""
        missing = {one.stream_id for one in group if self._cache.get(one.stream_id) is None}
        if self.log.exclusive:
            return False  # nobody can append meanwhile
        for stream_id in missing:
            with suppress(Exception):  # deciding will meet it again, and give it to its command
                self._cache.put(stream_id, self.folding.load(stream_id))
        return bool(missing)

    def _restore_changed(self, draft: _Draft) -> None:
        """Put back the copies of aggregates whose states may have been changed in place, or drop these.

        The others are as they were read. To fold a long stream again takes longer than others need to be first
        again: without the copies a writer that is slower than another one would never be done.
        """
        for stream_id in draft.aggregates.keys() - draft.frozen:
            if stream_id in draft.copies:
                self._cache.put(stream_id, draft.copies[stream_id])
            else:
                self._cache.drop([stream_id])

    def _can_be_read(self, error: EndMovedError, until_s: float) -> bool:
        """Return whether what moved the end can be read; it may be soon."""
        if self.log.bounds()[1] > self._end:
            return True
        if time.monotonic() > until_s:
            raise ConflictError(
                f"{self.log.topic}/{self.log.partition} ends at offset {error.end}, and can be read to "
                f"{self._end} only: something else has a transaction open in the topic. Only ms.EventStore "
                "may write to it; end the other, and send the command again"
            ) from error
        return False

    # -- step 2 -------------------------------------------------------------------------------

    def _decide_all(self, group: Sequence[PendingCommand], draft: _Draft) -> None:
        """Decide as many commands as one batch should have."""
        for one in group:
            self._decide(one, draft)
            draft.handled.append(one)
            if draft.size > GROUP_BYTES:
                break

    def _decide(self, one: PendingCommand, draft: _Draft) -> None:
        """Decide one command; an error is that command's result, and touches no other."""
        one.events, one.data, one.error, one.repeated = [], [], None, False
        key = (one.stream_id, one.metadata.command_id)
        try:
            if one.checks_repeats and self._repeat(one, draft):
                return
            aggregate = self._aggregate(one.stream_id, draft)
            one.version = aggregate.version
            _check_version(one, aggregate.version)
        except Exception as error:  # noqa: BLE001 - it is raised where the command was sent
            one.error = error
            return
        try:
            records = self._decide_on(one, aggregate)
        except Exception as error:  # noqa: BLE001 - the same
            one.events, one.data, one.error = [], [], error
            if not is_frozen(aggregate.state):
                self._fold_again(one, draft)
            return
        if records:
            draft.appending.append(one)
            draft.records += records
            draft.size += sum(record.size for record in records)
            draft.by_command[key] = one

    def _decide_on(self, one: PendingCommand, aggregate: FoldedStream) -> list[SimpleRecord]:
        """Decide on an aggregate, and bring it up to what was decided; return the records of that."""
        decided = list(self._decider.decide(one.command, aggregate.state))
        if not decided:
            return []
        command_id, about = one.metadata.command_id, about_of(one.metadata, one.nonce)
        # A stream's times never go back, so that its state at a time is well defined.
        timestamp_ms = max(self._clock_ms(), aggregate.timestamp_ms)
        encoded = [self._events.encode(event) for event in decided]
        one.data = [event.for_caller for event in encoded]
        for version, (kind, fields, _, _) in enumerate(encoded, start=aggregate.version + 1):
            place = (-1, timestamp_ms, one.stream_id, version)
            one.events.append(RawEvent(*place, kind.name, kind.version, fields, command_id, about))
        records = [encode_event(event) for event in one.events]
        for record in records:
            check_record_size(record.size)
        state = aggregate.state
        for event in encoded:
            state = self._decider.evolve(state, event.event)
        aggregate.state, aggregate.timestamp_ms = state, timestamp_ms
        aggregate.version = one.version = aggregate.version + len(records)
        return records

    def _fold_again(self, failed: PendingCommand, draft: _Draft) -> None:
        """Fold a state anew that the decider may have changed before it failed: it is a mutable one."""
        stream_id = failed.stream_id
        self._cache.drop([stream_id])
        try:
            again = self.folding.load(stream_id, draft.versions_before[stream_id])
            for one in draft.appending:
                for event in one.events if one.stream_id == stream_id else ():
                    self.folding.evolve(again, event)
        except Exception as error:
            raise MillstreamError(
                f"stream {stream_id!r} cannot be folded again, after a command failed on it: {error!r}; "
                "nothing was appended. Correct the decider, and send the commands again"
            ) from error
        draft.aggregates[stream_id] = again

    def _repeat(self, one: PendingCommand, draft: _Draft) -> bool:
        """Give a command that was handled before the result of then."""
        drafted = draft.by_command.get((one.stream_id, one.metadata.command_id))
        if drafted is not None:
            draft.repeats.append((one, drafted))
            return True
        run = self.index.run_of_command(one.stream_id, one.metadata.command_id)
        if run is None:
            return False
        one.events = list(self.log.read(run.first_offset, run.first_offset + run.length))
        one.data = [self.folding.data_of(event) for event in one.events]
        one.version, one.repeated = run.last_version, True
        return True

    def _aggregate(self, stream_id: str, draft: _Draft) -> FoldedStream:
        found = draft.aggregates.get(stream_id)
        if found is None:
            cached = self._cache.get(stream_id) or self.folding.load(stream_id)
            found = FoldedStream(cached.version, cached.state, cached.timestamp_ms)
            draft.aggregates[stream_id] = found
            draft.versions_before[stream_id] = found.version
            if is_frozen(found.state):
                draft.frozen.add(stream_id)
            copied = copy_of(found) if self._copies_left else None
            if copied is not None:
                draft.copies[stream_id] = copied
        return found

    # -- step 4 -------------------------------------------------------------------------------

    def _accept(self, draft: _Draft, offset: int) -> None:
        for one in draft.appending:
            one.events = [
                event._replace(offset=at) for at, event in enumerate(one.events, start=offset)
            ]
            first = one.events[0]
            run = EventRun(first.version, len(one.events), offset, one.metadata.command_id)
            self.index.add(one.stream_id, run, one.nonce)
            offset += len(one.events)
        self._end, self._certain = offset, True
        for one, drafted in draft.repeats:
            one.events, one.version, one.repeated = drafted.events, drafted.version, True
            one.data = deepcopy(drafted.data)
        for stream_id, aggregate in draft.aggregates.items():
            self._cache.put(stream_id, aggregate)
        for one in draft.handled:
            one.end = one.events[-1].offset + 1 if one.events else self.index.position
            one.done = True
        self._keep(draft)

    def _keep(self, draft: _Draft) -> None:
        """Keep snapshots, and flush the index. What fails here is made from the log another time."""
        for stream_id, before in draft.versions_before.items():
            aggregate = draft.aggregates[stream_id]
            with self._only_warning():
                self.folding.keep_snapshot(stream_id, before, aggregate, self._forgets)
        with self._only_warning():
            self.index.flush_if_due()

    @contextmanager
    def _only_warning(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, sqlite3.Error) as error:
            _log.warning("the index of %s/%s: %s", self.log.topic, self.log.partition, error)

    # -- step 1 -------------------------------------------------------------------------------

    def _follow_forgetting(self) -> None:
        """Drop what is in memory of subjects whom another process has forgotten."""
        forgets = self._events.forgets()
        if forgets != self._forgets:
            self._forgets = forgets
            self._cache.clear()
            self.index.drop_snapshots()

    def _catch_up(self, *, looks: bool = False) -> None:
        """Read on to the end; with ``looks`` also if only this lane may append, as far as it knows.

        It may have been fenced: its next append notices, and what it reads must not wait for that.
        """
        self._follow_forgetting()
        if self._end < 0:
            self._check_index()
        elif self.log.exclusive and self._certain and not looks:
            return
        end = self.log.bounds()[1]
        run: list[RawEvent] = []
        for event in self.log.read(self._end, end) if end > self._end else ():
            if run and not _continues(run[-1], event):
                self._add(run)
                run = []
            run.append(event)
        if run:
            self._add(run)
        self._end, self._certain = end, True

    def _check_index(self) -> None:
        """Compare the index with the log; drop it if it does not fit."""
        start, end = self.log.bounds()
        last = self.index.last
        fits = self.index.position <= end
        if fits and last is not None and last.offset >= start:
            found = next(self.log.read(last.offset, last.offset + 1), None)
            fits = found is not None and last == LastEvent(
                found.offset, found.stream_id, found.version, str(found.command_id), found.nonce
            )
        if not fits:
            self.index.clear()
        if self.index.position < start:
            raise events_deleted(self.log, self.index.position, start)
        self._end = self.index.position

    def _add(self, run: Sequence[RawEvent]) -> None:
        """Take the events of a command that was appended by another writer, or in another life."""
        first, stream_id = run[0], run[0].stream_id
        known = self.index.version(stream_id)
        right = self._partition_of(stream_id) == self.log.partition
        if first.version > known + 1 or not right or not self._is_same(first, known):
            raise CorruptionError(
                f"version {first.version} of stream {stream_id!r} is at {self.folding.place(first)}, and "
                f"does not follow version {known}: events were deleted, partitions were added to the topic, "
                "or something else than ms.EventStore wrote to it. Restore the topic from a backup"
            )
        added = EventRun(first.version, len(run), first.offset, first.command_id)
        self.index.add(stream_id, added, first.nonce)
        self.index.flush_if_due()
        self._bring_up(run)

    def _bring_up(self, run: Sequence[RawEvent]) -> None:
        """Fold the events of another writer into the cached aggregate, so that it need not be loaded again."""
        cached = self._cache.get(run[0].stream_id)
        if cached is None:
            return
        try:
            for event in run:
                if event.version > cached.version:
                    self.folding.evolve(cached, event)
        except BaseException as error:
            self._cache.drop([run[0].stream_id])  # it may have been changed in place
            if not isinstance(error, Exception):
                raise  # an interrupt; whoever needs this aggregate loads it, and gets any other error

    def _is_same(self, first: RawEvent, known: int) -> bool:
        """Return whether a version that the index has already is this event: another process added it."""
        if first.version > known:
            return True
        run = self.index.runs(first.stream_id, first.version - 1)[0]
        return run.first_offset + first.version - run.first_version == first.offset


def _continues(before: RawEvent, event: RawEvent) -> bool:
    """Return whether an event belongs to the run of the one before it."""
    return (
        event.stream_id == before.stream_id
        and event.command_id == before.command_id
        and event.version == before.version + 1
        and event.offset == before.offset + 1
    )


def _check_version(one: PendingCommand, version: int) -> None:
    """Check that the stream is where the caller, or the first look at it, had it.

    Raises:
        VersionConflictError: it is elsewhere.
    """
    if one.first_seen is None:
        one.first_seen = version
    expected = one.expected_version
    if expected is None and one.on_conflict == "raise":
        expected = one.first_seen
    if expected is not None and expected != version:
        raise VersionConflictError(
            f"stream {one.stream_id!r} is at version {version}, not at {expected}: nothing was "
            "appended. Load it, and decide again",
            stream_id=one.stream_id,
            version=version,
            expected=expected,
        )
