"""State of a key, as the user declares it. The words are Flink's: value, list and map state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError

StateKind = Literal["value", "list", "map"]
PolarsType = pl.DataType | type[pl.DataType]


@dataclass(frozen=True)
class StateDeclaration:
    """One state of a key: a value, a list or a map.

    ``dtype`` is the type of the value, of an element, or of what a map holds under a key of ``key_dtype``.
    """

    kind: StateKind
    dtype: pl.DataType
    key_dtype: pl.DataType | None = None
    default: Any = None
    ttl_us: int | None = None

    @property
    def stored_dtype(self) -> pl.DataType:
        """The type of the column that holds it."""
        if self.kind == "value":
            return self.dtype
        if self.kind == "list":
            return pl.List(self.dtype)
        assert self.key_dtype is not None
        return pl.List(pl.Struct({"key": self.key_dtype, "value": self.dtype}))


def value_state(
    dtype: PolarsType, *, default: Any = None, ttl: Duration | None = None
) -> StateDeclaration:
    """Declare one value of each key, of a polars type: ``count = ms.value_state(pl.Int64, default=0)``.

    ``context.state.count`` reads it, an assignment writes it. A key without one has the ``default``, and so
    has one to which None is assigned. A struct is read as a mapping and a list as a tuple, which cannot be changed in place.

    Args:
        dtype: The type of the value.
        default: What a key without a value reads.
        ttl: Forget it once the event time of its key is more than so long after it was last written.
    """
    return StateDeclaration("value", _dtype(dtype, "value_state"), None, default, _ttl(ttl))


def list_state(dtype: PolarsType, *, ttl: Duration | None = None) -> StateDeclaration:
    """Declare a list of each key, whose elements have a polars type: ``seen = ms.list_state(pl.String)``.

    ``context.state.seen`` is as a list of Python's: it has ``append``, ``clear``, indices and the rest. ``ttl`` is
    as of :func:`value_state`, and forgets the list as a whole.
    """
    return StateDeclaration("list", _dtype(dtype, "list_state"), ttl_us=_ttl(ttl))


def map_state(
    key: PolarsType, value: PolarsType, *, ttl: Duration | None = None
) -> StateDeclaration:
    """Declare a map of each key: ``carts = ms.map_state(pl.String, pl.Int64)``.

    ``context.state.carts`` is as a dict of Python's. ``ttl`` is as of :func:`value_state`, and forgets the map as a whole.
    """
    dtype = _dtype(key, "map_state")
    if dtype.is_nested():
        raise ConfigError(
            f"map_state is given keys of the type {dtype}. Give a plain type, such as pl.String."
        )
    if isinstance(dtype, pl.Datetime) and dtype.time_zone not in (None, "UTC"):
        raise ConfigError(
            f"map_state is given keys of the type {dtype}. To Python two times of day are equal when clocks are put back "
            'between them. Give pl.Datetime("us", "UTC").'
        )
    return StateDeclaration("map", _dtype(value, "map_state"), dtype, ttl_us=_ttl(ttl))


def _dtype(given: PolarsType, what: str) -> pl.DataType:
    try:
        return pl.Series([], dtype=given).dtype
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is given the type {given!r}. Give a polars type, such as pl.Int64."
        ) from error


def _ttl(given: Duration | None) -> int | None:
    if given is None:
        return None
    ttl_us = to_us(given, what="ttl")
    if ttl_us <= 0:
        raise ConfigError(f'ttl is {given!r}. Give how long state is kept, such as "1 day".')
    return ttl_us
