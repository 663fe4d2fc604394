"""A partition as one share group sees it: which records are whose, and which are done with.

========================  =================================================================
a record is               meaning
========================  =================================================================
available                 whoever fetches next is given it
acquired                  a member has it, until it says what became of it, goes, or its
                          acquisition lock expires
acknowledged              it was processed; nobody is given it again
archived                  it was given up, or is no record (a marker, a gap of compaction);
                          nobody is given it again
rejected, exhausted       it is to be given up, and a copy goes to the dead-letter topic first:
                          a member said so, or it was delivered as often as the group allows
========================  =================================================================

========================================  ==================  ================================
what happens                              to one that is      then
========================================  ==================  ================================
it is fetched                             available           acquired, and delivered once more
accept                                    acquired            acknowledged
reject                                    acquired            rejected
release; the lock expires; the member     acquired            available, or exhausted if that
goes                                                          was its last delivery
renew                                     acquired            acquired, with a new lock
its delivery was not made after all       acquired            available, delivered once less
its copy is in the dead-letter topic      rejected,           archived
                                          exhausted
========================================  ==================  ================================

Records below ``start`` are done with, so are those of the spans that say so; at and after ``end`` none
was delivered yet. What is kept on disk (:meth:`SharePartition.kept`) knows nothing of who has what: after
a restart, what was acquired is available, with its deliveries counted.

However large the group's lag, what is held here is small: it is spans, and at most ``in_flight_max``
records are delivered and not done with. One that takes for ever is one of these, and lets others pass.

Nothing here does I/O or knows a clock.

Source: KIP-932, KIP-1222 (renew); Kafka ``SharePartition``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """What a record is to the group; the values are how control.db names them."""

    AVAILABLE = "available"
    ACQUIRED = "acquired"
    ACKNOWLEDGED = "acknowledged"
    ARCHIVED = "archived"
    REJECTED = "rejected"
    EXHAUSTED = "exhausted"


class Verdict(Enum):
    """What a member says of a record; the values are the protocol's."""

    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


DONE = frozenset({State.ACKNOWLEDGED, State.ARCHIVED})
DOOMED = frozenset({State.REJECTED, State.EXHAUSTED})
_AFTER = {
    Verdict.GAP: State.ARCHIVED,
    Verdict.ACCEPT: State.ACKNOWLEDGED,
    Verdict.REJECT: State.REJECTED,
}
_CAUTION = 2  # bits by which each failed delivery makes the next one smaller


class Span(NamedTuple):
    """Records with offsets in [first, end) that stand alike.

    ``deliveries`` is how often they were given out. ``member`` has them until ``until_ms``, if they are
    acquired.
    """

    first: int
    end: int
    state: State
    deliveries: int
    member: str = ""
    until_ms: int = 0


class Kept(NamedTuple):
    """What is kept on disk of records that were delivered, or are done with out of order."""

    first: int
    end: int
    state: State
    deliveries: int


class Saying(NamedTuple):
    """What a member says of the records in [first, end)."""

    first: int
    end: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Limits:
    """What a group allows: how long, how often, how many at a time."""

    lock_ms: int = 30_000
    deliveries_max: int = 5
    in_flight_max: int = 2000


class NotAcquiredError(Exception):
    """Somebody speaks of records that it does not have, or has no longer."""


class SharePartition:
    """The state of one share partition. All its methods are atomic: they change all, or raise.

    Args:
        start: The first record that is not done with.
        kept: What :meth:`kept` has returned.
    """

    def __init__(self, start: int, kept: Iterable[Kept] = ()) -> None:
        self.start = start
        self.spans: list[Span] = []
        at = start
        for one in sorted(kept):
            assert one.first >= at, "what was kept does not overlap"
            if one.first > at:
                self.spans.append(Span(at, one.first, State.AVAILABLE, 0))
            self.spans.append(Span(*one))
            at = one.end
        self._tidy()

    def copy(self) -> SharePartition:
        """Return another one in the same state."""
        other = SharePartition(self.start)
        other.spans = list(self.spans)
        return other

    @property
    def end(self) -> int:
        """At and after this offset no record was delivered."""
        return self.spans[-1].end if self.spans else self.start

    @property
    def in_flight(self) -> int:
        """How many records were delivered and are not done with."""
        return sum(
            one.end - one.first for one in self.spans if one.deliveries and one.state not in DONE
        )

    def kept(self) -> list[Kept]:
        """Return what a restart must find, besides ``start``."""
        out: list[Kept] = []
        for one in self.spans:
            state = State.AVAILABLE if one.state == State.ACQUIRED else one.state
            if state == State.AVAILABLE and not one.deliveries:
                continue
            if out and out[-1][1:] == (one.first, state, one.deliveries):
                out[-1] = out[-1]._replace(end=one.end)
            else:
                out.append(Kept(one.first, one.end, state, one.deliveries))
        return out

    # -- giving out ---------------------------------------------------------------------------

    def wanted(self, limits: Limits) -> int | None:
        """Return from which offset on records can be given out; None: none can be at present."""
        room = self.in_flight < limits.in_flight_max
        for one in self.spans:
            if one.state == State.AVAILABLE and (one.deliveries or room):
                return one.first
        return self.end if room else None

    def acquire(
        self,
        member: str,
        found: Sequence[tuple[int, int]],
        read: tuple[int, int],
        *,
        count_max: int,
        limits: Limits,
        now_ms: int,
        already: int = 0,
        exactly: bool = False,
    ) -> list[Span]:
        """Give records to a member; return which, with their deliveries counted.

        Records that failed before come in smaller numbers, and alone when it is their last delivery: so
        one that ends whoever has it takes few others with it.

        Args:
            found: The records there are in ``read``, as half-open ranges in their order; one batch is
                at least one of them. Other offsets in ``read`` are no records.
            read: The range of offsets that was looked at.
            count_max: How many at most; a batch of new records is given whole, though.
            already: How many records of others the same fetch was given before.
            exactly: Not even then more than ``count_max``.
        """
        giving = _Giving(member, count_max, limits, now_ms, exactly=exactly)
        giving.count = already
        giving.room = limits.in_flight_max - self.in_flight
        at, stop = max(read[0], self.start), read[1]
        if stop <= at:
            return []
        before, after = self._cut(at, stop)
        if at > self.end:  # the end has gone back since it was looked at
            before.append(Span(self.end, at, State.AVAILABLE, 0))
        inside = self._between(at, stop)
        out: list[Span] = []
        for first, end in [*found, (stop, stop)]:
            first, end = max(first, at), min(end, stop)  # noqa: PLW2901 - within what was read
            if giving.over:
                break
            out += _each(inside, at, first, _given_up)
            giving.next_batch()
            out += _each(inside, first, end, giving.give)
            at = max(at, end)
        out += _each(inside, at, stop, lambda one: [one])
        self.spans = [*before, *out, *after]
        self._tidy()
        return giving.given

    def withdraw(self, member: str, given: Iterable[Span]) -> None:
        """Take back what was acquired and not sent: those deliveries were not made."""

        def undo(one: Span) -> Span:
            if one.state != State.ACQUIRED or one.member != member:
                return one
            return Span(one.first, one.end, State.AVAILABLE, one.deliveries - 1)

        for span in given:
            self._change(span.first, span.end, undo)
        self._tidy()

    # -- taking back --------------------------------------------------------------------------

    def acknowledge(
        self, member: str, sayings: Sequence[Saying], *, limits: Limits, now_ms: int
    ) -> None:
        """Note what a member says of records that it has.

        Raises:
            NotAcquiredError: it does not have one of them; nothing was changed.
        What lies below ``start`` was removed from the log meanwhile, and is passed over.
        """
        before = list(self.spans)
        try:
            for saying in sayings:
                self._say(member, saying, limits, now_ms)
        except NotAcquiredError:
            self.spans = before
            raise
        self._tidy()

    def _say(self, member: str, saying: Saying, limits: Limits, now_ms: int) -> None:
        def change(one: Span) -> Span:
            if one.state != State.ACQUIRED or one.member != member or one.until_ms <= now_ms:
                raise NotAcquiredError(
                    f"records {one.first} to {one.end - 1} are {one.state.value}, and not this member's"
                )
            if saying.verdict == Verdict.RENEW:
                return one._replace(until_ms=now_ms + limits.lock_ms)
            if saying.verdict == Verdict.RELEASE:
                return _released(one, limits)
            return Span(one.first, one.end, _AFTER[saying.verdict], one.deliveries)

        first = max(saying.first, self.start)
        if saying.end > max(first, self.end):
            raise NotAcquiredError(f"record {saying.end - 1} was not delivered to anybody")
        self._change(first, saying.end, change)

    def release(self, member: str, limits: Limits) -> bool:
        """Make available what a member has, as it is gone; return whether it had anything."""
        return self._release_if(lambda one: one.member == member, limits)

    def expire(self, now_ms: int, limits: Limits) -> bool:
        """Make available what members have had for too long; return whether there was anything."""
        return self._release_if(lambda one: one.until_ms <= now_ms, limits)

    def next_expiry_ms(self) -> int | None:
        """Return when the next acquisition lock expires; None if nothing is acquired."""
        return min(
            (one.until_ms for one in self.spans if one.state == State.ACQUIRED), default=None
        )

    def _release_if(self, meant: Callable[[Span], bool], limits: Limits) -> bool:
        before = self.spans
        self.spans = [
            _released(one, limits) if one.state == State.ACQUIRED and meant(one) else one
            for one in before
        ]
        changed = self.spans != before
        self._tidy()
        return changed

    # -- giving up ----------------------------------------------------------------------------

    def doomed(self) -> list[Span]:
        """Return the records that are to be given up."""
        return [one for one in self.spans if one.state in DOOMED]

    def bury(self, spans: Iterable[Span]) -> None:
        """Archive records that were doomed."""

        def archived(one: Span) -> Span:
            return _archived(one) if one.state in DOOMED else one

        for span in spans:
            self._change(max(span.first, self.start), span.end, archived)
        self._tidy()

    def removed_below(self, offset: int) -> None:
        """Note that the log holds no records below an offset any more."""
        if offset > self.start:
            self.spans = self._cut(offset, offset)[1]
            self.start = offset
            self._tidy()

    # -- spans --------------------------------------------------------------------------------

    def _cut(self, first: int, end: int) -> tuple[list[Span], list[Span]]:
        """Return the spans before ``first`` and those from ``end`` on; one across is divided."""
        before, after = [], []
        for one in self.spans:
            if one.first < first:
                before.append(one._replace(end=min(one.end, first)))
            if one.end > end:
                after.append(one._replace(first=max(one.first, end)))
        return before, after

    def _between(self, first: int, end: int) -> list[Span]:
        """Return the spans of [first, end); what lies behind the end is available."""
        inside = [
            one._replace(first=max(one.first, first), end=min(one.end, end))
            for one in self.spans
            if one.first < end and one.end > first
        ]
        if end > max(self.end, first):
            inside.append(Span(max(self.end, first), end, State.AVAILABLE, 0))
        return inside

    def _change(self, first: int, end: int, change: Callable[[Span], Span]) -> None:
        """Replace what lies in [first, end). Spans are found by halving; few are looked at."""
        if end <= first:
            return
        low = max(bisect_right(self.spans, first, key=lambda one: one.first) - 1, 0)
        high = bisect_right(self.spans, end - 1, key=lambda one: one.first)
        touched, out = self.spans[low:high], []
        for one in touched:
            left, right = max(one.first, first), min(one.end, end)
            if left >= right:
                out.append(one)
                continue
            if one.first < left:
                out.append(one._replace(end=left))
            out.append(change(one._replace(first=left, end=right)))
            if one.end > right:
                out.append(one._replace(first=right))
        self.spans[low:high] = out

    def _tidy(self) -> None:
        """Join spans that stand alike; forget those in front that are done with, and untouched ends."""
        out: list[Span] = []
        for one in self.spans:
            if not out and one.state in DONE:
                self.start = one.end
            elif out and out[-1].end == one.first and out[-1][2:] == one[2:]:
                out[-1] = out[-1]._replace(end=one.end)
            else:
                out.append(one)
        while out and out[-1].state == State.AVAILABLE and not out[-1].deliveries:
            out.pop()
        self.spans = out


class _Giving:
    """What one fetch is given of one partition, as it grows."""

    def __init__(
        self, member: str, count_max: int, limits: Limits, now_ms: int, *, exactly: bool
    ) -> None:
        self.given: list[Span] = []
        self.room = 0  # for records that were not delivered before
        self._member = member
        self._count_max = count_max
        self._limits = limits
        self._until_ms = now_ms + limits.lock_ms
        self._exactly = exactly
        self.count = 0
        self._allowed = count_max  # less, once one is among them that failed before
        self._careful = False
        self.over = count_max <= 0

    def next_batch(self) -> None:
        """Note that other records follow than those of the same batch."""
        self.over |= self.count >= self._allowed

    def give(self, one: Span) -> list[Span]:
        """Return what becomes of records that are there."""
        if one.state != State.AVAILABLE or self.over:
            return [one]
        if one.deliveries >= self._limits.deliveries_max:
            return [Span(one.first, one.end, State.EXHAUSTED, one.deliveries)]
        count = self._how_many(one)
        if count <= 0:
            self.over = True
            return [one]
        middle = one.first + count
        given = Span(
            one.first, middle, State.ACQUIRED, one.deliveries + 1, self._member, self._until_ms
        )
        self.given.append(given)
        self.count += count
        if middle == one.end:
            return [given]
        self.over = True
        return [given, one._replace(first=middle)]

    def _how_many(self, one: Span) -> int:
        size = one.end - one.first
        if not one.deliveries:
            # A batch that was begun is given whole, unless that was not wanted.
            whole = not self._exactly and not self._careful
            left = size if whole else self._allowed - self.count
            count = min(size, left, self.room)
            self.room -= max(count, 0)
            return count
        self._careful = True
        last = one.deliveries == self._limits.deliveries_max - 1
        fewer = 1 if last else max(1, self._count_max >> (_CAUTION * one.deliveries))
        self._allowed = min(self._allowed, fewer)
        return min(size, self._allowed - self.count)


def _each(
    spans: Sequence[Span], first: int, end: int, change: Callable[[Span], list[Span]]
) -> list[Span]:
    """Return what becomes of the spans in [first, end)."""
    out = []
    for one in spans:
        left, right = max(one.first, first), min(one.end, end)
        if left < right:
            out += change(one._replace(first=left, end=right))
    return out


def _given_up(one: Span) -> list[Span]:
    """Give up what is no record where it would have been given out."""
    return [_archived(one)] if one.state == State.AVAILABLE else [one]


def _archived(one: Span) -> Span:
    return Span(one.first, one.end, State.ARCHIVED, one.deliveries)


def _released(one: Span, limits: Limits) -> Span:
    last = one.deliveries >= limits.deliveries_max
    state = State.EXHAUSTED if last else State.AVAILABLE
    return Span(one.first, one.end, state, one.deliveries)
