"""One group of consumers: its members, its generation, and the table by which it changes.

========================  =================================================================
state                     meaning
========================  =================================================================
Empty                     nobody is in it
PreparingRebalance        members are to join anew; it waits for them, up to the largest
                          rebalance timeout among them
CompletingRebalance       a generation has begun; it waits for its leader's assignment
Stable                    every member has its assignment
========================  =================================================================

===========================================  ====================  =======================
what happens                                 in                    then
===========================================  ====================  =======================
a member comes, or says something else       any                   PreparingRebalance
a member goes, or is silent for too long     Completing, Stable    PreparingRebalance
all members have joined, or the time is up   Preparing             CompletingRebalance, or
                                                                   Empty without members
the leader brings the assignment             Completing            Stable
a member does not ask for it in time         Completing, Stable    it is put out
===========================================  ====================  =======================

The assignment is the clients' business: the leader, one of them, makes it, and it passes through as
bytes. Everything here runs in the event loop, by its clock.

Source: Kafka ``GroupCoordinator``, ``GroupMetadata``; KIP-345 (static members), KIP-394 (a member
is told its id first), KIP-814 (a static leader skips the assignment).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from millstream.broker.codes import Code, Refused
from millstream.broker.members import Identity, Joined, Joining, Member, MemberIdRequired
from millstream.broker.memory import MEMBER_BYTES, MemberMemory

State = Literal["Empty", "PreparingRebalance", "CompletingRebalance", "Stable"]
_log = logging.getLogger(__name__)


class Group:
    """One group. All methods are called in the event loop.

    Args:
        rebalance_delay_ms: How long an empty group waits for more members after each that comes.
        memory: Where what members say has room.
        on_empty: Called when nobody is left in it.
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
        self.state: State = "Empty"
        self.generation = 0
        self.protocol_type = ""
        self.protocol_name = ""
        self.leader = ""
        self.members: dict[str, Member] = {}  # by id, in the order in which they came
        self._static: dict[str, str] = {}  # ids of static members, by their names
        self._told: dict[str, asyncio.TimerHandle] = {}  # ids of those who are to come again
        self._delay_ms = rebalance_delay_ms
        self._delayed = False
        self._newcomers = False  # since the delay began
        self._on_empty = on_empty
        self._loop = asyncio.get_running_loop()
        self._join_timer: asyncio.TimerHandle | None = None
        self._sync_timer: asyncio.TimerHandle | None = None
        self._unsynced: set[str] = set()

    # -- who may speak ------------------------------------------------------------------------

    def member(self, who: Identity) -> Member:
        """Return a member.

        Raises:
            Refused: it is none, or another one has taken its name.
        """
        if who.instance_id is not None:
            known = self._static.get(who.instance_id)
            if known is None:
                raise Refused(Code.UNKNOWN_MEMBER_ID, f"no member is called {who.instance_id!r}")
            if known != who.member_id:
                raise Refused(
                    Code.FENCED_INSTANCE_ID, f"another member is called {who.instance_id!r} now"
                )
        found = self.members.get(who.member_id)
        if found is None:
            raise Refused(Code.UNKNOWN_MEMBER_ID, f"{who.member_id!r} is not in the group")
        return found

    def check_generation(self, generation: int) -> None:
        """Refuse what is said about another generation than the present one."""
        if generation != self.generation:
            raise Refused(
                Code.ILLEGAL_GENERATION,
                f"generation {generation} is over; now is {self.generation}",
            )

    def heartbeat(self, who: Identity, generation: int) -> None:
        """Note that a member is alive.

        Raises:
            Refused: it is none, or is to join anew.
        """
        member = self.member(who)
        self.check_generation(generation)
        self.touch(member)
        if self.state == "PreparingRebalance":
            raise Refused(Code.REBALANCE_IN_PROGRESS, "members join anew; join with them")

    def touch(self, member: Member) -> None:
        """Give a member its whole session timeout again."""
        if member.expiry is not None:
            member.expiry.cancel()
        member.expiry = self._loop.call_later(
            member.session_timeout_ms / 1000, self._expired, member
        )

    def _expired(self, member: Member) -> None:
        if member.waits:
            self.touch(member)
            return
        _log.info("member %s of group %s was silent for too long", member.who, self.name)
        self._remove(member)

    # -- joining ------------------------------------------------------------------------------

    async def join(self, joining: Joining) -> Joined:
        """Return the generation that a member is in, once it has begun.

        Raises:
            Refused: the member or its protocols do not fit the group.
        """
        try:
            return await self._join(joining)
        finally:
            if self.state == "Empty" and not self._told:  # it was made for one who is refused
                self._on_empty(self)

    async def _join(self, joining: Joining) -> Joined:
        member_id, instance_id = joining.who
        if not member_id and instance_id in self._static:
            self._check_protocols(joining, self._static[instance_id or ""])
            return await self._replace(joining, self.members[self._static[instance_id or ""]])
        self._check_protocols(joining, member_id)
        if not member_id:
            return await self._welcome(joining)
        if member_id in self._told:
            self._take_told(member_id)
            return await self._admit(joining, member_id)
        return await self._join_again(joining, self.member(joining.who))

    def _check_protocols(self, joining: Joining, member_id: str) -> None:
        if not joining.protocol_type or not joining.protocols:
            raise Refused(Code.INCONSISTENT_GROUP_PROTOCOL, "no protocol was named")
        others = [one for key, one in self.members.items() if key != member_id]
        if not others:
            return
        common = set(joining.protocols).intersection(*(one.protocols for one in others))
        if joining.protocol_type != self.protocol_type or not common:
            raise Refused(
                Code.INCONSISTENT_GROUP_PROTOCOL,
                f"the group is of type {self.protocol_type!r}, and has no protocol in common with it",
            )

    async def _welcome(self, joining: Joining) -> Joined:
        """Give a newcomer its id; one that can comes again with it."""
        self._memory.check_one_more(len(self.members) + len(self._told))
        prefix = joining.who.instance_id or joining.client_id
        member_id = f"{prefix}-{uuid.uuid4()}"
        if joining.who.instance_id is None and joining.id_first:
            self._memory.resize(0, _told_bytes(member_id))
            self._told[member_id] = self._loop.call_later(
                joining.session_timeout_ms / 1000, self._forget_told, member_id
            )
            raise MemberIdRequired(member_id)
        return await self._admit(joining, member_id)

    def _take_told(self, member_id: str) -> None:
        self._told.pop(member_id).cancel()
        self._memory.resize(_told_bytes(member_id), 0)

    def _forget_told(self, member_id: str) -> None:
        self._take_told(member_id)
        if self.state == "PreparingRebalance":
            self._try_complete_join()
        elif self.state == "Empty":
            self._become_empty()

    async def _admit(self, joining: Joining, member_id: str) -> Joined:
        member = Member.of(joining, Identity(member_id, joining.who.instance_id))
        self._hold(member, joining.bytes_said)
        self.members[member_id] = member
        if member.who.instance_id is not None:
            self._static[member.who.instance_id] = member_id
        self.protocol_type = joining.protocol_type
        self._newcomers = True
        return await self._await_join(member)

    async def _join_again(self, joining: Joining, member: Member) -> Joined:
        """Answer a member that is in already; it makes the group rebalance only if it must."""
        same = dict(member.protocols) == dict(joining.protocols)
        follows = self.state == "Stable" and member.who.member_id != self.leader
        if same and (follows or self.state == "CompletingRebalance"):
            self.touch(member)
            return self._joined(member)
        self._hold(member, joining.bytes_said + len(member.assignment))
        member.update(joining)
        return await self._await_join(member)

    async def _replace(self, joining: Joining, member: Member) -> Joined:
        """Let a static member come back under a new id; whoever has the old one is fenced."""
        old_id, instance_id = member.who.member_id, member.who.instance_id
        self._hold(member, joining.bytes_said + len(member.assignment))
        for refuse in (member.refuse_join, member.refuse_sync):
            refuse(Code.FENCED_INSTANCE_ID, f"another member is called {instance_id!r} now")
        member.who = Identity(f"{instance_id}-{uuid.uuid4()}", instance_id)
        member.update(joining)
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
        if joining.skips_assignment:
            return self._joined(member, skip_assignment=True)
        return self._joined(member, leader=old_id)  # told that it leads, it would assign anew

    def _hold(self, member: Member, size: int) -> None:
        """Have room for what is kept of a member.

        Raises:
            Refused: there is none.
        """
        self._memory.resize(member.held_bytes, size)
        member.held_bytes = size

    async def _await_join(self, member: Member) -> Joined:
        """Have the group rebalance, and return what comes of it for this member."""
        member.refuse_join(Code.UNKNOWN_MEMBER_ID, "it joined again meanwhile")
        joined: asyncio.Future[Joined] = self._loop.create_future()
        member.joining = joined
        self.touch(member)
        if self.state == "PreparingRebalance":
            self._try_complete_join()
        else:
            self._prepare()
        return await joined

    # -- rebalancing --------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Gather the members for the next generation."""
        begins = self.state == "Empty"
        for member in self.members.values():
            if member.syncing is not None:
                self.touch(member)  # it could say nothing while it waited
            member.refuse_sync(Code.REBALANCE_IN_PROGRESS, "members join anew; join with them")
        self._await_syncs(set())
        self.state = "PreparingRebalance"
        if begins and self._delay_ms:
            self._delayed, self._newcomers = True, False
            self._await_joins(self._delay_ms, self._after_delay)
        else:
            self._await_joins(self._patience_ms(), self._complete_join)
            self._try_complete_join()

    def _after_delay(self) -> None:
        """Wait on while members keep coming."""
        if self._newcomers:
            self._newcomers = False
            self._await_joins(self._delay_ms, self._after_delay)
            return
        self._delayed = False
        self._await_joins(self._patience_ms(), self._complete_join)
        self._try_complete_join()

    def _patience_ms(self) -> int:
        return max((one.rebalance_timeout_ms for one in self.members.values()), default=0)

    def _await_joins(self, timeout_ms: int, then: Callable[[], None]) -> None:
        if self._join_timer is not None:
            self._join_timer.cancel()
        self._join_timer = self._loop.call_later(timeout_ms / 1000, then)

    def _try_complete_join(self) -> None:
        """Go on if nobody is missing."""
        missing = any(one.joining is None for one in self.members.values())
        if not self._delayed and not missing and not self._told:
            self._complete_join()

    def _complete_join(self) -> None:
        """Begin the next generation with those who have come; static members need not."""
        for member in list(self.members.values()):
            if member.joining is None and member.who.instance_id is None:
                self._put_out(member)
        came = [one.who.member_id for one in self.members.values() if one.joining is not None]
        if self.members and not came:  # static members have time until their sessions end
            self._await_joins(self._patience_ms(), self._complete_join)
            return
        if self._join_timer is not None:
            self._join_timer.cancel()
        self.generation += 1
        if not self.members:
            self._become_empty()
            return
        if self.leader not in came:
            self.leader = came[0]
        self.protocol_name = self._chosen_protocol()
        self.state = "CompletingRebalance"
        self._await_syncs(set(came))
        for member in self.members.values():
            self._hold(member, member.held_bytes - len(member.assignment))
            member.assignment = b""
            self.touch(member)
            member.answer_join(self._joined(member))

    def _become_empty(self) -> None:
        self.state, self.leader, self.protocol_name = "Empty", "", ""
        self._await_syncs(set())
        if not self._told:
            self._on_empty(self)

    def _chosen_protocol(self) -> str:
        """Return the protocol that most members prefer, of those that all have."""
        protocols = [one.protocols for one in self.members.values()]
        common = set(protocols[0]).intersection(*protocols[1:])
        votes = Counter(next(name for name in one if name in common) for one in protocols)
        return votes.most_common(1)[0][0]

    def _joined(
        self, member: Member, *, leader: str | None = None, skip_assignment: bool = False
    ) -> Joined:
        leads = leader is None and member.who.member_id == self.leader
        others = [
            (one.who, one.protocols.get(self.protocol_name, b"")) for one in self.members.values()
        ]
        return Joined(
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
        """Return what a member is assigned, once the leader has said so.

        Args:
            assignments: By member id; only the leader brings some.
            protocol: Type and name, if the member says which it goes by.

        Raises:
            Refused: it is no member, or is to join anew.
        """
        member = self.member(who)
        self.check_generation(generation)
        for said, real in zip(protocol, (self.protocol_type, self.protocol_name), strict=True):
            if said is not None and said != real:
                raise Refused(Code.INCONSISTENT_GROUP_PROTOCOL, f"{said!r} is not {real!r}")
        self.touch(member)
        if self.state == "PreparingRebalance":
            raise Refused(Code.REBALANCE_IN_PROGRESS, "members join anew; join with them")
        self._unsynced.discard(who.member_id)
        if self.state == "Stable":
            return member.assignment
        member.refuse_sync(Code.UNKNOWN_MEMBER_ID, "it asked again meanwhile")
        synced: asyncio.Future[bytes] = self._loop.create_future()
        member.syncing = synced
        if who.member_id == self.leader:
            try:
                self._hold_assignments(assignments)
            except Refused as error:
                member.refuse_sync(Code.UNKNOWN_SERVER_ERROR, str(error))
            else:
                self._assign(assignments)
        return await synced

    def _hold_assignments(self, assignments: Mapping[str, bytes]) -> None:
        """Have room for all of them, or for none.

        Raises:
            Refused: there is none.
        """
        sizes = {one: len(assignments.get(one, b"")) for one in self.members}
        self._memory.resize(0, sum(sizes.values()))
        for member_id, member in self.members.items():
            member.held_bytes += sizes[member_id]

    def _assign(self, assignments: Mapping[str, bytes]) -> None:
        self.state = "Stable"
        for member_id, member in self.members.items():
            member.assignment = assignments.get(member_id, b"")
            if member.syncing is not None:
                self.touch(member)
            member.answer_sync()

    def _await_syncs(self, members: set[str]) -> None:
        """Give members time to ask for their assignments."""
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        self._unsynced = members
        if members:
            self._sync_timer = self._loop.call_later(
                self._patience_ms() / 1000, self._put_out_unsynced
            )

    def _put_out_unsynced(self) -> None:
        late = [self.members[one] for one in self._unsynced if one in self.members]
        for member in late:
            self._put_out(member)
        if late:
            _log.info("%d members of group %s did not sync in time", len(late), self.name)
            self._after_loss()

    # -- leaving ------------------------------------------------------------------------------

    def leave(self, who: Identity) -> None:
        """Let a member go; a static one may be named without its id.

        Raises:
            Refused: there is no such member.
        """
        member_id, instance_id = who
        if member_id in self._told:
            self._forget_told(member_id)
            return
        if instance_id is not None and not member_id:
            who = Identity(self._static.get(instance_id, ""), instance_id)
        self._remove(self.member(who))

    def _remove(self, member: Member) -> None:
        self._put_out(member)
        self._after_loss()

    def _put_out(self, member: Member) -> None:
        """Forget a member; what becomes of the group is the caller's business."""
        if member.expiry is not None:
            member.expiry.cancel()
        for refuse in (member.refuse_join, member.refuse_sync):
            refuse(Code.UNKNOWN_MEMBER_ID, "it is no longer in the group; join anew")
        self.members.pop(member.who.member_id, None)
        self._hold(member, 0)
        if member.who.instance_id is not None:
            self._static.pop(member.who.instance_id, None)

    def _after_loss(self) -> None:
        """Rebalance what a member that has gone leaves."""
        if self.state in ("Stable", "CompletingRebalance"):
            self._prepare()
        elif self.state == "PreparingRebalance":
            self._try_complete_join()

    def close(self) -> None:
        """Cancel every timer, and answer those who wait: the broker ends."""
        for timer in (self._join_timer, self._sync_timer, *self._told.values()):
            if timer is not None:
                timer.cancel()
        for member in list(self.members.values()):
            if member.expiry is not None:
                member.expiry.cancel()
            for refuse in (member.refuse_join, member.refuse_sync):
                refuse(Code.COORDINATOR_NOT_AVAILABLE, "the broker ends")


def _told_bytes(member_id: str) -> int:
    return MEMBER_BYTES + len(member_id)
