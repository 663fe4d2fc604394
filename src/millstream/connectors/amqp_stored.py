"""StoredMessages: the digests of the messages of a queue that were stored last, as positions.

They are kept in slots, each a split of its own, which are used in turn: a batch writes the slots that it has changed, and
not all that are remembered.

A broker sends again what is out and not acknowledged. After a crash it may also send again what was acknowledged: RabbitMQ
3.10 writes acknowledgements of a classic queue later, up to 4,096 entries of its journal (``queue_index_max_journal_entries``).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from millstream.connectors.amqp_message import DIGEST_BYTES
from millstream.connectors.connector import Position

_SLOTS = 17  # one of them is being filled
_SLOT_DIGESTS = 1024
REMEMBERED = (_SLOTS - 1) * _SLOT_DIGESTS
"""How many of the last messages are known, at least."""


class StoredMessages:
    """What was stored, as far as it is remembered."""

    def __init__(self, queue: str, positions: Mapping[str, Position]) -> None:
        said = positions.get(queue) or {}
        self._queue = queue
        self._slot: int = said.get("slot", 0)
        self._repeated: int = said.get("repeated", 0)
        self._slots = [_unpacked(positions.get(self._split(slot))) for slot in range(_SLOTS)]
        self._known = {digest for slot in self._slots for digest in slot}
        self._changed: set[int] = set()

    def is_new(self, digest: bytes) -> bool:
        """Return whether a message is none of these, and remember it; one that comes again is counted."""
        if digest in self._known:
            self._repeated += 1
            return False
        if len(self._slots[self._slot]) >= _SLOT_DIGESTS:
            self._slot = (self._slot + 1) % _SLOTS
            self._known.difference_update(self._slots[self._slot])
            self._slots[self._slot] = []
        self._slots[self._slot].append(digest)
        self._known.add(digest)
        self._changed.add(self._slot)
        return True

    def positions(self) -> dict[str, Position]:
        """Return the positions that have changed since they were returned last."""
        changed = {self._split(slot): _packed(self._slots[slot]) for slot in self._changed}
        self._changed.clear()
        return {self._queue: {"slot": self._slot, "repeated": self._repeated}, **changed}

    def _split(self, slot: int) -> str:
        return f"{self._queue} {slot}"


def _packed(digests: list[bytes]) -> str:
    return base64.b64encode(b"".join(digests)).decode()


def _unpacked(text: str | None) -> list[bytes]:
    data = base64.b64decode(text or "")
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]
