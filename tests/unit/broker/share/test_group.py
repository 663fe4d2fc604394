"""Members of share groups, and their assignments."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.share.group import MEMBERS_MAX, Heartbeat, ShareGroupCoordinator, assign
from millstream.broker.share.settings import DEAD_LETTER_TOPIC, ShareGroupSettings, parse_settings
from millstream.errors import ConfigError
from millstream.record import TopicPartition

TOPICS = ("a", "b", "c")
READERS = st.dictionaries(
    st.sampled_from("pqrstuv"),
    st.lists(st.sampled_from(TOPICS), unique=True, min_size=1),
    min_size=1,
    max_size=7,
)
COUNTS = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9))


@settings(max_examples=some(150), deadline=None)
@given(first=READERS, second=READERS, counts=COUNTS, later=COUNTS)
def test_each_partition_has_a_member_each_member_a_partition_and_loads_are_even(
    first, second, counts, later
) -> None:
    before: dict[str, tuple[TopicPartition, ...]] = {}
    for readers, partitions in ((first, counts), (second, later), (second, later)):
        found = assign(
            {name: (topics, before.get(name, ())) for name, topics in readers.items()}, partitions
        )
        assert set(found) == set(readers)
        for topic, count in partitions.items():
            those = [name for name, topics in readers.items() if topic in topics]
            pairs = [
                (name, one.partition) for name in those for one in found[name] if one.topic == topic
            ]
            if not those:
                continue
            assert len(set(pairs)) == len(pairs) == max(count, len(those))
            by_member, by_partition = (
                Counter(name for name, _ in pairs),
                Counter(at for _, at in pairs),
            )
            assert set(by_partition) == set(range(count))
            assert set(by_member) == set(those)
            for loads in (by_member, by_partition):
                assert max(loads.values()) - min(loads.values()) <= 1
        assert all(one.topic in readers[name] for name in readers for one in found[name])
        before = found
    assert (
        assign({name: (topics, before[name]) for name, topics in second.items()}, later) == before
    )


def test_few_partitions_move_when_a_member_joins_or_leaves() -> None:
    names = [f"m{number}" for number in range(4)]
    alone = assign({name: (["a"], ()) for name in names[:3]}, {"a": 12})
    joined = assign({name: (["a"], alone.get(name, ())) for name in names}, {"a": 12})
    kept = sum(len(set(alone[name]) & set(joined[name])) for name in names[:3])
    assert kept == 9
    left = assign({name: (["a"], joined[name]) for name in names[1:]}, {"a": 12})
    assert all(set(joined[name]) <= set(left[name]) for name in names[1:])


# -- heartbeats -------------------------------------------------------------------------------

BUDGET_BYTES = (MEMBERS_MAX + 10) * MEMBER_BYTES


class Groups:
    """Share groups, and the members that they report as left."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.some_left = asyncio.Event()
        self.counts = {"a": 2}
        self.memory = MemberMemory(BUDGET_BYTES, 1)
        self.coordinator = ShareGroupCoordinator(
            memory=self.memory,
            on_change=lambda group: None,
            on_left=lambda group, member: self.note_left(member),
        )

    def note_left(self, member: str) -> None:
        self.left.append(member)
        self.some_left.set()

    def heartbeat(self, member: str, generation: int, topics=None, timeout_ms: int = 60_000):
        heartbeat = Heartbeat(member, generation, topics, "client", "127.0.0.1")
        return self.coordinator.heartbeat("g", heartbeat, self.counts, timeout_ms)


def run(scenario: Callable[[Groups], Awaitable[None]]) -> None:
    async def main() -> None:
        groups = Groups()
        await scenario(groups)
        groups.coordinator.close()

    asyncio.run(main())


def refusal(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        call()
    return refused.value.code


def test_members_receive_a_new_assignment_with_their_next_heartbeat() -> None:
    async def scenario(groups: Groups) -> None:
        ann = groups.heartbeat("ann", 0, ["a"])
        assert (ann.member_epoch, [one.partition for one in ann.assignment]) == (1, [0, 1])
        bob = groups.heartbeat("bob", 0, ["a"])
        assert bob.member_epoch == 2
        assert ann.member_epoch == 1
        again = groups.heartbeat("ann", 1)
        assert again is ann
        assert ann.member_epoch == 2
        assert [one.partition for one in ann.assignment] == [0]
        assert groups.heartbeat("ann", 2).member_epoch == 2
        groups.counts = {"a": 4}
        assert len(groups.heartbeat("ann", 2).assignment) == 2
        groups.coordinator.get_for_member("g").leave("bob")
        assert groups.left == ["bob"]
        assert len(groups.heartbeat("ann", 3).assignment) == 4

    run(scenario)


def test_a_member_whose_response_was_lost_receives_its_assignment_again() -> None:
    async def scenario(groups: Groups) -> None:
        groups.heartbeat("ann", 0, ["a"])
        ann = groups.heartbeat("ann", 1)
        ann.assignment_epoch = ann.member_epoch
        groups.heartbeat("bob", 0, ["b"])
        assert groups.heartbeat("ann", 1).member_epoch == 2
        ann.assignment_epoch = ann.member_epoch  # as the response is sent, and lost
        assert groups.heartbeat("ann", 1).assignment_epoch == -1
        ann.assignment_epoch = ann.member_epoch
        assert groups.heartbeat("ann", 2).assignment_epoch == 2

    run(scenario)


def test_heartbeats_of_non_members_and_of_another_generation_are_rejected() -> None:
    async def scenario(groups: Groups) -> None:
        assert refusal(lambda: groups.heartbeat("ann", 1)) == ErrorCode.UNKNOWN_MEMBER_ID
        assert refusal(lambda: groups.heartbeat("ann", 0)) == ErrorCode.INVALID_REQUEST
        assert refusal(lambda: groups.heartbeat("", 0, ["a"])) == ErrorCode.INVALID_REQUEST
        assert groups.coordinator.names() == []
        groups.heartbeat("ann", 0, ["a"])
        assert refusal(lambda: groups.heartbeat("ann", 2)) == ErrorCode.FENCED_MEMBER_EPOCH
        assert groups.heartbeat("ann", 0, ["a"]).member_epoch == 1
        for number in range(MEMBERS_MAX - 1):
            groups.heartbeat(f"m{number}", 0, ["a"])
        assert (
            refusal(lambda: groups.heartbeat("late", 0, ["a"])) == ErrorCode.GROUP_MAX_SIZE_REACHED
        )

    run(scenario)


def test_a_member_that_sends_no_heartbeat_expires() -> None:
    async def scenario(groups: Groups) -> None:
        groups.heartbeat("ann", 0, ["a"], timeout_ms=20)
        groups.heartbeat("bob", 0, ["a"])
        await groups.some_left.wait()
        assert groups.left == ["ann"]
        assert len(groups.heartbeat("bob", 2).assignment) == 2

    run(scenario)


def test_metadata_of_members_is_within_a_budget_and_released_when_they_leave() -> None:
    async def scenario(groups: Groups) -> None:
        topics = [f"topic-{number:06}" for number in range(5000)]
        crowd = [f"{one}-{number}" for one in topics for number in range(5)]
        for _ in range(3):  # each time all is given back
            groups.heartbeat("ann", 0, ["a"])
            assert (
                refusal(lambda: groups.heartbeat("bob", 0, crowd))
                == ErrorCode.GROUP_MAX_SIZE_REACHED
            )
            groups.heartbeat("ann", 1, topics)
            groups.heartbeat("ann", 2, ["a"])
            groups.coordinator.get_for_member("g").leave("ann")
        groups.memory.resize(0, BUDGET_BYTES)
        assert (
            refusal(lambda: groups.heartbeat("ann", 0, ["a"])) == ErrorCode.GROUP_MAX_SIZE_REACHED
        )
        assert groups.coordinator.names() == []

    run(scenario)


# -- settings ---------------------------------------------------------------------------------


def test_settings_have_the_names_and_defaults_that_kafka_has() -> None:
    assert parse_settings({}) == ShareGroupSettings()
    found = parse_settings(
        {
            "share.auto.offset.reset": "by_duration:PT1H30M",
            "share.isolation.level": "read_committed",
            "share.delivery.count.limit": "2",
            "share.renew.acknowledge.enable": "false",
            DEAD_LETTER_TOPIC: "dead",
        }
    )
    assert (found.auto_offset_reset, found.isolation, found.renew_enabled) == (
        5_400_000,
        "read_committed",
        False,
    )
    assert (found.limits.delivery_count_max, found.dead_letter_topic) == (2, "dead")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share.auto.offset.reset", "sometime"),
        ("share.auto.offset.reset", "by_duration:P"),
        ("share.isolation.level", "none"),
        ("share.delivery.count.limit", "0"),
        ("share.record.lock.duration.ms", "1e3"),
        ("share.renew.acknowledge.enable", "perhaps"),
        (DEAD_LETTER_TOPIC, "no/topic"),
        ("share.colour", "blue"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.rpartition(".")[2] if "/" not in value else value):
        parse_settings({name: value})
