"""Selects the small files of a dataset to merge: size-tiered, with a bound on their number.

A file of r rows is in tier ``floor(log8 r)``. As soon as eight files of one partition are in one tier,
they are merged into one file of a higher tier; files of ``8 ** TIERS`` rows or more, or of 32 MiB in memory, are not
merged. So a partition has at most 7 smaller files in each of the ``TIERS`` lower tiers (42 in all), a row is
written at most 7 times, and one merge reads at most ``8 ** (TIERS + 1)`` rows, and 256 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.views.sinks.dataset_manifest import DataFile

TIERS = 6
_FILES = 8  # files of one tier that become one; a power of two, so that the tier is a bit length
_BITS = 3
_MEMORY_BYTES_MAX = 32 << 20


def files_to_merge(files: Sequence[DataFile], tiers: int = TIERS) -> list[DataFile] | None:
    """Return files of one partition and one of the lower tiers that are to become one, oldest first, or None."""
    groups: dict[tuple[str, int], list[DataFile]] = {}
    for file in files:
        tier = (max(file.rows, 1).bit_length() - 1) // _BITS
        if tier >= tiers or file.memory_bytes >= _MEMORY_BYTES_MAX:
            continue
        group = groups.setdefault((file.partition, tier), [])
        group.append(file)
        if len(group) == _FILES:
            return group
    return None
