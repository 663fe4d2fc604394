"""json_text: a value of a row as JSON, with the digits that the record has."""

from __future__ import annotations

import json
from typing import Any

from millstream.connectors.sinks.connector import WrittenNumber

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_text(value: Any) -> str:
    """Return a value as JSON, its numbers with all digits that the record has.

    Raises:
        RecursionError: its lists and objects are nested too deeply.
    """
    if isinstance(value, WrittenNumber):
        return value.text
    if isinstance(value, dict):
        members = (f"{_ENCODE(name)}:{json_text(member)}" for name, member in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(json_text, value))}]"
    return _ENCODE(value)
