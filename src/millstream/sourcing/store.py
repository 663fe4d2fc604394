"""The event store: commands in, events out, and the state of every aggregate, over one topic of a log."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from millstream.choices import choose
from millstream.client.folder.log import FolderLog
from millstream.client.json_values import plain_value
from millstream.client.log import EventLog
from millstream.errors import CommandRejectedError, ConfigError, FencedError
from millstream.log.murmur2 import murmur2
from millstream.sourcing.aggregate import Folding
from millstream.sourcing.command_queue import CommandQueue, OnConflict, PendingCommand
from millstream.sourcing.decider import check_decider
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.excision import ForgetReport, check_subjects, forget_subjects
from millstream.sourcing.folder_partition import FolderAppender, FolderPartition
from millstream.sourcing.kafka_partition import KafkaPartition
from millstream.sourcing.lane import Lane
from millstream.sourcing.partition_log import PartitionLog
from millstream.sourcing.projection import Projection, ProjectionRun
from millstream.sourcing.stored_event import LogPosition, Metadata, SourcedEvent, decode_event
from millstream.sourcing.stream_index import StreamIndex, index_folder, remove_deleted
from millstream.sourcing.subject_keys import SubjectKeys

_PARTITIONS_BEHIND_BROKERS = 4
_KEPT_FOR_EVER = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}


@dataclass(frozen=True, slots=True)
class Handled:
    """What came of a command.

    ``events`` are those it appended, ``version`` where they leave its stream, ``position`` where they end
    in the topic. ``repeated`` says that the command was handled before: these are the events of then.
    """

    stream_id: str
    version: int
    events: list[Any]
    position: LogPosition
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class LoadedAggregate:
    """The state of an aggregate, and the version that it is of; 0 if it has no events."""

    stream_id: str
    version: int
    state: Any


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, kw_only=True)
class _StoreOptions:
    index: Path | None
    snapshot_every: int | None
    cache: int
    clock_ms: Callable[[], int] = field(default=_wall_clock_ms)


class EventStore:
    """Aggregates of one kind, whose events are the records of one topic.

    Args:
        log: An open log: a folder, or brokers.
        topic: Of the events; created if it is missing, and kept for ever. Nothing else may write to it;
            anything may read it.
        decider: :class:`millstream.Decider`, or an object with its three functions.
        events: The registered events.
        partitions: Of the topic, if it is created; if not given, 1 in a folder and 4 behind brokers. In a folder
            fewer need fewer syncs; behind brokers each has a writer, and more can be shared by more processes. It
            can never be changed, as streams would move.
        keys: The file of the keys of personal fields; see :meth:`EventTypes.register` and :meth:`forget`.
            It is needed if there are such fields.
        index: A folder for the index, which is made from the log and may be deleted. For a log in a folder
            it is in there, if not given.
        snapshot_every: Keep an aggregate snapshot every so many events; the decider needs a ``state`` type.
        cache: How many aggregates stay in memory, per partition.
        rejections: "discard" leaves nothing of a command that is refused; "record" keeps a record of it
            in the topic named ``topic`` + ``.rejections``.
        clock_ms: Milliseconds since 1970; tests give another clock.

    Raises:
        ConfigError: an argument is not possible, or the topic has a retention that deletes events.

    Guarantees: thread-safe. In a folder, any number of processes may have stores of one topic; behind
    brokers a partition has one writer, and the store that wrote to it last fences the others.
    """

    def __init__(
        self,
        log: EventLog,
        topic: str,
        decider: Any,
        events: EventTypes,
        *,
        partitions: int | None = None,
        keys: str | Path | None = None,
        index: str | Path | None = None,
        snapshot_every: int | None = None,
        cache: int = 10_000,
        rejections: Literal["discard", "record"] = "discard",
        clock_ms: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        self.log, self.topic = log, topic
        self.decider = check_decider(decider)
        choose("rejections", rejections, ("discard", "record"))
        if cache < 1:
            raise ConfigError(
                f"cache is {cache}; give how many aggregates to keep in memory, 1 or more"
            )
        self._options = _StoreOptions(
            index=None if index is None else Path(index),
            snapshot_every=snapshot_every,
            cache=cache,
            clock_ms=clock_ms,
        )
        self._index_folder = self._find_index_folder()
        self._keys = None if keys is None else SubjectKeys(keys)
        self.events = events.sealed_with(self._keys)
        if partitions is None:
            partitions = 1 if log.is_folder else _PARTITIONS_BEHIND_BROKERS
        info = log.create_topic(
            topic, partitions=partitions, settings=_KEPT_FOR_EVER, exist_ok=True
        )
        self._check_kept(topic)
        self.topic_id, self.partitions = info.topic_id, info.partitions
        self.remove_deleted_indexes()
        self._lanes: dict[int, Lane] = {}
        self._queues: dict[int, CommandQueue] = {}
        self._appender: FolderAppender | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._rejections = None
        if rejections == "record":
            log.create_topic(f"{topic}.rejections", settings=_KEPT_FOR_EVER, exist_ok=True)
            self._rejections = log.producer()

    def _find_index_folder(self) -> Path:
        if self._options.index is not None:
            return self._options.index
        if isinstance(self.log, FolderLog):
            return self.log.folder / "sourcing"
        raise ConfigError(
            "a store over brokers needs a folder of this machine for its index, which is made from the log; "
            "give index='some-folder'"
        )

    def remove_deleted_indexes(self) -> list[str]:
        """Remove what the index folder has of topics that the log has no more; return their ids."""

        def topic_ids() -> set[str]:
            return {one.topic_id for one in self.log.topics().values()}

        place = self._index_folder, self.log.identity
        return remove_deleted(*place, self.topic_id, topic_ids)

    def _check_kept(self, topic: str) -> None:
        settings = self.log.topic_settings(topic)
        for name, wanted in _KEPT_FOR_EVER.items():
            found = settings.get(name, wanted)
            if found != wanted:
                raise ConfigError(
                    f"topic {topic!r} has {name}={found}, and would lose events; set it to {wanted} with "
                    "alter_topic, or give the store another topic"
                )

    # -- commands -----------------------------------------------------------------------------

    def handle(
        self,
        stream_id: str,
        command: Any,
        *,
        command_id: str | None = None,
        expected_version: int | None = None,
        on_conflict: OnConflict = "retry",
        causation_id: str | None = None,
        correlation_id: str | None = None,
        who: str | None = None,
        why: str | None = None,
    ) -> Handled:
        """Decide a command on the state of a stream, and append what was decided, all of it or nothing.

        When this returns, the events are durable, and everybody sees them.

        Args:
            stream_id: Of the aggregate; it begins to exist with its first event.
            command: Given to ``decide`` as it is.
            command_id: A command with an id is handled once: sent again, to the same stream, it changes
                nothing and gives the result of then. Of a command that had no events nothing is known.
            expected_version: The version that the caller has seen; another one is an error.
            on_conflict: If another writer was first: "retry" decides again on what the stream has become,
                "raise" raises.
            causation_id: What caused the command, such as the id of another one.
            correlation_id: The whole story that it belongs to.
            who: Whoever acts.
            why: Their reason.

        Raises:
            CommandRejectedError: the decider refused; nothing was appended. Any other exception of the
                decider is raised as it is, and nothing was appended either.
            VersionConflictError: the stream is at another version than was expected.
            DiskFullError: nothing was appended; make room, and send it again.
            FencedError: another store has the partition now (brokers only); close this one.
            MillstreamError: the command may have been handled. Send it again with the same command_id.

        Guarantees: thread-safe; commands that wait for the same partition share one sync.
        """
        choose("on_conflict", on_conflict, ("retry", "raise"))
        if expected_version is not None and (
            type(expected_version) is not int or expected_version < 0
        ):
            raise ConfigError(
                f"expected_version is {expected_version!r}; give 0 for a new stream, or a greater whole number"
            )
        given = os.urandom(16).hex() if command_id is None else _check_command_id(command_id)
        metadata = _check_metadata(Metadata(given, causation_id, correlation_id, who, why))
        pending = PendingCommand(
            check_stream_id(stream_id),
            command,
            metadata,
            expected_version,
            on_conflict,
            checks_repeats=command_id is not None,
            nonce="" if command_id is None else os.urandom(8).hex(),
        )
        partition = self.partition_of(stream_id)
        lane = self.lane(partition)
        self._queues[partition].handle(lane, pending)
        if pending.error is not None:
            if isinstance(pending.error, CommandRejectedError):
                self._record_rejection(pending)
            raise pending.error
        position = LogPosition(partition, pending.end)
        return Handled(stream_id, pending.version, pending.data, position, pending.repeated)

    def _record_rejection(self, pending: PendingCommand) -> None:
        if self._rejections is None:
            return
        value = {
            "stream": pending.stream_id,
            "version": pending.version,
            "command_type": type(pending.command).__qualname__,
            "command": _readable(pending.command),
            "reason": str(pending.error),
            "metadata": pending.metadata,
        }
        topic = f"{self.topic}.rejections"
        self._rejections.send(
            topic, value, key=pending.stream_id, timestamp_ms=self._options.clock_ms()
        ).result()

    # -- reading ------------------------------------------------------------------------------

    def load(self, stream_id: str) -> LoadedAggregate:
        """Return the state of an aggregate with everything that was appended before this call.

        Raises:
            ConfigError, UserCodeError: an event cannot be read by this program; the error has its place.
        """
        found = self.lane_of(check_stream_id(stream_id)).current(stream_id)
        return LoadedAggregate(stream_id, found.version, found.state)

    def history(self, stream_id: str, *, after_version: int = 0) -> Iterator[SourcedEvent]:
        """Yield the events of a stream in their order: what happened, when, who did it, and why.

        Raises:
            ConfigError, UserCodeError: an event cannot be read by this program; the error has its place.
        """
        lane = self._checked_lane(stream_id)
        for event in lane.folding.raw_events(stream_id, after_version):
            yield lane.folding.sourced(event)

    def stream_ids(self) -> list[str]:
        """Return the ids of all streams, sorted."""
        found: list[str] = []
        for number in range(self.partitions):
            lane = self.lane(number)
            lane.catch_up()
            found += lane.index.stream_ids()
        return sorted(found)

    def state_at(self, stream_id: str, at: int | datetime) -> LoadedAggregate:
        """Return the state that an aggregate had at a version, or at a time.

        At a time means: with every event recorded until then. Times do not go back within a stream.

        Raises:
            ConfigError: the version is negative, or the time has no time zone.
            ConfigError, UserCodeError: an event cannot be read by this program; the error has its place.
        """
        folding = self._checked_lane(stream_id).folding
        if isinstance(at, datetime):
            if at.tzinfo is None:
                raise ConfigError(f"the time {at} has no time zone; give one, such as datetime.UTC")
            version = 0
            for event in folding.raw_events(stream_id):
                if event.recorded_at > at:
                    break
                version = event.version
        elif at < 0:
            raise ConfigError(f"the version {at} is not possible; give 0 or more")
        else:
            version = at
        found = folding.load(stream_id, version)
        return LoadedAggregate(stream_id, found.version, found.state)

    def subscribe(
        self, positions: Mapping[int, int] | None = None, *, follow: bool = True
    ) -> Iterator[SourcedEvent]:
        """Yield the events of all streams, in order within each, and wait for more.

        To go on after a restart, keep ``position`` of the last event of each partition together with what
        you made of it, and give them as ``positions``.

        Args:
            positions: The next offset of each partition; those not given are read from their start.
            follow: Wait at the end; otherwise stop there.

        Raises:
            ConfigError, UserCodeError: an event cannot be read by this program; the error has its place.
        """
        start = dict.fromkeys(range(self.partitions), 0) | dict(positions or {})
        topic, topic_id = self.topic, self.topic_id
        with self.log.consumer(topic, start=start, follow=follow, topic_id=topic_id) as consumer:
            for record in consumer:
                folding = self.reading(record.partition)
                place = (topic, record.partition, record.offset, record.timestamp_ms)
                yield folding.sourced(decode_event(*place, record.value))

    def project(
        self, projection: Projection, into: str | Path, *, rebuild: bool = False
    ) -> ProjectionRun:
        """Return a projection of the events into a database, to run and to query; close it.

        Args:
            into: The path of a SQLite file, or the URL of a PostgreSQL database.
            rebuild: Fill the tables anew beside those that are there, which stay readable, and then put them in
                their place in one transaction; this returns when it is done.

        Raises:
            ConfigError: the tables were filled by other code, and ``rebuild`` was not given; or the
                database cannot be opened.
        """
        return ProjectionRun(self, projection, into, rebuild=rebuild)

    def forget(
        self,
        subject: str | Sequence[str],
        *,
        projections: Sequence[ProjectionRun] = (),
        remove: bool = False,
    ) -> ForgetReport:
        """Make the personal fields of a subject unreadable, wherever they were copied to, for good.

        The subject's keys are destroyed; from then on the events have the values that were registered for the
        forgotten. Aggregate snapshots, which have them in clear, are deleted, and are made again. Projections
        are called to forget, or rebuilt if they cannot. Calling it again finishes what a crash left.

        The topic is read through, to say where the data was. What is not reached is in the report's
        ``remaining``.

        Args:
            subject: One subject, or several.
            projections: Those with data of the subject.
            remove: Remove the bytes, too: of what was sealed, of personal fields that earlier events have in clear,
                and of recorded rejections that name the subject. Closed segments are written anew, with every
                offset kept; so give several subjects at once if you can. Others may read and write meanwhile.

        Raises:
            ConfigError: the store was opened without ``keys``; or bytes are to be removed from brokers, which
                cannot do that. Nothing was done.
            FencedError: the store was opened before a fork. Nothing was done.
            DiskFullError: there was no room to write segments anew; the keys are destroyed. Make room, and
                call it again.
        """
        self._check_not_forked()
        if self._keys is None:
            raise ConfigError(
                "this store has no keys, so nothing in it is sealed; open it with keys='keys.db', and register "
                "personal fields"
            )
        subjects = check_subjects(subject)
        return forget_subjects(self, self._keys, subjects, projections, remove=remove)

    def verify_snapshots(self) -> Iterator[tuple[str, str | None]]:
        """Compare every aggregate snapshot with a full fold: yield each stream, and what is wrong or None.

        Snapshots of other code are not used, and not compared.
        """
        for number in range(self.partitions):
            lane = self.lane(number)
            lane.catch_up()
            for stream_id in lane.index.stream_ids():
                if lane.folding.has_snapshot(stream_id):
                    yield stream_id, lane.folding.fault_of_snapshot(stream_id)

    # -- partitions ---------------------------------------------------------------------------

    def partition_of(self, stream_id: str) -> int:
        """Return the partition of a stream: the one that Kafka's clients choose for this key."""
        if self.partitions == 1:
            return 0
        return (murmur2(stream_id.encode()) & 0x7FFFFFFF) % self.partitions

    def _checked_lane(self, stream_id: str) -> Lane:
        lane = self.lane_of(check_stream_id(stream_id))
        lane.catch_up()
        return lane

    def reading(self, partition: int) -> Folding:
        """Return what reads the events of a partition."""
        return self.lane(partition).folding

    def lane_of(self, stream_id: str) -> Lane:
        """Return the lane that a stream's commands go through."""
        return self.lane(self.partition_of(stream_id))

    def lane(self, partition: int) -> Lane:
        """Return the lane of a partition; the first call opens it.

        Raises:
            FencedError: the store was closed, or opened before a fork: its locks may be held by threads that this
                process does not have.
        """
        self._check_not_forked()
        lane = self._lanes.get(partition)
        if lane is not None:
            return lane
        with self._lock:
            if self._closed:
                raise FencedError(f"the store of {self.topic!r} was closed; open another one")
            if partition not in self._lanes:
                self._lanes[partition] = self._open_lane(partition)
            return self._lanes[partition]

    def _check_not_forked(self) -> None:
        if os.getpid() != self._process:
            raise FencedError(
                f"the store of {self.topic!r} was opened before a fork; connect and open one in the child"
            )

    def _open_lane(self, partition: int) -> Lane:
        with ExitStack() as undo:
            log, queue = self._open_log(partition)
            undo.callback(log.close)
            folder = index_folder(self._index_folder, self.log.identity, self.topic_id)
            index = StreamIndex(folder / f"{partition}.db", self.topic_id, self.partitions)
            undo.callback(index.close)
            options = self._options
            folding = Folding(log, index, self.decider, self.events, options.snapshot_every)
            lane = Lane(
                log,
                index,
                folding,
                self.decider,
                self.events,
                clock_ms=options.clock_ms,
                partition_of=self.partition_of,
                cache_max=options.cache,
            )
            undo.pop_all()
        self._queues[partition] = queue
        return lane

    def _open_log(self, partition: int) -> tuple[PartitionLog, CommandQueue]:
        """Return the log of a partition, and the queue of its commands: in a folder one for all partitions."""
        place = self.topic, partition, self.topic_id
        if not isinstance(self.log, FolderLog):
            behind_brokers = KafkaPartition(self.log, *place)
            return behind_brokers, CommandQueue(behind_brokers.append_all)
        if self._appender is None:
            self._appender = FolderAppender(self.log)
        queue = next(iter(self._queues.values()), None)
        return FolderPartition(self.log, *place), queue or CommandQueue(self._appender.append_all)

    def close(self) -> None:
        """Close the store, before the log. Calling it again does nothing, and in a forked child neither."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes, {}
        with ExitStack() as closing:
            if self._keys is not None:
                closing.callback(self._keys.close)  # last: callbacks run from the last to the first
            if self._appender is not None:
                closing.callback(self._appender.close)
            for lane in lanes.values():
                closing.callback(lane.close)
            if self._rejections is not None:
                closing.callback(self._rejections.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_stream_id(stream_id: str) -> str:
    """Return the id of a stream.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(stream_id, str) or not stream_id or not _is_unicode(stream_id):
        raise ConfigError(
            f"the stream id {stream_id!r} is not possible; give a text, such as 'cart-17'"
        )
    return stream_id


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text)


def _check_command_id(command_id: str) -> str:
    """Return the id of a command: what is stored is a text, and only a text is found again as what it was.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(command_id, str) or not command_id or not _is_unicode(command_id):
        raise ConfigError(
            f"the command id {command_id!r} is not possible; give a text, such as 'deposit-17', or str() of what "
            "you have, or leave it out"
        )
    return command_id


def _check_metadata(metadata: Metadata) -> Metadata:
    """Return what is known about a command, which is stored as text.

    Raises:
        ConfigError: something is given that is no text.
    """
    for name in ("causation_id", "correlation_id", "who", "why"):
        given = getattr(metadata, name)
        if given is not None and not (isinstance(given, str) and _is_unicode(given)):
            raise ConfigError(f"{name} is {given!r}; give a text, or leave it out")
    return metadata


def _readable(command: Any) -> Any:
    """Return a command in JSON values, or as text where it has no such form."""
    try:
        return json.loads(json.dumps(command, default=plain_value, allow_nan=False))
    except (TypeError, ValueError):
        return repr(command)
