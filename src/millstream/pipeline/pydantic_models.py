"""Pydantic models as schemas, without importing pydantic: a model says itself what it is.

Types, aliases, defaults and constraints are read off the model, and checked by Millstream a column
at a time. What a model does by code of its own (validators, transformations, unusual settings)
only pydantic can do: such a model *validates*, and its values go through it one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import ConfigError

# Settings of a model that change what it takes or makes of it.
_TELLING_SETTINGS = (
    "str_strip_whitespace",
    "str_to_lower",
    "str_to_upper",
    "str_min_length",
    "str_max_length",
    "coerce_numbers_to_str",
    "arbitrary_types_allowed",
    "populate_by_name",
    "validate_by_name",
    "validate_default",
)


@dataclass(frozen=True)
class ModelField:
    """A field as its class declares it. ``default`` makes the default; None if there is none.

    ``strict_presence``: a field that may be null must be there all the same.
    """

    name: str
    hint: Any
    metadata: tuple[object, ...] = ()
    default: Callable[[], Any] | None = None
    wire: str = ""
    strict_presence: bool = False


def is_model(declared: object) -> bool:
    """Whether it is a model of pydantic 2, or one of its dataclasses."""
    return isinstance(declared, type) and isinstance(
        getattr(declared, "__pydantic_fields__", None), dict
    )


def fields_of_model(declared: type) -> Iterator[ModelField]:
    """List the fields of a model.

    Raises:
        ConfigError: it is a RootModel: its values are no objects.
    """
    if getattr(declared, "__pydantic_root_model__", False):
        raise ConfigError(
            f"{declared.__name__} is a RootModel. The values of a topic are objects: give a model "
            "with fields."
        )
    for name, info in _infos(declared).items():
        alias = info.validation_alias or info.alias
        yield ModelField(
            name,
            info.annotation,
            metadata=tuple(info.metadata),
            default=_default(info),
            wire=alias if isinstance(alias, str) else "",
            strict_presence=True,
        )


def validates(declared: type) -> bool:
    """Whether a model does by code of its own what only pydantic can do."""
    if not is_model(declared):
        return False
    if any(_own_code(declared)):
        return True
    settings: Mapping[str, Any] = getattr(
        declared, "model_config", getattr(declared, "__pydantic_config__", {})
    )
    return (
        any(settings.get(name) for name in _TELLING_SETTINGS)
        or settings.get("extra") == "forbid"
        or settings.get("allow_inf_nan") is False
        or settings.get("regex_engine") == "python-re"
        or any(map(_field_needs_pydantic, _infos(declared).values()))
    )


def _own_code(declared: type) -> Iterator[bool]:
    decorators = declared.__pydantic_decorators__  # type: ignore[attr-defined]
    for kind in ("validators", "field_validators", "root_validators", "model_validators"):
        yield bool(getattr(decorators, kind))
    yield bool(getattr(declared, "__pydantic_custom_init__", False))
    for each in declared.__mro__:
        if not each.__module__.startswith("pydantic"):
            yield "__get_pydantic_core_schema__" in vars(each)


def _field_needs_pydantic(info: Any) -> bool:
    alias = info.validation_alias or info.alias
    return bool(
        (alias is not None and not isinstance(alias, str))
        or getattr(info, "discriminator", None) is not None
        or getattr(info, "default_factory_takes_validated_data", False)
    )


def _infos(declared: type) -> dict[str, Any]:
    infos: dict[str, Any] = declared.__pydantic_fields__  # type: ignore[attr-defined]
    return infos


def _default(info: Any) -> Callable[[], Any] | None:
    if info.is_required():
        return None
    if info.default_factory is not None:
        if getattr(info, "default_factory_takes_validated_data", False):
            return lambda: None  # pydantic makes it, record by record
        factory: Callable[[], Any] = info.default_factory
        return factory
    return lambda: info.default
