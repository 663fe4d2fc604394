"""The class that the user derives from whose methods are called for the rows of many keys at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import polars as pl

from millstream.kernels.process.function import KeyedFunction


class FrameContext:
    """What a :class:`FrameFunction` is given with each call: where output goes. It is only valid during the call."""

    __slots__ = ("_emit",)

    def __init__(self, emit: Callable[[object, str | None], None]) -> None:
        self._emit = emit

    def emit(self, rows: pl.DataFrame, *, to: str | None = None) -> None:
        """Emit rows: a frame with the columns that were declared, and ``__key``, the key that each row is about.

        A row has the event time of the last row of its key in the call, or of the timer. If the frame has the column
        ``__time``, as the rows that are given have it, that is its event time. ``to`` is the name of a side output.
        """
        self._emit(rows, to)


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

    Example::

        class Totals(ms.FrameFunction):
            total = ms.value_state(pl.Int64, default=0)

            def on_rows(self, context, rows, state):
                costs = rows.group_by("__key").agg(pl.col("cost").sum())
                state = state.join(costs, on="__key").with_columns(pl.col("total") + pl.col("cost"))
                context.emit(state.select("__key", "ad", "total"))
                return state
    """

    @abstractmethod
    def on_rows(
        self, context: FrameContext, rows: pl.DataFrame, state: pl.DataFrame
    ) -> pl.DataFrame:
        """Take rows, those of each key in the order that was declared; return the new state of their keys.

        A call that raises is made again with the first half of its rows, and then with the second: so the rows that fail
        alone are found, and become dead letters.
        """

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
