"""Deciders: what an aggregate is, in three plain functions.

The state of an aggregate is a fold of its events: ``evolve`` from ``initial``. ``decide`` looks at a command
and the state and returns the events that follow, or refuses. None of the three does anything else: they
are called again whenever a state is folded, and when another writer was first.

Source: Chassaing, "Functional Event Sourcing Decider", 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, Protocol
from uuid import UUID

from millstream.errors import ConfigError

_FROZEN = (str, bytes, int, float, bool, type(None), Decimal, Enum, UUID)
_FROZEN_TIMES = (datetime, date, time, timedelta, frozenset)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


class DeciderLike(Protocol):
    """An object with the three functions; a class of your own has them as methods."""

    def initial(self) -> Any: ...

    def decide(self, command: Any, state: Any) -> Iterable[Any]: ...

    def evolve(self, state: Any, event: Any) -> Any: ...


@dataclass(frozen=True)
class Decider:
    """An aggregate as three functions. A class with methods of these names serves as well.

    Each is called any number of times, from any thread, and must neither change its arguments nor look at
    a clock, a file or a network: what it needs comes with the command.

    Args:
        initial: Returns the state of an aggregate that has no events.
        decide: Takes a command and the state; returns the events that follow, in their order. To refuse the
            command, raise :class:`millstream.CommandRejectedError`.
        evolve: Takes the state and an event; returns the next state.
        state: The type of the state, for aggregate snapshots: a dataclass, a pydantic model, or a type
            such as ``dict[str, int]``. Without it there are no snapshots.
    """

    initial: Callable[[], Any]
    decide: Callable[[Any, Any], Iterable[Any]]
    evolve: Callable[[Any, Any], Any]
    state: Any = None


def check_decider(decider: Any) -> DeciderLike:
    """Return the decider.

    Raises:
        ConfigError: one of the three functions is missing.
    """
    missing = [
        name
        for name in ("initial", "decide", "evolve")
        if not callable(getattr(decider, name, None))
    ]
    if missing or isinstance(decider, type):
        what = f"lacks {', '.join(missing)}" if missing else "is a class; give an instance of it"
        raise ConfigError(
            f"the decider {decider!r} {what}; give ms.Decider(initial=..., decide=..., evolve=...) or "
            "an object with these three methods"
        )
    found: DeciderLike = decider
    return found


def is_frozen(state: object) -> bool:
    """Return whether a state cannot be changed in place, as far as can be told cheaply."""
    kind: Any = type(state)
    if kind in _PLAIN:
        return True
    if isinstance(state, tuple):
        return all(map(is_frozen, state))
    if dataclasses.is_dataclass(state):
        names = _frozen_fields(kind)
        return names is not None and all(is_frozen(getattr(state, name)) for name in names)
    return isinstance(state, _FROZEN + _FROZEN_TIMES)


@cache
def _frozen_fields(kind: Any) -> Sequence[str] | None:
    """Return the names of the fields of a frozen dataclass; None if it is not frozen."""
    if not kind.__dataclass_params__.frozen:
        return None
    return [field.name for field in dataclasses.fields(kind)]
