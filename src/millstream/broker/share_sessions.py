"""Share sessions: what a member fetches, remembered from request to request, and the turn it is at.

Each request of a session carries its turn: 0 begins a session, and the next ones count from 1; -1 ends
it. A request that is not the next one is refused, as one before it was lost or comes twice. A session
lives on its connection: when that ends, the member is taken for dead, and what it has is available
again.

Source: KIP-932; Kafka ``ShareSessionCache``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.broker.codes import Code, Refused

FIRST_TURN, LAST_TURN = 0, -1
_TURN_MAX = (1 << 31) - 1
SESSIONS_MAX = 2000


class Place(NamedTuple):
    """A partition as requests name it."""

    topic_id: bytes
    partition: int


@dataclass(eq=False, slots=True)
class Session:
    """One share session. ``places`` are the partitions that it fetches, in turn."""

    group: str
    member: str
    connection: int
    turn: int = 1
    places: dict[Place, None] = field(default_factory=dict)
    closed: bool = False

    def rotate(self) -> None:
        """Let another partition be the first next time."""
        if self.places:
            first = next(iter(self.places))
            del self.places[first]
            self.places[first] = None


class Sessions:
    """Every share session. Lives in the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], Session] = {}

    def begin(self, group: str, member: str, connection: int) -> Session:
        """Begin a session; one of the same member ends, but what the member has stays its own.

        Raises:
            Refused: there are too many.
        """
        before = self._sessions.pop((group, member), None)
        if before is not None:
            before.closed = True
        elif len(self._sessions) >= SESSIONS_MAX:
            raise Refused(
                Code.SHARE_SESSION_LIMIT_REACHED, f"there are {SESSIONS_MAX} sessions, the limit"
            )
        session = Session(group, member, connection)
        self._sessions[group, member] = session
        return session

    def take(self, group: str, member: str, turn: int) -> Session:
        """Return the session that a request belongs to; it is at its next turn.

        Raises:
            Refused: there is none, or it is at another turn.
        """
        session = self._sessions.get((group, member))
        if session is None:
            raise Refused(Code.SHARE_SESSION_NOT_FOUND, "there is no such session; begin one")
        if turn == LAST_TURN:
            return session
        if turn != session.turn:
            raise Refused(
                Code.INVALID_SHARE_SESSION_EPOCH,
                f"turn {turn}, but the session is at {session.turn}",
            )
        session.turn = 1 if turn == _TURN_MAX else turn + 1
        return session

    def end(self, group: str, member: str) -> None:
        """End a session, if there is one."""
        session = self._sessions.pop((group, member), None)
        if session is not None:
            session.closed = True

    def of_connection(self, connection: int) -> list[Session]:
        """Return the sessions that live on a connection."""
        return [one for one in self._sessions.values() if one.connection == connection]

    def __len__(self) -> int:
        return len(self._sessions)
