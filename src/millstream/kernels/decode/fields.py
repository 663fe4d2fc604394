"""What a topic's values hold: fields, each of a shape, and the Arrow types that go with them.

A shape has two Arrow types: that of its column, and that with which Arrow's JSON reader reads the value
(times of day, for example, as text). Some shapes Arrow's reader cannot read, or not exactly: durations,
objects whose keys are data, lists of decimals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from millstream.kernels.decode.constraints import Constraint

ScalarKind = Literal[
    "int",
    "float",
    "bool",
    "str",
    "datetime",
    "date",
    "time",
    "timedelta",
    "decimal",
    "bytes",
    "uuid",
]
Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

_ARROW: dict[ScalarKind, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "datetime": pa.timestamp("us", "UTC"),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timedelta": pa.duration("us"),
    "decimal": pa.decimal128(38, 9),
    "bytes": pa.binary(),
    "uuid": pa.string(),
}
_READ_AS_TEXT = frozenset[ScalarKind]({"date", "time", "bytes", "uuid"})


@dataclass(frozen=True)
class Scalar:
    """A single value. ``zoned``: a datetime whose text must name its offset from UTC."""

    kind: ScalarKind
    constraints: tuple[Constraint, ...] = ()
    zoned: bool = False


@dataclass(frozen=True)
class ListOf:
    """A list; ``null`` says whether its elements may be null."""

    item: Shape
    null: bool = False
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class MapOf:
    """An object whose keys are data. It becomes a list of structs of ``key`` and ``value``."""

    value: Shape
    null: bool = False
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class StructOf:
    """An object with the given fields."""

    fields: tuple[Field, ...]


Shape = Scalar | ListOf | MapOf | StructOf
Meta = Literal["key", "partition", "offset", "timestamp", "headers"]


@dataclass(frozen=True)
class Field:
    """One field of a topic's values, or of an object within them.

    Args:
        name: The column's name.
        type: The column's type.
        required: Whether it must be there. If it need not, a missing one is ``default``.
        default: A plain value, as `row_reader.py` makes them.
        null: Whether null may be given; by default where it is not required.
        wire: Its name in the value; by default the column's.
        shape: By default what its type says.
        meta: What it is of the record itself, if it is not part of the value.
    """

    name: str
    type: pa.DataType
    required: bool
    default: Any = None
    null: bool | None = None
    wire: str = ""
    shape: Shape | None = None
    meta: Meta | None = None

    @cached_property
    def takes_null(self) -> bool:
        return not self.required if self.null is None else self.null

    @cached_property
    def key(self) -> str:
        """Its name in the value."""
        return self.wire or self.name

    @cached_property
    def value_shape(self) -> Shape:
        """Its shape, given or read off its type."""
        return self.shape or shape_of(self.type)

    @classmethod
    def of(cls, name: str, shape: Shape, *, required: bool, **options: Any) -> Field:
        """Make a field of a shape, with the column's type that goes with it."""
        return cls(name, column_type(shape), required, shape=shape, **options)


@dataclass(frozen=True)
class Decoded:
    """``table`` has a row for each decoded value; ``good`` has their positions among the values."""

    table: pa.Table
    good: Positions
    errors: list[tuple[int, str]]  # position, reason


class Decoder(Protocol):
    """What turns the values of a batch into a table."""

    def decode(self, values: pa.Array) -> Decoded:
        """Decode values (binary). Rows come in the order of the values."""
        ...


def column_type(shape: Shape) -> pa.DataType:
    """Return the type of the column that a shape becomes."""
    match shape:
        case Scalar(kind):
            return _ARROW[kind]
        case ListOf(item):
            return pa.list_(column_type(item))
        case MapOf(value):
            return pa.list_(pa.struct([("key", pa.string()), ("value", column_type(value))]))
        case StructOf(fields):
            return pa.struct([(field.name, field.type) for field in fields])


def json_type(shape: Shape) -> pa.DataType | None:
    """Return the type with which Arrow's JSON reader reads a shape; None if it cannot."""
    match shape:
        case Scalar(kind, _, zoned):
            if kind == "timedelta" or zoned:
                return None
            return pa.string() if kind in _READ_AS_TEXT else _ARROW[kind]
        case ListOf(item):
            inner = None if _is_decimal(item) else json_type(item)
            return None if inner is None else pa.list_(inner)
        case MapOf():
            return None
        case StructOf(fields):
            types = [(field.key, json_type(field.value_shape)) for field in fields]
            if not types or any(kind is None for _, kind in types):
                return None
            return pa.struct(types)


def decimal_keys(shape: Shape, key: str) -> set[str]:
    """Yield the names of the members of a shape that are decimals, itself under ``key`` included."""
    match shape:
        case Scalar("decimal"):
            return {key}
        case ListOf(item) | MapOf(item):
            return decimal_keys(item, key)
        case StructOf(fields):
            return {
                found for field in fields for found in decimal_keys(field.value_shape, field.key)
            }
    return set()


def _is_decimal(shape: Shape) -> bool:
    if isinstance(shape, ListOf):
        return _is_decimal(shape.item)
    return isinstance(shape, Scalar) and shape.kind == "decimal"


def shape_of(arrow: pa.DataType) -> Shape:
    """Read a shape off a column's type; elements and fields within may be null."""
    for kind, known in _ARROW.items():
        if arrow == known:
            return Scalar(kind)
    if pa.types.is_list(arrow):
        return ListOf(shape_of(arrow.value_type), null=True)
    assert pa.types.is_struct(arrow), f"no field has the type {arrow}"
    return StructOf(tuple(Field(f.name, f.type, required=False) for f in arrow))


def table_schema(fields: tuple[Field, ...]) -> pa.Schema:
    """Return the schema of the table that fields become."""
    return pa.schema([(field.name, field.type) for field in fields])
