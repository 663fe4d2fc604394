"""The members of a group of consumers as plain values: what they say, and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millstream.broker.codes import Code, Refused
from millstream.broker.memory import MEMBER_BYTES

Protocols = Mapping[str, bytes]  # each with what the member says in it, the preferred one first


class Identity(NamedTuple):
    """Who says something to a group; ``instance_id`` is a static member's own name."""

    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Joining:
    """What a member says when it joins.

    ``id_first``: it can be told its id, and come again with it. ``skips_assignment``: as a leader, it
    can be told that there is nothing to assign.
    """

    who: Identity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    id_first: bool = False
    skips_assignment: bool = False

    @property
    def bytes_said(self) -> int:
        """How much is kept of it while it is in the group."""
        texts = (*self.who, self.client_id, self.protocol_type, *self.protocols)
        said = sum(len(text) for text in texts if text) + sum(map(len, self.protocols.values()))
        return MEMBER_BYTES + said


@dataclass(frozen=True, slots=True)
class Joined:
    """What a member is told of the generation that it is in; the leader is told of the others."""

    generation: int
    protocol_type: str
    protocol_name: str
    leader: str
    member_id: str
    members: Sequence[tuple[Identity, bytes]] = ()
    skip_assignment: bool = False


class MemberIdRequired(Refused):
    """The member is to come again with this id: so that no member is made for an answer that is lost."""

    def __init__(self, member_id: str) -> None:
        super().__init__(Code.MEMBER_ID_REQUIRED, "join again with this id")
        self.member_id = member_id


@dataclass(slots=True, eq=False)
class Member:
    """One member as its group knows it; a future stands for an answer that it waits for."""

    who: Identity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    joining: asyncio.Future[Joined] | None = None
    syncing: asyncio.Future[bytes] | None = None
    expiry: asyncio.TimerHandle | None = None
    held_bytes: int = 0

    @classmethod
    def of(cls, joining: Joining, who: Identity) -> Member:
        """Return a new member."""
        return cls(
            who,
            joining.client_id,
            joining.client_host,
            joining.session_timeout_ms,
            joining.rebalance_timeout_ms,
            joining.protocols,
        )

    def update(self, joining: Joining) -> None:
        """Note what it says now."""
        self.client_id, self.client_host = joining.client_id, joining.client_host
        self.session_timeout_ms = joining.session_timeout_ms
        self.rebalance_timeout_ms = joining.rebalance_timeout_ms
        self.protocols = joining.protocols

    @property
    def waits(self) -> bool:
        """Whether it waits for an answer, and so cannot say that it is alive."""
        return self.joining is not None or self.syncing is not None

    def answer_join(self, joined: Joined) -> None:
        """Answer its join, if it waits."""
        future, self.joining = self.joining, None
        if future is not None and not future.done():
            future.set_result(joined)

    def answer_sync(self) -> None:
        """Answer its sync with its assignment, if it waits."""
        future, self.syncing = self.syncing, None
        if future is not None and not future.done():
            future.set_result(self.assignment)

    def refuse_join(self, code: Code, message: str) -> None:
        """Answer its join with an error, if it waits."""
        future, self.joining = self.joining, None
        _refuse(future, code, message)

    def refuse_sync(self, code: Code, message: str) -> None:
        """Answer its sync with an error, if it waits."""
        future, self.syncing = self.syncing, None
        _refuse(future, code, message)


def _refuse(future: asyncio.Future[Any] | None, code: Code, message: str) -> None:
    if future is not None and not future.done():
        future.set_exception(Refused(code, message))
        future.exception()  # its client may have gone, and then nobody looks at it
