"""The layout of a JSON object: what stands before, between and after the values of its members.

A program writes its objects with the same members in the same order, so all but the values is the same in each.
Readers that guess this from one value and check it in the others need not parse them, as in Mison (Li, Katsipoulakis,
Chandramouli, Goldstein, Kossmann: Mison: A Fast JSON Parser for Data Analytics. PVLDB 10, no. 10, 2017, section 5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["text", "number", "truth"]

_SPACE = rb"[ \t\n\r]*"
_TEXT = rb'"[^"\\\x00-\x1f]*"'
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_MEMBER = re.compile(
    rb"(%(space)s(?P<key>%(text)s)%(space)s:%(space)s)"
    rb"(?:(?P<text>%(text)s)|(?P<number>%(number)s)|(?P<truth>true|false))"
    % {b"space": _SPACE, b"text": _TEXT, b"number": _NUMBER}
)
_COMMA = re.compile(_SPACE + rb",")
_END = re.compile(_SPACE + rb"\}")


@dataclass(frozen=True)
class JsonMember:
    """A member of the object. ``before`` is all from the end of the value before it to the start of its own.

    Quotes belong to what is around a value, not to the value.
    """

    key: str
    kind: Kind
    before: bytes


@dataclass(frozen=True)
class Layout:
    """The members of an object in their order, and what follows the last value."""

    members: tuple[JsonMember, ...]
    after: bytes

    @cached_property
    def quotes(self) -> int:
        """How many quotes each object has."""
        return self.after.count(b'"') + sum(m.before.count(b'"') for m in self.members)


def layout_of(value: bytes) -> Layout | None:
    """Give the layout of an object; None if it has members within members, lists, nulls, escapes or a key twice."""
    members: list[JsonMember] = []
    if not value.startswith(b"{"):
        return None
    at, start = 1, 0
    while found := _MEMBER.match(value, at):
        kind: Kind = next(k for k in ("text", "number", "truth") if found[k] is not None)
        quote = kind == "text"
        key = found["key"][1:-1].decode(errors="replace")
        members.append(JsonMember(key, kind, value[start : found.start(kind) + quote]))
        start = found.end() - quote
        comma = _COMMA.match(value, found.end())
        if comma is None:
            break
        at = comma.end()
    if not members or len({member.key for member in members}) < len(members):
        return None
    end = _END.match(value, found.end()) if found else None
    if end is None or end.end() != len(value):
        return None
    return Layout(tuple(members), value[start:])
