"""A share partition: the state of each record of a partition in one share group.

========================  =================================================================
a record is               meaning
========================  =================================================================
available                 the next fetch may acquire it
acquired                  a member has acquired it: until the member acknowledges it or
                          leaves, or the acquisition lock expires
acknowledged              it was processed; it is not delivered again
archived                  it was undeliverable, or is no record (a marker, a gap of
                          compaction); it is not delivered again
rejected, exhausted       it is undeliverable, and goes to the dead-letter topic before it is
                          archived: a member rejected it, or it was delivered as often as the
                          group allows
========================  =================================================================

========================================  ==================  ================================
what happens                              to a record that    then it is
                                          is
========================================  ==================  ================================
a member fetches it                       available           acquired, with one more delivery
accept                                    acquired            acknowledged
reject                                    acquired            rejected
release; the lock expires; the member     acquired            available, or exhausted if that
leaves                                                        was its last delivery
renew                                     acquired            acquired, with a new lock
the response is not sent after all        acquired            available, with one delivery less
its copy is in the dead-letter topic      rejected,           archived
                                          exhausted
========================================  ==================  ================================

Records below ``start`` are done: acknowledged or archived. So are those in spans of these states. At and
after ``end`` no record was delivered yet. The persisted state (:meth:`SharePartition.persisted_spans`)
does not have the members: after a restart, acquired records are available, with their deliveries counted.

However large the group's lag, this state is small: it consists of spans, and at most ``in_flight_max``
records are delivered and not done. A record that is never acknowledged is one of these; others pass it.

Nothing here does I/O or has a clock.

Source: KIP-932, KIP-1222 (renew); Kafka ``SharePartition``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from millstream.log.share_state import RecordState, ShareState, SpanRow


class AcknowledgeType(Enum):
    """How a member acknowledges a record; the values are the protocol's."""

    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


DONE = frozenset({RecordState.ACKNOWLEDGED, RecordState.ARCHIVED})
UNDELIVERABLE = frozenset({RecordState.REJECTED, RecordState.EXHAUSTED})
_STATE_AFTER = {
    AcknowledgeType.GAP: RecordState.ARCHIVED,
    AcknowledgeType.ACCEPT: RecordState.ACKNOWLEDGED,
    AcknowledgeType.REJECT: RecordState.REJECTED,
}
_SINGLE_DELIVERY_FROM = 2  # bits by which each failed delivery shrinks the next acquisition


class RecordSpan(NamedTuple):
    """Records with offsets in [first, end) that have the same state.

    ``delivery_count`` is how often they were acquired. If they are acquired now, ``member`` has them
    until ``lock_expires_ms``.
    """

    first: int
    end: int
    state: RecordState
    delivery_count: int
    member: str = ""
    lock_expires_ms: int = 0


class Acknowledgement(NamedTuple):
    """How a member acknowledges the records in [first, end)."""

    first: int
    end: int
    acknowledge_type: AcknowledgeType


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """The limits of a group: how long a lock lasts, how many deliveries, how many records in flight."""

    lock_duration_ms: int = 30_000
    delivery_count_max: int = 5
    in_flight_max: int = 2000


class NotAcquiredError(Exception):
    """A member acknowledges records that it has not acquired, or whose lock has expired."""


class SharePartition:
    """The state of one share partition. All its methods are atomic: they change all, or raise.

    Args:
        start: The first record that is not done.
        persisted: What :meth:`persisted_spans` has returned.
    """

    def __init__(self, start: int, persisted: Iterable[SpanRow] = ()) -> None:
        self.start = start
        self.spans: list[RecordSpan] = []
        at = start
        for one in sorted(persisted):
            assert one.first >= at, "persisted spans do not overlap"
            if one.first > at:
                self.spans.append(RecordSpan(at, one.first, RecordState.AVAILABLE, 0))
            self.spans.append(RecordSpan(*one))
            at = one.end
        self._coalesce()

    def copy(self) -> SharePartition:
        """Return a copy of the state."""
        other = SharePartition(self.start)
        other.spans = list(self.spans)
        return other

    @classmethod
    def of(cls, state: ShareState) -> SharePartition:
        """Return a share partition in its persisted state."""
        return cls(state.start, state.spans)

    def persisted(self) -> ShareState:
        """Return the state that control.db stores."""
        return ShareState(self.start, tuple(self.persisted_spans()))

    @property
    def end(self) -> int:
        """At and after this offset no record was delivered."""
        return self.spans[-1].end if self.spans else self.start

    @property
    def in_flight(self) -> int:
        """How many records were delivered and are not done."""
        return sum(
            one.end - one.first
            for one in self.spans
            if one.delivery_count and one.state not in DONE
        )

    def persisted_spans(self) -> list[SpanRow]:
        """Return what a restart needs, besides ``start``."""
        out: list[SpanRow] = []
        for one in self.spans:
            state = RecordState.AVAILABLE if one.state == RecordState.ACQUIRED else one.state
            if state == RecordState.AVAILABLE and not one.delivery_count:
                continue
            if out and out[-1][1:] == (one.first, state, one.delivery_count):
                out[-1] = out[-1]._replace(end=one.end)
            else:
                out.append(SpanRow(one.first, one.end, state, one.delivery_count))
        return out

    # -- acquiring ----------------------------------------------------------------------------

    def next_fetch_offset(self, limits: ShareLimits) -> int | None:
        """Return the offset from which on records can be acquired; None: none can be at present."""
        below_limit = self.in_flight < limits.in_flight_max
        for one in self.spans:
            if one.state == RecordState.AVAILABLE and (one.delivery_count or below_limit):
                return one.first
        return self.end if below_limit else None

    def acquire(
        self,
        member: str,
        ranges: Sequence[tuple[int, int]],
        interval: tuple[int, int],
        *,
        count_max: int,
        limits: ShareLimits,
        now_ms: int,
        count_before: int = 0,
        record_limit: bool = False,
    ) -> list[RecordSpan]:
        """Acquire records for a member; return them, with this delivery counted.

        Records that failed before are acquired in smaller numbers, and alone for their last delivery:
        so a record that crashes its member takes few others with it.

        Args:
            ranges: The records in ``interval``, as half-open ranges in order; each batch is at least
                one range. Other offsets in ``interval`` are no records.
            interval: The range of offsets that was read.
            count_max: How many at most; a batch of new records is acquired whole, though.
            count_before: How many records the same fetch has acquired in other partitions.
            record_limit: ``count_max`` holds for new batches too.
        """
        acquisition = _Acquisition(member, count_max, limits, now_ms, record_limit=record_limit)
        acquisition.count = count_before
        acquisition.in_flight_left = limits.in_flight_max - self.in_flight
        at, stop = max(interval[0], self.start), interval[1]
        if stop <= at:
            return []
        before, after = self._cut(at, stop)
        if at > self.end:  # the end was moved back after the read
            before.append(RecordSpan(self.end, at, RecordState.AVAILABLE, 0))
        inside = self._between(at, stop)
        out: list[RecordSpan] = []
        for first, end in [*ranges, (stop, stop)]:
            first, end = max(first, at), min(end, stop)  # noqa: PLW2901 - within what was read
            if acquisition.over:
                break
            out += _each(inside, at, first, _archive_gap)
            acquisition.next_batch()
            out += _each(inside, first, end, acquisition.acquire)
            at = max(at, end)
        out += _each(inside, at, stop, lambda one: [one])
        self.spans = [*before, *out, *after]
        self._coalesce()
        return acquisition.acquired

    def cancel_acquisition(self, member: str, acquired: Iterable[RecordSpan]) -> None:
        """Cancel an acquisition whose response is not sent: its deliveries do not count."""

        def undo(one: RecordSpan) -> RecordSpan:
            if one.state != RecordState.ACQUIRED or one.member != member:
                return one
            return RecordSpan(one.first, one.end, RecordState.AVAILABLE, one.delivery_count - 1)

        for span in acquired:
            self._change(span.first, span.end, undo)
        self._coalesce()

    # -- acknowledging ------------------------------------------------------------------------

    def acknowledge(
        self,
        member: str,
        acknowledgements: Sequence[Acknowledgement],
        *,
        limits: ShareLimits,
        now_ms: int,
    ) -> None:
        """Apply the acknowledgements of a member.

        Raises:
            NotAcquiredError: the member has not acquired one of the records; nothing was changed.
        Records below ``start`` were removed from the log meanwhile, and are skipped.
        """
        before = list(self.spans)
        try:
            for one in acknowledgements:
                self._apply(member, one, limits, now_ms)
        except NotAcquiredError:
            self.spans = before
            raise
        self._coalesce()

    def _apply(
        self, member: str, acknowledgement: Acknowledgement, limits: ShareLimits, now_ms: int
    ) -> None:
        def change(one: RecordSpan) -> RecordSpan:
            if (
                one.state != RecordState.ACQUIRED
                or one.member != member
                or one.lock_expires_ms <= now_ms
            ):
                raise NotAcquiredError(
                    f"records {one.first} to {one.end - 1} are {one.state.value}, and not acquired "
                    "by this member"
                )
            kind = acknowledgement.acknowledge_type
            if kind == AcknowledgeType.RENEW:
                return one._replace(lock_expires_ms=now_ms + limits.lock_duration_ms)
            if kind == AcknowledgeType.RELEASE:
                return _released(one, limits)
            return RecordSpan(one.first, one.end, _STATE_AFTER[kind], one.delivery_count)

        first = max(acknowledgement.first, self.start)
        if acknowledgement.end > max(first, self.end):
            raise NotAcquiredError(
                f"record {acknowledgement.end - 1} was not delivered to any member"
            )
        self._change(first, acknowledgement.end, change)

    def release(self, member: str, limits: ShareLimits) -> bool:
        """Release what a member has acquired, as it has left; return whether there was anything."""
        return self._release_if(lambda one: one.member == member, limits)

    def expire(self, now_ms: int, limits: ShareLimits) -> bool:
        """Release the records whose lock has expired; return whether there were any."""
        return self._release_if(lambda one: one.lock_expires_ms <= now_ms, limits)

    def next_expiry_ms(self) -> int | None:
        """Return when the next acquisition lock expires; None if no record is acquired."""
        return min(
            (one.lock_expires_ms for one in self.spans if one.state == RecordState.ACQUIRED),
            default=None,
        )

    def _release_if(self, matches: Callable[[RecordSpan], bool], limits: ShareLimits) -> bool:
        before = self.spans
        self.spans = [
            _released(one, limits) if one.state == RecordState.ACQUIRED and matches(one) else one
            for one in before
        ]
        changed = self.spans != before
        self._coalesce()
        return changed

    # -- dead letters -------------------------------------------------------------------------

    def undeliverable(self) -> list[RecordSpan]:
        """Return the undeliverable records, which are to be dead-lettered."""
        return [one for one in self.spans if one.state in UNDELIVERABLE]

    def archive(self, spans: Iterable[RecordSpan]) -> None:
        """Archive undeliverable records."""

        def archived(one: RecordSpan) -> RecordSpan:
            return _archived(one) if one.state in UNDELIVERABLE else one

        for span in spans:
            self._change(max(span.first, self.start), span.end, archived)
        self._coalesce()

    def advance_start(self, offset: int) -> None:
        """Note that the log has removed all records below an offset."""
        if offset > self.start:
            self.spans = self._cut(offset, offset)[1]
            self.start = offset
            self._coalesce()

    # -- spans --------------------------------------------------------------------------------

    def _cut(self, first: int, end: int) -> tuple[list[RecordSpan], list[RecordSpan]]:
        """Return the spans before ``first`` and those from ``end`` on; spans across a bound are split."""
        before, after = [], []
        for one in self.spans:
            if one.first < first:
                before.append(one._replace(end=min(one.end, first)))
            if one.end > end:
                after.append(one._replace(first=max(one.first, end)))
        return before, after

    def _between(self, first: int, end: int) -> list[RecordSpan]:
        """Return the spans of [first, end); records after the last span are available."""
        inside = [
            one._replace(first=max(one.first, first), end=min(one.end, end))
            for one in self.spans
            if one.first < end and one.end > first
        ]
        if end > max(self.end, first):
            inside.append(RecordSpan(max(self.end, first), end, RecordState.AVAILABLE, 0))
        return inside

    def _change(self, first: int, end: int, change: Callable[[RecordSpan], RecordSpan]) -> None:
        """Replace the spans in [first, end). They are found by binary search."""
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

    def _coalesce(self) -> None:
        """Join adjacent spans of the same state; drop done spans in front and undelivered ones at the end."""
        out: list[RecordSpan] = []
        for one in self.spans:
            if not out and one.state in DONE:
                self.start = one.end
            elif out and out[-1].end == one.first and out[-1][2:] == one[2:]:
                out[-1] = out[-1]._replace(end=one.end)
            else:
                out.append(one)
        while out and out[-1].state == RecordState.AVAILABLE and not out[-1].delivery_count:
            out.pop()
        self.spans = out


class _Acquisition:
    """Collects what one fetch acquires of one partition."""

    def __init__(
        self, member: str, count_max: int, limits: ShareLimits, now_ms: int, *, record_limit: bool
    ) -> None:
        self.acquired: list[RecordSpan] = []
        self.in_flight_left = 0  # for records that were not delivered before
        self._member = member
        self._count_max = count_max
        self._limits = limits
        self._until_ms = now_ms + limits.lock_duration_ms
        self._record_limit = record_limit
        self.count = 0
        self._allowed = count_max  # lowered by records that failed before
        self._redelivers = False
        self.over = count_max <= 0

    def next_batch(self) -> None:
        """Note that the records of another batch follow."""
        self.over |= self.count >= self._allowed

    def acquire(self, one: RecordSpan) -> list[RecordSpan]:
        """Return the new spans of existing records, acquired as far as the limits allow."""
        if one.state != RecordState.AVAILABLE or self.over:
            return [one]
        if one.delivery_count >= self._limits.delivery_count_max:
            return [RecordSpan(one.first, one.end, RecordState.EXHAUSTED, one.delivery_count)]
        count = self._acquirable(one)
        if count <= 0:
            self.over = True
            return [one]
        middle = one.first + count
        acquired = RecordSpan(
            one.first,
            middle,
            RecordState.ACQUIRED,
            one.delivery_count + 1,
            self._member,
            self._until_ms,
        )
        self.acquired.append(acquired)
        self.count += count
        if middle == one.end:
            return [acquired]
        self.over = True
        return [acquired, one._replace(first=middle)]

    def _acquirable(self, one: RecordSpan) -> int:
        size = one.end - one.first
        if not one.delivery_count:
            # A batch is acquired whole once it has begun, unless ``record_limit`` forbids that.
            whole = not self._record_limit and not self._redelivers
            left = size if whole else self._allowed - self.count
            count = min(size, left, self.in_flight_left)
            self.in_flight_left -= max(count, 0)
            return count
        self._redelivers = True
        last = one.delivery_count == self._limits.delivery_count_max - 1
        fewer = (
            1 if last else max(1, self._count_max >> (_SINGLE_DELIVERY_FROM * one.delivery_count))
        )
        self._allowed = min(self._allowed, fewer)
        return min(size, self._allowed - self.count)


def _each(
    spans: Sequence[RecordSpan],
    first: int,
    end: int,
    change: Callable[[RecordSpan], list[RecordSpan]],
) -> list[RecordSpan]:
    """Return the spans that ``change`` makes of those in [first, end)."""
    out = []
    for one in spans:
        left, right = max(one.first, first), min(one.end, end)
        if left < right:
            out += change(one._replace(first=left, end=right))
    return out


def _archive_gap(one: RecordSpan) -> list[RecordSpan]:
    """Archive available offsets that are no records."""
    return [_archived(one)] if one.state == RecordState.AVAILABLE else [one]


def _archived(one: RecordSpan) -> RecordSpan:
    return RecordSpan(one.first, one.end, RecordState.ARCHIVED, one.delivery_count)


def _released(one: RecordSpan, limits: ShareLimits) -> RecordSpan:
    last = one.delivery_count >= limits.delivery_count_max
    state = RecordState.EXHAUSTED if last else RecordState.AVAILABLE
    return RecordSpan(one.first, one.end, state, one.delivery_count)
