"""What all sketches have in common: state as bytes, merged group by group."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import polars as pl

from millstream.errors import ConfigError, EnvironmentProblem, UserCodeError
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
            dtype = checked_type(name, self.value, type_of, self.accepts, self.accepted_types)
        return replace(self, dtype=dtype)

    def for_retractions(self) -> Aggregate:
        raise ConfigError(
            f"A {self.display_name} sketch is over rows that can be retracted, which no sketch can do. "
            f"Use {self.exact_alternative} instead: it is exact."
        )

    def _column(self, name: str) -> str:
        return f"{name}.{self.kind}"

    def sketch_input(self) -> pl.Expr:
        """Return the values as the sketch is to see them."""
        return self.value

    def _or_error(self, name: str, made: Callable[[], bytes]) -> bytes:
        try:
            return made()
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserCodeError(
                f"The aggregate {name!r} was given bytes that are no {self.display_name} sketch that it "
                f"can merge ({error}). Give it sketches made with the same settings."
            ) from error

    # ── what a kind of sketch is ────────────────────────────────────────────────────────────

    display_name: ClassVar[str]  # what it is called in errors ...
    exact_alternative: ClassVar[str]  # ... and what to use in its place
    accepted_types: ClassVar[str]

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name the kind with all that its bytes depend on; it names the column of the state."""

    @property
    @abstractmethod
    def result_type(self) -> pl.DataType: ...

    @abstractmethod
    def accepts(self, dtype: pl.DataType) -> bool:
        """Return whether values of a type can be sketched."""

    @abstractmethod
    def merged(self, sketches: list[bytes]) -> bytes:
        """Merge sketches, none of them if need be, into one."""

    @abstractmethod
    def read(self, sketches: pl.Series) -> pl.Series:
        """Return the result of each sketch."""
