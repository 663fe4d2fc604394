"""The size and contents of the partitions of a log, without reading every record.

It reads the seals of closed segments, and reads only segments that grow or have no seal. It needs no lock,
and may run beside a living owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.errors import CorruptionError
from millstream.log import seal
from millstream.log.control import ControlDb
from millstream.log.files import DISK, Files, size_of
from millstream.log.owner import read_format
from millstream.log.producers import ProducerStates
from millstream.log.repair.inspection import check_is_log
from millstream.log.scan import scan_segment
from millstream.log.seal import Seal
from millstream.log.segment import segment_name, segment_offsets
from millstream.log.state_file import STATE_NAME, PartitionState, StateFile
from millstream.log.topics import TopicMetadata, catalog_of, partition_folder


@dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One partition. Offsets ``[start, end)`` are committed.

    ``oldest_ms`` is the timestamp of the first batch and ``newest_ms`` the largest of all; None if
    there is none. ``damaged`` are the offsets that are known to be unreadable: ``inspect`` finds damage that
    came after a segment was closed.
    """

    topic: str
    partition: int
    segments: int
    size_bytes: int
    start: int
    end: int
    oldest_ms: int | None
    newest_ms: int | None
    open_transactions: int
    damaged: tuple[tuple[int, int], ...]


def measure(
    folder: Path | str, files: Files = DISK, *, control: ControlDb | None = None
) -> list[PartitionStatistics]:
    """Return what each partition holds, by topic and number.

    Args:
        control: The content of control.db; only tests give another one.

    Raises:
        ConfigError: the folder is not a log, or control.db cannot be opened.
        CorruptionError: state.mm says nothing of a partition; open the folder for writing once.
    """
    folder = Path(folder)
    check_is_log(folder, files)
    read_format(folder, files)
    with catalog_of(folder, control) as catalog:
        topics = catalog.topics()
    if not topics:
        return []
    if not files.exists(folder / STATE_NAME):
        raise _unknown(folder)
    state = StateFile(folder, files, write=False)
    try:
        return [
            _facts(folder, files, state, topic, number)
            for topic in topics.values()
            for number in range(len(topic.slots))
        ]
    finally:
        state.close()


def _unknown(folder: Path) -> CorruptionError:
    return CorruptionError(
        f"{folder / STATE_NAME} has no valid high watermarks; open the folder for "
        "writing once, to have it recovered"
    )


def _facts(
    folder: Path, files: Files, state: StateFile, topic: TopicMetadata, number: int
) -> PartitionStatistics:
    published = state.partition(topic.slots[number], topic.topic_id, number)
    if published is None:
        raise _unknown(folder)
    of_partition = partition_folder(folder, topic, number)
    bases = segment_offsets(files.names(of_partition))
    seals: list[Seal] = []
    producers = ProducerStates()
    for base in bases:
        found = _seal_of(files, of_partition / segment_name(base), base, producers, published)
        producers = found.producers
        seals.append(found)
    producers = producers.copy()
    producers.end_transactions_below(published.last_stable_offset)
    times = [one.first_timestamp_ms for one in seals if one.first_timestamp_ms >= 0]
    latest = [one.max_timestamp_ms for one in seals if one.max_timestamp_ms >= 0]
    return PartitionStatistics(
        topic=topic.name,
        partition=number,
        segments=len(bases),
        size_bytes=sum(one.size for one in seals),
        start=published.log_start,
        end=published.high_watermark,
        oldest_ms=times[0] if times else None,
        newest_ms=max(latest, default=None),
        open_transactions=len(producers.open_transactions()),
        damaged=tuple(part for one in seals for part in one.damaged),
    )


def _seal_of(
    files: Files, path: Path, base: int, producers: ProducerStates, published: PartitionState
) -> Seal:
    """Return a segment's seal, or what it would be."""
    found = seal.read(files, path, size_of(files, path))
    if found is not None:
        return found
    scan = scan_segment(files, path, base, producers, end_offset=published.high_watermark)
    return scan.as_seal(scan.end_offset, scan.damaged)
