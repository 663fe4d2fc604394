"""One consumer group: its members, its generation, and its state table.

========================  =================================================================
state                     meaning
========================  =================================================================
Empty                     it has no members
PreparingRebalance        members must rejoin; it waits for them, up to the largest
                          rebalance timeout among them
CompletingRebalance       a generation has begun; it waits for the leader's assignment
Stable                    every member has its assignment
========================  =================================================================

===========================================  ====================  =======================
what happens                                 in                    then
===========================================  ====================  =======================
a member joins, or joins again with other    any                   PreparingRebalance
metadata; the leader joins again             Stable                PreparingRebalance
a static member returns, nothing changed     Stable                Stable
a member leaves, or its session expires      Completing, Stable    PreparingRebalance
all members have joined, or the time is up   Preparing             CompletingRebalance, or
                                                                   Empty without members, or
                                                                   the same while only static
                                                                   members remain
the leader sends the assignment              Completing            Stable
a member does not sync in time               Completing, Stable    the member is removed
===========================================  ====================  =======================

Clients make the assignment: one of them is the leader and computes it; the broker passes it on as bytes.
Everything here runs in the event loop, by its clock.

Source: Kafka ``GroupCoordinator``, ``GroupMetadata``; KIP-345 (static members), KIP-394 (a member
is given its member id first), KIP-814 (a static leader skips the assignment).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from millstream.broker.groups.member import (
    Identity,
    JoinRequest,
    JoinResult,
    Member,
    MemberIdRequiredError,
)
from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.broker.protocol.error_codes import ApiError, ErrorCode

GroupState = Literal["Empty", "PreparingRebalance", "CompletingRebalance", "Stable"]
_log = logging.getLogger(__name__)


class Group:
    """One group. All methods are called in the event loop.

    Args:
        rebalance_delay_ms: How long an empty group waits for more members after each that joins.
        memory: The budget for the metadata of members.
        on_empty: Called when it has no members any more.
    """

    def __init__(
        self,
        name: str,
        *,
        rebalance_delay_ms: int,
        memory: MemberMemory,
        on_empty: Callable[[Group], None],
    ) -> None:
        self.name = name
        self._memory = memory
        self.state: GroupState = "Empty"
        self.generation = 0
        self.protocol_type = ""
        self.protocol_name = ""
        self.leader = ""
        self.members: dict[str, Member] = {}  # by id, in the order in which they joined
        self._static: dict[str, str] = {}  # ids of static members, by their names
        self._pending_ids: dict[
            str, asyncio.TimerHandle
        ] = {}  # ids given to members that have yet to join again
        self._delay_ms = rebalance_delay_ms
        self._delayed = False
        self._has_new_members = False  # since the delay began
        self._on_empty = on_empty
        self._loop = asyncio.get_running_loop()
        self._join_timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._unsynced: set[str] = set()

    # -- checks ------------------------------------------------------------------------------

    def member(self, who: Identity) -> Member:
        """Return a member.

        Raises:
            ApiError: there is no such member, or another one has taken its name.
        """
        if who.instance_id is not None:
            known = self._static.get(who.instance_id)
            if known is None:
                raise ApiError(
                    ErrorCode.UNKNOWN_MEMBER_ID, f"no member is called {who.instance_id!r}"
                )
            if known != who.member_id:
                raise ApiError(
                    ErrorCode.FENCED_INSTANCE_ID,
                    f"another member is called {who.instance_id!r} now",
                )
        found = self.members.get(who.member_id)
        if found is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"{who.member_id!r} is not in the group")
        return found

    def check_generation(self, generation: int) -> None:
        """Reject a request of another generation than the current one."""
        if generation != self.generation:
            raise ApiError(
                ErrorCode.ILLEGAL_GENERATION,
                f"generation {generation} is over; now is {self.generation}",
            )

    def heartbeat(self, who: Identity, generation: int) -> None:
        """Handle a heartbeat.

        Raises:
            ApiError: there is no such member, or it must rejoin.
        """
        member = self.member(who)
        self.check_generation(generation)
        self.touch(member)
        if self.state == "PreparingRebalance":
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS, "a rebalance is in progress; rejoin")

    def touch(self, member: Member) -> None:
        """Restart the session timeout of a member."""
        if member.expiry is not None:
            member.expiry.cancel()
        member.expiry = self._loop.call_later(
            member.session_timeout_ms / 1000, self._expired, member
        )

    def _expired(self, member: Member) -> None:
        if member.awaits_response:
            self.touch(member)
            return
        _log.info("the session of member %s of group %s has expired", member.who, self.name)
        self._remove(member)

    # -- joining ------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinResult:
        """Return the generation that a member is in, once it has begun.

        Raises:
            ApiError: the member or its protocols do not match the group.
        """
        try:
            return await self._join(request)
        finally:
            if (
                self.state == "Empty" and not self._pending_ids
            ):  # it was created for a member that was rejected
                self._on_empty(self)

    async def _join(self, request: JoinRequest) -> JoinResult:
        member_id, instance_id = request.who
        if not member_id and instance_id in self._static:
            self._check_protocols(request, self._static[instance_id or ""])
            return await self._replace(request, self.members[self._static[instance_id or ""]])
        self._check_protocols(request, member_id)
        if not member_id:
            return await self._assign_member_id(request)
        if member_id in self._pending_ids:
            self._take_pending_id(member_id)
            return await self._add_member(request, member_id)
        return await self._rejoin(request, self.member(request.who))

    def _check_protocols(self, request: JoinRequest, member_id: str) -> None:
        if not request.protocol_type or not request.protocols:
            raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "the request names no protocol")
        others = [one for key, one in self.members.items() if key != member_id]
        if not others:
            return
        common = set(request.protocols).intersection(*(one.protocols for one in others))
        if request.protocol_type != self.protocol_type or not common:
            raise ApiError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"the group is of type {self.protocol_type!r}, and has no protocol in common with it",
            )

    async def _assign_member_id(self, request: JoinRequest) -> JoinResult:
        """Give a new member its id; a client that supports this joins again with it."""
        self._memory.check_members(len(self.members) + len(self._pending_ids))
        prefix = request.who.instance_id or request.client_id
        member_id = f"{prefix}-{uuid.uuid4()}"
        if request.who.instance_id is None and request.member_id_required:
            self._memory.resize(0, _pending_id_bytes(member_id))
            self._pending_ids[member_id] = self._loop.call_later(
                request.session_timeout_ms / 1000, self._drop_pending_id, member_id
            )
            raise MemberIdRequiredError(member_id)
        return await self._add_member(request, member_id)

    def _take_pending_id(self, member_id: str) -> None:
        self._pending_ids.pop(member_id).cancel()
        self._memory.resize(_pending_id_bytes(member_id), 0)

    def _drop_pending_id(self, member_id: str) -> None:
        self._take_pending_id(member_id)
        if self.state == "PreparingRebalance":
            self._try_complete_join()
        elif self.state == "Empty":
            self._become_empty()

    async def _add_member(self, request: JoinRequest, member_id: str) -> JoinResult:
        member = Member.of(request, Identity(member_id, request.who.instance_id))
        self._reserve_memory(member, request.metadata_bytes)
        self.members[member_id] = member
        if member.who.instance_id is not None:
            self._static[member.who.instance_id] = member_id
        self.protocol_type = request.protocol_type
        self._has_new_members = True
        return await self._await_join(member)

    async def _rejoin(self, request: JoinRequest, member: Member) -> JoinResult:
        """Join a member that is in the group already; the group rebalances only if it must."""
        same = dict(member.protocols) == dict(request.protocols)
        follows = self.state == "Stable" and member.who.member_id != self.leader
        if same and (follows or self.state == "CompletingRebalance"):
            self.touch(member)
            return self._joined(member)
        self._reserve_memory(member, request.metadata_bytes + len(member.assignment))
        member.update(request)
        return await self._await_join(member)

    async def _replace(self, request: JoinRequest, member: Member) -> JoinResult:
        """Rejoin a static member under a new id; a client that uses the old one is fenced."""
        old_id, instance_id = member.who.member_id, member.who.instance_id
        self._reserve_memory(member, request.metadata_bytes + len(member.assignment))
        for fail in (member.fail_join, member.fail_sync):
            fail(ErrorCode.FENCED_INSTANCE_ID, f"another member is called {instance_id!r} now")
        member.who = Identity(f"{instance_id}-{uuid.uuid4()}", instance_id)
        member.update(request)
        self.members = {one.who.member_id: one for one in self.members.values()}
        self._static[instance_id or ""] = member.who.member_id
        leads = old_id == self.leader
        if leads:
            self.leader = member.who.member_id
        if self.state != "Stable" or self._chosen_protocol() != self.protocol_name:
            return await self._await_join(member)
        self.touch(member)
        if not leads:
            return self._joined(member)
        if request.can_skip_assignment:
            return self._joined(member, skip_assignment=True)
        return self._joined(member, leader=old_id)  # as the leader it would assign again

    def _reserve_memory(self, member: Member, size: int) -> None:
        """Reserve memory for the metadata of a member.

        Raises:
            ApiError: there is not enough.
        """
        self._memory.resize(member.held_bytes, size)
        member.held_bytes = size

    async def _await_join(self, member: Member) -> JoinResult:
        """Rebalance the group, and return the result for this member."""
        member.fail_join(ErrorCode.UNKNOWN_MEMBER_ID, "it joined again meanwhile")
        joined: asyncio.Future[JoinResult] = self._loop.create_future()
        member.pending_join = joined
        self.touch(member)
        if self.state == "PreparingRebalance":
            self._try_complete_join()
        else:
            self._prepare_rebalance()
        return await joined

    # -- rebalancing --------------------------------------------------------------------------

    def _prepare_rebalance(self) -> None:
        """Wait for the members of the next generation."""
        begins = self.state == "Empty"
        for member in self.members.values():
            if member.pending_sync is not None:
                self.touch(member)  # it sent no heartbeat while it waited
            member.fail_sync(ErrorCode.REBALANCE_IN_PROGRESS, "a rebalance is in progress; rejoin")
        self._await_syncs(set())
        self.state = "PreparingRebalance"
        if begins and self._delay_ms:
            self._delayed, self._has_new_members = True, False
            self._await_joins(self._delay_ms, self._after_delay)
        else:
            self._await_joins(self._rebalance_timeout_ms(), self._complete_join)
            self._try_complete_join()

    def _after_delay(self) -> None:
        """Wait again while new members join."""
        if self._has_new_members:
            self._has_new_members = False
            self._await_joins(self._delay_ms, self._after_delay)
            return
        self._delayed = False
        self._await_joins(self._rebalance_timeout_ms(), self._complete_join)
        self._try_complete_join()

    def _rebalance_timeout_ms(self) -> int:
        return max((one.rebalance_timeout_ms for one in self.members.values()), default=0)

    def _await_joins(self, timeout_ms: int, then: Callable[[], None]) -> None:
        if self._join_timer is not None:
            self._join_timer.cancel()
        self._join_timer = self._loop.call_later(timeout_ms / 1000, then)

    def _try_complete_join(self) -> None:
        """Complete the join if no member is missing."""
        missing = any(one.pending_join is None for one in self.members.values())
        if not self._delayed and not missing and not self._pending_ids:
            self._complete_join()

    def _complete_join(self) -> None:
        """Begin the next generation with the members that have joined, and all static ones."""
        for member in list(self.members.values()):
            if member.pending_join is None and member.who.instance_id is None:
                self._evict(member)
        joined = [
            one.who.member_id for one in self.members.values() if one.pending_join is not None
        ]
        if self.members and not joined:  # static members remain until their sessions expire
            self._await_joins(self._rebalance_timeout_ms(), self._complete_join)
            return
        if self._join_timer is not None:
            self._join_timer.cancel()
        self.generation += 1
        if not self.members:
            self._become_empty()
            return
        if self.leader not in joined:
            self.leader = joined[0]
        self.protocol_name = self._chosen_protocol()
        self.state = "CompletingRebalance"
        self._await_syncs(set(joined))
        for member in self.members.values():
            self._reserve_memory(member, member.held_bytes - len(member.assignment))
            member.assignment = b""
            self.touch(member)
            member.complete_join(self._joined(member))

    def _become_empty(self) -> None:
        self.state, self.leader, self.protocol_name = "Empty", "", ""
        self._await_syncs(set())
        if not self._pending_ids:
            self._on_empty(self)

    def _chosen_protocol(self) -> str:
        """Return the protocol that most members prefer, of those that all have."""
        protocols = [one.protocols for one in self.members.values()]
        common = set(protocols[0]).intersection(*protocols[1:])
        votes = Counter(next(name for name in one if name in common) for one in protocols)
        return votes.most_common(1)[0][0]

    def _joined(
        self, member: Member, *, leader: str | None = None, skip_assignment: bool = False
    ) -> JoinResult:
        leads = leader is None and member.who.member_id == self.leader
        others = [
            (one.who, one.protocols.get(self.protocol_name, b"")) for one in self.members.values()
        ]
        return JoinResult(
            self.generation,
            self.protocol_type,
            self.protocol_name,
            leader or self.leader,
            member.who.member_id,
            others if leads else (),
            skip_assignment,
        )

    # -- assigning ----------------------------------------------------------------------------

    async def sync(
        self,
        who: Identity,
        generation: int,
        assignments: Mapping[str, bytes],
        *,
        protocol: tuple[str | None, str | None] = (None, None),
    ) -> bytes:
        """Return the assignment of a member, once the leader has sent it.

        Args:
            assignments: By member id; only the leader sends some.
            protocol: Type and name, if the member names them.

        Raises:
            ApiError: there is no such member, or it must rejoin.
        """
        member = self.member(who)
        self.check_generation(generation)
        for named, actual in zip(protocol, (self.protocol_type, self.protocol_name), strict=True):
            if named is not None and named != actual:
                raise ApiError(
                    ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"{named!r} is not {actual!r}"
                )
        self.touch(member)
        if self.state == "PreparingRebalance":
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS, "a rebalance is in progress; rejoin")
        self._unsynced.discard(who.member_id)
        if self.state == "Stable":
            return member.assignment
        member.fail_sync(ErrorCode.UNKNOWN_MEMBER_ID, "it synced again meanwhile")
        synced: asyncio.Future[bytes] = self._loop.create_future()
        member.pending_sync = synced
        if who.member_id == self.leader:
            try:
                self._reserve_assignments(assignments)
            except ApiError as error:
                member.fail_sync(ErrorCode.UNKNOWN_SERVER_ERROR, str(error))
            else:
                self._assign(assignments)
        return await synced

    def _reserve_assignments(self, assignments: Mapping[str, bytes]) -> None:
        """Reserve memory for all of them, or none.

        Raises:
            ApiError: there is not enough.
        """
        sizes = {one: len(assignments.get(one, b"")) for one in self.members}
        self._memory.resize(0, sum(sizes.values()))
        for member_id, member in self.members.items():
            member.held_bytes += sizes[member_id]

    def _assign(self, assignments: Mapping[str, bytes]) -> None:
        self.state = "Stable"
        for member_id, member in self.members.items():
            member.assignment = assignments.get(member_id, b"")
            if member.pending_sync is not None:
                self.touch(member)
            member.complete_sync()

    def _await_syncs(self, members: set[str]) -> None:
        """Start the time in which members must sync."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        self._unsynced = members
        if members:
            self._sync_timer = self._loop.call_later(
                self._rebalance_timeout_ms() / 1000, self._evict_unsynced
            )

    def _evict_unsynced(self) -> None:
        late = [self.members[one] for one in self._unsynced if one in self.members]
        for member in late:
            self._evict(member)
        if late:
            _log.info("%d members of group %s did not sync in time", len(late), self.name)
            self._rebalance_after_leave()

    # -- leaving ------------------------------------------------------------------------------

    def leave(self, who: Identity) -> None:
        """Remove a member; a static one may be named without its id.

        Raises:
            ApiError: there is no such member.
        """
        member_id, instance_id = who
        if member_id in self._pending_ids:
            self._drop_pending_id(member_id)
            return
        if instance_id is not None and not member_id:
            who = Identity(self._static.get(instance_id, ""), instance_id)
        self._remove(self.member(who))

    def _remove(self, member: Member) -> None:
        self._evict(member)
        self._rebalance_after_leave()

    def _evict(self, member: Member) -> None:
        """Remove a member; the caller rebalances the group."""
        if member.expiry is not None:
            member.expiry.cancel()
        for fail in (member.fail_join, member.fail_sync):
            fail(ErrorCode.UNKNOWN_MEMBER_ID, "it is no longer in the group; join again")
        self.members.pop(member.who.member_id, None)
        self._reserve_memory(member, 0)
        if member.who.instance_id is not None:
            self._static.pop(member.who.instance_id, None)

    def _rebalance_after_leave(self) -> None:
        """Rebalance after members have left."""
        if self.state in ("Stable", "CompletingRebalance"):
            self._prepare_rebalance()
        elif self.state == "PreparingRebalance":
            self._try_complete_join()

    def close(self) -> None:
        """Cancel every timer, and respond to waiting members: the broker ends."""
        for timer in (self._join_timer, self._sync_timer, *self._pending_ids.values()):
            if timer is not None:
                timer.cancel()
        for member in list(self.members.values()):
            if member.expiry is not None:
                member.expiry.cancel()
            for fail in (member.fail_join, member.fail_sync):
                fail(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the broker ends")


def _pending_id_bytes(member_id: str) -> int:
    return MEMBER_BYTES + len(member_id)
