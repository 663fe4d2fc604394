"""``state.mm``: how far each partition may be read, for every process on the machine.

One header and one slot per partition, mapped into memory. Each is kept twice; the writer fills the
older copy, and a copy counts only if its checksum holds, so that a reader in another process, or
after a crash at any byte, finds the last whole value and never a torn one. Among whole copies the
higher generation wins.

The high watermark here is published after the data is synced and before anything is acknowledged. So the
value that survives is a lower bound of what was acknowledged; after a kill -9 (same boot id) it is exact.

::

    header copy (128 bytes at 0 and 128)       slot copy (64 bytes at 4096 + 128 n + {0, 64})
      0  magic            8 bytes                0  generation         uint64
      8  generation       uint64                 8  topic id, start    8 bytes
     16  directory id     16 bytes              16  partition          uint32
     32  boot id          16 bytes              20  unused             uint32
     48  owner pid        uint64                24  log start          int64
     56  leader epoch     uint32                32  last stable offset int64
     60  flags            uint32  1: clean      40  high watermark     int64
     64  catalog version  uint64                48  log end offset     int64
     72  CRC-32C          uint32                56  CRC-32C            uint32

Numbers are little-endian. ``catalog version`` rises when a topic is created or deleted.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from millstream.errors import ConfigError, SyncFailedError
from millstream.log.files import Files, Mapping

STATE_NAME = "state.mm"
STATE_BYTES = 1 << 20
SLOTS_MAX = (STATE_BYTES - 4096) // 128  # 8,160 partitions
CLEAN = 1

_MAGIC = b"MSSTATE1"
_HEADER = struct.Struct("<8sQ16s16sQIIQ")
_SLOT = struct.Struct("<Q8sIIqqqq")
_CRC = struct.Struct("<I")
_HEADER_COPY = 128
_SLOT_COPY = 64


class FolderState(NamedTuple):
    """The header: the owner, the boot id of its machine, and whether it closed cleanly."""

    directory_id: bytes
    boot_id: bytes
    owner_pid: int
    leader_epoch: int
    flags: int
    catalog_version: int


class PartitionState(NamedTuple):
    """How far a partition may be read: ``[log_start, high_watermark)`` is committed."""

    log_start: int
    last_stable_offset: int
    high_watermark: int
    log_end_offset: int


class StateFile:
    """The mapped file. One writer; any number of readers, in any process."""

    def __init__(self, folder: Path, files: Files, *, write: bool) -> None:
        self._map: Mapping = files.map(folder / STATE_NAME, STATE_BYTES, write=write)
        self._generations: dict[int, int] = {}
        self._header_bytes = b""
        self._header: FolderState | None = None

    def close(self) -> None:
        """Close the mapping."""
        self._map.close()

    def flush(self) -> None:
        """Return when the file is on stable storage.

        Raises:
            SyncFailedError: the disk failed; the writer must stop.
        """
        try:
            self._map.flush()
        except OSError as error:
            raise SyncFailedError(
                f"the disk failed to keep where partitions begin and end ({error}); nothing more is "
                "accepted. Check the disk, then open the folder again: it will be verified"
            ) from error

    def header(self) -> FolderState | None:
        """Return the header, or None if no copy of it is whole."""
        both = self._map[0 : 2 * _HEADER_COPY]
        if both != self._header_bytes:  # producers read it for each record that they send
            found = _newest_of(both, _HEADER_COPY, _HEADER)
            whole = found is not None and found[0] == _MAGIC
            self._header = FolderState._make(found[2:]) if found is not None and whole else None
            self._header_bytes = both
        return self._header

    def publish_header(self, state: FolderState) -> None:
        """Publish the header to every reader."""
        generation = self._next_generation(0, _HEADER_COPY, _HEADER)
        self._put(0, _HEADER_COPY, generation, _HEADER.pack(_MAGIC, generation, *state))

    def partition(self, slot: int, topic_id: str, partition: int) -> PartitionState | None:
        """Return what was published for this partition, or None if nothing whole is there."""
        if not 0 <= slot < SLOTS_MAX:
            return None
        found = self._newest(4096 + 128 * slot, _SLOT_COPY, _SLOT)
        if found is None or found[1] != _short(topic_id) or found[2] != partition:
            return None
        return PartitionState._make(found[4:])

    def publish(self, slot: int, topic_id: str, partition: int, state: PartitionState) -> None:
        """Publish the state of a partition to every reader."""
        place = 4096 + 128 * slot
        generation = self._next_generation(place, _SLOT_COPY, _SLOT)
        content = _SLOT.pack(generation, _short(topic_id), partition, 0, *state)
        self._put(place, _SLOT_COPY, generation, content)

    def _newest(self, place: int, size: int, layout: struct.Struct) -> tuple[Any, ...] | None:
        return _newest_of(self._map[place : place + 2 * size], size, layout)

    def _next_generation(self, place: int, size: int, layout: struct.Struct) -> int:
        if place not in self._generations:
            newest = self._newest(place, size, layout)
            known = 0 if newest is None else newest[1] if layout is _HEADER else newest[0]
            self._generations[place] = known
        self._generations[place] += 1
        return self._generations[place]

    def _put(self, place: int, size: int, generation: int, content: bytes) -> None:
        at = place + size * (generation % 2)
        sealed = content + _CRC.pack(google_crc32c.value(content))
        self._map[at : at + len(sealed)] = sealed


def _newest_of(both: bytes, size: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    """Return the fields of the newer of two copies that is whole."""
    best: tuple[Any, ...] | None = None
    best_generation = 0
    for at in (0, size):
        content = both[at : at + layout.size]
        (crc,) = _CRC.unpack_from(both, at + layout.size)
        fields = layout.unpack(content)
        generation = fields[1] if layout is _HEADER else fields[0]
        if generation > best_generation and google_crc32c.value(content) == crc:
            best, best_generation = fields, generation
    return best


def check_same_folder(state: FolderState, directory_id: str, folder: Path) -> None:
    """Check that state.mm belongs to this log folder.

    Raises:
        ConfigError: the files of two folders were mixed; copy whole folders only.
    """
    if state.directory_id.hex() != directory_id:
        raise ConfigError(
            f"{folder / STATE_NAME} belongs to log {state.directory_id.hex()}, the folder is "
            f"{directory_id}; copy a log folder as a whole, or delete state.mm to have it rebuilt"
        )


def _short(topic_id: str) -> bytes:
    return bytes.fromhex(topic_id)[:8]
