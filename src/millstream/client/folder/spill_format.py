"""The files of a spill: entries in ``<20 digits>.spill``, and ``state.json``.

Entries follow each other; a file is named by the number of its first record. Records are numbered
as they enter, and no number is used twice. An entry is, in big-endian numbers::

    byte  0  MSE1            what an entry begins with
          4  CRC-32C         uint32  over byte 8 to the end of the batch's first 17 bytes
          8  durable         uint64  bytes of this file on stable storage when this was written
         16  partition       uint32
         20  flags           uint16  1: a record has no key
         22  topic length    uint16
         24  topic           UTF-8
             record batch    version 2, as in the log; its base offset is its first record's number

The batch's own CRC-32C covers what is behind its first 17 bytes (see ``log.batch``).

``state.json`` has the names of producer and log, the start of the queue, and the next sequence of each
partition. It is replaced as a whole: one line, and its CRC-32C on the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import google_crc32c

from millstream.errors import CorruptionError
from millstream.log.batch import (
    HEADER_BYTES,
    PREFIX_BYTES,
    EncodedBatch,
    as_encoded,
    crc_matches,
    header_fault,
    read_header,
)
from millstream.log.checked_json import pack_checked, unpack_checked
from millstream.log.files import Files, numbered, read_whole, replace_file
from millstream.log.producer_identity import ProducerIdentity
from millstream.record import TopicPartition

STATE_NAME = "state.json"
_VERSION = 1
_SUFFIX = ".spill"
_MAGIC = b"MSE1"
_HEAD = struct.Struct(">4sIQIHH")
_CRC_START = 8
_UNKEYED = 1


def spill_file_name(number: int) -> str:
    """Return the name of the file that begins with record ``number``."""
    return f"{number:020d}{_SUFFIX}"


def spill_file_numbers(names: list[str]) -> list[int]:
    """Return the first numbers of the spill files among some names, ascending."""
    return numbered(names, _SUFFIX)


class Entry(NamedTuple):
    """A batch in the queue; ``number`` is its first record's, ``end`` the byte behind it."""

    name: TopicPartition
    number: int
    batch: EncodedBatch
    end: int


def pack_entry(name: TopicPartition, batch: EncodedBatch, number: int, durable: int) -> bytes:
    """Return the bytes of an entry."""
    topic = name.topic.encode()
    prefix = batch.prefix(number, 0)
    flags = _UNKEYED if batch.unkeyed else 0
    head = _HEAD.pack(_MAGIC, 0, durable, name.partition, flags, len(topic))
    covered = head[_CRC_START:] + topic + prefix
    crc = google_crc32c.value(covered).to_bytes(4, "big")
    return b"".join((_MAGIC, crc, covered, batch.tail))


def read_entries(data: bytes, number: int, *, position: int = 0) -> Iterator[Entry]:
    """Yield the entries of ``data``, from record ``number`` on; stop before one that is not whole.

    Args:
        position: Where in its file ``data`` begins.
    """
    at = 0
    while (found := _read_entry(data, at, number)) is not None:
        entry, _ = found
        at = entry.end
        number += entry.batch.count
        yield entry._replace(end=position + at)


def durable_after(data: bytes) -> int:
    """Return how far the file was durable, by the whole entries anywhere in ``data``."""
    durable = 0
    at = data.find(_MAGIC)
    while at != -1:
        found = _read_entry(data, at, None)
        durable = max(durable, 0 if found is None else found[1])
        at = data.find(_MAGIC, at + 1)
    return durable


def _read_entry(data: bytes, at: int, number: int | None) -> tuple[Entry, int] | None:
    """Return the entry at ``at`` and its ``durable``; None if it is not whole and right."""
    if len(data) - at < _HEAD.size + HEADER_BYTES:
        return None
    magic, crc, durable, partition, flags, topic_bytes = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size + topic_bytes
    covered = data[at + _CRC_START : start + PREFIX_BYTES]
    if magic != _MAGIC or google_crc32c.value(covered) != crc or len(data) - start < HEADER_BYTES:
        return None
    header = read_header(data, start)
    expected = header.base_offset if number is None else number
    if header_fault(header, expected) is not None or len(data) - start < header.size:
        return None
    if not crc_matches(data, start, header):
        return None
    name = TopicPartition(data[at + _HEAD.size : start].decode(), partition)
    batch = replace(as_encoded(data, start, header), unkeyed=bool(flags & _UNKEYED))
    return Entry(name, expected, batch, start + header.size), durable


@dataclass(frozen=True, slots=True)
class SpillState:
    """The producer and the log of a spill, and the start of its queue: byte ``position`` of file ``segment``.

    ``number`` is the number of the first record in the queue; ``sequences`` has for each partition
    the sequence of the next record that will be appended to the log.
    """

    directory_id: str
    name: str
    identity: ProducerIdentity
    segment: int = 0
    position: int = 0
    number: int = 0
    sequences: Mapping[TopicPartition, int] = field(default_factory=dict)


def write_state(files: Files, folder: Path, state: SpillState) -> None:
    """Replace ``state.json``, durably; a crash leaves the old one or this. Raises OSError."""
    values = {
        "directory_id": state.directory_id,
        "name": state.name,
        "identity": list(state.identity),
        "segment": state.segment,
        "position": state.position,
        "number": state.number,
        "sequences": [[*name, sequence] for name, sequence in sorted(state.sequences.items())],
    }
    replace_file(files, folder / STATE_NAME, pack_checked(values, version=_VERSION))


def read_state(files: Files, folder: Path) -> SpillState | None:
    """Return what ``state.json`` says; None if there is none.

    Raises:
        CorruptionError: it is damaged, or of another version.
    """
    path = folder / STATE_NAME
    if not files.exists(path):
        return None
    try:
        values = unpack_checked(read_whole(files, path), version=_VERSION)
        producer_id, producer_epoch = values.pop("identity")
        sequences = {
            TopicPartition(topic, partition): sequence
            for topic, partition, sequence in values.pop("sequences")
        }
        identity = ProducerIdentity(producer_id, producer_epoch)
        return SpillState(**values, identity=identity, sequences=sequences)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptionError(
            f"{path} cannot be used: {error}; restore it from a backup, or move {folder} away and "
            "lose the records in it"
        ) from error
