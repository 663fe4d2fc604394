"""``<base offset>.seal``: a summary of a segment, so that it need not be read.

Written and synced when a segment is closed for good, and for the growing one when the log is closed
cleanly. It is derived from the segment, so it may be missing; it is valid only if it is whole and has exactly
the segment's size. JSON on one line, and its CRC-32C on the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millstream.log.checked_json import pack_checked, unpack_checked
from millstream.log.files import Files, read_whole, replace_file
from millstream.log.index import NO_TIME, IndexBuilder
from millstream.log.producers import ProducerStates

SUFFIX = ".seal"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Seal:
    """The contents of a segment, and the producers at its end.

    ``chain`` is the CRC-32C over all batch headers, ``aborted`` how many aborted transactions end
    here, ``damaged`` the offsets ``[start, end)`` that cannot be read. ``cleaned_ms`` says when
    compaction last went over the segment, ``horizon_ms`` when the last of its tombstones may go.
    """

    next_offset: int
    size: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    chain: int
    aborted: int = 0
    damaged: tuple[tuple[int, int], ...] = ()
    cleaned_ms: int | None = None
    horizon_ms: int | None = None
    producers: ProducerStates = field(default_factory=ProducerStates, compare=False)

    @classmethod
    def of(
        cls,
        index: IndexBuilder,
        *,
        next_offset: int,
        size: int,
        aborted: int,
        producers: ProducerStates,
        damaged: Sequence[tuple[int, int]] = (),
    ) -> Seal:
        """Return the seal of a segment whose batches went into ``index``."""
        return cls(
            next_offset=next_offset,
            size=size,
            first_timestamp_ms=NO_TIME if index.first_ms is None else index.first_ms,
            max_timestamp_ms=index.latest_ms,
            chain=index.chain,
            aborted=aborted,
            damaged=tuple(damaged),
            producers=producers.copy(),
        )


def write(files: Files, path: Path, seal: Seal) -> None:
    """Write the seal beside the segment at ``path``, durably; a crash leaves the old one or this."""
    values = {
        "next_offset": seal.next_offset,
        "size": seal.size,
        "first_timestamp_ms": seal.first_timestamp_ms,
        "max_timestamp_ms": seal.max_timestamp_ms,
        "chain": seal.chain,
        "aborted": seal.aborted,
        "damaged": [list(part) for part in seal.damaged],
        "cleaned_ms": seal.cleaned_ms,
        "horizon_ms": seal.horizon_ms,
        "producers": seal.producers.to_rows(),
    }
    replace_file(files, path.with_suffix(SUFFIX), pack_checked(values, version=_VERSION))


def read(files: Files, path: Path, size: int) -> Seal | None:
    """Return the seal of the segment at ``path``, which has ``size`` bytes; None if there is no valid one."""
    found = read_any(files, path)
    return found if found is not None and found.size == size else None


def read_any(files: Files, path: Path) -> Seal | None:
    """Return the seal beside a segment, whether it matches or not; None if none is whole."""
    try:
        content = read_whole(files, path.with_suffix(SUFFIX))
    except FileNotFoundError:
        return None
    try:
        values = unpack_checked(content, version=_VERSION)
        values["producers"] = ProducerStates.from_rows(values["producers"])
        values["damaged"] = tuple((int(a), int(b)) for a, b in values["damaged"])
        return Seal(**values)
    except (ValueError, TypeError, KeyError):
        return None
