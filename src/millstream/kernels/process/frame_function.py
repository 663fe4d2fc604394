"""The class that the user derives from whose methods are called for the rows of many keys at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import polars as pl

from millstream.kernels.process.function import KeyedFunction


class FrameContext:
    """What a :class:`FrameFunction` is given with each call: where output goes. It is only valid during the call."""

    __slots__ = ("_emit",)

    def __init__(self, emit: Callable[[object, str | None, int], None]) -> None:
        self._emit = emit

    def emit(self, rows: pl.DataFrame, *, to: str | None = None) -> None:
        """Emit rows: a frame with the columns that were declared, and ``__key``, the key that each row is about.

        A row has the event time of the last row of its key in the call, or of the timer. If the frame has the column
        ``__time``, as the rows that are given have it, that is its event time. ``to`` is the name of a side output.
        """
        self._emit(rows, to, 1)

    def retract(self, rows: pl.DataFrame, *, to: str | None = None) -> None:
        """Take back rows that were emitted for their keys, by giving them again: a frame as for :meth:`emit`.

        A function may do so after rows that may be taken back; after events, if its class has ``retracts = True``. Rows
        are taken back with the event times that they were emitted with. If one does not hold, that is an error of the call.
        """
        self._emit(rows, to, -1)


class FrameFunction(KeyedFunction):
    """Your code for the rows and timers of many keys at once, in polars, with state: see :meth:`Stream.process`.

    State is declared by attributes of the class, as that of a :class:`ProcessFunction`. A method is given frames, and
    returns the new state. How many rows and keys are in a frame depends on batches, so a method must
    treat each key by itself, and give for the rows of a key in one frame what it gives for them in several, one after the other.

    ``rows`` has the stream's columns, ``__key``, which numbers the keys of the call from 0, and ``__time``, the event
    time in microseconds since 1970. ``state`` has a row for each of these keys, in the order of ``__key``: the columns of
    the key, one for each state (a value, a list, or a list of a map's ``key`` and ``value``), and, if there is an
    ``on_timers``, ``__timers``, a list of the times of the key's timers. What is returned has ``__key``, a column for each
    state, and ``__timers``, in any order; other columns are ignored. Of a key that it has no row of, state and timers are forgotten.

    Attributes:
        retracts: Whether it takes back what it has emitted (:meth:`FrameContext.retract`), though no row that it is given
            is taken back. Then a key remembers each row that it has emitted and that holds.

    Example::

        class Totals(ms.FrameFunction):
            total = ms.value_state(pl.Int64, default=0)

            def on_rows(self, context, rows, state):
                costs = rows.group_by("__key").agg(pl.col("cost").sum())
                state = state.join(costs, on="__key").with_columns(pl.col("total") + pl.col("cost"))
                context.emit(state.select("__key", "ad", "total"))
                return state
    """

    retracts: ClassVar[bool] = False

    @abstractmethod
    def on_rows(
        self, context: FrameContext, rows: pl.DataFrame, state: pl.DataFrame
    ) -> pl.DataFrame:
        """Take rows, those of each key in the order that was declared; return the new state of their keys.

        A call that raises is made again with the first half of its rows, and then with the second: so the rows that fail
        alone are found, and become dead letters.
        """

    def on_retractions(
        self, context: FrameContext, rows: pl.DataFrame, state: pl.DataFrame
    ) -> pl.DataFrame:
        """Take rows that no longer hold, as they were given to :meth:`on_rows`; return the new state of their keys.

        A class with this method may come after rows that are replaced or taken back, and may there take back what it
        has emitted: :meth:`FrameContext.retract`. Those of a batch come before the rows that it adds. A row that ``on_rows``
        failed on is not taken back. After events it is never called.
        """
        raise NotImplementedError

    def on_timers(
        self, context: FrameContext, timers: pl.DataFrame, state: pl.DataFrame
    ) -> pl.DataFrame:
        """Act on the timers that are due: ``timers`` has ``__key``, ``__time`` and the timer's ``time``, one of each key.

        They are called after the rows of their batch, the earliest of each key first. Return the new state of their keys.
        """
        raise NotImplementedError

    @classmethod
    def defines(cls, method: str) -> bool:
        """Return whether the user's class has a method of its own."""
        return getattr(cls, method, None) is not getattr(FrameFunction, method, None)
