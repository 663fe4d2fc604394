"""Share groups: their members, and the assignment of partitions to them.

A member joins with its first heartbeat, receives its assignment, and remains as long as it sends
heartbeats. The assignment gives each partition a member and each member a partition: where there are more
members than partitions, several share one. When members join or leave, as few partitions as possible move.
Each change begins a new generation; members receive it in the response to their next heartbeat.

Members are kept in memory; after a restart of the broker they rejoin. The records that they have acquired
are not known here (``partition_manager``); a callback reports members that have left.

Source: KIP-932; Kafka ``ShareGroup``, ``SimpleAssignor``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.record import TopicPartition

MEMBERS_MAX = 200
JOIN_EPOCH, LEAVE_EPOCH = 0, -1  # member epochs of a heartbeat that joins or leaves
MEMBER_ID_CHARACTERS_MAX = 128


@dataclass(eq=False, slots=True)
class ShareGroupMember:
    """A member, and the generation whose assignment it has received."""

    member_id: str
    client_id: str
    client_host: str
    topics: tuple[str, ...] = ()
    member_epoch: int = 0
    assignment_epoch: int = -1
    assignment: tuple[TopicPartition, ...] = ()
    expiry: asyncio.TimerHandle | None = None
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of a member. ``topics`` is None if they are unchanged."""

    member_id: str
    member_epoch: int
    topics: Sequence[str] | None
    client_id: str
    client_host: str


class ShareGroup:
    """One share group with members. All methods are called in the event loop.

    Args:
        memory: The budget for the metadata of members.
        on_change: Called when members or assignments have changed.
        on_left: Called with the id of a member that has left or expired.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: MemberMemory,
        on_change: Callable[[], None],
        on_left: Callable[[str], None],
    ) -> None:
        self.name = name
        self._memory = memory
        self.generation = 0
        self.members: dict[str, ShareGroupMember] = {}  # in the order in which they joined
        self._partitions: dict[str, int] = {}  # of the subscribed topics, at the last assignment
        self._on_change = on_change
        self._on_left = on_left
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> str:
        """``Stable`` with members, else ``Empty``."""
        return "Stable" if self.members else "Empty"

    def heartbeat(
        self, heartbeat: Heartbeat, counts: Mapping[str, int], session_timeout_ms: int
    ) -> ShareGroupMember:
        """Handle a heartbeat of a member that joins or remains; return the member.

        Args:
            counts: How many partitions each topic has.

        Raises:
            ApiError: it is not in the group, has an invalid generation, or there are too many members.
        """
        member = self._find_or_add(heartbeat)
        if heartbeat.topics is not None:
            self._reserve_memory(member, heartbeat)
            member.topics = tuple(sorted(set(heartbeat.topics)))
        member.client_id, member.client_host = heartbeat.client_id, heartbeat.client_host
        if heartbeat.member_epoch != member.member_epoch:  # it has not received the response
            member.assignment_epoch = -1
        subscribed = {topic for one in self.members.values() for topic in one.topics}
        partitions = {topic: counts[topic] for topic in sorted(subscribed) if topic in counts}
        needed = self._needs_assignment(member)
        if partitions != self._partitions or needed or not member.member_epoch:
            self._assign(partitions)
        member.member_epoch = self.generation
        if member.expiry is not None:
            member.expiry.cancel()
        member.expiry = self._loop.call_later(session_timeout_ms / 1000, self._expired, member)
        return member

    def _find_or_add(self, heartbeat: Heartbeat) -> ShareGroupMember:
        member = self.members.get(heartbeat.member_id)
        if member is None:
            if heartbeat.member_epoch != JOIN_EPOCH:
                raise ApiError(
                    ErrorCode.UNKNOWN_MEMBER_ID,
                    f"{heartbeat.member_id!r} is not in the group; join it",
                )
            if len(self.members) >= MEMBERS_MAX:
                raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"there are {MEMBERS_MAX} members")
            if not 0 < len(heartbeat.member_id) <= MEMBER_ID_CHARACTERS_MAX:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, "a member needs an id of at most 128 characters"
                )
            if heartbeat.topics is None:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "a member that joins needs to name the topics that it reads",
                )
            member = ShareGroupMember(
                heartbeat.member_id, heartbeat.client_id, heartbeat.client_host
            )
            self._reserve_memory(member, heartbeat)
            self.members[heartbeat.member_id] = member
        elif heartbeat.member_epoch > member.member_epoch or heartbeat.member_epoch < LEAVE_EPOCH:
            raise ApiError(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"generation {heartbeat.member_epoch}; this member is in {member.member_epoch}",
            )
        return member

    def _reserve_memory(self, member: ShareGroupMember, heartbeat: Heartbeat) -> None:
        """Reserve memory for the metadata of a member.

        Raises:
            ApiError: there is not enough.
        """
        size = MEMBER_BYTES + len(heartbeat.client_id) + sum(map(len, set(heartbeat.topics or ())))
        self._memory.resize(member.held_bytes, size)
        member.held_bytes = size

    def _needs_assignment(self, member: ShareGroupMember) -> bool:
        """Return whether a member reads other topics than it has partitions of."""
        return {one.topic for one in member.assignment} != {
            topic for topic in member.topics if topic in self._partitions
        }

    def leave(self, member_id: str) -> None:
        """Remove a member.

        Raises:
            ApiError: it is not in the group.
        """
        member = self.members.pop(member_id, None)
        if member is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id!r} is not in the group")
        if member.expiry is not None:
            member.expiry.cancel()
        self._memory.resize(member.held_bytes, 0)
        self._on_left(member_id)
        subscribed = {topic for one in self.members.values() for topic in one.topics}
        self._assign(
            {name: count for name, count in self._partitions.items() if name in subscribed}
        )

    def _expired(self, member: ShareGroupMember) -> None:
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
                member.assignment, member.assignment_epoch = fresh, -1
        self._on_change()

    def close(self) -> None:
        """Cancel the timers."""
        for member in self.members.values():
            if member.expiry is not None:
                member.expiry.cancel()


Subscription = tuple[Sequence[str], Sequence[TopicPartition]]


def assign(
    members: Mapping[str, Subscription], partitions: Mapping[str, int]
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return which partitions each member fetches.

    Args:
        members: By id: the topics that a member reads, and its previous assignment.
        partitions: How many each topic has.
    """
    assigned: dict[str, list[TopicPartition]] = {member: [] for member in members}
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
        pairs = _assign_topic(readers, range(count), before, loads)
        for name, number in pairs:
            assigned[name].append(TopicPartition(topic, number))
            loads[name] += 1
    return {name: tuple(sorted(names)) for name, names in assigned.items()}


def _assign_topic(
    readers: Sequence[str], numbers: range, before: set[tuple[str, int]], loads: Counter[str]
) -> list[tuple[str, int]]:
    """Pair members and partitions, each at least once and evenly, with as few moves as possible."""
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
    """Assign to each of ``many`` one of ``few``, as before where that is even; ``loads`` breaks ties."""
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


class ShareGroupCoordinator:
    """The share groups that have members. Lives in the event loop.

    Args:
        memory: The budget for the metadata of members.
        on_change: Called with a group whose members or assignments have changed.
        on_left: Called with the name of a group and the id of a member that has left or expired.
    """

    def __init__(
        self,
        *,
        memory: MemberMemory,
        on_change: Callable[[ShareGroup], None],
        on_left: Callable[[str, str], None],
    ) -> None:
        self._memory = memory
        self._groups: dict[str, ShareGroup] = {}
        self._on_change = on_change
        self._on_left = on_left

    def get(self, name: str) -> ShareGroup | None:
        """Return a group that has members."""
        return self._groups.get(name)

    def names(self) -> list[str]:
        """Return the groups that have members."""
        return list(self._groups)

    def get_for_member(self, name: str) -> ShareGroup:
        """Return the group of a member's request.

        Raises:
            ApiError: it has no members.
        """
        found = self._groups.get(name)
        if found is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; join it")
        return found

    def heartbeat(
        self, name: str, heartbeat: Heartbeat, counts: Mapping[str, int], session_timeout_ms: int
    ) -> ShareGroupMember:
        """Handle a heartbeat; see :meth:`ShareGroup.heartbeat`. A missing group is created."""
        group = self._groups.get(name)
        if group is None:
            group = ShareGroup(
                name,
                memory=self._memory,
                on_change=lambda: self._changed(name),
                on_left=lambda member: self._on_left(name, member),
            )
            self._groups[name] = group
        try:
            return group.heartbeat(heartbeat, counts, session_timeout_ms)
        finally:
            if not group.members:
                self._groups.pop(name, None)

    def _changed(self, name: str) -> None:
        group = self._groups[name]
        if not group.members:
            del self._groups[name]
        self._on_change(group)

    def close(self) -> None:
        """Cancel the timers."""
        for group in self._groups.values():
            group.close()
