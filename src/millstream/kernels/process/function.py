"""The class that the user derives from, whose methods are called for each row and timer; and what such classes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any, ClassVar

from millstream.kernels.process.context import ProcessContext
from millstream.kernels.process.declarations import StateDeclaration

VERSION_MAX = 2**31 - 1


class KeyedFunction(ABC):
    """What all of the user's classes with state of keys have: a version, and a way from older ones.

    Attributes:
        version: The version of the state. Raise it when state is declared or meant differently, and
            give :meth:`migrate`; then a deployment carries state over instead of reading the log again.
    """

    version: ClassVar[int] = 1

    def migrate(self, version: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return a key's state as this version declares it, given what an older version had.

        Called once for each key that has state, in the first batch after a deployment. ``state`` has a value, a
        list or a dict for each state that was declared; what is left out of the result begins anew.
        """
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def defines(cls, method: str) -> bool:
        """Return whether the user's class has a method of its own."""


class ProcessFunction(KeyedFunction):
    """Your code for the rows and timers of a key, with state: see :meth:`Stream.process`.

    State is declared by attributes of the class (:func:`value_state`, :func:`list_state`, :func:`map_state`). The
    methods are called with a context that has the state of the key that the call is about. They
    must depend on nothing but their arguments and the context: a batch may be repeated, and then they are called again.

    Attributes:
        retracts: Whether it takes back what it has emitted (:meth:`ProcessContext.retract`), though no row that it is given
            is taken back. Then a key remembers each row that it has emitted and that holds.

    Example::

        class Visits(ms.ProcessFunction):
            count = ms.value_state(pl.Int64, default=0)

            def on_row(self, context, row):
                context.state.count += 1
                context.set_timer(context.time + timedelta(minutes=30))

            def on_timer(self, context, time):
                context.emit({"user": context.key["user"], "visits": context.state.count})
                context.state.count = 0
    """

    retracts: ClassVar[bool] = False

    @abstractmethod
    def on_row(self, context: ProcessContext, row: dict[str, Any]) -> None:
        """Take a row of the context's key. Called once for each row, in the order that was declared."""

    def on_retraction(self, context: ProcessContext, row: dict[str, Any]) -> None:
        """Take a row that no longer holds, as it was given to :meth:`on_row`. Called once for each row that is taken back.

        A class with this method may come after rows that are replaced or taken back, and may there take back what it
        has emitted: :meth:`ProcessContext.retract`. A row that ``on_row`` failed on is not taken back. After events it is never
        called.
        """
        raise NotImplementedError

    def on_timer(self, context: ProcessContext, time: datetime) -> None:
        """Act at an event time for which :meth:`ProcessContext.set_timer` was called. Called once."""
        raise NotImplementedError

    def on_processing_timer(self, context: ProcessContext, time: datetime) -> None:
        """Act when the clock has reached the time of a processing-time timer. Called once.

        When that is depends on the clock, and so on batches.
        """
        raise NotImplementedError

    @classmethod
    def defines(cls, method: str) -> bool:
        """Return whether the user's class has a method of its own."""
        return getattr(cls, method) is not getattr(ProcessFunction, method)


def states_of(function: KeyedFunction) -> tuple[tuple[str, StateDeclaration], ...]:
    """Return what state a function declares, in the order of names."""
    cls = type(function)
    found = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("__")}
    return tuple(
        (name, one) for name, one in sorted(found.items()) if isinstance(one, StateDeclaration)
    )
