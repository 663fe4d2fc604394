"""Whether a copy of a state can stand for it: it holds the same, and nothing that both could change in place.

A user's class may say how it is copied and compared. A copy may so lack fields, share what it holds, or be the original
itself, and equal it all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, MemberDescriptorType
from typing import Any

from millstream.sourcing.decider import is_frozen

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_CONTAINERS = frozenset({dict, list, tuple, set})  # as such, they have no fields
_UNSET = None  # of a slot without a value; a decider that tells them apart reads neither


def are_twins(one: Any, other: Any) -> bool:
    """Return whether two objects hold the same, in the same places, and share nothing that can be changed in place.

    False where it cannot be told, such as of arrays.
    """
    return _are_twins(one, other, {})


def _are_twins(one: Any, other: Any, seen: dict[int, Any]) -> bool:
    """``seen`` is, by the id of what ``one`` holds, its twin: what is there twice is twice the same there, too."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _PLAIN or (kind not in _CONTAINERS and is_frozen(one)):
        return bool(one is other or one == other)
    if isinstance(one, type) or (isinstance(one, FunctionType) and not one.__closure__):
        return one is other
    if id(one) in seen:
        return seen[id(one)] is other
    seen[id(one)] = other
    parts, others = _parts(one), _parts(other)
    return (
        (one is not other or kind is tuple)
        and parts is not None
        and others is not None
        and len(parts) == len(others)
        and all(_are_twins(mine, its, seen) for mine, its in zip(parts, others, strict=True))
    )


def _parts(value: Any) -> list[Any] | None:
    """Return what an object holds, in its order, with the names; None if that is not known."""
    parts = [] if type(value) in _CONTAINERS else [*_fields(value)]
    if isinstance(value, dict):
        parts += [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple | deque):
        parts += value
    elif isinstance(value, set):
        if not all(map(is_frozen, value)):
            return None  # which is whose twin is not known
        parts.append(frozenset(value))
    elif not parts and not hasattr(value, "__dict__"):
        return None
    return parts


def _fields(value: Any) -> Iterator[Any]:
    for name, field in getattr(value, "__dict__", {}).items():
        yield name
        yield field
    for kind in type(value).__mro__:
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    yield slot.__get__(value)
                except AttributeError:
                    yield _UNSET
