"""What all sketches have in common: state as bytes, merged group by group."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import polars as pl

from millstream.errors import ConfigError, EnvironmentProblem, UserCodeError
from millstream.kernels.aggregates.groups import (
    Lengths,
    flat,
    grouped,
    over_groups,
    over_rows,
    without_nulls,
)
from millstream.kernels.aggregates.protocol import Aggregate, OverValue, TypeOf, checked_type


def datasketches() -> Any:
    """Load the package.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    try:
        return importlib.import_module("datasketches")
    except ImportError as error:
        raise EnvironmentProblem(
            "Approximate aggregates need the package datasketches, which is not installed. "
            "Install it: pip install 'millstream[sketches]'."
        ) from error


@dataclass(frozen=True)
class Sketch(OverValue, ABC):
    """A sketch of the values, or with ``of_sketches`` of sketches made before, merged.

    With ``as_sketch`` the result is the sketch itself, as bytes; otherwise what it says.
    """

    as_sketch: bool = False
    of_sketches: bool = False
    dtype: pl.DataType | None = None

    def bound(self, name: str, type_of: TypeOf) -> Self:
        datasketches()
        if self.of_sketches:
            dtype = checked_type(
                name, self.value, type_of, lambda dtype: dtype == pl.Binary, "sketches, as bytes"
            )
        else:
            dtype = checked_type(name, self.value, type_of, self.takes, self.takes_words)
        return replace(self, dtype=dtype)

    def for_changes(self) -> Aggregate:
        raise ConfigError(
            f"A {self.word} sketch is over rows that can be taken back, which no sketch can do. "
            f"Use {self.exact} instead: it is exact."
        )

    def partial(self, name: str) -> list[pl.Expr]:
        if self.of_sketches:
            made = over_groups(self.value, lambda lists: self._merged(name, lists), pl.Binary())
        else:
            made = over_groups(self.seen(), self._made, pl.Binary())
        return [made.alias(self._column(name))]

    def merge(self, name: str) -> list[pl.Expr]:
        column = pl.col(self._column(name))
        return [over_groups(column, lambda lists: self._merged(name, lists), pl.Binary())]

    def result(self, name: str) -> pl.Expr:
        sketches = pl.col(self._column(name))
        if self.as_sketch:
            return sketches.alias(name)
        return over_rows(sketches, self.read, self.result_type).alias(name)

    def _column(self, name: str) -> str:
        return f"{name}.{self.kind}"

    def seen(self) -> pl.Expr:
        """Give the values as the sketch is to see them."""
        return self.value

    def _made(self, lists: pl.Series) -> pl.Series:
        return pl.Series(self.sketches_of(*without_nulls(*flat(lists))), dtype=pl.Binary)

    def _merged(self, name: str, lists: pl.Series) -> pl.Series:
        sketches, lengths = without_nulls(*flat(lists))
        return pl.Series(
            [self._one(name, group) for group in grouped(sketches.to_list(), lengths)],
            dtype=pl.Binary,
        )

    def _one(self, name: str, sketches: list[bytes]) -> bytes:
        if len(sketches) == 1 and not self.of_sketches:
            return sketches[0]
        try:
            return self.merged(sketches)
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserCodeError(
                f"The aggregate {name!r} was given bytes that are no {self.word} sketch that it "
                f"can merge ({error}). Give it sketches made with the same settings."
            ) from error

    # ── what a kind of sketch is ────────────────────────────────────────────────────────────

    word: ClassVar[str]  # what it is called in errors ...
    exact: ClassVar[str]  # ... and what to use in its place
    takes_words: ClassVar[str]

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name the kind with all that its bytes depend on; it names the column of the state."""

    @property
    @abstractmethod
    def result_type(self) -> pl.DataType: ...

    @abstractmethod
    def takes(self, dtype: pl.DataType) -> bool:
        """Say whether values of a type can be sketched."""

    @abstractmethod
    def sketches_of(self, values: pl.Series, lengths: Lengths) -> Iterable[bytes]:
        """Make a sketch of each group's values, which lie end to end, without nulls."""

    @abstractmethod
    def merged(self, sketches: list[bytes]) -> bytes:
        """Merge sketches, none of them if need be, into one."""

    @abstractmethod
    def read(self, sketches: pl.Series) -> pl.Series:
        """Read the answer off each sketch."""
