"""Change events: the documents of a change stream, read.

An event that is not known stops the capture; none is skipped, except those listed in ``_WITHOUT_CHANGES``, which change
no document. Source: MongoDB's manual, "Change Events" and "Change Streams".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import bson

from millstream.errors import ConfigError, CorruptionError

EventKind: TypeAlias = Literal[
    "c", "u", "d", "create", "drop", "rename", "drop_database", "invalidate", "none"
]
Document: TypeAlias = dict[str, Any]

_KINDS: dict[str, EventKind] = {
    "insert": "c",
    "update": "u",
    "replace": "u",
    "delete": "d",
    "create": "create",
    "drop": "drop",
    "rename": "rename",
    "dropDatabase": "drop_database",
    "invalidate": "invalidate",
}
_WITHOUT_CHANGES = frozenset(
    (
        "createIndexes", "dropIndexes", "modify", "shardCollection", "reshardCollection", "refineCollectionShardKey",
    )
)  # fmt: skip
_TIMESTAMP_TAG = (
    0x82  # what a resume token begins with: then seconds and a number, of four bytes each
)
_TOKEN_HEAD_BYTES = 9


class ClusterTime(NamedTuple):
    """A place in the order of a deployment's changes: seconds, and a number within the second."""

    seconds: int
    number: int

    @classmethod
    def of(cls, timestamp: Any) -> ClusterTime:
        """Return that of BSON's Timestamp."""
        return cls(timestamp.time, timestamp.inc)

    def __str__(self) -> str:
        return f"{self.seconds}.{self.number}"


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """A change of a document, or of a collection; ``token`` is what reading goes on after.

    ``before`` and ``after`` are None where the server has them not. ``renamed_to`` has a database and a collection.
    """

    kind: EventKind
    time: ClusterTime
    token: Document
    timestamp_ms: int
    database: str = ""
    collection: str = ""
    key: Document | None = None
    before: Document | None = None
    after: Document | None = None
    uuid: str = ""
    renamed_to: tuple[str, str] = ("", "")
    transaction: bytes = b""
    """What events of one transaction have alike; empty of those that are in none."""

    def is_with(self, other: ChangeEvent) -> bool:
        """Say whether two events belong together: they are of one time, or of one transaction."""
        return self.time == other.time or (
            bool(self.transaction) and self.transaction == other.transaction
        )


def read_event(document: Mapping[str, Any]) -> ChangeEvent:
    """Return an event's content.

    Raises:
        ConfigError: its type is not known.
        CorruptionError: it lacks what each event has.
    """
    name = document.get("operationType")
    kind = "none" if name in _WITHOUT_CHANGES else _KINDS.get(str(name))
    if kind is None:
        raise ConfigError(
            f"the change stream has an event of type {name!r}, which capture does not know, and skips none. Capture with "
            "a later version of Millstream."
        )
    try:
        time = ClusterTime.of(document["clusterTime"])
        space, to = document.get("ns") or {}, document.get("to") or {}
        wall = document.get("wallTime")
        return ChangeEvent(
            kind,
            time,
            dict(document["_id"]),
            time.seconds * 1000 if wall is None else int(wall),
            space.get("db", ""),
            space.get("coll", ""),
            document.get("documentKey"),
            document.get("fullDocumentBeforeChange"),
            document.get("fullDocument"),
            uuid_text(document.get("collectionUUID")),
            (to.get("db", ""), to.get("coll", "")),
            _transaction(document),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"an event of type {name!r} of the change stream lacks what each has ({error!r}). Start the capture again; "
            "if it stays so, report it."
        ) from error


def _transaction(document: Mapping[str, Any]) -> bytes:
    if "txnNumber" not in document:
        return b""
    return bson.encode({"lsid": document.get("lsid"), "txnNumber": document["txnNumber"]})


def uuid_text(found: Any) -> str:
    """Return the identity of a collection as hexadecimal digits; nothing where there is none."""
    return "" if found is None else bytes(getattr(found, "bytes", found)).hex()


def merged(fragments: list[Document]) -> Document:
    """Return an event that was too large for one document: the fields of its fragments, and the last one's token."""
    whole: Document = {}
    for fragment in fragments:
        whole.update(fragment)
    whole.pop("splitEvent", None)
    return whole


def token_time(token: Mapping[str, Any]) -> ClusterTime | None:
    """Return the time up to which reading was when a token was given; None of a token of another form.

    A token is a key of the server's sort format, in hexadecimal digits, of which the first field is the time. Source:
    MongoDB, ``resume_token.h``, and ``KeyString``'s types.
    """
    try:
        head = bytes.fromhex(token["_data"][: 2 * _TOKEN_HEAD_BYTES])
    except (KeyError, TypeError, ValueError):
        return None
    if len(head) != _TOKEN_HEAD_BYTES or head[0] != _TIMESTAMP_TAG:
        return None
    return ClusterTime(int.from_bytes(head[1:5], "big"), int.from_bytes(head[5:], "big"))
