"""Where the records of batches begin and end: the one part of decoding that is not columnar.

Each record's length says where the next record is, so a batch has to be followed from its start. There are
three ways, and the one that should be the fastest is chosen:

- record by record, in Python; records of equal size are found as one run;
- in parallel: the n-th record of every batch in one step, for many small batches;
- by a guess that is proved: a record without headers ends in a zero byte (their number), and the
  next one has a zero byte after its length (its attributes). All such positions are taken as beginnings. They
  are right if the length at each of them leads exactly to the next, and the last one to the end of the batch;
  else the guess is dropped, and one of the other ways is used.

Whatever the bytes are, the result is the same as that of following the lengths one by one. Used by
``decoding``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from millstream.errors import CorruptBatchError
from millstream.log.batch import RECORD_BYTES_MIN
from millstream.log.varint import Bytes, Int64s, read_varint, read_varints

# What each way costs in microseconds, roughly: measured on the machine of benchmarks/results.md.
_HOP_BATCH, _HOP_RECORD, _HOP_EQUAL = 25.0, 0.2, 0.02
_PARALLEL_STEP, _PARALLEL_RECORD = 11.0, 0.03
_GUESS_BATCH, _GUESS_RECORD, _GUESS_BYTE = 2.0, 0.03, 0.0004
_GUESS_RECORDS_MIN = 500  # with fewer there is nothing to gain

LENGTH_BYTES_MAX = 5  # Kafka reads a record's length as a number of 32 bits
_RUN_MIN = 12  # equal lengths in a row before the rest is looked at as a run
_GUESS_BYTES = 256 * 1024  # looked at in one step: small enough for the processor's cache
_STRAYS_MAX = 3  # wrong guesses between two right ones that can be recognized


class BatchBodies(NamedTuple):
    """The records of some batches: body i is in ``data`` at [starts[i], stops[i]).

    Each has ``counts[i]`` records, at least one, and no fewer bytes than so many records take.
    """

    data: bytes
    view: Bytes
    starts: Int64s
    stops: Int64s
    counts: Int64s


BatchErrorFactory: TypeAlias = Callable[[str, int], CorruptBatchError]


def find_records(bodies: BatchBodies, misfit: BatchErrorFactory) -> tuple[Int64s, Int64s]:
    """Return where each record begins (behind its length) and where it ends, in order.

    Args:
        misfit: Makes the error to raise: what does not fit into the batch, and which batch.

    Raises:
        CorruptBatchError: the lengths in a batch do not lead from its start to its end.
    Guarantees: looks at no byte outside ``data``; allocates in proportion to it.
    """
    records = int(bodies.counts.sum())
    hop = _HOP_RECORD
    if records >= _GUESS_RECORDS_MIN:
        hop = _HOP_EQUAL if _looks_equal(bodies) else _HOP_RECORD
        size = int((bodies.stops - bodies.starts).sum())
        guess = len(bodies.counts) * _GUESS_BATCH + records * _GUESS_RECORD + size * _GUESS_BYTE
        if guess < min(_hop_cost(bodies.counts, hop), _parallel_cost(bodies.counts)):
            found = _guess(bodies)
            if found is not None:
                return found
    return _follow(bodies, hop, misfit)


def _hop_cost(counts: Int64s, per_record: float) -> float:
    return len(counts) * _HOP_BATCH + int(counts.sum()) * per_record


def _parallel_cost(counts: Int64s) -> float:
    return int(counts.max()) * _PARALLEL_STEP + int(counts.sum()) * _PARALLEL_RECORD


def _looks_equal(bodies: BatchBodies) -> bool:
    """Return whether the first records of the first batch are of one size."""
    at, stop = int(bodies.starts[0]), int(bodies.stops[0])
    sizes = set()
    for _ in range(min(_RUN_MIN, int(bodies.counts[0]))):
        try:
            length, begin = read_varint(bodies.data, at, stop)
        except ValueError:
            return False
        sizes.add(begin + length - at)
        at = begin + max(length, 0)
    return len(sizes) == 1


def _guess(bodies: BatchBodies) -> tuple[Int64s, Int64s] | None:
    """Return the records by the zeros between them, or None if that is not proved right."""
    _, view, starts, stops, counts = bodies
    records = int(counts.sum())
    between = _between_zeros(view, int(starts[0]), int(stops[-1]), 2 * records + 1000)
    if between is None:
        return None
    lows, highs = np.searchsorted(between, starts, "right"), np.searchsorted(between, stops)
    pieces: list[Int64s] = []
    for batch, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        pieces += (starts[batch : batch + 1], between[low:high])
    places = np.concatenate(pieces)
    lengths, begins = read_varints(view, places)
    ends = begins + lengths
    if len(places) != records:
        # Keys and values have such zeros as well. No length leads to those positions.
        led_to = np.zeros(len(places), bool)
        led_to[np.searchsorted(places, starts)] = True
        for back in range(1, _STRAYS_MAX + 2):
            led_to[back:] |= places[back:] == ends[:-back]
        places, begins, ends = places[led_to], begins[led_to], ends[led_to]
        if len(places) != records:
            return None
    firsts = np.cumsum(counts) - counts
    following = np.append(places[1:], stops[-1])
    following[firsts[1:] - 1] = stops[:-1]
    proved = (
        np.array_equal(places[firsts], starts)
        and np.array_equal(ends, following)
        and bool((ends - begins >= RECORD_BYTES_MIN - 1).all())
    )
    return (begins, ends) if proved else None


def _between_zeros(view: Bytes, start: int, stop: int, count_max: int) -> Int64s | None:
    """Return the positions behind a zero byte that have a zero after one byte or two.

    A record of up to 8 KiB may begin there, behind one without headers. None if they are more than
    ``count_max``, too many to guess by.
    """
    pieces: list[Int64s] = [np.empty(0, np.int64)]
    left = count_max
    for at in range(start, stop, _GUESS_BYTES):
        zero = view[at : min(at + _GUESS_BYTES + 3, stop)] == 0
        behind = zero[2:-1] | zero[3:]
        behind &= zero[:-3]
        pieces.append(np.flatnonzero(behind) + (at + 1))
        left -= len(pieces[-1])
        if left < 0:
            return None
    return np.concatenate(pieces)


def _follow(bodies: BatchBodies, hop: float, misfit: BatchErrorFactory) -> tuple[Int64s, Int64s]:
    """Follow the lengths: in parallel while that is faster, then batch by batch."""
    data, view, at, stop, left = bodies
    begins = np.empty(int(left.sum()), np.int64)
    ends = np.empty_like(begins)
    slot, batch = np.cumsum(left) - left, np.arange(len(left))
    side_by_side = len(left) > 1 and _parallel_cost(left) < _hop_cost(left, hop)
    while side_by_side:
        lengths, begin = read_varints(view, at)
        fits = (lengths >= RECORD_BYTES_MIN - 1) & (lengths <= stop - begin)
        fits &= begin - at <= LENGTH_BYTES_MAX
        if not fits.all():
            raise misfit("a record length", int(batch[np.argmin(fits)]))
        at = begin + lengths
        begins[slot], ends[slot] = begin, at
        slot, left = slot + 1, left - 1
        done = left == 0
        if done.any():
            if (at[done] != stop[done]).any():
                raise misfit("the end of the last record", int(batch[done & (at != stop)][0]))
            batch, slot, left, at, stop = (x[~done] for x in (batch, slot, left, at, stop))
            side_by_side = len(left) > 1 and _parallel_cost(left) < _hop_cost(left, hop)
    for number, start, end, count, first in zip(
        *(x.tolist() for x in (batch, at, stop, left, slot)), strict=True
    ):
        found = _hop(data, view, start, end, count)
        if found is None:
            raise misfit("a record length", number)
        begins[first : first + count], ends[first : first + count] = found
    return begins, ends


def _hop(data: bytes, view: Bytes, at: int, stop: int, count: int) -> tuple[Int64s, Int64s] | None:
    """Return begin and end of ``count`` records between ``at`` and ``stop``; None if the lengths are wrong.

    Lengths are followed one by one until several in a row are equal; then the whole run of that
    length is found in one step, because each length of a run proves where the next one is.
    """
    places: list[int] = []
    runs: list[Int64s] = []
    append = places.append
    last, equal, found = -1, 0, 0
    while found < count:
        if at >= stop:
            return None
        append(at)
        found += 1
        first = data[at]
        if first < 128:
            width, size = 1, 1 + (first >> 1)
        elif at + 1 < stop and (second := data[at + 1]) < 128:
            width, size = 2, 2 + ((second << 6) | (first & 127) >> 1)
        else:
            width, size = _long_length(data, at)
            if not size:
                return None
        at += size
        if size != last:
            last, equal = size, 0
            continue
        equal += 1
        if equal >= _RUN_MIN:
            run = _run(view, at, min(count - found, (stop - at) // size), size, width)
            runs += (np.array(places, np.int64), run)
            places, equal = [], 0
            append = places.append
            at += size * len(run)
            found += len(run)
    if at != stop:
        return None
    lengths, begins = read_varints(view, np.concatenate([*runs, np.array(places, np.int64)]))
    ends = begins + lengths
    return (begins, ends) if bool((lengths >= RECORD_BYTES_MIN - 1).all()) else None


def _long_length(data: bytes, at: int) -> tuple[int, int]:
    """Return the width of a record length, and the size that it gives: 0 if it is no length."""
    folded = 0
    for width, byte in enumerate(data[at : at + LENGTH_BYTES_MAX]):
        folded |= (byte & 127) << 7 * width
        if byte < 128:
            return width + 1, width + 1 + (folded >> 1)
    return 0, 0


def _run(view: Bytes, at: int, count_max: int, size: int, width: int) -> Int64s:
    """Return the places from ``at`` on where records of the same size as the last one begin."""
    pieces: list[Int64s] = []
    model = view[at - size : at - size + width]
    step = 64
    while count_max > 0:
        places = at + size * np.arange(min(step, count_max), dtype=np.int64)
        same = view[places] == model[0]
        for byte in range(1, width):
            same &= view[places + byte] == model[byte]
        length = len(places) if same.all() else int(np.argmin(same))
        pieces.append(places[:length])
        if length < len(places):
            break
        at, count_max, step = at + size * length, count_max - length, step * 8
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
