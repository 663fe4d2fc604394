"""A share partition against a model that knows every record by itself, with crashes at every commit."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace

import pytest
from example_counts import some
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.broker.share.partition import (
    DONE,
    UNDELIVERABLE,
    Acknowledgement,
    AcknowledgeType,
    NotAcquiredError,
    RecordSpan,
    ShareLimits,
    SharePartition,
)
from millstream.log.control import ControlDb
from millstream.log.share_state import RecordState, ShareKey, SpanRow, put_share, share_state

LIMITS = ShareLimits(lock_duration_ms=100, delivery_count_max=3, in_flight_max=6)
MEMBERS = ("ann", "bob")
KEY = ShareKey("g", "a topic", 0)


class Crash(BaseException):
    """The end of a process."""


@dataclass(frozen=True)
class One:
    """The state of one record."""

    state: RecordState = RecordState.AVAILABLE
    deliveries: int = 0
    member: str = ""
    until_ms: int = 0

    def released(self) -> One:
        last = self.deliveries >= LIMITS.delivery_count_max
        return One(RecordState.EXHAUSTED if last else RecordState.AVAILABLE, self.deliveries)


class Model(RuleBasedStateMachine):
    """Every record is available, acquired, acknowledged, archived, or about to be archived."""

    def __init__(self) -> None:
        super().__init__()
        self.partition = SharePartition(0)
        self.records: dict[int, One] = {}
        self.batches: list[list[int]] = []  # the offsets that are records, batch by batch
        self.end = 0
        self.now_ms = 0
        self.acquired: tuple[str, list[RecordSpan]] = ("", [])
        self.acknowledged: set[int] = set()
        self.crashing = False
        connection = sqlite3.connect(":memory:", isolation_level=None)
        self.control = ControlDb(connection, write=True, before_commit=self._crash)
        with self.control.commit() as inside:
            inside.execute("INSERT INTO topics VALUES ('t', 'a topic', '{}', 0)")
        self.written = None
        self.durable: dict[int, One] = {}

    def teardown(self) -> None:
        self.control.close()

    def _crash(self) -> None:
        if self.crashing:
            raise Crash

    # -- what happens -------------------------------------------------------------------------

    @initialize()
    def there_are_records(self) -> None:
        self.records_are_appended([(0, 4), (2, 3), (1, 1), (0, 4)])

    @precondition(lambda self: len(self.records) < 40)
    @rule(sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=3))
    def records_are_appended(self, sizes) -> None:
        for gap, size in sizes:
            first = self.end + gap
            self.batches.append(list(range(first, first + size)))
            self.records.update(dict.fromkeys(self.batches[-1], One()))
            self.end = first + size

    @rule(
        member=st.sampled_from(MEMBERS),
        count_max=st.integers(1, 7),
        reach=st.integers(1, 9),
        record_limit=st.booleans(),
    )
    def a_member_fetches(self, member, count_max, reach, record_limit) -> None:
        start = self.partition.next_fetch_offset(LIMITS)
        in_flight = self.in_flight()
        below_limit = in_flight < LIMITS.in_flight_max
        failed = [at for at, one in sorted(self.records.items()) if self.failed(one)]
        fresh = [
            at
            for at, one in sorted(self.records.items())
            if one == One() and at >= self.first_left()
        ]
        if start is None:
            assert not failed
            assert not below_limit
            return
        stop = min(start + reach, self.end)
        found = [
            (part[0], part[-1] + 1)
            for batch in self.batches
            if (part := [at for at in batch if start <= at < stop])
        ]
        acquired = self.partition.acquire(
            member,
            found,
            (start, stop),
            count_max=count_max,
            limits=LIMITS,
            now_ms=self.now_ms,
            record_limit=record_limit,
        )
        offsets = [at for span in acquired for at in range(span.first, span.end)]
        assert offsets == sorted(set(offsets))
        for (
            span
        ) in self.partition.undeliverable():  # its last delivery was made before the broker died
            for at in range(max(span.first, start), min(span.end, stop)):
                if self.records[at] == One(RecordState.AVAILABLE, LIMITS.delivery_count_max):
                    self.records[at] = One(RecordState.EXHAUSTED, LIMITS.delivery_count_max)
        again = 0
        for span in acquired:
            for at in range(span.first, span.end):
                one = self.records[at]  # and no gap
                assert one.state == RecordState.AVAILABLE
                assert span.delivery_count == one.deliveries + 1 <= LIMITS.delivery_count_max
                again += one.deliveries > 0
                self.records[at] = One(
                    RecordState.ACQUIRED,
                    span.delivery_count,
                    member,
                    self.now_ms + LIMITS.lock_duration_ms,
                )
        if any(span.delivery_count == LIMITS.delivery_count_max for span in acquired):
            assert len(offsets) == 1, "a last delivery goes alone"
        if record_limit or again:
            assert len(offsets) <= count_max
        else:
            assert len(offsets) <= max(count_max - 1, 0) + 4, "up to the end of a batch"
        assert self.in_flight() <= max(LIMITS.in_flight_max, in_flight)
        reachable = [at for at in failed + (fresh if below_limit else []) if start <= at < stop]
        assert bool(offsets) == bool(reachable), "a fetch acquires what it can reach"
        self.acquired = (member, acquired)

    @precondition(lambda self: self.acquired[1])
    @rule()
    def what_was_acquired_is_not_sent(self) -> None:
        member, acquired = self.acquired
        mine = [
            at
            for span in acquired
            for at in range(span.first, span.end)
            if self.records[at].state == RecordState.ACQUIRED and self.records[at].member == member
        ]
        self.partition.cancel_acquisition(member, acquired)
        for at in mine:
            self.records[at] = One(RecordState.AVAILABLE, self.records[at].deliveries - 1)
        self.acquired = ("", [])

    @rule(
        member=st.sampled_from(MEMBERS),
        types=st.lists(
            st.tuples(st.integers(0, 8), st.integers(1, 4), st.sampled_from(AcknowledgeType)),
            min_size=1,
            max_size=3,
        ),
    )
    def a_member_acknowledges(self, member, types) -> None:
        self.acquired = ("", [])
        at, acknowledgements = self.partition.start, []
        for skip, size, kind in types:
            acknowledgements.append(Acknowledgement(at + skip, at + skip + size, kind))
            at += skip + size
        meant = [
            (at, one.acknowledge_type)
            for one in acknowledgements
            for at in range(one.first, one.end)
        ]
        holds = all(self.has(member, at) for at, _ in meant)
        try:
            self.partition.acknowledge(member, acknowledgements, limits=LIMITS, now_ms=self.now_ms)
        except NotAcquiredError:
            assert not holds
            return
        assert holds
        for at, kind in meant:
            self.records[at] = self.after(self.records[at], kind)
            if kind == AcknowledgeType.ACCEPT:
                self.acknowledged.add(at)

    @rule(
        member=st.sampled_from(MEMBERS),
        count_max=st.integers(1, 7),
        record_limit=st.booleans(),
        types=st.lists(st.sampled_from(AcknowledgeType), min_size=12, max_size=12),
    )
    def a_member_fetches_and_acknowledges_what_it_has(
        self, member, count_max, record_limit, types
    ) -> None:
        self.a_member_fetches(member, count_max, 9, record_limit)
        mine = [at for at in self.records if self.has(member, at)]
        acknowledged = list(zip(mine, types, strict=False))
        acknowledgements = [Acknowledgement(at, at + 1, kind) for at, kind in acknowledged]
        self.partition.acknowledge(member, acknowledgements, limits=LIMITS, now_ms=self.now_ms)
        for at, kind in acknowledged:
            self.records[at] = self.after(self.records[at], kind)
            if kind == AcknowledgeType.ACCEPT:
                self.acknowledged.add(at)
        self.acquired = ("", [])

    @rule(member=st.sampled_from(MEMBERS))
    def a_member_dies(self, member) -> None:
        had = any(self.records[at].member == member for at in self.records)
        assert self.partition.release(member, LIMITS) == had
        for at, one in self.records.items():
            if one.member == member:
                self.records[at] = one.released()
        self.acquired = ("", [])

    @rule(passed_ms=st.sampled_from((1, 30, 60, 100)))
    def time_passes(self, passed_ms) -> None:
        self.now_ms += passed_ms
        self.partition.expire(self.now_ms, LIMITS)
        for at, one in self.records.items():
            if one.state == RecordState.ACQUIRED and one.until_ms <= self.now_ms:
                self.records[at] = one.released()
        left = [one.until_ms for one in self.records.values() if one.state == RecordState.ACQUIRED]
        assert self.partition.next_expiry_ms() == min(left, default=None)
        self.acquired = ("", [])

    @rule()
    def copies_are_written(self) -> None:
        self.partition.archive(self.partition.undeliverable())
        for at, one in self.records.items():
            if one.state in UNDELIVERABLE:
                self.records[at] = One(RecordState.ARCHIVED, one.deliveries)

    @rule(commits=st.integers(0, 4))
    def what_changed_is_written(self, commits) -> None:
        after, self.crashing = self.partition.persisted(), not commits
        try:
            with self.control.commit() as connection:
                put_share(connection, KEY, self.written, after)
        except Crash:
            self.restart()
        else:
            self.written = after
            self.durable = {at: self.kept(one) for at, one in self.records.items()}
        finally:
            self.crashing = False

    @precondition(lambda self: any(one.deliveries > 1 for one in self.durable.values()))
    @rule()
    def the_broker_dies(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.written = share_state(self.control, KEY)
        self.partition = SharePartition.of(self.written) if self.written else SharePartition(0)
        kept = {at: self.durable.get(at, One()) for at in self.records}
        # What was acknowledged and not written may come again; what was written may not.
        self.acknowledged = {
            at for at, one in kept.items() if one.state == RecordState.ACKNOWLEDGED
        }
        self.records, self.acquired = kept, ("", [])

    # -- what holds ---------------------------------------------------------------------------

    def has(self, member: str, at: int) -> bool:
        one = self.records.get(at, One())
        return (
            one.state == RecordState.ACQUIRED
            and one.member == member
            and one.until_ms > self.now_ms
        )

    def after(self, one: One, kind: AcknowledgeType) -> One:
        if kind == AcknowledgeType.RELEASE:
            return one.released()
        if kind == AcknowledgeType.RENEW:
            return replace(one, until_ms=self.now_ms + LIMITS.lock_duration_ms)
        states = {
            AcknowledgeType.GAP: RecordState.ARCHIVED,
            AcknowledgeType.ACCEPT: RecordState.ACKNOWLEDGED,
            AcknowledgeType.REJECT: RecordState.REJECTED,
        }
        return One(states[kind], one.deliveries)

    @staticmethod
    def kept(one: One) -> One:
        return (
            One(RecordState.AVAILABLE, one.deliveries) if one.state == RecordState.ACQUIRED else one
        )

    @staticmethod
    def failed(one: One) -> bool:
        return one.state == RecordState.AVAILABLE and 0 < one.deliveries < LIMITS.delivery_count_max

    def in_flight(self) -> int:
        return sum(one.deliveries > 0 and one.state not in DONE for one in self.records.values())

    def first_left(self) -> int:
        return self.partition.start

    @invariant()
    def every_record_is_in_the_state_of_the_model(self) -> None:
        spans = self.partition.spans
        assert all(one.first < one.end for one in spans)
        bounds = [self.partition.start, *(one.end for one in spans)]
        assert [one.first for one in spans] == bounds[:-1], "spans follow each other"
        found = {at: span for span in spans for at in range(span.first, span.end)}
        for at, one in self.records.items():
            if at < self.partition.start:
                assert one.state in DONE, "nothing is lost"
            elif at >= self.partition.end:
                assert one == One()
            else:
                assert One(*found[at][2:]) == one
        assert all(self.records[at].state == RecordState.ACKNOWLEDGED for at in self.acknowledged)
        gaps = set(found) - set(self.records)
        assert all(found[at].state in (RecordState.AVAILABLE, RecordState.ARCHIVED) for at in gaps)

    @invariant()
    def the_state_is_small(self) -> None:
        assert len(self.partition.spans) <= 2 * LIMITS.in_flight_max + 2 * len(self.batches) + 1


Model.TestCase.settings = settings(
    max_examples=some(120),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
TestAgainstAModel = Model.TestCase


# -- by hand ----------------------------------------------------------------------------------


def fetch(partition: SharePartition, member: str, *batches: tuple[int, int], **options) -> list:
    wanted = {"count_max": 500, "limits": LIMITS, "now_ms": 0, **options}
    read = (batches[0][0], batches[-1][1])
    acquired = partition.acquire(member, list(batches), read, **wanted)
    return [(one.first, one.end, one.delivery_count) for one in acquired]


def test_a_batch_is_acquired_whole_unless_the_limit_is_strict() -> None:
    limits = ShareLimits(in_flight_max=100)
    batches = ((0, 10), (10, 20), (20, 30))
    assert fetch(SharePartition(0), "ann", *batches, count_max=12, limits=limits) == [
        (0, 10, 1),
        (10, 20, 1),
    ]
    assert fetch(
        SharePartition(0), "ann", *batches, count_max=12, limits=limits, record_limit=True
    ) == [
        (0, 10, 1),
        (10, 12, 1),
    ]


def test_records_that_failed_are_acquired_in_smaller_numbers_and_at_last_alone() -> None:
    limits = ShareLimits(delivery_count_max=4, in_flight_max=1000)
    partition, sizes = SharePartition(0), []
    for _ in range(4):
        found = fetch(partition, "ann", (0, 600), limits=limits, count_max=400)
        sizes.append(sum(end - first for first, end, _ in found))
        partition.release("ann", limits)
    assert sizes == [600, 100, 25, 1]
    assert [(one.first, one.end) for one in partition.undeliverable()] == [(0, 1)]


def test_one_record_that_takes_for_ever_lets_a_hundred_thousand_others_pass() -> None:
    partition = SharePartition(0)
    fetch(partition, "ann", (0, 1))
    for at in range(1, 100_001, 1000):
        limits = ShareLimits(in_flight_max=2000)
        assert partition.next_fetch_offset(limits) == at
        fetch(partition, "bob", (at, at + 1000), limits=limits, count_max=1000)
        acknowledged = [Acknowledgement(at, at + 1000, AcknowledgeType.ACCEPT)]
        partition.acknowledge("bob", acknowledged, limits=limits, now_ms=0)
    assert partition.start == 0
    assert len(partition.spans) == 2


def test_records_that_retention_removed_are_done() -> None:
    partition = SharePartition(
        0,
        [
            SpanRow(2, 6, RecordState.AVAILABLE, 1),
            SpanRow(8, 9, RecordState.ARCHIVED, 1),
        ],
    )
    partition.advance_start(4)
    assert (partition.start, partition.persisted_spans()[0]) == (
        4,
        SpanRow(4, 6, RecordState.AVAILABLE, 1),
    )
    partition.advance_start(100)
    assert (partition.start, partition.spans) == (100, [])
    partition.acknowledge(
        "ann", [Acknowledgement(3, 5, AcknowledgeType.ACCEPT)], limits=LIMITS, now_ms=0
    )


def test_a_lower_limit_counts_for_what_was_delivered_before_it() -> None:
    partition = SharePartition(0, [SpanRow(0, 2, RecordState.AVAILABLE, 3)])
    assert fetch(partition, "ann", (0, 4), limits=LIMITS) == [(2, 4, 1)]
    assert [(one.first, one.end, one.state) for one in partition.undeliverable()] == [
        (0, 2, RecordState.EXHAUSTED)
    ]


@pytest.mark.parametrize("kind", list(AcknowledgeType))
def test_only_the_acquiring_member_acknowledges(kind: AcknowledgeType) -> None:
    partition = SharePartition(0)
    fetch(partition, "ann", (0, 3))
    before = list(partition.spans)
    for member, acknowledgement in (
        ("bob", Acknowledgement(0, 1, kind)),
        ("ann", Acknowledgement(1, 4, kind)),
        ("ann", Acknowledgement(5, 6, kind)),
    ):
        with pytest.raises(NotAcquiredError):
            partition.acknowledge(member, [acknowledgement], limits=LIMITS, now_ms=0)
    with pytest.raises(NotAcquiredError):
        partition.acknowledge("ann", [Acknowledgement(0, 3, kind)], limits=LIMITS, now_ms=100)
    assert partition.spans == before
