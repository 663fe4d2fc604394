"""Members of a consumer group, and their requests and responses, as plain values."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millstream.broker.memory import MEMBER_BYTES
from millstream.broker.protocol.error_codes import ApiError, ErrorCode

Protocols = Mapping[str, bytes]  # with the member's metadata for each, the preferred one first


class Identity(NamedTuple):
    """The sender of a request to a group; ``instance_id`` is a static member's own name."""

    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The request of a member that joins.

    ``member_id_required``: it first receives its member id, and joins again with it (KIP-394).
    ``can_skip_assignment``: as a leader, it understands that there is nothing to assign (KIP-814).
    """

    who: Identity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    member_id_required: bool = False
    can_skip_assignment: bool = False

    @property
    def metadata_bytes(self) -> int:
        """How much memory it holds while it is in the group."""
        texts = (*self.who, self.client_id, self.protocol_type, *self.protocols)
        size = sum(len(text) for text in texts if text) + sum(map(len, self.protocols.values()))
        return MEMBER_BYTES + size


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The response to a join: the generation and, for the leader, all members."""

    generation: int
    protocol_type: str
    protocol_name: str
    leader: str
    member_id: str
    members: Sequence[tuple[Identity, bytes]] = ()
    skip_assignment: bool = False


class MemberIdRequiredError(ApiError):
    """The member must join again with this id; so a lost response leaves no member behind."""

    def __init__(self, member_id: str) -> None:
        super().__init__(ErrorCode.MEMBER_ID_REQUIRED, "join again with this id")
        self.member_id = member_id


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group; a future is a response that it waits for."""

    who: Identity
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    pending_join: asyncio.Future[JoinResult] | None = None
    pending_sync: asyncio.Future[bytes] | None = None
    expiry: asyncio.TimerHandle | None = None
    held_bytes: int = 0

    @classmethod
    def of(cls, request: JoinRequest, who: Identity) -> Member:
        """Return a new member."""
        return cls(
            who,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.protocols,
        )

    def update(self, request: JoinRequest) -> None:
        """Apply the metadata of a new join request."""
        self.client_id, self.client_host = request.client_id, request.client_host
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.protocols = request.protocols

    @property
    def awaits_response(self) -> bool:
        """Whether it waits for a response, and so sends no heartbeat."""
        return self.pending_join is not None or self.pending_sync is not None

    def complete_join(self, joined: JoinResult) -> None:
        """Respond to its join, if it waits."""
        future, self.pending_join = self.pending_join, None
        if future is not None and not future.done():
            future.set_result(joined)

    def complete_sync(self) -> None:
        """Respond to its sync with its assignment, if it waits."""
        future, self.pending_sync = self.pending_sync, None
        if future is not None and not future.done():
            future.set_result(self.assignment)

    def fail_join(self, code: ErrorCode, message: str) -> None:
        """Respond to its join with an error, if it waits."""
        future, self.pending_join = self.pending_join, None
        _fail(future, code, message)

    def fail_sync(self, code: ErrorCode, message: str) -> None:
        """Respond to its sync with an error, if it waits."""
        future, self.pending_sync = self.pending_sync, None
        _fail(future, code, message)


def _fail(future: asyncio.Future[Any] | None, code: ErrorCode, message: str) -> None:
    if future is not None and not future.done():
        future.set_exception(ApiError(code, message))
        future.exception()  # marks it as read: its client may have disconnected
