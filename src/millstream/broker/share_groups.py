"""Share groups: who is in one, and which partitions each member fetches.

A member comes with its first heartbeat, is told its partitions, and stays as long as heartbeats do.
Partitions are shared out so that each has a member and each member a partition: where there are more
members than partitions, several share one. Who moves when somebody comes or goes are as few as can be.
A change begins a new generation, and members are told of it by their next heartbeat.

Members are kept in memory; after a restart of the broker they come anew. What they have in hand is not
known here (``shares``); that a member is gone is told to whoever asked.

Source: KIP-932; Kafka ``ShareGroup``, ``SimpleAssignor``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millstream.broker.codes import Code, Refused
from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.record import TopicPartition

MEMBERS_MAX = 200
JOINS, LEAVES = 0, -1  # what a heartbeat says in place of a generation
MEMBER_ID_CHARACTERS_MAX = 128


@dataclass(eq=False, slots=True)
class ShareMember:
    """A member, and up to which generation it knows its assignment."""

    member_id: str
    client_id: str
    client_host: str
    topics: tuple[str, ...] = ()
    generation: int = 0
    knows: int = -1
    assignment: tuple[TopicPartition, ...] = ()
    expiry: asyncio.TimerHandle | None = None
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: who sends it, and what it says of itself. ``topics`` is None if they are as before."""

    member_id: str
    generation: int
    topics: Sequence[str] | None
    client_id: str
    client_host: str


class ShareGroup:
    """One share group with members. All methods are called in the event loop.

    Args:
        memory: Where what members say has room.
        on_change: Called when members or assignments have changed.
        on_gone: Called with the id of a member that is gone.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: MemberMemory,
        on_change: Callable[[], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.name = name
        self._memory = memory
        self.generation = 0
        self.members: dict[str, ShareMember] = {}  # in the order in which they came
        self._partitions: dict[str, int] = {}  # of the topics subscribed to, when last assigned
        self._on_change = on_change
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> str:
        """``Stable`` with members, else ``Empty``."""
        return "Stable" if self.members else "Empty"

    def beat(self, beat: Beat, counts: Mapping[str, int], session_timeout_ms: int) -> ShareMember:
        """Take a heartbeat of a member that comes or stays; return the member.

        Args:
            counts: How many partitions each topic has.

        Raises:
            Refused: it is not in the group, is at an impossible generation, or there are too many.
        """
        member = self._known(beat)
        if beat.topics is not None:
            self._hold(member, beat)
            member.topics = tuple(sorted(set(beat.topics)))
        member.client_id, member.client_host = beat.client_id, beat.client_host
        if beat.generation != member.generation:  # it was not told, or the answer was lost
            member.knows = -1
        subscribed = {topic for one in self.members.values() for topic in one.topics}
        partitions = {topic: counts[topic] for topic in sorted(subscribed) if topic in counts}
        wanted = self._wants(member)
        if partitions != self._partitions or wanted or not member.generation:
            self._assign(partitions)
        member.generation = self.generation
        if member.expiry is not None:
            member.expiry.cancel()
        member.expiry = self._loop.call_later(session_timeout_ms / 1000, self._expired, member)
        return member

    def _known(self, beat: Beat) -> ShareMember:
        member = self.members.get(beat.member_id)
        if member is None:
            if beat.generation != JOINS:
                raise Refused(
                    Code.UNKNOWN_MEMBER_ID, f"{beat.member_id!r} is not in the group; join it"
                )
            if len(self.members) >= MEMBERS_MAX:
                raise Refused(Code.GROUP_MAX_SIZE_REACHED, f"there are {MEMBERS_MAX} members")
            if not 0 < len(beat.member_id) <= MEMBER_ID_CHARACTERS_MAX:
                raise Refused(
                    Code.INVALID_REQUEST, "a member needs an id of at most 128 characters"
                )
            if beat.topics is None:
                raise Refused(
                    Code.INVALID_REQUEST, "a member that joins says which topics it reads"
                )
            member = ShareMember(beat.member_id, beat.client_id, beat.client_host)
            self._hold(member, beat)
            self.members[beat.member_id] = member
        elif beat.generation > member.generation or beat.generation < LEAVES:
            raise Refused(
                Code.FENCED_MEMBER_EPOCH,
                f"generation {beat.generation}; this member was told of {member.generation}",
            )
        return member

    def _hold(self, member: ShareMember, beat: Beat) -> None:
        """Have room for what a member says.

        Raises:
            Refused: there is none.
        """
        size = MEMBER_BYTES + len(beat.client_id) + sum(map(len, set(beat.topics or ())))
        self._memory.resize(member.held_bytes, size)
        member.held_bytes = size

    def _wants(self, member: ShareMember) -> bool:
        """Return whether a member reads other topics than it has partitions of."""
        return {one.topic for one in member.assignment} != {
            topic for topic in member.topics if topic in self._partitions
        }

    def leave(self, member_id: str) -> None:
        """Let a member go.

        Raises:
            Refused: it is not in the group.
        """
        member = self.members.pop(member_id, None)
        if member is None:
            raise Refused(Code.UNKNOWN_MEMBER_ID, f"{member_id!r} is not in the group")
        if member.expiry is not None:
            member.expiry.cancel()
        self._memory.resize(member.held_bytes, 0)
        self._on_gone(member_id)
        subscribed = {topic for one in self.members.values() for topic in one.topics}
        self._assign(
            {name: count for name, count in self._partitions.items() if name in subscribed}
        )

    def _expired(self, member: ShareMember) -> None:
        if self.members.get(member.member_id) is member:
            self.leave(member.member_id)

    def _assign(self, partitions: dict[str, int]) -> None:
        self._partitions = partitions
        self.generation += 1
        assigned = assign(
            {one.member_id: (one.topics, one.assignment) for one in self.members.values()},
            partitions,
        )
        for member in self.members.values():
            fresh = assigned[member.member_id]
            if fresh != member.assignment:
                member.assignment, member.knows = fresh, -1
        self._on_change()

    def close(self) -> None:
        """Stop the clocks."""
        for member in self.members.values():
            if member.expiry is not None:
                member.expiry.cancel()


Reader = tuple[Sequence[str], Sequence[TopicPartition]]


def assign(
    members: Mapping[str, Reader], partitions: Mapping[str, int]
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return which partitions each member fetches.

    Args:
        members: By id: the topics that it reads, and what it had before.
        partitions: How many each topic has.
    """
    given: dict[str, list[TopicPartition]] = {member: [] for member in members}
    loads: Counter[str] = Counter(dict.fromkeys(members, 0))
    for topic, count in sorted(partitions.items()):
        readers = [name for name, (topics, _) in members.items() if topic in topics]
        if not readers or not count:
            continue
        before = {
            (name, one.partition)
            for name in readers
            for one in members[name][1]
            if one.topic == topic and one.partition < count
        }
        pairs = _paired(readers, range(count), before, loads)
        for name, number in pairs:
            given[name].append(TopicPartition(topic, number))
            loads[name] += 1
    return {name: tuple(sorted(places)) for name, places in given.items()}


def _paired(
    readers: Sequence[str], numbers: range, before: set[tuple[str, int]], loads: Counter[str]
) -> list[tuple[str, int]]:
    """Pair members and partitions, each at least once, evenly, and as many as before as can be."""
    if len(readers) > len(numbers):
        free: Counter[int] = Counter(dict.fromkeys(numbers, 0))
        had = dict(sorted(before))
        return [(name, number) for name, number in _spread(readers, numbers, had, free).items()]
    fewest = min(loads[name] for name in readers)
    uneven = Counter({name: loads[name] - fewest for name in readers})
    had_by = {number: name for name, number in sorted(before)}
    return [(name, number) for number, name in _spread(numbers, readers, had_by, uneven).items()]


Many = TypeVar("Many", str, int)
Few = TypeVar("Few", str, int)


def _spread(
    many: Sequence[Many], few: Sequence[Few], had: Mapping[Many, Few], loads: Counter[Few]
) -> dict[Many, Few]:
    """Give each of ``many`` one of ``few``, as before where that is even; ``loads`` breaks ties."""
    full, larger = divmod(len(many), len(few))
    counts: Counter[Few] = Counter(dict.fromkeys(few, 0))
    chosen: dict[Many, Few] = {}
    for one in many:
        other = had.get(one)
        if other is None:
            continue
        if counts[other] == full:
            if not larger:
                continue
            larger -= 1
        elif counts[other] > full:
            continue
        counts[other] += 1
        chosen[one] = other
    for one in many:
        if one not in chosen:
            other = min(few, key=lambda other: (counts[other], loads[other]))
            counts[other] += 1
            chosen[one] = other
    return chosen


class ShareGroups:
    """The share groups that have members. Lives in the event loop.

    Args:
        memory: Where what members say has room.
        on_change: Called with a group whose members or assignments have changed.
        on_gone: Called with the name of a group and the id of a member that is gone.
    """

    def __init__(
        self,
        *,
        memory: MemberMemory,
        on_change: Callable[[ShareGroup], None],
        on_gone: Callable[[str, str], None],
    ) -> None:
        self._memory = memory
        self._groups: dict[str, ShareGroup] = {}
        self._on_change = on_change
        self._on_gone = on_gone

    def get(self, name: str) -> ShareGroup | None:
        """Return a group that has members."""
        return self._groups.get(name)

    def names(self) -> list[str]:
        """Return the groups that have members."""
        return list(self._groups)

    def of_member(self, name: str) -> ShareGroup:
        """Return the group that a member speaks to.

        Raises:
            Refused: it has no members.
        """
        found = self._groups.get(name)
        if found is None:
            raise Refused(Code.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; join it")
        return found

    def beat(
        self, name: str, beat: Beat, counts: Mapping[str, int], session_timeout_ms: int
    ) -> ShareMember:
        """Take a heartbeat; see :meth:`ShareGroup.beat`. The group is made if it is not there."""
        group = self._groups.get(name)
        if group is None:
            group = ShareGroup(
                name,
                memory=self._memory,
                on_change=lambda: self._changed(name),
                on_gone=lambda member: self._on_gone(name, member),
            )
            self._groups[name] = group
        try:
            return group.beat(beat, counts, session_timeout_ms)
        finally:
            if not group.members:
                self._groups.pop(name, None)

    def _changed(self, name: str) -> None:
        group = self._groups[name]
        if not group.members:
            del self._groups[name]
        self._on_change(group)

    def close(self) -> None:
        """Stop the clocks."""
        for group in self._groups.values():
            group.close()
