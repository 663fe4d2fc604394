"""From the types of Python to the shapes of values, with the constraints that stand beside them."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.decode.constraints import Constraint, Rule
from millstream.kernels.decode.fields import ListOf, MapOf, Scalar, ScalarKind, Shape

KNOWN_TYPES = (
    "int, float, bool, str, datetime, date, time, timedelta, Decimal, bytes, UUID, enums and "
    "Literal of one type, list[...], tuple[..., ...], dict[str, ...], dataclasses, pydantic "
    "models, TypedDicts, and any of these with | None"
)

_KINDS: Mapping[Any, ScalarKind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    datetime: "datetime",
    date: "date",
    time: "time",
    timedelta: "timedelta",
    Decimal: "decimal",
    bytes: "bytes",
    UUID: "uuid",
}
_RULES: frozenset[str] = frozenset(typing.get_args(Rule)) - {"one_of", "finite"}
_UNIONS = (typing.Union, types.UnionType)

Nested = Callable[[Any], Shape | None]


@dataclass(frozen=True)
class HintShape:
    """What a type is. ``validating``: only pydantic can check all that it asks for."""

    shape: Shape
    null: bool = False
    validating: bool = False


@dataclass(frozen=True)
class Constraints:
    """What stands beside a type. ``unsupported`` is the first that is not understood here."""

    checks: tuple[Constraint, ...] = ()
    unsupported: object = None


def shape_of_hint(
    hint: Any, metadata: Sequence[object], what: str, nested: Nested, *, pydantic: bool
) -> HintShape:
    """Give the shape of a type. ``nested`` gives the shape of a class that has fields.

    Raises:
        ConfigError: the type is not known, or a constraint does not go with it.
    """
    return _Types(what, nested, pydantic=pydantic).found(hint, tuple(metadata))


@dataclass(frozen=True)
class _Types:
    what: str
    nested: Nested
    pydantic: bool

    def found(self, hint: Any, metadata: tuple[object, ...]) -> HintShape:
        hint, within = _unwrapped(hint)
        metadata = (*within, *metadata)
        if typing.get_origin(hint) in _UNIONS:
            return self._union(hint, metadata)
        constraints = read_constraints(metadata)
        if constraints.unsupported is not None and not self.pydantic:
            raise ConfigError(
                f"{self.what} is constrained by {constraints.unsupported!r}, which only pydantic can "
                "check. Make the class a pydantic model, or filter the stream."
            )
        found = self._plain(hint, constraints.checks)
        validating = found.validating or constraints.unsupported is not None
        return HintShape(found.shape, found.null, validating)

    def _union(self, hint: Any, metadata: tuple[object, ...]) -> HintShape:
        members = [each for each in typing.get_args(hint) if each is not type(None)]
        null = len(members) < len(typing.get_args(hint))
        if set(members) == {int, float}:
            members = [float]
        if len(members) != 1:
            raise self._unknown(hint)
        found = self.found(members[0], metadata)
        return HintShape(found.shape, found.null or null, found.validating)

    def _plain(self, hint: Any, checks: tuple[Constraint, ...]) -> HintShape:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint in _KINDS:
            kind = _KINDS[hint]
            # Pydantic has rules of its own for bytes in JSON, which its configuration changes.
            validating = self.pydantic and kind == "bytes"
            return HintShape(Scalar(kind, self._fitting(checks, kind)), validating=validating)
        if self.pydantic and getattr(hint, "__name__", "") == "AwareDatetime":
            return HintShape(Scalar("datetime", self._fitting(checks, "datetime"), zoned=True))
        if origin is typing.Literal:
            null = None in arguments
            return HintShape(self._choice([a for a in arguments if a is not None], hint), null)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return HintShape(self._choice([member.value for member in hint], hint))
        found = self._collection(origin, arguments, checks)
        if found is not None:
            return found
        inner = self.nested(hint)
        if inner is None:
            raise self._unknown(hint)
        return HintShape(inner)

    def _collection(
        self, origin: Any, arguments: tuple[Any, ...], checks: tuple[Constraint, ...]
    ) -> HintShape | None:
        if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (Ellipsis,)):
            inner = self.found(arguments[0], ())
            shape = ListOf(inner.shape, inner.null, self._fitting(checks, "list"))
            return HintShape(shape, validating=inner.validating)
        if origin in (dict, Mapping) and arguments[0] is str:
            inner = self.found(arguments[1], ())
            mapped = MapOf(inner.shape, inner.null, self._fitting(checks, "dict"))
            return HintShape(mapped, validating=inner.validating)
        return None

    def _choice(self, values: list[Any], hint: Any) -> Shape:
        for kind in (str, int):
            if values and all(type(value) is kind for value in values):
                return Scalar(_KINDS[kind], (Constraint("one_of", tuple(values)),))
        if all(isinstance(value, str) for value in values):
            return Scalar("str", (Constraint("one_of", tuple(map(str, values))),))
        raise ConfigError(
            f"{self.what} has the type {_name(hint)}, whose values are {values!r}. Use values that "
            "are all text, or all whole numbers."
        )

    def _fitting(self, checks: tuple[Constraint, ...], kind: str) -> tuple[Constraint, ...]:
        """Make the limits values of the kind, and refuse what does not go with it."""
        return tuple(self._limit(check, kind) for check in checks)

    def _limit(self, check: Constraint, kind: str) -> Constraint:
        numbers = ("int", "float", "decimal")
        ordered = (*numbers, "datetime", "date", "time", "timedelta")
        allowed: Mapping[str, tuple[str, ...]] = {
            "min_length": ("str", "bytes", "list", "dict"),
            "max_length": ("str", "bytes", "list", "dict"),
            "pattern": ("str",),
            "multiple_of": numbers,
            "finite": numbers,
        }
        if kind not in allowed.get(check.rule, ordered):
            raise ConfigError(
                f"{self.what} has the constraint {check.rule}={check.limit!r}, which does not go "
                f"with {kind}. Remove it."
            )
        if check.rule == "finite":
            return check
        if check.rule == "pattern":
            return Constraint("pattern", self._pattern(check.limit))
        if kind == "decimal":
            return Constraint(check.rule, Decimal(str(check.limit)))
        if kind == "float":
            return Constraint(check.rule, float(check.limit))
        if kind == "datetime" and check.limit.tzinfo is None:
            return Constraint(check.rule, check.limit.replace(tzinfo=UTC))
        return check

    def _pattern(self, pattern: str | re.Pattern[str]) -> str:
        text = pattern if isinstance(pattern, str) else pattern.pattern
        try:
            pl.Series([""]).str.contains(text)
        except pl.exceptions.PolarsError as error:
            raise ConfigError(
                f"{self.what} has the pattern {text!r}, which Rust's regular expressions do not "
                f"know: {str(error).splitlines()[0]}. Write it without look-around and references."
            ) from error
        return text

    def _unknown(self, hint: Any) -> ConfigError:
        return ConfigError(f"{self.what} has the type {_name(hint)}. Known are {KNOWN_TYPES}.")


def read_constraints(metadata: Iterable[object]) -> Constraints:
    """Read what stands beside a type: objects with attributes such as ``ge`` or ``max_length``.

    That is how `annotated-types` and pydantic write constraints. Objects of other makes that do
    not take part in validation are passed over.
    """
    checks: list[Constraint] = []
    foreign: object = None
    for each in metadata:
        if hasattr(each, "metadata") and hasattr(each, "annotation"):  # pydantic's Field(...)
            inner = read_constraints(each.metadata)
            checks += inner.checks
            foreign = foreign or inner.unsupported
            continue
        if not _takes_part(each):
            continue
        for name, value in _attributes(each).items():
            if name in _RULES and value is not None:
                checks.append(Constraint(typing.cast("Rule", name), value))
            elif name == "allow_inf_nan" and value is False:
                checks.append(Constraint("finite"))
            elif name not in ("strict", "allow_inf_nan") and value not in (None, False):
                foreign = foreign or each
    return Constraints(tuple(checks), foreign)


def _takes_part(each: object) -> bool:
    maker = type(each).__module__.partition(".")[0]
    return maker in ("pydantic", "annotated_types") or hasattr(each, "__get_pydantic_core_schema__")


def _attributes(each: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(each):
        found = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
    else:
        found = dict(getattr(each, "__dict__", {}))
    # What validates without saying by which attribute is not to be passed over.
    return found or {"validation": each}


def _unwrapped(hint: Any) -> tuple[Any, tuple[object, ...]]:
    """Take names and annotations off a type."""
    metadata: tuple[object, ...] = ()
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            hint, *beside = typing.get_args(hint)
            metadata = (*metadata, *beside)
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__"):  # a `type` alias
            hint = hint.__value__
        else:
            return hint, metadata


def _name(hint: Any) -> str:
    return str(hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else hint)
