"""Aggregates of the user's own: a small class, called value by value.

The one kind that runs Python for each row: some hundred thousand values a second and core. Keep it
for what the others cannot say.
"""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, TypeVar

import polars as pl

from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.aggregates.groups import flat, grouped, over_groups, over_rows
from millstream.kernels.aggregates.protocol import OverValue, TypeOf, checked_type
from millstream.kernels.frames import DIFF

UserState = Any
PolarsType = pl.DataType | type[pl.DataType]
T = TypeVar("T")


class UserAggregate(ABC):
    """How to aggregate, with your own class; used as ``ms.aggregate(Product(), "factor")``.

    Rows of a key are taken up by :meth:`add` into states that begin as :meth:`zero`; states are kept,
    and put together by :meth:`merge` when it suits. So that the result does not depend on when that
    is, ``merge`` must be associative and commutative, ``zero`` must change nothing in it, and the
    order of rows must not matter. Every method may change the state that it is given, and gives the
    new one back. Nulls are handed to ``add`` like other values.

    Set ``result_type`` to the polars type of the result. States are kept by pickle, which needs
    classes that can be imported; with ``state_type``, as values of that polars type, which is
    smaller and outlives a change of code.

    Example::

        class Product(ms.UserAggregate):
            result_type = pl.Float64()
            state_type = pl.Float64()

            def zero(self):
                return 1.0

            def add(self, state, value):
                return state if value is None else state * value

            def merge(self, state, other):
                return state * other
    """

    result_type: ClassVar[PolarsType]
    state_type: ClassVar[PolarsType | None] = None

    @abstractmethod
    def zero(self) -> UserState:
        """Return the state of no rows; a new one each time where states are changed in place."""

    @abstractmethod
    def add(self, state: UserState, value: Any) -> UserState:
        """Take a row's value up; a dict, where several columns were named."""

    @abstractmethod
    def merge(self, state: UserState, other: UserState) -> UserState:
        """Put two states together."""

    def retract(self, state: UserState, value: Any) -> UserState:
        """Take a value back that was added before, perhaps into another state: undo :meth:`add`.

        Needed only over rows that can be retracted.
        """
        raise NotImplementedError

    def result(self, state: UserState) -> Any:
        """Return the result of a state; by default the state itself."""
        return state


@dataclass(frozen=True)
class UserDefined(OverValue):
    """A user's aggregate over values, which are dicts where they come of several columns."""

    own: UserAggregate
    signed: bool = False

    @property
    def _word(self) -> str:
        return type(self.own).__name__

    @property
    def _state_type(self) -> pl.DataType:
        if self.own.state_type is None:
            return pl.Binary()
        return self._type(self.own.state_type, "state_type")

    @property
    def _result_type(self) -> pl.DataType:
        return self._type(getattr(self.own, "result_type", None), "result_type")

    def _type(self, declared: PolarsType | None, what: str) -> pl.DataType:
        if isinstance(declared, pl.DataType):
            return declared
        if isinstance(declared, type(pl.DataType)) and not declared.is_nested():
            return declared()
        raise ConfigError(
            f"{self._word}.{what} is {declared!r}. Give a polars type, such as pl.Float64() or "
            "pl.List(pl.String())."
        )

    def bound(self, name: str, type_of: TypeOf) -> UserDefined:
        checked_type(name, self.value, type_of, lambda _: True, "values of any type")
        self._try_out(name)
        return self

    def _try_out(self, name: str) -> None:
        """Run the class once without values, so that what is wrong shows where it is declared."""
        empty = pl.Series([[], []], dtype=pl.List(pl.Null))
        try:
            states = self._merged(name, self._added(name, empty).implode())
            self._results(name, states)
        except ConfigError:
            raise
        except (UserCodeError, pl.exceptions.PolarsError, TypeError) as error:
            raise ConfigError(
                f"{self._word}, the aggregate {name!r}, does not hold together without any values: "
                f"{error} Check zero, merge and result, and the types that it declares."
            ) from error

    def for_retractions(self) -> UserDefined:
        if type(self.own).retract is UserAggregate.retract:
            raise ConfigError(
                f"{self._word} is over rows that can be retracted, and has no retract. Give it "
                "one: retract(state, value) undoes add(state, value)."
            )
        return replace(self, signed=True)

    def partial(self, name: str) -> list[pl.Expr]:
        taken = self.value
        if self.signed:
            taken = pl.struct(self.value.alias("value"), pl.col(DIFF).alias("diff"))
        states = over_groups(taken, lambda lists: self._added(name, lists), self._state_type)
        return [states.alias(self._column(name))]

    def merge(self, name: str) -> list[pl.Expr]:
        column = pl.col(self._column(name))
        return [over_groups(column, lambda lists: self._merged(name, lists), self._state_type)]

    def result(self, name: str) -> pl.Expr:
        column = pl.col(self._column(name))
        return over_rows(
            column, lambda states: self._results(name, states), self._result_type
        ).alias(name)

    def _column(self, name: str) -> str:
        return f"{name}.{self._word}"

    def _added(self, name: str, lists: pl.Series) -> pl.Series:
        values, lengths = flat(lists)
        groups = grouped(values.to_list(), lengths)
        return self._kept([self._run(name, self._take_up, group) for group in groups])

    def _take_up(self, values: list[Any]) -> UserState:
        if not self.signed:
            return reduce(self.own.add, values, self.own.zero())
        state = self.own.zero()
        for change in values:
            step = self.own.add if change["diff"] > 0 else self.own.retract
            state = step(state, change["value"])
        return state

    def _merged(self, name: str, lists: pl.Series) -> pl.Series:
        states, lengths = flat(lists)
        groups = grouped(self._live(states), lengths)
        return self._kept([self._run(name, self._put_together, group) for group in groups])

    def _put_together(self, states: list[UserState]) -> UserState:
        return reduce(self.own.merge, states) if states else self.own.zero()

    def _results(self, name: str, states: pl.Series) -> pl.Series:
        results = [self._run(name, self.own.result, state) for state in self._live(states)]
        return pl.Series(results, dtype=self._result_type, strict=True)

    def _kept(self, states: list[UserState]) -> pl.Series:
        if self.own.state_type is None:
            return pl.Series([pickle.dumps(state) for state in states], dtype=pl.Binary)
        return pl.Series(states, dtype=self._state_type, strict=True)

    def _live(self, states: pl.Series) -> list[UserState]:
        if self.own.state_type is None:
            return [pickle.loads(state) for state in states.to_list()]  # noqa: S301 - our own state
        return states.to_list()

    def _run(self, name: str, function: Callable[[T], Any], given: T) -> Any:
        try:
            return function(given)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = next((frame for frame in frames if frame.filename != __file__), frames[-1])
            raise UserCodeError(
                f"{self._word}, the aggregate {name!r}, failed at {at.filename}:{at.lineno}: "
                f"{type(error).__name__}: {error}."
            ) from error
