"""Inspects a log folder: every batch of every segment, and all files beside them.

It only reads, needs no lock, and may run beside a living owner: then it checks what is committed, up to the
high watermark in ``state.mm``. It continues after every finding. A
:class:`Finding` says what is wrong, what that means for records, and what to do; ``repair`` repairs
what can be repaired.

It checks: headers, CRC-32C and continuity of every batch; whether index, seal and aborted transactions match
the segment; whether segments are missing; leftovers of a crash; whether FORMAT, control.db and state.mm are
there and of one folder. Records are not decoded.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from millstream.errors import ConfigError, MillstreamError
from millstream.log.control import CONTROL_NAME, ControlDb
from millstream.log.files import DISK, Files, read_whole, size_of
from millstream.log.findings import Finding, FindingKind, Severity, size_if_readable
from millstream.log.owner import FORMAT_VERSION, read_format
from millstream.log.repair.partition_check import (
    FIXED_AT_OPENING,
    FolderCondition,
    PartitionCheck,
    PartitionRef,
)
from millstream.log.segment import segment_name, segment_offsets
from millstream.log.state_file import CLEAN, STATE_BYTES, STATE_NAME, PartitionState, StateFile
from millstream.log.takeover import NEEDS_VERIFY, holds_bytes
from millstream.log.topics import TopicMetadata, catalog_of, partition_folder

QUARANTINE = "quarantine"
InspectionProgress = Callable[[int, int], None]


def inspect(
    folder: Path | str,
    files: Files = DISK,
    *,
    control: ControlDb | None = None,
    progress: InspectionProgress | None = None,
    owner_lives: Callable[[int], bool] | None = None,
) -> Iterator[Finding]:
    """Yield the findings in a log folder; none if it is whole.

    Args:
        control: The content of control.db; only tests give another one.
        progress: Called with the bytes of segments read so far, and in all.
        owner_lives: Returns whether the process with this id is alive; asks the system by default.

    Raises:
        ConfigError: the folder is not a log, of another format version, or cannot be read at all.
    Guarantees: changes nothing (SQLite may put its own files beside control.db, as for any reader);
        needs memory for one segment at most.
    """
    inspection = _Inspection(Path(folder), files, control, owner_lives or process_lives)
    try:
        yield from inspection.findings(progress or (lambda _done, _total: None))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be looked over: {error}; check its rights and the disk"
        ) from error
    finally:
        inspection.close()


def process_lives(process_id: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # there is one, of another user
    return True


def check_is_log(folder: Path, files: Files) -> None:
    """Check that a folder is a log.

    Raises:
        ConfigError: name the folder of a log.
    """
    if not any(files.exists(folder / name) for name in ("FORMAT", STATE_NAME, CONTROL_NAME)):
        raise ConfigError(f"{folder} is not a log; name the folder of one")


class _Inspection:
    def __init__(
        self,
        folder: Path,
        files: Files,
        control: ControlDb | None,
        owner_lives: Callable[[int], bool],
    ) -> None:
        self._folder = folder
        self._files = files
        self._control = control
        self._owner_lives = owner_lives
        self._state: StateFile | None = None
        self._circumstances = FolderCondition(living=False, clean=False, exact=False)
        self._done = 0

    def close(self) -> None:
        if self._state is not None:
            self._state.close()

    def findings(self, progress: Callable[[int, int], None]) -> Iterator[Finding]:
        check_is_log(self._folder, self._files)
        directory_id, *found = self._check_format()
        yield from found
        yield from self._check_state(directory_id)
        # Names first: a topic that is being created has its folder before its row.
        names = self._names("t")
        try:
            topics, deleted = self._read_catalog()
        except (MillstreamError, sqlite3.Error) as error:
            advice = "restore control.db from a backup of the folder"
            text = f"the topics are not known: {error}"
            yield self._finding("control", "records lost", text, advice, CONTROL_NAME)
            places = self._partitions_by_folder(names)
        else:
            yield from self._check_folders(names, topics, deleted)
            places = self._partitions(topics)
        total = sum(self._bytes_in(place.folder) for place in places)
        progress(0, total)
        for place in places:

            def read(size: int) -> None:
                self._done += size
                progress(self._done, max(total, self._done))

            yield from self._check_partition(place, read)
        yield from self._check_quarantine()

    # -- the folder ---------------------------------------------------------------------------

    def _names(self, *parts: str) -> list[str]:
        return self._files.names(self._folder.joinpath(*parts))

    def _exists(self, name: str) -> bool:
        return self._files.exists(self._folder / name)

    def _finding(
        self, kind: FindingKind, severity: Severity, text: str, advice: str, *parts: str
    ) -> Finding:
        return Finding(kind, severity, text, advice, self._folder.joinpath(*parts))

    def _check_format(self) -> tuple[str | None, *tuple[Finding, ...]]:
        """Return the identity of the folder, and the findings about FORMAT.

        Raises:
            ConfigError: another version wrote it, so that nothing in it can be checked.
        """
        restore = "restore FORMAT from a backup of the folder"
        if not self._exists("FORMAT"):
            return None, self._finding("format", "records lost", "it is missing", restore, "FORMAT")
        try:
            return (read_format(self._folder, self._files),)
        except ConfigError as error:
            content = read_whole(self._files, self._folder / "FORMAT")
            if _version(content) not in (None, FORMAT_VERSION):
                raise
            return None, self._finding("format", "records lost", str(error), restore, "FORMAT")

    def _check_state(self, directory_id: str | None) -> Iterator[Finding]:
        """Open state.mm, and find out who owns the folder."""
        if self._exists(NEEDS_VERIFY):
            text = "a sync has failed, so records that were not acknowledged may be missing"
            advice = "nothing to do: the next opening reads everything from the disk"
            yield self._finding("unverified", "harmless", text, advice, NEEDS_VERIFY)
        size = size_of(self._files, self._folder / STATE_NAME)
        if size < STATE_BYTES:
            text = "it is missing" if not size else f"it has {size} bytes instead of {STATE_BYTES}"
            yield self._finding("state", "harmless", text, FIXED_AT_OPENING, STATE_NAME)
            return
        self._state = StateFile(self._folder, self._files, write=False)
        header = self._state.header()
        if header is None:
            text = "its header is not whole"
            yield self._finding("state", "harmless", text, FIXED_AT_OPENING, STATE_NAME)
            return
        if directory_id is not None and header.directory_id.hex() != directory_id:
            text = f"it belongs to log {header.directory_id.hex()}, the folder is {directory_id}"
            advice = "put the right one back, or delete it to have it rebuilt"
            yield self._finding("state", "records lost", text, advice, STATE_NAME)
            self._state.close()
            self._state = None
            return
        boot_id = self._files.boot_id()
        same_boot = header.boot_id == boot_id
        clean = bool(header.flags & CLEAN)
        self._circumstances = FolderCondition(
            living=not clean
            and same_boot
            and header.owner_pid > 0
            and self._owner_lives(header.owner_pid),
            clean=clean,
            exact=same_boot and any(boot_id),
        )

    def _check_folders(
        self, names: list[str], topics: dict[str, TopicMetadata], deleted: set[str]
    ) -> Iterator[Finding]:
        """Report topics that are partly created or deleted, and records of no topic."""
        if self._circumstances.living:
            return  # topics may be created and deleted meanwhile
        known = {topic.folder_name for topic in topics.values()}
        for name in names:
            if name in known:
                continue
            if name in deleted or not holds_bytes(self._files, self._folder / "t" / name):
                text = "it is left of a topic that was being made or deleted"
                yield self._finding("leftover", "harmless", text, FIXED_AT_OPENING, "t", name)
                continue
            text = "it holds records, but control.db knows no such topic"
            advice = "restore control.db from a backup, or move this folder away"
            yield self._finding("unknown folder", "records lost", text, advice, "t", name)

    def _check_quarantine(self) -> Iterator[Finding]:
        names = self._names(QUARANTINE)
        size = sum(size_of(self._files, self._folder / QUARANTINE / name) for name in names)
        if names:
            text = f"{size} bytes in {len(names)} files were moved here by recovery or repair"
            advice = "look at them, and delete them when they are not needed"
            yield self._finding("quarantine", "harmless", text, advice, QUARANTINE)

    # -- the partitions -----------------------------------------------------------------------

    def _read_catalog(self) -> tuple[dict[str, TopicMetadata], set[str]]:
        """Return the topics, and the folders of those that are being deleted."""
        if self._control is None and not self._exists(CONTROL_NAME):
            raise ConfigError(f"{CONTROL_NAME} is missing")
        with catalog_of(self._folder, self._control) as catalog:
            deleted = {topic.folder_name for topic in catalog.deleted_topics().values()}
            return catalog.topics(), deleted

    def _partitions(self, topics: dict[str, TopicMetadata]) -> list[PartitionRef]:
        return [
            PartitionRef(
                topic.name,
                number,
                partition_folder(self._folder, topic, number),
                topic.topic_id,
                slot,
            )
            for topic in topics.values()
            for number, slot in enumerate(topic.slots)
        ]

    def _partitions_by_folder(self, names: list[str]) -> list[PartitionRef]:
        """Return the partitions by their folders."""
        return [
            PartitionRef(name.rpartition(".")[0], int(number), self._folder / "t" / name / number)
            for name in names
            for number in self._names("t", name)
            if number.isdigit()
        ]

    def _bytes_in(self, folder: Path) -> int:
        bases = segment_offsets(self._files.names(folder))
        return sum(size_if_readable(self._files, folder / segment_name(base)) for base in bases)

    def _check_partition(self, place: PartitionRef, read: Callable[[int], None]) -> list[Finding]:
        slot = place.slot
        # A living owner shows a new partition's entry last, and before its first record; so whether
        # there are records is looked at first.
        in_creation = self._circumstances.living and not self._bytes_in(place.folder)
        state = None if slot is None else self._state_of(place, slot)
        found = []
        if self._state is not None and slot is not None and state is None and not in_creation:
            text = "its entry is not whole, or of another partition"
            found.append(
                Finding(
                    "state",
                    "harmless",
                    text,
                    FIXED_AT_OPENING,
                    self._folder / STATE_NAME,
                    place.topic,
                    place.partition,
                )
            )
        check = PartitionCheck(
            self._files,
            place,
            self._circumstances,
            state=lambda: None if slot is None else self._state_of(place, slot),
            read=read,
        )
        found += check.findings()
        if found and self._circumstances.living and slot is not None:
            topics, _ = self._read_catalog()
            if all(topic.topic_id != place.topic_id for topic in topics.values()):
                return []  # the topic was deleted during the inspection
        return found

    def _state_of(self, place: PartitionRef, slot: int) -> PartitionState | None:
        if self._state is None:
            return None
        return self._state.partition(slot, place.topic_id, place.partition)


def _version(content: bytes) -> object:
    try:
        return json.loads(content)["version"]
    except (ValueError, KeyError, TypeError):
        return None
