"""Share sessions: what a member fetches, remembered between its requests, and the session epoch.

Each request of a session has a share session epoch: 0 opens a session, the next ones count from 1, and -1
closes it. A request with another session epoch than the next one is rejected, as a request before it was lost or
it is a duplicate. A session belongs to its connection: when the connection ends, the member counts as
failed, and the records that it has acquired are available again.

Source: KIP-932; Kafka ``ShareSessionCache``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.broker.protocol.error_codes import ApiError, ErrorCode

INITIAL_EPOCH, FINAL_EPOCH = 0, -1
_SESSION_EPOCH_MAX = (1 << 31) - 1
SESSIONS_MAX = 2000


class TopicIdPartition(NamedTuple):
    """A partition, with its topic given by id."""

    topic_id: bytes
    partition: int


@dataclass(eq=False, slots=True)
class ShareSession:
    """One share session. ``partitions`` are fetched in rotating order."""

    group: str
    member: str
    connection: int
    session_epoch: int = 1
    partitions: dict[TopicIdPartition, None] = field(default_factory=dict)
    closed: bool = False

    def rotate(self) -> None:
        """Move the first partition to the end, so that the next fetch begins with another one."""
        if self.partitions:
            first = next(iter(self.partitions))
            del self.partitions[first]
            self.partitions[first] = None


class ShareSessionCache:
    """Every share session. Lives in the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def begin(self, group: str, member: str, connection: int) -> ShareSession:
        """Open a session; one of the same member ends, but the member keeps what it has acquired.

        Raises:
            ApiError: there are too many sessions.
        """
        before = self._sessions.pop((group, member), None)
        if before is not None:
            before.closed = True
        elif len(self._sessions) >= SESSIONS_MAX:
            raise ApiError(
                ErrorCode.SHARE_SESSION_LIMIT_REACHED,
                f"there are {SESSIONS_MAX} sessions, the limit",
            )
        session = ShareSession(group, member, connection)
        self._sessions[group, member] = session
        return session

    def next_request(self, group: str, member: str, session_epoch: int) -> ShareSession:
        """Return the session of a request, and advance its session epoch.

        Raises:
            ApiError: there is no session, or it expects another session epoch.
        """
        session = self._sessions.get((group, member))
        if session is None:
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, "there is no such session; open one")
        if session_epoch == FINAL_EPOCH:
            return session
        if session_epoch != session.session_epoch:
            raise ApiError(
                ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                f"share session epoch {session_epoch}; expected {session.session_epoch}",
            )
        session.session_epoch = 1 if session_epoch == _SESSION_EPOCH_MAX else session_epoch + 1
        return session

    def end(self, group: str, member: str) -> None:
        """Close a session, if there is one."""
        session = self._sessions.pop((group, member), None)
        if session is not None:
            session.closed = True

    def of_connection(self, connection: int) -> list[ShareSession]:
        """Return the sessions of a connection."""
        return [one for one in self._sessions.values() if one.connection == connection]

    def __len__(self) -> int:
        return len(self._sessions)
