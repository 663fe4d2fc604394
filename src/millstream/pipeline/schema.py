"""Topic schemas from classes: which fields a value has, of which type, and which must be there.

A class is a dataclass, a pydantic model or a TypedDict; a mapping of names to types is read as a TypedDict.
`type_hints.py` lists the types of fields (:data:`~millstream.pipeline.type_hints.KNOWN_TYPES`);
`pydantic_models.py` has what pydantic adds. A field that has a default may be missing, and has its default
then. Null is accepted only where the type allows None, and such a field of a dataclass may be missing as
well.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Field, Shape, StructOf, table_schema
from millstream.kernels.decode.row_reader import RowReader
from millstream.kernels.frames import HIDDEN_PREFIX
from millstream.pipeline.pydantic_models import ModelField, fields_of_model, is_model, validates
from millstream.pipeline.type_hints import shape_of_hint

ColumnTypes = dict[str, pl.DataType]
Declaration = type | Mapping[str, Any]
"""What a schema is declared by: a class, or a mapping of names to types."""


@dataclass(frozen=True)
class Schema:
    """The fields of a class. ``model`` is the class itself where it has validators of its own."""

    fields: tuple[Field, ...]
    model: type | None = None


def schema_of(declared: Declaration, *, what: str) -> Schema:
    """Read the fields of a class or a mapping. ``what`` names it in errors.

    Raises:
        ConfigError: it is none of the classes that are understood, or a field has a type that is
            not known, or a default that does not fit its type.
    """
    if isinstance(declared, Mapping):
        declared = _typed_dict(declared, what)
    if not _is_schema(declared):
        raise ConfigError(
            f"The schema of {what} is {declared!r}. Give a dataclass, a pydantic model, a TypedDict or a "
            "mapping of names to types: its fields are the fields of the topic's values."
        )
    reader = _Reader(())
    fields = reader.fields(declared)
    return Schema(fields, declared if reader.validating or validates(declared) else None)


def _typed_dict(types: Mapping[str, Any], what: str) -> type:
    """Make the TypedDict that a mapping of names to types stands for."""
    for name in types:
        if not isinstance(name, str):
            raise ConfigError(
                f"The schema of {what} has a field whose name is {name!r}. Names are text: give a mapping "
                'such as {"ad": str, "at": datetime}.'
            )
    make: Any = typing.TypedDict  # made like this, which type checkers know of literals only
    made: type = make("values", dict(types))
    return made


def fields_of(declared: Declaration, *, what: str) -> tuple[Field, ...]:
    """Read the fields of a class, as :func:`schema_of` does."""
    return schema_of(declared, what=what).fields


def columns_of(fields: tuple[Field, ...]) -> ColumnTypes:
    """Return the polars type of each field, as expressions see it."""
    empty = pl.from_arrow(table_schema(fields).empty_table())
    assert isinstance(empty, pl.DataFrame)
    return dict(empty.schema)


def _is_schema(declared: object) -> bool:
    return isinstance(declared, type) and (
        dataclasses.is_dataclass(declared) or is_model(declared) or typing.is_typeddict(declared)
    )


@dataclass
class _Reader:
    """Reads one class. ``above`` are the classes in which it is nested."""

    above: tuple[type, ...]
    validating: bool = False  # something below can only be checked by pydantic

    def fields(self, declared: type) -> tuple[Field, ...]:
        if declared in self.above:
            raise ConfigError(
                f"{declared.__name__} has a field that holds {declared.__name__} again. A column "
                "has one depth: leave the field out, or declare it as str."
            )
        inner = _Reader((*self.above, declared))
        found = [inner.field(each, declared) for each in _members(declared)]
        self.validating |= inner.validating
        if not found:
            raise ConfigError(f"{declared.__name__} has no fields. Declare at least one.")
        keys = [field.key for field in found]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{declared.__name__} has two fields read from {key!r}.")
        return tuple(found)

    def field(self, member: ModelField, declared: type) -> Field:
        what = f"{declared.__name__}.{member.name}"
        if member.name.startswith(HIDDEN_PREFIX):
            raise ConfigError(
                f"{what} begins with {HIDDEN_PREFIX!r}, which is reserved. Rename it."
            )
        found = shape_of_hint(
            member.hint, member.metadata, what, self._nested, pydantic=is_model(declared)
        )
        self.validating |= found.validating
        missing_is_null = found.null and not member.strict_presence
        default, null = None, found.null
        if member.default is not None:
            value = _default(member.default, what)
            null |= value is None
            default = None if value is None else _plain(found.shape, value, what)
        return Field.of(
            member.name,
            found.shape,
            required=member.default is None and not missing_is_null,
            default=default,
            null=null,
            wire=member.wire,
        )

    def _nested(self, declared: Any) -> Shape | None:
        if not _is_schema(declared):
            return None
        self.validating |= validates(declared)
        return StructOf(self.fields(declared))


def _members(declared: type) -> Iterator[ModelField]:
    """List a class's fields, with their types as they were written."""
    if is_model(declared):
        yield from fields_of_model(declared)
        return
    hints = _hints(declared)
    if typing.is_typeddict(declared):
        for name, hint in hints.items():
            inner, required = hint, name in declared.__required_keys__  # type: ignore[attr-defined]
            if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
                inner = typing.get_args(hint)[0]
            yield ModelField(name, inner, default=None if required else lambda: None)
        return
    assert dataclasses.is_dataclass(declared)
    for each in dataclasses.fields(declared):
        default: Callable[[], Any] | None = None
        if each.default is not dataclasses.MISSING:
            default = lambda value=each.default: value  # noqa: E731 - a value as a factory
        elif each.default_factory is not dataclasses.MISSING:
            default = each.default_factory
        yield ModelField(each.name, hints[each.name], default=default)


def _hints(declared: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(declared, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"{declared.__name__} has a type that cannot be found: {error}. Define the types that "
            "it names at the top level of its module."
        ) from error


def _default(factory: Callable[[], Any], what: str) -> Any:
    """Return the default; one that differs from call to call would change results."""
    value = factory()
    if factory() != value:
        raise ConfigError(
            f"{what} has a default that is another one each time ({value!r} now). Declare it as "
            "optional, and put the value in with with_columns."
        )
    return value


def _plain(shape: Shape, value: Any, what: str) -> Any:
    try:
        return RowReader(by_name=True).value(shape, value)
    except DecodeError as fault:
        raise ConfigError(
            f"{what} has the default {value!r}: {fault.what}. Give a default of its type."
        ) from None
