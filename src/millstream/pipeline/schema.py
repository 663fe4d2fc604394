"""Topic schemas from dataclasses: which fields a value has, of which type, and which must be there.

``int``, ``float``, ``bool``, ``str``, ``datetime``, ``Decimal``, ``list[...]`` and nested
dataclasses are known. A field may be null or missing when its type allows None or it has a default.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.decode import Field
from millstream.kernels.frames import HIDDEN_PREFIX

_TYPES: Mapping[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
    datetime: pa.timestamp("us", "UTC"),
    Decimal: pa.decimal128(38, 9),
}

Columns = dict[str, pl.DataType]


def fields_of(declared: type, *, what: str) -> tuple[Field, ...]:
    """Read the fields off a dataclass. ``what`` names it in errors.

    Raises:
        ConfigError: it is no dataclass, or a field has a type that is not known.
    """
    if not (isinstance(declared, type) and dataclasses.is_dataclass(declared)):
        raise ConfigError(
            f"The schema of {what} is {declared!r}. Give a dataclass: its fields are the fields of "
            "the topic's JSON values."
        )
    hints = typing.get_type_hints(declared)
    return tuple(
        _field(field, hints[field.name], f"{declared.__name__}.{field.name}")
        for field in dataclasses.fields(declared)
    )


def _field(field: dataclasses.Field[Any], hint: Any, what: str) -> Field:
    if field.name.startswith(HIDDEN_PREFIX):
        raise ConfigError(f"{what} begins with {HIDDEN_PREFIX!r}, which is reserved. Rename it.")
    inner, optional = _without_none(hint)
    defaulted = (
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )
    return Field(field.name, _arrow_type(inner, what), required=not (optional or defaulted))


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        if len(inner) == 1:
            return inner[0], True
    return hint, False


def _arrow_type(hint: Any, what: str) -> pa.DataType:
    if hint in _TYPES:
        return _TYPES[hint]
    if typing.get_origin(hint) is list:
        element, _ = _without_none(typing.get_args(hint)[0])
        return pa.list_(_arrow_type(element, what))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        nested = [(field.name, field.type) for field in fields_of(hint, what=what)]
        return pa.struct(nested)
    raise ConfigError(
        f"{what} has the type {getattr(hint, '__name__', hint)}. Known are int, float, bool, str, "
        "datetime, Decimal, list[...], other dataclasses, and any of these with | None."
    )


def columns_of(fields: tuple[Field, ...]) -> Columns:
    """Give the polars type of each field, as expressions meet it."""
    empty = pl.from_arrow(pa.schema([(field.name, field.type) for field in fields]).empty_table())
    assert isinstance(empty, pl.DataFrame)
    return dict(empty.schema)
