"""What expressions of a row pattern say of matched rows: as columns with reserved names.

A :class:`RowReference` is a value of one row of the match, or of a row near it: *logical* steps go from the first
or last row that is matched to some variables to others of these, *physical* ones from there to rows before or after, matched
or not. Or it is an aggregate of the rows that are matched to some variables. ``final`` looks at the whole match, else at
its rows up to the current one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.patterns.conditions import MATCHED_PREFIX, Matched

ReferenceKind = Literal[
    "first", "last", "count", "sum", "mean", "min", "max", "list", "match_number"
]
_PREFIX = f"{MATCHED_PREFIX}_row:"


@dataclass(frozen=True)
class RowReference:
    """A value of matched rows. ``variable``: None for all. ``column``: None for rows as such, or with ``classifier``.

    ``logical`` and ``physical`` are steps, the latter below zero for rows before. ``classifier``: which variable the row is matched to.
    """

    kind: ReferenceKind
    variable: str | None = None
    column: str | None = None
    final: bool = False
    logical: int = 0
    physical: int = 0
    classifier: bool = False

    @property
    def name(self) -> str:
        """The name of the column that stands for it."""
        flags = f"{int(self.final)}{int(self.classifier)}{int(self.column is not None)}"
        return (
            f"{_PREFIX}{self.kind}:{self.variable or ''}:{flags}:{self.logical}:{self.physical}:"
            f"{self.column or ''}"
        )

    @classmethod
    def of(cls, name: str) -> RowReference | None:
        """Return what a column stands for; None if it is one of the stream's."""
        if not name.startswith(_PREFIX):
            return None
        kind, variable, flags, logical, physical, column = name.removeprefix(_PREFIX).split(":", 5)
        return cls(
            cast("ReferenceKind", kind),
            variable or None,
            column if flags[2] == "1" else None,
            flags[0] == "1",
            int(logical),
            int(physical),
            flags[1] == "1",
        )

    @property
    def navigates(self) -> bool:
        """Whether it is a value of one row."""
        return self.kind in ("first", "last")

    def dtype(self, columns: Mapping[str, pl.DataType]) -> pl.DataType:
        """Return its type, given those of the stream's columns.

        Raises:
            ConfigError: the column's type does not have the aggregate.
        """
        if self.kind == "match_number":
            return pl.Int64()
        if self.classifier:
            return pl.String()
        if self.navigates:
            assert self.column is not None
            return columns[self.column]
        if self.kind == "count":
            return pl.Int64()
        return Matched(self.kind, self.variable or "", self.column).dtype(columns)

    def __str__(self) -> str:
        """Return it as it is written in Python."""
        if self.kind == "match_number":
            return "match_number()"
        rows = f"{self.variable or 'row'}{'.final' if self.final else ''}"
        what = f'"{self.column}"' if self.column is not None else ""
        if not self.navigates:
            return f"{rows}.{self.kind}({what})"
        if (self.kind, self.logical) != ("last", 0) or not self.physical:
            rows += (
                f".{self.kind}({self.logical or ''})"
                if (self.kind, self.logical) != ("last", 0)
                else ""
            )
        if self.physical:
            rows += f".{'prev' if self.physical < 0 else 'next'}({abs(self.physical)})"
        return f"{rows}.classifier()" if self.classifier else f"{rows}[{what}]"


def references_in(expressions: Iterable[pl.Expr]) -> dict[str, RowReference]:
    """Return what expressions use of matched rows, by the name of the column."""
    names = dict.fromkeys(name for one in expressions for name in one.meta.root_names())
    found = {name: RowReference.of(name) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def readable(expression: pl.Expr) -> str:
    """Return an expression as text, with references as they are written."""
    shown = str(expression)
    for name, reference in references_in([expression]).items():
        shown = shown.replace(f'col("{name}")', str(reference))
    return shown


def require_known(what: str, name: str, known: Iterable[str], kind: str) -> None:
    """Make sure that a variable or column is there."""
    if name not in known:
        raise ConfigError(f"{what} names the {kind} {name!r}. Those there are {', '.join(known)}.")
