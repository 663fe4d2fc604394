"""Conditions of a pattern: expressions of polars over the row, and over the rows that were matched before it.

What was matched is in an expression as a column with a reserved name (:class:`Matched`). What looks at the
row alone is left to polars, which works it out for all rows at once: as a *gate*, where the condition can only hold if it
does, or as a *value*. What is left is arithmetic, comparison and logic of values and matched aggregates. It becomes a
program for a stack, which is run for a partial match and a row
(:mod:`millstream.kernels.patterns.programs`). Its numbers have 64 bits; null, NaN and logic are as in polars.

The root of an expression is found by building each operation that is known from its inputs anew, and comparing: polars
gives the inputs of an expression and says whether two are equal, but has no public way to ask what it is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Literal, get_args

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.patterns import programs as m
from millstream.kernels.patterns import tables

Aggregate = Literal["first", "last", "sum", "mean", "min", "max", "count", "list"]
AGGREGATES: tuple[str, ...] = get_args(Aggregate)
_PREFIX = "__matched:"
MATCHED_PREFIX = "__matched"  # of all names that stand for something of matched rows

Kind = Literal["whole", "float", "truth", "text", "time"]
_WIDE = {"Int128", "UInt64", "UInt128"}


@dataclass(frozen=True)
class Matched:
    """An aggregate of the rows that a step has taken; its column, or None where it is of whole rows."""

    aggregate: str
    step: str
    column: str | None

    @property
    def name(self) -> str:
        """The name of the column that stands for it."""
        return f"{_PREFIX}{self.aggregate}:{self.step}:{self.column or ''}"

    @classmethod
    def of(cls, name: str) -> Matched | None:
        """Return what a column stands for; None if it is one of the stream's."""
        if not name.startswith(_PREFIX):
            return None
        aggregate, step, column = name.removeprefix(_PREFIX).split(":", 2)
        return cls(aggregate, step, column or None)

    def dtype(self, columns: Mapping[str, pl.DataType]) -> pl.DataType:
        """Return its type, given those of the stream's columns. Numbers are Int64 or Float64.

        Raises:
            ConfigError: the column's type does not have the aggregate.
        """
        if self.column is None:
            every = pl.Struct([pl.Field(name, dtype) for name, dtype in columns.items()])
            return pl.List(every) if self.aggregate == "list" else pl.Int64()
        own = columns[self.column]
        if self.aggregate == "list":
            return pl.List(own)
        number = own.is_integer() or own.is_float()
        if self.aggregate in ("min", "max") and own.is_nested():
            raise ConfigError(
                f"The {self.aggregate} of {self.column!r} is asked for, which is a {own}: such values have no order. Give a "
                "column of single values, or ask for the list()."
            )
        if self.aggregate in ("sum", "mean") and not number:
            raise ConfigError(
                f"The {self.aggregate} of {self.column!r} is asked for, which is a {own}. Give a column of numbers, or cast it."
            )
        if self.aggregate == "mean":
            return pl.Float64()
        if number and type(own).__name__ not in _WIDE:
            return pl.Float64() if own.is_float() else pl.Int64()
        return own


def matched_in(expressions: Iterable[pl.Expr]) -> dict[str, Matched]:
    """Return what expressions use of matched rows, by the name of the column."""
    names = dict.fromkeys(name for one in expressions for name in one.meta.root_names())
    found = {name: Matched.of(name) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def uses_matched(expression: pl.Expr) -> bool:
    """Return whether an expression looks at matched rows."""
    return any(name.startswith(MATCHED_PREFIX) for name in expression.meta.root_names())


@dataclass(frozen=True)
class RowValue:
    """An expression over the row alone, and what its values are."""

    expression: pl.Expr
    kind: Kind

    def column(self, name: str) -> pl.Expr:
        """Return its values as a column that is sent: numbers, truths and times as numbers, text as it is."""
        if self.kind == "text":
            return self.expression.cast(pl.String).alias(name)
        if self.kind == "float":
            return self.expression.cast(pl.Float64).alias(name)
        return self.expression.to_physical().cast(pl.Int64).alias(name)


@dataclass(frozen=True)
class Register:
    """An aggregate of the rows of one state: its code, the state, and the row's value (by number)."""

    aggregate: int
    state: int
    value: int
    is_float: bool


@dataclass
class CompiledConditions:
    """Conditions as gates and programs. ``gates`` has an expression of truth for each; None where nothing is known before.

    ``programs`` has the operations of each with their arguments; one without is decided by its gate.
    """

    states: Mapping[str, int]
    columns: Mapping[str, pl.DataType]
    gates: list[pl.Expr | None] = field(default_factory=list)
    programs: list[list[tuple[int, int]]] = field(default_factory=list)
    values: list[RowValue] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)

    def add(self, condition: pl.Expr, what: str) -> None:
        """Compile one condition more; ``what`` names it in an error.

        Raises:
            ConfigError: it does with matched rows what cannot be compiled.
        """
        alone: list[pl.Expr] = []
        others: list[pl.Expr] = []
        for part in _conjuncts(condition.meta.undo_aliases()):
            (others if uses_matched(part) else alone).append(part)
        self.gates.append(reduce(operator.and_, alone) if alone else None)
        program = self.program(what)
        for number, part in enumerate(others):
            program.emit(part)
            if number:
                program.code.append((m.AND, 0))
        self.programs.append(program.code)

    def program(self, what: str) -> ConditionProgram:
        """Return a program without operations."""
        return ConditionProgram(self, what)

    def types_of_matched(self, expression: pl.Expr) -> dict[str, pl.DataType]:
        """Return the types of what an expression uses of matched rows."""
        return {name: one.dtype(self.columns) for name, one in matched_in([expression]).items()}

    def shown(self, expression: pl.Expr) -> str:
        """Return an expression as a text for an error."""
        return str(expression).replace(_PREFIX, "matched:")

    def value(self, expression: pl.Expr, kind: Kind) -> int:
        """Return the number of a row's value."""
        for number, known in enumerate(self.values):
            if known.kind == kind and known.expression.meta.eq(expression):
                return number
        self.values.append(RowValue(expression, kind))
        return len(self.values) - 1

    def register(self, aggregate: int, state: int, value: int, *, is_float: bool) -> int:
        """Return the number of a register."""
        wanted = Register(aggregate, state, value, is_float)
        if wanted not in self.registers:
            self.registers.append(wanted)
        return self.registers.index(wanted)


def _conjuncts(condition: pl.Expr) -> list[pl.Expr]:
    inputs = _inputs(condition)
    if len(inputs) == 2 and condition.meta.eq(inputs[0] & inputs[1]):
        return [*_conjuncts(inputs[0]), *_conjuncts(inputs[1])]
    return [condition]


def _inputs(expression: pl.Expr) -> list[pl.Expr]:
    return expression.meta.pop()[::-1]


def kind_of(dtype: pl.DataType) -> Kind | None:
    """Return what values of a type are in a program; None: it has no such values."""
    if dtype == pl.Boolean:
        return "truth"
    if dtype.is_float():
        return "float"
    if dtype.is_integer() and type(dtype).__name__ not in _WIDE:
        return "whole"
    if dtype == pl.String:
        return "text"
    return "time" if isinstance(dtype, (pl.Date, pl.Datetime, pl.Duration)) else None


_BINARY: tuple[tuple[Callable[[pl.Expr, pl.Expr], pl.Expr], str], ...] = (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
    (operator.truediv, "div"),
    (operator.eq, "eq"),
    (operator.ne, "ne"),
    (operator.lt, "lt"),
    (operator.le, "le"),
    (operator.gt, "gt"),
    (operator.ge, "ge"),
    (operator.and_, "and"),
    (operator.or_, "or"),
)
_UNARY: tuple[tuple[Callable[[pl.Expr], pl.Expr], str], ...] = (
    (operator.invert, "not"),
    (operator.neg, "negate"),
    (lambda one: one.abs(), "abs"),
    (lambda one: one.is_null(), "is_null"),
    (lambda one: one.is_not_null(), "is_not_null"),
)
_ARITHMETIC = {
    "add": (m.ADD_I, m.ADD_F),
    "sub": (m.SUB_I, m.SUB_F),
    "mul": (m.MUL_I, m.MUL_F),
    "negate": (m.NEGATE_I, m.NEGATE_F),
    "abs": (m.ABS_I, m.ABS_F),
}
_COMPARISONS = {
    "eq": (m.EQ_I, m.EQ_F),
    "ne": (m.NE_I, m.NE_F),
    "lt": (m.LT_I, m.LT_F),
    "le": (m.LE_I, m.LE_F),
    "gt": (m.LT_I, m.LT_F),
    "ge": (m.LE_I, m.LE_F),
}
_LOGIC = {"and": m.AND, "or": m.OR, "not": m.NOT}
_NULLS = {"is_null": m.IS_NULL, "is_not_null": m.IS_NOT_NULL}
_AGGREGATES = {
    "first": tables.FIRST,
    "last": tables.LAST,
    "sum": tables.SUM,
    "min": tables.MIN,
    "max": tables.MAX,
}


@dataclass
class ConditionProgram:
    """The program of one condition while it is made."""

    conditions: CompiledConditions
    what: str
    code: list[tuple[int, int]] = field(default_factory=list)

    def emit(self, expression: pl.Expr) -> Kind:
        """Append what puts the expression's value on the stack; return what it is."""
        if not uses_matched(expression):
            return self._row(expression)
        if expression.meta.is_column():
            return self.load_matched(expression.meta.output_name())
        inputs = _inputs(expression)
        if len(inputs) == 2:
            for build, word in _BINARY:
                if _is_built(expression, build, inputs):
                    return self._binary(word, inputs, expression)
        if len(inputs) == 1:
            for make, word in _UNARY:
                if _is_built(expression, make, inputs):
                    return self._unary(word, inputs[0], expression)
        raise self.refused(expression, "")

    def _row(self, expression: pl.Expr) -> Kind:
        kind = self.kind(expression)
        number = self.conditions.value(expression, kind)
        self.code.append((m.ROW_F if kind == "float" else m.ROW_I, number))
        return kind

    def load_matched(self, name: str) -> Kind:
        """Load what a reserved name stands for; return what it is."""
        matched = Matched.of(name)
        assert matched is not None
        return self._aggregate(matched)

    def _aggregate(self, matched: Matched) -> Kind:
        """Load an aggregate; a mean is a total divided by the number of values."""
        state = self.conditions.states[matched.step]
        if matched.aggregate == "count":
            self._load(tables.ROWS, state, -1, is_float=False)
            return "whole"
        column = pl.col(matched.name)  # reserved names are never patterns
        if matched.aggregate == "list":
            raise self.refused(column, " A list of values can only be a measure.")
        assert matched.column is not None
        source = self.conditions.columns[matched.column]
        if kind_of(source) is None:
            raise self.refused(column, f" {matched.column!r} is a {source}.")
        if matched.aggregate == "mean":
            value = self.conditions.value(as_float(matched.column), "float")
            self._load(tables.TOTAL, state, value, is_float=True)
            self._load(tables.VALUES, state, value, is_float=False)
            self.code += [(m.TO_FLOAT, 0), (m.DIV_F, 0)]
            return "float"
        kind = self.kind(column)
        value = self.conditions.value(column_of(matched.column), kind)
        self._load(_AGGREGATES[matched.aggregate], state, value, is_float=kind == "float")
        return kind

    def _load(self, aggregate: int, state: int, value: int, *, is_float: bool) -> None:
        number = self.conditions.register(aggregate, state, value, is_float=is_float)
        self.code.append((m.MATCHED_F if is_float else m.MATCHED_I, number))

    def _binary(self, word: str, inputs: Sequence[pl.Expr], whole: pl.Expr) -> Kind:
        one, other = self.emit(inputs[0]), self.emit(inputs[1])
        if word in _LOGIC:
            self._require(one == other == "truth", whole, " Combine conditions with & and |.")
            self.code.append((_LOGIC[word], 0))
            return "truth"
        numbers = {one, other} <= {"whole", "float"}
        alike = one == other and self._same_unit(inputs, one)
        if word in _COMPARISONS:
            self._require(numbers or alike, whole, " Compare values of one type: cast one of them.")
            floating = self._as_floats(one, other)
            if word in ("gt", "ge"):
                self.code.append((m.SWAP, 0))
            self.code.append((_COMPARISONS[word][floating], 0))
            return "truth"
        times = one == other == "time" and word == "sub" and alike
        self._require(numbers or times, whole, " Calculate with numbers: cast what is none.")
        if word == "div":
            self._as_floats(one, other, always=True)
            self.code.append((m.DIV_F, 0))
            return "float"
        self.code.append((_ARITHMETIC[word][self._as_floats(one, other)], 0))
        if times and self._dtype(inputs[0]) == pl.Date:
            self._days_as(self._dtype(whole))
        return self.kind(whole)

    def _days_as(self, duration: pl.DataType) -> None:
        """Make a duration of a number of days, in its unit."""
        day = pl.lit(timedelta(days=1)).cast(duration).to_physical()
        self.code += [(m.ROW_I, self.conditions.value(day, "whole")), (m.MUL_I, 0)]

    def _unary(self, word: str, given: pl.Expr, whole: pl.Expr) -> Kind:
        kind = self.emit(given)
        if word in _NULLS:
            self.code.append((_NULLS[word], 0))
            return "truth"
        if word in _LOGIC:
            self._require(kind == "truth", whole, " ~ negates conditions.")
            self.code.append((_LOGIC[word], 0))
            return "truth"
        self._require(kind in ("whole", "float", "time"), whole, "")
        self.code.append((_ARITHMETIC[word][kind == "float"], 0))
        return kind

    def _as_floats(self, one: Kind, other: Kind, *, always: bool = False) -> bool:
        """Make floats of both values if one is; return whether they are."""
        floating = always or "float" in (one, other)
        if floating and one != "float":
            self.code.append((m.TO_FLOAT_BELOW, 0))
        if floating and other != "float":
            self.code.append((m.TO_FLOAT, 0))
        return floating

    def _same_unit(self, inputs: Sequence[pl.Expr], kind: Kind) -> bool:
        """Return whether two times are numbers of one unit, of one kind of time."""
        if kind != "time":
            return True
        one, other = (self._dtype(given) for given in inputs)
        return type(one) is type(other) and getattr(one, "time_unit", "") == getattr(
            other, "time_unit", ""
        )

    def _dtype(self, expression: pl.Expr) -> pl.DataType:
        columns = {**self.conditions.columns, **self.conditions.types_of_matched(expression)}
        return pl.DataFrame(schema=columns).select(expression).dtypes[0]

    def kind(self, expression: pl.Expr) -> Kind:
        """Return what an expression's values are in a program."""
        dtype = self._dtype(expression)
        kind = kind_of(dtype)
        if kind is None:
            raise self.refused(expression, f" {expression} is a {dtype}.")
        return kind

    def _require(self, fits: bool, expression: pl.Expr, remedy: str) -> None:  # noqa: FBT001
        if not fits:
            raise self.refused(expression, remedy)

    def refused(self, expression: pl.Expr, remedy: str) -> ConfigError:
        """Return the error of what cannot be compiled."""
        shown = self.conditions.shown(expression)
        return ConfigError(
            f"{self.what} has {shown}. With matched rows a condition may calculate (+, -, *, /, abs), compare "
            "(==, !=, <, <=, >, >=), combine (&, |, ~) and ask for nulls; values are numbers, truths, texts and times. Do "
            f"everything else with columns of the row, or before, with with_columns.{remedy}"
        )


def column_of(name: str) -> pl.Expr:
    """Return the column of exactly this name: polars takes some names for patterns."""
    is_pattern = name == "*" or (name.startswith("^") and name.endswith("$"))
    return pl.col(f"^{re.escape(name)}$" if is_pattern else name)


def as_float(column: str) -> pl.Expr:
    """Return a column as floats."""
    return column_of(column).cast(pl.Float64)


def _is_built(
    expression: pl.Expr, build: Callable[..., pl.Expr], inputs: Sequence[pl.Expr]
) -> bool:
    try:
        return bool(expression.meta.eq(build(*inputs)))
    except (TypeError, pl.exceptions.PolarsError):  # it is not built of such inputs
        return False
