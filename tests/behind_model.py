"""Why a job is behind, said naively: each sentence of the table in docs/operate.md, one after the other, in exact numbers.

It knows a job as a person would write it down: its batches, its partitions, and whether a process is alive. It shares
no code with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True)
class Batch:
    """A batch: when it was committed, how long it took, in seconds, what it read and left, and what it may read."""

    run: int
    at_s: Fraction
    took_s: Fraction
    read: int
    unread: int
    rows_max: int | None = None


@dataclass(frozen=True)
class Partition:
    """A partition: what was read up to, and its end; None if that cannot be read."""

    position: int
    end: int | None

    @property
    def waiting(self):
        return 0 if self.end is None else max(0, self.end - self.position)


@dataclass(frozen=True)
class Known:
    """All that is known of a job at a moment. ``alive`` is the run that is alive, and since when; None if none is."""

    batches: list[Batch]
    partitions: list[Partition]
    now_s: Fraction
    alive: tuple[int, Fraction] | None
    failed: bool = False
    asked_to_stop: bool = False
    brokers: bool = False
    oldest_s: Fraction | None = None  # when the oldest record that waits came; None if nobody knows
    held: list[tuple[int, bool]] = field(
        default_factory=list
    )  # since which batch; held by anything

    @property
    def waiting(self):
        return sum(one.waiting for one in self.partitions)

    @property
    def newest(self):
        """The batches of the newest run that has any."""
        return [one for one in self.batches if one.run == self.batches[-1].run]


def causes(known):
    """Return the causes, as a set of words."""
    return {word for word, holds in RULES.items() if holds(known)}


def of_alive(known):
    return [one for one in known.batches if known.alive and one.run == known.alive[0]]


def starting(known):
    if known.alive is None or of_alive(known):
        return False
    return known.now_s - known.alive[1] <= 5 * 60


def stalled(known):
    if known.alive is None or not known.waiting:
        return False
    mine = of_alive(known)
    allowed_s = max(60, 10 * max(one.took_s for one in mine)) if mine else 5 * 60
    if known.oldest_s is not None and known.oldest_s <= known.now_s < known.oldest_s + allowed_s:
        return False  # nothing was due before
    if known.oldest_s is not None and known.oldest_s + allowed_s == known.now_s:
        return False
    return known.now_s - (mine[-1].at_s if mine else known.alive[1]) > allowed_s


def unreadable(known):
    ends = [(one.end, one.position) for one in known.partitions]
    return not known.brokers and any(end is None or end < position for end, position in ends)


def was_down(known):
    if not known.waiting or not known.batches:
        return False
    before = [one for one in known.batches if one.run != known.batches[-1].run]
    if not before or any(one.unread < one.read for one in known.newest):
        return False
    first = known.newest[0]
    began_s = first.at_s - first.took_s
    came = first.unread + first.read - before[-1].unread
    return began_s > before[-1].at_s and came > 0


def fullest(batches):
    """The fullest quarter; of equal ones the newer."""
    from_fewest = sorted(range(len(batches)), key=lambda place: (batches[place].read, place))
    return [batches[place] for place in from_fewest[3 * len(batches) // 4 :]]


def usual_rate(batches):
    """What arrives half of the time, or less."""
    stretches = []
    for before, one in pairwise(batches):
        long_s = one.at_s - before.at_s
        if long_s > 0:
            came = one.read + one.unread - before.unread
            stretches.append((max(Fraction(0), came / long_s), long_s))
    whole_s = sum(long_s for _, long_s in stretches)
    for rate in sorted({rate for rate, _ in stretches}):
        if sum(long_s for one, long_s in stretches if one <= rate) * 2 >= whole_s:
            return rate
    return None


def prospect(known):
    """Return whether it catches up: yes, never, or unknown."""
    batches = known.newest
    full = fullest(batches)
    read, took_s = sum(one.read for one in full), sum(one.took_s for one in full)
    usual = usual_rate(batches) if batches[-1].at_s > batches[0].at_s else None
    if not read or not took_s or usual is None:
        return "unknown"
    if known.waiting <= max(one.read for one in batches):
        return "yes"
    left_much = [one for one in full if one.unread >= 2 * one.read]
    if 2 * len(left_much) <= len(full) or len(batches) < 5:
        return "unknown"
    return "yes" if read / took_s > usual else "never"


def behind(known):
    return bool(known.alive and known.waiting and known.batches)


def overload(known):
    return behind(known) and prospect(known) == "never"


def backlog(known):
    if not behind(known) or overload(known):
        return False
    return known.waiting > max(one.read for one in known.newest)


def batch_limit(known):
    if not known.waiting or not known.batches:
        return False
    last = known.batches[-1]
    return bool(last.rows_max and last.unread and 10 * last.read >= 9 * last.rows_max)


def one_partition(known):
    most = max((one.waiting for one in known.partitions), default=0)
    return len(known.partitions) > 1 and most > 0 and 5 * most >= 4 * known.waiting


def watermark(known):
    return any(
        by and any(one.read for place, one in enumerate(known.batches) if place > since)
        for since, by in known.held
    )


def slow_batches(known):
    if not behind(known):
        return False
    batches = known.newest
    whole_s = batches[-1].at_s - batches[0].at_s
    worked = any(one.took_s for one in batches)
    return (
        worked
        and whole_s > 0
        and 10 * sum((one.took_s for one in batches[1:]), Fraction(0)) >= 9 * whole_s
    )


RULES = {
    "failed": lambda known: known.alive is None and known.failed,
    "stopped": lambda known: known.alive is None and not known.failed,
    "stopping": lambda known: known.alive is not None and known.asked_to_stop,
    "starting": starting,
    "stalled": stalled,
    "unreadable": unreadable,
    "was-down": was_down,
    "overload": overload,
    "backlog": backlog,
    "batch-limit": batch_limit,
    "one-partition": one_partition,
    "watermark": watermark,
    "slow-batches": slow_batches,
}
