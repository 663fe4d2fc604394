"""Forgetting: the keys of subjects are destroyed, and every place where their data was is named.

1. The keys are destroyed (``subject_keys``). From here on nothing that was sealed can be read, wherever it was
   copied to. A crash before: nothing is forgotten, and forgetting is to be repeated.
2. The topic is read through for what was sealed with them, and for personal fields in clear: those of events that
   are older than the declaration that the field is personal. If asked, both are removed from the segments
   (``log.excision``), with every offset kept; the marks ``{"$sealed": "<key store>:<number>:"}`` stay, and are
   read as forgotten. A crash before or within: some of the bytes are there.
3. What is in memory, here and in other processes, and all aggregate snapshots are dropped. A crash before:
   snapshots have it in clear, and are not used any more.
4. Projections are told. A crash before: their tables have it in clear.

Forgetting again does whatever a crash has left, and finds nothing to do in the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from millstream.client.folder.log import FolderLog
from millstream.client.log import EventLog
from millstream.errors import ConfigError, CorruptBatchError
from millstream.log.reader import Isolation
from millstream.sourcing.event_types import EventTypes
from millstream.sourcing.json_form import ENCODER
from millstream.sourcing.lane import Lane
from millstream.sourcing.subject_keys import SEALED, SubjectKeys

_READ_OFFSETS = 50_000  # at a time, so that a long partition does not fill the memory
_REQUEST_BYTES = 8 << 20  # of new values in one request to the owner of the folder
_NO_KEY = 0  # keys are numbered from 1: the mark of a field that was in clear
_FORGOTTEN = "forgotten"  # the reason of a refused command that was emptied


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """Where the data of subjects was, and what became of it there: a line for each place.

    ``places`` are done with. ``remaining`` are not: what is still there, why, and what to do about it.
    """

    subjects: tuple[str, ...]
    places: tuple[str, ...]
    remaining: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.subjects))
        return "\n".join((f"forgotten: {names}", *self.places, "what remains:", *self.remaining))


class ForgettingProjection(Protocol):
    """A projection that may be told to forget."""

    def forget(self, subject: str) -> str:
        """Remove what the tables have of a subject; return what was done."""


class ForgettingStore(Protocol):
    """What forgetting needs of a store."""

    log: EventLog
    topic: str
    topic_id: str
    partitions: int
    events: EventTypes

    def lane(self, partition: int) -> Lane:
        """Return the lane of a partition."""

    def remove_deleted_indexes(self) -> list[str]:
        """Remove the indexes of topics that the log has no more; return their ids."""


def check_subjects(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the subjects to forget.

    Raises:
        ConfigError: there is none, or one is no text, or empty.
    """
    subjects = (given,) if isinstance(given, str) else tuple(given)
    if not subjects:
        raise ConfigError("nobody is to be forgotten; give one subject or more")
    for one in subjects:
        if not isinstance(one, str) or not one:
            raise ConfigError(
                f"the subject {one!r} is not possible; give the text that its events have in their subject field"
            )
    return subjects


def forget_subjects(
    store: ForgettingStore,
    keys: SubjectKeys,
    subjects: Sequence[str],
    projections: Sequence[ForgettingProjection],
    *,
    remove: bool,
) -> ForgetReport:
    """Do the four steps of the module.

    Raises:
        ConfigError: bytes are to be removed from brokers. Nothing was done.
    """
    folder = store.log if isinstance(store.log, FolderLog) else None
    if remove and folder is None:
        raise ConfigError(
            "brokers cannot change what a topic holds, so remove=True is not possible. Forget without it: the keys "
            "are destroyed, and what was sealed is noise; to be rid of that, too, copy the events to a new topic, and "
            "delete this one. A folder of Millstream's broker can be opened beside it by its path, and does remove"
        )
    destroyed = sum(keys.destroy(subject) for subject in subjects)
    places = [f"{keys.path}: {destroyed} keys destroyed"]
    search = _Search(store, keys, subjects)
    removal = folder if remove else None
    for number in range(store.partitions):
        search.go_through(store.topic, number, search.event_without, removal)
    rejections = f"{store.topic}.rejections"
    for number in range(_partitions_of(store.log, rejections)):
        search.go_through(rejections, number, search.rejection_without, removal)
    places += search.places
    if remove:
        keys.announce()  # others may have read what was in clear since the keys were destroyed
    for number in range(store.partitions):
        count = store.lane(number).forget_states()
        places.append(f"index of {store.topic}/{number}: {count} aggregate snapshots deleted")
    deleted = store.remove_deleted_indexes()
    places += [f"index of the deleted topic with id {one}: removed" for one in deleted]
    places += [one.forget(subject) for one in projections for subject in subjects]
    remaining = [*search.remaining, *_elsewhere(folder)]
    if folder is not None:
        remaining += _quarantined(folder.folder / "quarantine", search)
    return ForgetReport(tuple(subjects), tuple(places), tuple(remaining))


def _elsewhere(folder: FolderLog | None) -> Iterator[str]:
    if folder is None:
        yield (
            "the brokers: what was sealed stays in their segments and replicas, and cannot be opened; to be rid of "
            "it, copy the events to a new topic, and delete this one"
        )
    yield (
        "backups and copies of the log: what is sealed in them cannot be opened. Delete backups of the key store "
        "that are older than this, which could open it"
    )
    yield "projections that were not given, their backups, and whatever else was made from the events"


def _quarantined(folder: Path, search: _Search) -> Iterator[str]:
    """Name the files of bytes that were cut off or replaced after damage, and hold something."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file() and search.pattern.search(path.read_bytes()):
            yield f"{path}: bytes that were damaged hold something of it; delete the file"


def _partitions_of(log: EventLog, topic: str) -> int:
    found = log.topics().get(topic)
    return 0 if found is None else found.partitions


Without = Callable[[Any, "_Found"], Any]


@dataclass(slots=True)
class _Found:
    """What one partition has of the subjects: records, sealed values in them, and values in clear.

    ``values`` are those to put in the place of others, ``end`` is how far was searched.
    """

    topic: str
    partition: int
    without: Without
    records: int = 0
    sealed: int = 0
    clear: int = 0
    unknown: int = 0
    mentions: int = 0
    segments: int = 0
    archives: int = 0
    end: int = 0
    values: dict[int, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"topic {self.topic!r}, partition {self.partition}, below offset {self.end}"


class _Search:
    """Finds what records have of the subjects.

    Topics are read and changed by their ids: what has an offset in one that was made anew is another record.
    """

    def __init__(self, store: ForgettingStore, keys: SubjectKeys, subjects: Sequence[str]) -> None:
        self._log, self._events = store.log, store.events
        self._topic_ids = {name: found.topic_id for name, found in store.log.topics().items()}
        self._topic_ids[store.topic] = store.topic_id
        # Aborted records are bytes of the file as others are; brokers do not show them.
        isolation: Isolation = (
            "read_uncommitted" if isinstance(store.log, FolderLog) else "read_committed"
        )
        self._reader = store.log.reader(self._topic_ids, isolation=isolation)
        self._subjects = frozenset(subjects)
        self._no_key = f"{keys.store_id}:{_NO_KEY}:"
        self._marks = tuple(
            f"{keys.store_id}:{number}:" for one in subjects for number in keys.destroyed(one)
        )
        written = [ENCODER.encode(one)[1:-1] for one in subjects]  # as between quotes
        texts = [text.encode() for text in (*self._marks, *written)]
        self.pattern = re.compile(b"|".join(map(re.escape, texts)))
        self._named = _mention_of([one for one in subjects if not one.isdecimal()])
        self._numbers = _mention_of([one for one in subjects if one.isdecimal()])
        self._subject_fields = store.events.subject_fields()
        self.places: list[str] = []
        self.remaining: list[str] = []

    def go_through(
        self, topic: str, partition: int, without: Without, folder: FolderLog | None
    ) -> None:
        """Search a partition to its end, and with ``folder`` remove what is found; note both."""
        found, before = _Found(topic, partition, without), -1
        while found.records > before:  # then also what others sealed before the key was destroyed
            before = found.records
            low, end = self._reader.bounds(topic, partition)
            found.end = max(found.end, low)
            while found.end < end:
                found.end = self._look(found, end)
                if folder is not None:
                    self._remove(found, folder)
                found.values = {}
        self._note(found, removed=folder is not None)

    def _remove(self, found: _Found, folder: FolderLog) -> None:
        for values in _portions(found.values):
            place = found.topic, found.partition, values
            done = folder.excise(*place, topic_id=self._topic_ids[found.topic])
            found.segments += done.segments
            found.archives += done.archives
            self.remaining += [f"{found}: {one}" for one in done.left]

    def _look(self, found: _Found, end: int) -> int:
        """Search some of the records from where the last search ended; return where to go on."""
        start, until = found.end, min(end, found.end + _READ_OFFSETS)
        bounds = found.topic, found.partition, start, until
        columns = ("offset", "value")
        try:
            batches = list(self._reader.read(*bounds, columns=columns))
        except CorruptBatchError as error:
            if start < error.start:
                return self._look(found, error.start)
            self.remaining.append(f"{found}: {error}")
            return max(error.end, start + 1)
        for batch in batches:
            for offset, value in zip(*(one.to_pylist() for one in batch.columns), strict=True):
                if value is not None and self.pattern.search(value):
                    self._look_at(offset, value, found)
        return until

    def _look_at(self, offset: int, value: bytes, found: _Found) -> None:
        try:
            other = found.without(json.loads(value), found)
        except (ValueError, KeyError, TypeError) as error:
            self.remaining.append(
                f"topic {found.topic!r}, partition {found.partition}: the record at offset {offset} names a "
                f"subject, and is none of a store ({error!r})"
            )
            return
        if other is not None:
            found.records += 1
            found.values[offset] = ENCODER.encode(other).encode()

    def _note(self, found: _Found, *, removed: bool) -> None:
        what = (
            f"{found.sealed} sealed values and {found.clear} in clear, in {found.records} records"
        )
        if found.unknown:
            self.remaining.append(
                f"{found}: {found.unknown} events of earlier versions, or of types that are not registered, name a "
                "subject, and nothing says what is personal in them; register it, or give it to the upcaster, and "
                "forget again"
            )
        if found.mentions:
            self.remaining.append(
                f"{found}: {found.mentions} refused commands have the number of a subject in their text, which may be "
                "any number; look at them, and if they must go, delete the topic"
            )
        if removed:
            self.places.append(
                f"{found}: {what}, removed; {found.segments} segments written anew, {found.archives} archives "
                "deleted"
            )
            return
        self.places.append(f"{found}, and its archives: {what}; what is sealed cannot be opened")
        if found.sealed:
            self.remaining.append(
                f"{found}: the bytes of {found.sealed} sealed values, which are noise now; forget with remove=True "
                "to remove them, too"
            )
        if found.clear:
            self.remaining.append(
                f"{found}: {found.clear} values in clear, from before they were personal, or in refused commands; "
                "forget with remove=True to remove them"
            )

    # -- one record ---------------------------------------------------------------------------

    def event_without(self, event: Any, found: _Found) -> Any:
        """Return an event without what it has of the subjects; None if it has nothing."""
        fields = event["data"]
        if not isinstance(fields, dict):
            return None
        name, version = event["type"], event["schema"]
        subject, personal = self._events.personal_in(name, version)
        if subject is None or str(fields.get(subject)) not in self._subjects:
            personal = {}
        other = {name: self._without(name, one, personal, found) for name, one in fields.items()}
        if other != fields:
            return {**event, "data": other}
        sealed = any(_mark_of(one) for one in fields.values())
        if not sealed and not self._events.says_what_was_personal(name, version):
            elsewhere = subject not in fields and self._names(fields)
            found.unknown += elsewhere or not personal.keys() <= fields.keys()
        return None

    def _without(self, name: str, value: Any, personal: Mapping[str, Any], found: _Found) -> Any:
        mark = _mark_of(value)
        if mark is None:
            if name not in personal:
                return value
            found.clear += 1
            return {SEALED: self._no_key}
        prefix = mark[: mark.rindex(":") + 1]
        if prefix == mark or prefix not in self._marks:
            return value  # removed before, or sealed with another key
        found.sealed += 1
        return {SEALED: prefix}

    def rejection_without(self, rejection: Any, found: _Found) -> Any:
        """Return a refused command without what it was, if it names a subject; else None.

        It does if its stream is the subject, if a field that has the subject in events has it, or if a text is the
        subject or mentions it. A number in a text may be any number: it is counted, and not taken for a subject.
        """
        command, reason, stream = rejection["command"], rejection["reason"], rejection["stream"]
        if command is None and reason == _FORGOTTEN:
            return None
        if stream not in self._subjects and not self._names([command, reason]):
            found.mentions += self._has_number([command, reason])
            return None
        found.clear += 1
        return {**rejection, "command": None, "reason": _FORGOTTEN}

    def _names(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(
                (name in self._subject_fields and str(one) in self._subjects)
                or self._names(name)
                or self._names(one)
                for name, one in value.items()
            )
        if isinstance(value, list):
            return any(map(self._names, value))
        if not isinstance(value, str):
            return False
        return value in self._subjects or self._named.search(value) is not None

    def _has_number(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(self._has_number, (*value, *value.values())))
        if isinstance(value, list):
            return any(map(self._has_number, value))
        return isinstance(value, str) and self._numbers.search(value) is not None


def _mention_of(subjects: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of any of these as a word of its own: not as a part of a longer id, name or address."""
    if not subjects:
        return re.compile(r"(?!)")
    either = "|".join(map(re.escape, sorted(subjects, key=len, reverse=True)))
    return re.compile(rf"(?<![\w@+/-])(?<!\w[.:])(?:{either})(?![\w@+/-])(?![.:]\w)")


def _mark_of(value: Any) -> str | None:
    """Return what a sealed value says, which begins with its key; None if it is not sealed."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(SEALED), str):
        found: str = value[SEALED]
        return found
    return None


def _portions(values: Mapping[int, bytes]) -> Iterator[dict[int, bytes]]:
    """Divide values into requests."""
    portion: dict[int, bytes] = {}
    size = 0
    for offset, value in values.items():
        portion[offset] = value
        size += len(value)
        if size >= _REQUEST_BYTES:
            yield portion
            portion, size = {}, 0
    if portion:
        yield portion
