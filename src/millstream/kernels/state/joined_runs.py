"""The runs of buckets that are divided, and of buckets that are put together.

Of a stored run each bucket has the rows of a range of hashes, its share. Shares that meet become one again, and one that has
all of its run, in a bucket of the run's own range, is the run. So nothing is referred to twice. What each share counts,
rows and events, is a guess by its range, such that the guesses add up to what the run has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from millstream.kernels.state.sorted_runs import Run, Share

HashRange = tuple[int, int]
"""Hashes ``[low, high)``."""
_UNKNOWN: HashRange = (0, 0)


def intersection(one: HashRange, other: HashRange) -> HashRange | None:
    """Return the hashes that are in both ranges; None if there are none."""
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return (low, high) if low < high else None


def share_of(count: int, part: HashRange, whole: HashRange) -> int:
    """Return about how much of a count is in a part of a range; what parts have that make the whole adds up to the count."""
    start, width = whole[0], whole[1] - whole[0]
    return count * (part[1] - start) // width - count * (part[0] - start) // width


def ranges_of(parts: Sequence[Run], bucket: HashRange) -> Iterator[HashRange]:
    """Yield the range of hashes of each part of a run of a bucket."""
    known = all(run.first for run in parts[1:])
    starts = [parts[0].first or bucket[0], *(run.first for run in parts[1:]), bucket[1]]
    for number, run in enumerate(parts):
        if run.share is not None:
            yield run.share.low, run.share.high
        else:
            yield (starts[number], starts[number + 1]) if known else bucket


def divided(
    run: Run, own: HashRange, bucket: HashRange, *, raised: int, always_counted: bool
) -> Run | None:
    """Return the part of a run that is in a bucket's range; None if none is.

    Args:
        run: The run, or a share of it.
        own: Its range.
        bucket: The range.
        raised: What is added to the numbers of its rows.
        always_counted: It does no harm that others have the same rows.
    """
    common = intersection(own, bucket)
    if common is None:
        return None
    whole = (run.share.whole_low, run.share.whole_high) if run.share else own
    share = Share(
        *common,
        run.stored_rows,
        run.is_counted and (common == own or always_counted),
        raised + (run.share.renumbered if run.share else 0),
        *whole,
        run.stored_events,
    )
    rows, events = (share_of(count, common, own) for count in (run.rows, run.events))
    return replace(run, rows=rows, events=events, share=share)


def put_together(lists: Sequence[list[list[Run]]], bucket: HashRange) -> list[Run]:
    """Put the runs of several buckets into one list, the oldest first; the buckets are in the order of their hashes.

    Each list keeps its order; shares of one run become one. Of runs that may come next the largest does.
    """
    waiting = [list(runs) for runs in lists]
    behind = [Counter(_names(runs[1:])) for runs in waiting]
    everywhere = sum(behind, Counter[str]())
    made: list[list[Run]] = []
    while heads := [number for number, runs in enumerate(waiting) if runs]:
        # One of which another list has a share further behind waits for it.
        ready = [
            number
            for number in heads
            if all(everywhere[run.name] == behind[number][run.name] for run in waiting[number][0])
        ]
        first = max(ready or heads, key=lambda number: (_rows(waiting[number][0]), -number))
        taken = [first]
        run = waiting[first][0]
        for number in (*range(first - 1, -1, -1), *range(first + 1, len(waiting))):
            both = waiting[number] and _joined(
                *((waiting[number][0], run) if number < first else (run, waiting[number][0]))
            )
            if both:
                run = both
                taken.append(number)
        for number in taken:
            del waiting[number][0]
            if waiting[number]:
                names = Counter(_names(waiting[number][:1]))
                behind[number] -= names
                everywhere -= names
        made.append(run)
    return [run for parts in made for run in _plain(parts, bucket)]


def one_chunk(shares: Sequence[Run], bucket: HashRange) -> Run:
    """Return as one what several buckets have of a chunk, which is in none of them in parts."""
    made = shares[0]
    for chunk in shares[1:]:
        assert chunk.name == made.name
        assert made.share is not None
        assert chunk.share is not None
        share = _both(made.share, chunk.share)
        if share is None:  # a bucket between them has its rows elsewhere by now
            whole = dict(zip(("whole_low", "whole_high"), _UNKNOWN, strict=True))
            share = made.share._replace(high=chunk.share.high, counted=False, **whole)
        made = replace(made, rows=made.rows + chunk.rows, share=share)
    (chunk,) = _plain([made], bucket)
    return chunk


def _names(runs: Iterable[list[Run]]) -> Iterator[str]:
    return (name for parts in runs for name in {run.name for run in parts})


def _rows(parts: Iterable[Run]) -> int:
    return sum(run.rows for run in parts)


def _joined(one: list[Run], other: list[Run]) -> list[Run] | None:
    """Return as one two runs that are shares of one run, of which the second goes on where the first ends; None: they aren't."""
    if len(one) == len(other) > 1 and one[0].name == other[0].name:  # each part has all hashes
        pairs = [_joined_parts(*pair) for pair in zip(one, other, strict=True)]
        return None if None in pairs else [run for run in pairs if run is not None]
    both = _joined_parts(one[-1], other[0])
    return None if both is None else [*one[:-1], both, *other[1:]]


def _joined_parts(one: Run, other: Run) -> Run | None:
    if one.share is None or other.share is None or one.name != other.name:
        return None
    share = _both(one.share, other.share)
    if share is None:
        return None
    return replace(one, rows=one.rows + other.rows, events=one.events + other.events, share=share)


def _both(one: Share, other: Share) -> Share | None:
    """Return two shares of a run as one, if the second goes on where the first ends."""
    if one.high != other.low or one.renumbered != other.renumbered:
        return None
    both = one._replace(high=other.high)
    return both._replace(counted=both.is_complete or (one.counted and other.counted))


def _plain(parts: list[Run], bucket: HashRange) -> list[Run]:
    """Return the parts of a run with numbers from 0 on, those without a share that have all of what they stand for."""
    numbered = [replace(run, part=part) for part, run in enumerate(parts)]
    bare = [replace(run, share=None) for run in numbered]
    return [
        alone if run.share is None or _is_all(run.share, range_) else run
        for run, alone, range_ in zip(numbered, bare, ranges_of(bare, bucket), strict=True)
    ]


def _is_all(share: Share, range_: HashRange) -> bool:
    return (
        share.is_complete and not share.renumbered and (share.whole_low, share.whole_high) == range_
    )
