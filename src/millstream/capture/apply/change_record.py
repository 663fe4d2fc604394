"""Records of captured tables, read back from their JSON: see ``capture/envelope.py``, which writes them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from millstream.capture.envelope import to_json
from millstream.errors import CorruptionError


class AppliedChange(NamedTuple):
    """A change of a row, or of a table (``t``). ``key`` is JSON, the same bytes for the same key.

    ``unavailable`` are columns that keep the value they have: that of the row with the key ``carry_from``, if given.
    """

    collection: str
    op: str
    key: bytes | None
    after: dict[str, Any] | None
    unavailable: tuple[str, ...] = ()
    carry_from: bytes | None = None


class TableRecord(NamedTuple):
    """A record of a table's topic. A tombstone has neither transaction nor change."""

    offset: int
    key: bytes | None
    transaction: str | None
    order: int
    change: AppliedChange | None


def parse_record(topic: str, offset: int, key: bytes | None, value: bytes | None) -> TableRecord:
    """Return a record of a table's topic.

    Raises:
        CorruptionError: it is not one that capture writes.
    """
    if value is None:
        return TableRecord(offset, key, None, 0, None)
    try:
        found = json.loads(value)
        source, transaction = found["source"], found["transaction"]
        database = source["schema"] if "schema" in source else source["db"]
        carry = found.get("carry_from")
        change = AppliedChange(
            f"{database}.{source['table']}",
            found["op"],
            key,
            found["after"],
            tuple(found.get("unavailable", ())),
            None if carry is None else to_json(carry),
        )
        return TableRecord(offset, key, transaction["id"], transaction["total_order"], change)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"the record at offset {offset} of {topic!r} is none that capture writes ({type(error).__name__}: "
            f"{error}). Apply topics that `millstream capture` has written, and no other program."
        ) from error


def key_row(key: bytes) -> dict[str, Any]:
    """Return the columns of a record's key."""
    found: dict[str, Any] = json.loads(key)
    return found
