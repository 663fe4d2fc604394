"""The definition of a step or output as plain values: the same in every process, and readable.

A description has every field of every step, expressions with all their options, types in full, and the
user's functions by their code. So it is complete by construction, and a kernel that gets a new parameter
need not report it. The names of steps are for people, and left out.

Where the text is not complete (an expression prints neither all its options nor the code of functions), a
leaf has ``text``, the text, and ``code``, a digest of the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa

from millstream.durations import format_us
from millstream.kernels.code_digest import code_digest, code_name, digest, expression_digest

Description = Any  # of JSON's kinds

_WORD_ENDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_UNSAID = frozenset({"class", "dtype", "state", "signed"})  # they follow from the rest


def describe(value: Any, *, without: frozenset[str] = frozenset()) -> Description:
    """Describe a value; of a dataclass of ours all fields but those named in ``without``.

    Fields that do not define it (``NOT_DEFINING``) are left out, too.
    """
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        if value and all(_is_named(item) for item in value):
            return {name: describe(item) for name, item in value}
        return [describe(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((describe(item) for item in value), key=canonical_text)
    if is_dataclass(value) and type(value).__module__.startswith("millstream."):
        described = [
            f.name
            for f in fields(value)
            if f.name not in without and f.metadata.get("defining", True)
        ]
        own = {name: describe(getattr(value, name)) for name in described}
        return {"class": type(value).__name__, **own}
    return _plain(value)


def _is_named(item: Any) -> bool:
    """Return whether an item of a list is a name and what has it, as columns and aggregates are."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _plain(value: Any) -> Description:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, pl.Expr):
        return {"text": str(value), "code": expression_digest(value)}
    if isinstance(value, pl.DataFrame):
        return {name: repr(dtype) for name, dtype in value.schema.items()}
    if isinstance(value, (float, bytes, pl.DataType)):
        return repr(value)
    if isinstance(value, pa.DataType):
        return str(value)
    return {"text": code_name(value), "code": code_digest(value)}


def canonical_text(description: Description) -> str:
    """Return the text by which descriptions are compared."""
    return json.dumps(description, ensure_ascii=False)


def without_code(description: Description) -> Description:
    """Return what text says of it: a description without the digests of code."""
    if isinstance(description, Mapping):
        return {key: without_code(item) for key, item in description.items() if key != "code"}
    if isinstance(description, list):
        return [without_code(item) for item in description]
    return description


def definition_keys(descriptions: list[Description]) -> list[str]:
    """Return each description a short key that depends on it alone, and not on its place in the list.

    Those that say the same get numbers, in the order of what their code is.
    """
    stems = [digest(canonical_text(without_code(one))) for one in descriptions]
    ranked = sorted(range(len(stems)), key=lambda n: canonical_text(descriptions[n]))
    keys = dict.fromkeys(range(len(stems)), "")
    for number in ranked:
        before = sum(1 for other in ranked if keys[other] and stems[other] == stems[number])
        keys[number] = stems[number] if not before else f"{stems[number]}#{before + 1}"
    return [keys[number] for number in range(len(stems))]


def _named(key: str, value: Any) -> str:
    return f"{key.removesuffix('_us')}={field_to_text(key, value)}"


def field_to_text(key: str, description: Description) -> str:
    """Say in words what a description has under a key: what is in microseconds, as a duration."""
    if key.endswith("_us") and isinstance(description, int):
        return format_us(description)
    return to_text(description)


def to_text(description: Description) -> str:
    """Say a description in words, as in an error."""
    if isinstance(description, Mapping):
        if "text" in description:
            return str(description["text"])
        word = _WORD_ENDS.sub("_", str(description.get("class", ""))).lower()
        described = [
            to_text(item) if isinstance(item, (Mapping, list)) else _named(key, item)
            for key, item in description.items()
            if key not in _UNSAID and item is not None and item is not False and item != []
        ]
        return f"{word}({', '.join(described)})"
    if isinstance(description, list):
        return f"[{', '.join(map(to_text, description))}]"
    return "none" if description is None else str(description)


describe_step = partial(describe, without=frozenset({"name"}))
"""Describe a step or kernel without its name."""
