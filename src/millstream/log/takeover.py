"""What a new owner finds: partitions, and how far each was durable; topics half created or half deleted."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    MillstreamError,
    RetriableError,
    SyncFailedError,
)
from millstream.log.files import Files, replace_file, size_of, sync_names
from millstream.log.recovery import DurableEnd, RecoveredPartition, Recovery
from millstream.log.segment import Segment, segment_offsets
from millstream.log.state_file import StateFile
from millstream.log.topics import Catalog, TopicMetadata, partition_folder

NEEDS_VERIFY = "NEEDS_VERIFY"
SPARE_FILES = 100  # open besides those of partitions and connections
_log = logging.getLogger(__name__)


def mark_needs_verify(files: Files, folder: Path, error: MillstreamError) -> None:
    """Mark the folder after a failed disk: the next opening verifies everything."""
    try:
        replace_file(files, folder / NEEDS_VERIFY, f"{error}\n".encode())
    except (OSError, SyncFailedError) as second:
        error.add_note(f"and {NEEDS_VERIFY} could not be written: {second}")


@contextmanager
def translate_opening_errors(folder: Path, files: Files) -> Iterator[None]:
    """Translate an OSError of opening a folder into one clear error.

    Raises:
        ConfigError: check the folder's rights and the disk.
        SyncFailedError: the disk failed; the folder is marked for the next opening.
    """
    try:
        yield
    except SyncFailedError as error:
        mark_needs_verify(files, folder, error)
        raise
    except OSError as error:
        raise ConfigError(
            f"the log {folder} cannot be opened for writing: {error}; check the folder's rights "
            "and the disk, then open it again"
        ) from error


def recover_partitions(
    files: Files,
    folder: Path,
    recovery: Recovery,
    state: StateFile,
    topics: Iterable[TopicMetadata],
    *,
    exact: bool,
) -> Iterator[tuple[TopicMetadata, int, RecoveredPartition]]:
    """Yield each partition of the topics once it is recovered: its topic, its number and its content.

    Args:
        exact: What ``state`` says is all that was published: the machine has run since.
    """
    for topic in topics:
        for number in range(len(topic.slots)):
            path = partition_folder(folder, topic, number)
            durable = _durable_end(files, path, state, topic, number, exact=exact)
            yield topic, number, recovery.partition(path, durable)


def _durable_end(
    files: Files,
    path: Path,
    state: StateFile,
    topic: TopicMetadata,
    partition: int,
    *,
    exact: bool,
) -> DurableEnd:
    """Return how far a partition was durable when its last owner ended."""
    found = state.partition(topic.slots[partition], topic.topic_id, partition)
    if found is None:
        bases = segment_offsets(files.names(path))
        return DurableEnd(0, bases[-1] if bases else 0, published=False, exact=False)
    return DurableEnd(
        found.log_start,
        found.high_watermark,
        published=True,
        exact=exact,
        last_stable=found.last_stable_offset,
    )


def check_files_open(partitions: int, *, readers: int = 0) -> None:
    """Raise the limit of open files to one for each partition of a folder, if the system allows it.

    Args:
        readers: How many more files, for connections that read and write.

    Raises:
        ConfigError: the system does not allow so many; raise its limit.
    """
    wanted = partitions + readers + SPARE_FILES
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or wanted <= files:
        return
    if most == resource.RLIM_INFINITY or wanted <= most:
        with suppress(ValueError, OSError):  # where another, lower limit holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            return
    raise ConfigError(
        f"{partitions} partitions in one folder need {wanted} open files, with those beside them, and "
        f"this process may have {files}; raise that limit (ulimit -n), or use fewer partitions"
    )


@contextmanager
def partition_folders(
    files: Files, folder: Path, topic: TopicMetadata, first: int
) -> Iterator[list[Segment]]:
    """Yield an empty segment for each of a topic's partitions from ``first`` on.

    They are closed if the context ends with an error. If not all folders could be made, they are removed; if
    the topic could not be stored, the next opening removes them.

    Raises:
        DiskFullError: they could not be made.
    """
    segments = _make_folders(files, folder, topic, first)
    try:
        yield segments
    except BaseException:
        _close(segments)
        raise


def _close(segments: Sequence[Segment]) -> None:
    for segment in segments:
        with suppress(OSError):
            segment.close()


def _make_folders(files: Files, folder: Path, topic: TopicMetadata, first: int) -> list[Segment]:
    segments: list[Segment] = []
    try:
        for number in range(first, len(topic.slots)):
            path = partition_folder(folder, topic, number)
            files.make_folder(path)
            segments.append(Segment.create(files, path, 0))
        if segments:
            sync_names(files, folder / "t" / topic.folder_name)
            sync_names(files, folder / "t")
            sync_names(files, folder)
    except OSError as error:
        _close(segments)
        paths = [partition_folder(folder, topic, one) for one in range(first, len(topic.slots))]
        for path in paths if first else [folder / "t" / topic.folder_name]:
            with suppress(OSError):  # the next opening takes what is left
                files.remove_folder(path)
        raise DiskFullError(
            f"topic {topic.name!r} could not be made in {folder}: {error}; nothing of it was "
            "created. Make room on the disk, then try again"
        ) from error
    return segments


def remove_leftovers(
    files: Files, folder: Path, catalog: Catalog, topics: Mapping[str, TopicMetadata]
) -> None:
    """Finish deletions, and remove folders of topics whose creation was not finished.

    Raises:
        CorruptionError: a folder that no topic owns holds records; it is not touched.
    """
    with leaving_to_maintenance():
        remove_deleted_topics(files, folder, catalog)
    known = {topic.folder_name for topic in (*topics.values(), *catalog.deleted_topics().values())}
    unknown = [folder / "t" / name for name in files.names(folder / "t") if name not in known]
    # All are checked before one is removed: if control.db was lost, they are all topics.
    for path in unknown:
        if holds_bytes(files, path):
            raise CorruptionError(
                f"{path} holds records, but control.db knows no such topic; restore control.db "
                "from a backup, or move this folder away"
            )
    for path in unknown:
        files.remove_folder(path)


@contextmanager
def leaving_to_maintenance() -> Iterator[None]:
    """Log the error of removing a deleted topic's files: maintenance and the next opening retry it."""
    try:
        yield
    except (OSError, RetriableError) as error:
        _log.warning("a topic is deleted, and its files are left to maintenance: %s", error)


def remove_deleted_topics(files: Files, folder: Path, catalog: Catalog) -> None:
    """Remove the files of every deleted topic; one that cannot be removed does not keep the others.

    Raises:
        OSError, RetriableError: the first one that remains.
    """
    failed: OSError | RetriableError | None = None
    for topic in catalog.deleted_topics().values():
        try:
            remove_topic(files, folder, catalog, topic)
        except (OSError, RetriableError) as error:
            failed = failed or error
    if failed is not None:
        raise failed


def remove_topic(files: Files, folder: Path, catalog: Catalog, topic: TopicMetadata) -> None:
    """Remove the files of a deleted topic, then its row; see :meth:`Catalog.mark_deleted`."""
    files.remove_folder(folder / "t" / topic.folder_name)
    # A folder that a power cut brought back would be one of no topic, which the opening refuses.
    sync_names(files, folder / "t")
    catalog.delete(topic.topic_id)


def holds_bytes(files: Files, folder: Path) -> bool:
    """Return whether any file of a topic's partitions has content."""
    return any(
        size_of(files, folder / partition / name)
        for partition in files.names(folder)
        for name in files.names(folder / partition)
    )
