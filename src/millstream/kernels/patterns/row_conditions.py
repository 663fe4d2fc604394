"""Conditions of row patterns: expressions over the row, and over the rows that are matched up to it.

They become gates, values and programs, as those of sequences do (:mod:`millstream.kernels.patterns.conditions`). What looks at
matched rows is read from registers: aggregates, which each entry takes over from the one before it, and *navigations*, which are
worked out before the condition is asked. The row that is asked about is matched to the variable of the condition meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from millstream.kernels.patterns import programs as m
from millstream.kernels.patterns import row_tables as t
from millstream.kernels.patterns import tables
from millstream.kernels.patterns.conditions import (
    CompiledConditions,
    ConditionProgram,
    Kind,
    as_float,
    column_of,
    kind_of,
)
from millstream.kernels.patterns.row_references import RowReference, readable, references_in

_AGGREGATES = {"sum": tables.TOTAL, "min": tables.MIN, "max": tables.MAX}


@dataclass(frozen=True)
class Navigation:
    """A value of a row that a condition looks at: see :class:`RowReference`. ``variables`` is a set, as bits."""

    variables: int
    is_first: bool
    logical: int
    physical: int
    value: int
    is_float: bool


@dataclass
class RowConditions(CompiledConditions):
    """Conditions of the variables of a row pattern; ``states`` gives the sets that names stand for, as bits.

    ``navigations`` are those of all conditions, ``navigations_of`` which of them each one has.
    """

    variables: Sequence[str] = ()
    navigations: list[Navigation] = field(default_factory=list)
    navigations_of: list[list[int]] = field(default_factory=list)
    asked: int = 0  # the variable, as a set, whose condition is compiled

    @property
    def every(self) -> int:
        """The set of all variables."""
        return (1 << len(self.variables)) - 1

    @property
    def context_free(self) -> bool:
        """Whether no condition looks at what rows are matched to."""
        sets = [one.variables for one in self.navigations if one.value != t.NUMBER]
        labels = any(one.value == t.CLASSIFIER for one in self.navigations)
        sets += [one.state for one in self.registers]
        return not labels and all(one == self.every for one in sets)

    def add_variable(self, variable: str, condition: pl.Expr) -> None:
        """Compile the condition of a variable.

        Raises:
            ConfigError: it does with matched rows what cannot be compiled.
        """
        self.navigations_of.append([])
        self.asked = self.states[variable]
        self.add(condition, f"The condition of {variable!r}")

    def program(self, what: str) -> ConditionProgram:
        return _RowProgram(self, what)

    def types_of_matched(self, expression: pl.Expr) -> dict[str, pl.DataType]:
        return {name: one.dtype(self.columns) for name, one in references_in([expression]).items()}

    def shown(self, expression: pl.Expr) -> str:
        return readable(expression)

    def set_of(self, name: str | None) -> int:
        """Return the variables that a name stands for."""
        return self.every if name is None else self.states[name]

    def navigation(self, wanted: Navigation) -> int:
        """Return the number of a navigation, which the last condition uses."""
        if wanted not in self.navigations:
            self.navigations.append(wanted)
        number = self.navigations.index(wanted)
        if number not in self.navigations_of[-1]:
            self.navigations_of[-1].append(number)
        return number

    def navigation_rows(self) -> list[tuple[int, ...]]:
        """Return the navigations as the matcher reads them, condition by condition."""
        sets = self.sets()
        return [
            (
                len(self.registers) + number,
                sets.index(one.variables),
                int(one.is_first),
                one.logical,
                one.physical,
                one.value,
            )
            for of_condition in self.navigations_of
            for number, one in ((number, self.navigations[number]) for number in of_condition)
        ]

    def sets(self) -> list[int]:
        """Return the sets of variables that navigations begin with."""
        return list(dict.fromkeys(one.variables for one in self.navigations))

    def programs_with_registers(self) -> list[list[tuple[int, int]]]:
        """Return the programs; a navigation's register is known when all aggregates are."""
        first = len(self.registers)
        return [
            [
                (operation, first - argument - 1 if argument < 0 else argument)
                for operation, argument in program
            ]
            for program in self.programs
        ]


@dataclass
class _RowProgram(ConditionProgram):
    conditions: RowConditions

    def load_matched(self, name: str) -> Kind:
        found = RowReference.of(name)
        assert found is not None
        shown = pl.col(name)
        if found.kind == "match_number":
            return self._navigate(
                Navigation(self.conditions.every, False, 0, 0, t.NUMBER, False), "whole"
            )
        variables = self.conditions.set_of(found.variable)
        if found.kind == "list":
            raise self.refused(shown, " A list of values can only be a measure.")
        if found.navigates:
            return self._row_of_match(found, variables, shown)
        return self._aggregate_of(found, variables, shown)

    def _row_of_match(self, found: RowReference, variables: int, shown: pl.Expr) -> Kind:
        if found.kind == "last" and not found.logical and variables & self.conditions.asked:
            variables = self.conditions.every  # it is the row that is asked about
            if not found.physical and found.column is not None:
                return self.emit(column_of(found.column))
        kind, value = self.kind(shown), t.CLASSIFIER
        if not found.classifier:
            assert found.column is not None
            value = self.conditions.value(column_of(found.column), kind)
        is_first, is_float = found.kind == "first", kind == "float"
        made = Navigation(variables, is_first, found.logical, found.physical, value, is_float)
        return self._navigate(made, kind)

    def _navigate(self, navigation: Navigation, kind: Kind) -> Kind:
        # A register behind those of aggregates, of which there may be more to come.
        number = self.conditions.navigation(navigation)
        self.code.append((m.MATCHED_F if navigation.is_float else m.MATCHED_I, -number - 1))
        return kind

    def _aggregate_of(self, found: RowReference, variables: int, shown: pl.Expr) -> Kind:
        if found.kind == "count" and found.column is None:
            self._load(tables.ROWS, variables, -1, is_float=False)
            return "whole"
        assert found.column is not None
        source = self.conditions.columns[found.column]
        kind = kind_of(source)
        if kind is None:
            raise self.refused(shown, f" {found.column!r} is a {source}.")
        if found.kind == "count":
            value = self.conditions.value(column_of(found.column), kind)
            self._load(tables.VALUES, variables, value, is_float=False)
            return "whole"
        if found.kind == "mean":
            value = self.conditions.value(as_float(found.column), "float")
            self._load(tables.TOTAL, variables, value, is_float=True)
            self._load(tables.VALUES, variables, value, is_float=False)
            self.code += [(m.TO_FLOAT, 0), (m.DIV_F, 0)]
            return "float"
        kind = self.kind(shown)
        value = self.conditions.value(column_of(found.column), kind)
        self._load(_AGGREGATES[found.kind], variables, value, is_float=kind == "float")
        return kind
