"""Search and merge of rising hashes, in one pass over them.

It is written in the part of Python that numba compiles, and run compiled (:mod:`millstream.kernels.state.hash_search`).
"""

from __future__ import annotations

from millstream.kernels.arrays import Int64s, UInt64s


def search(held: UInt64s, wanted: UInt64s, places: Int64s, numbers: Int64s) -> tuple[int, bool]:
    """Note of each wanted hash that is held where it stands first, and which it is of those wanted.

    Returns:
        How many were noted, and whether one of them stands in several places.
    """
    count, at, end, repeated = 0, 0, len(held), False
    for number in range(len(wanted)):
        hash_ = wanted[number]
        # Both rise: it is not far from the one before, so the first steps are short, and each is twice as long.
        probe, step = at, 1
        while probe < end and held[probe] < hash_:
            at = probe + 1
            probe += step
            step *= 2
        last = min(probe, end)
        while at < last:
            middle = (at + last) // 2
            if held[middle] < hash_:
                at = middle + 1
            else:
                last = middle
        if at < end and held[at] == hash_:
            places[count], numbers[count] = at, number
            count += 1
            if at + 1 < end and held[at + 1] == hash_:
                repeated = True
    return count, repeated


def merge(
    older: UInt64s,
    older_start: int,
    newer: UInt64s,
    newer_places: Int64s,
    hashes: UInt64s,
    places: Int64s,
) -> int:
    """Write rising hashes of older and newer rows in one order, with the places of their rows, without older ones that newer ones have.

    ``older_start`` is the place of the first older row. Returns how many were written.
    """
    count, at = 0, 0
    for number in range(len(newer)):
        hash_ = newer[number]
        while at < len(older) and older[at] < hash_:
            hashes[count], places[count] = older[at], older_start + at
            at += 1
            count += 1
        while at < len(older) and older[at] == hash_:
            at += 1
        hashes[count], places[count] = hash_, newer_places[number]
        count += 1
    for rest in range(at, len(older)):
        hashes[count], places[count] = older[rest], older_start + rest
        count += 1
    return count


def place(values: UInt64s, places: Int64s, goes: Int64s, out: UInt64s) -> None:
    """Write the values that are at some places to where each goes."""
    for number in range(len(places)):
        out[goes[number]] = values[places[number]]
