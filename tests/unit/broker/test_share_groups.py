"""Who is in a share group, and which partitions each fetches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from drawn import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.codes import Code, Refused
from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.broker.share_groups import MEMBERS_MAX, Beat, ShareGroups, assign
from millstream.broker.share_settings import DEAD_LETTERS, GroupSettings, parse
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


def test_few_partitions_move_when_somebody_comes_or_goes() -> None:
    names = [f"m{number}" for number in range(4)]
    alone = assign({name: (["a"], ()) for name in names[:3]}, {"a": 12})
    joined = assign({name: (["a"], alone.get(name, ())) for name in names}, {"a": 12})
    kept = sum(len(set(alone[name]) & set(joined[name])) for name in names[:3])
    assert kept == 9
    left = assign({name: (["a"], joined[name]) for name in names[1:]}, {"a": 12})
    assert all(set(joined[name]) <= set(left[name]) for name in names[1:])


# -- heartbeats -------------------------------------------------------------------------------

ROOM_BYTES = (MEMBERS_MAX + 10) * MEMBER_BYTES


class House:
    """Share groups, and what they tell of members."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.somebody_went = asyncio.Event()
        self.counts = {"a": 2}
        self.memory = MemberMemory(ROOM_BYTES, 1)
        self.groups = ShareGroups(
            memory=self.memory,
            on_change=lambda group: None,
            on_gone=lambda group, member: self.went(member),
        )

    def went(self, member: str) -> None:
        self.gone.append(member)
        self.somebody_went.set()

    def beat(self, member: str, generation: int, topics=None, timeout_ms: int = 60_000):
        beat = Beat(member, generation, topics, "client", "127.0.0.1")
        return self.groups.beat("g", beat, self.counts, timeout_ms)


def run(story: Callable[[House], Awaitable[None]]) -> None:
    async def tell() -> None:
        house = House()
        await story(house)
        house.groups.close()

    asyncio.run(tell())


def refusal(call: Callable[[], object]) -> Code:
    with pytest.raises(Refused) as refused:
        call()
    return refused.value.code


def test_members_are_told_of_a_new_assignment_by_their_next_heartbeat() -> None:
    async def story(house: House) -> None:
        ann = house.beat("ann", 0, ["a"])
        assert (ann.generation, [one.partition for one in ann.assignment]) == (1, [0, 1])
        bob = house.beat("bob", 0, ["a"])
        assert bob.generation == 2
        assert ann.generation == 1
        again = house.beat("ann", 1)
        assert again is ann
        assert ann.generation == 2
        assert [one.partition for one in ann.assignment] == [0]
        assert house.beat("ann", 2).generation == 2
        house.counts = {"a": 4}
        assert len(house.beat("ann", 2).assignment) == 2
        house.groups.of_member("g").leave("bob")
        assert house.gone == ["bob"]
        assert len(house.beat("ann", 3).assignment) == 4

    run(story)


def test_a_member_whose_answer_was_lost_is_told_again() -> None:
    async def story(house: House) -> None:
        house.beat("ann", 0, ["a"])
        ann = house.beat("ann", 1)
        ann.knows = ann.generation
        house.beat("bob", 0, ["b"])
        assert house.beat("ann", 1).generation == 2
        ann.knows = ann.generation  # as the answer goes out, and is lost
        assert house.beat("ann", 1).knows == -1
        ann.knows = ann.generation
        assert house.beat("ann", 2).knows == 2

    run(story)


def test_who_is_not_in_the_group_or_at_another_generation_is_told_so() -> None:
    async def story(house: House) -> None:
        assert refusal(lambda: house.beat("ann", 1)) == Code.UNKNOWN_MEMBER_ID
        assert refusal(lambda: house.beat("ann", 0)) == Code.INVALID_REQUEST
        assert refusal(lambda: house.beat("", 0, ["a"])) == Code.INVALID_REQUEST
        assert house.groups.names() == []
        house.beat("ann", 0, ["a"])
        assert refusal(lambda: house.beat("ann", 2)) == Code.FENCED_MEMBER_EPOCH
        assert house.beat("ann", 0, ["a"]).generation == 1
        for number in range(MEMBERS_MAX - 1):
            house.beat(f"m{number}", 0, ["a"])
        assert refusal(lambda: house.beat("late", 0, ["a"])) == Code.GROUP_MAX_SIZE_REACHED

    run(story)


def test_a_member_that_is_silent_is_put_out() -> None:
    async def story(house: House) -> None:
        house.beat("ann", 0, ["a"], timeout_ms=20)
        house.beat("bob", 0, ["a"])
        await house.somebody_went.wait()
        assert house.gone == ["ann"]
        assert len(house.beat("bob", 2).assignment) == 2

    run(story)


def test_what_members_say_has_room_or_is_refused_and_gives_it_back_when_they_go() -> None:
    async def story(house: House) -> None:
        topics = [f"topic-{number:06}" for number in range(5000)]
        crowd = [f"{one}-{number}" for one in topics for number in range(5)]
        for _ in range(3):  # each time all is given back
            house.beat("ann", 0, ["a"])
            assert refusal(lambda: house.beat("bob", 0, crowd)) == Code.GROUP_MAX_SIZE_REACHED
            house.beat("ann", 1, topics)
            house.beat("ann", 2, ["a"])
            house.groups.of_member("g").leave("ann")
        house.memory.resize(0, ROOM_BYTES)
        assert refusal(lambda: house.beat("ann", 0, ["a"])) == Code.GROUP_MAX_SIZE_REACHED
        assert house.groups.names() == []

    run(story)


# -- settings ---------------------------------------------------------------------------------


def test_settings_have_the_names_and_defaults_that_kafka_has() -> None:
    assert parse({}) == GroupSettings()
    found = parse(
        {
            "share.auto.offset.reset": "by_duration:PT1H30M",
            "share.isolation.level": "read_committed",
            "share.delivery.count.limit": "2",
            "share.renew.acknowledge.enable": "false",
            DEAD_LETTERS: "dead",
        }
    )
    assert (found.reset, found.isolation, found.renews) == (5_400_000, "read_committed", False)
    assert (found.limits.deliveries_max, found.dead_letters) == (2, "dead")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share.auto.offset.reset", "sometime"),
        ("share.auto.offset.reset", "by_duration:P"),
        ("share.isolation.level", "none"),
        ("share.delivery.count.limit", "0"),
        ("share.record.lock.duration.ms", "1e3"),
        ("share.renew.acknowledge.enable", "perhaps"),
        (DEAD_LETTERS, "no/topic"),
        ("share.colour", "blue"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.rpartition(".")[2] if "/" not in value else value):
        parse({name: value})
