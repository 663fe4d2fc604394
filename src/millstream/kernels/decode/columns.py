"""From the columns that Arrow read to those of the fields, and which rows remain undecided.

Column by column: text becomes dates, times of day, bytes and UUIDs, constraints are checked, and
nulls are looked at. A row in which anything is not plainly valid is *undecided*: it is then read by row
(`row_reader.py`), which gives the value or the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from millstream.kernels.decode.constraints import Constraint
from millstream.kernels.decode.fields import (
    Field,
    ListOf,
    Mask,
    Scalar,
    ScalarKind,
    Shape,
    StructOf,
)

# Microseconds since 1970. Plain numbers: to make one of Arrow's loads pandas, in every process anew.
_AFTER_LAST_YEAR = 253_402_300_800_000_000  # the year 10000
_FIRST_YEAR = -62_135_596_800_000_000  # the year 1

_UUID = r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_TIME = r"^([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?$"


def converted(column: pa.Array, shape: Shape) -> tuple[pa.Array, Mask | None]:
    """Turn a column as read into one of the shape's type.

    Returns:
        The column, and which of its elements are undecided; None if none is. Nulls are not: the caller knows
        whether they are allowed.
    """
    match shape:
        case Scalar(kind, checks, _):
            plain, undecided = _scalars(column, kind)
            return plain, _either(undecided, _broken(plain, checks))
        case ListOf(_, _, checks):
            plain, undecided = _lists(column, shape)
            return plain, _either(undecided, _broken(column, checks))
        case StructOf(fields):
            return _structs(column, fields)
    raise AssertionError(f"Arrow's JSON reader takes no {shape}")


def ambiguous(field: Field) -> bool:
    """Whether a null may stand for a missing field, and that is something else than null."""
    return field.takes_null != (not field.required) or field.default is not None


def inexact_decimals(keys: set[str]) -> str:
    """Return the pattern of JSON in which one of the members is a decimal that Arrow may get wrong.

    Arrow reads decimals of more than 38 digits, nine of them decimal places, into other numbers, as
    it does some that have exponents. So those of 30 digits, and those with exponents, are read by
    row; and so are values in which letters are written as escapes, for they may hide a key.
    """
    names = "|".join(
        sorted(form for key in keys for form in (re.escape(key), f"(?i:{_escaped(key)})"))
    )
    number = r'"?[-+]?(?:[0-9]{30}|[0-9.]*[eE])'
    return rf'"(?:{names})"\s*:\s*{number}|\\u00(?:3[0-9]|[46][0-9a-fA-F]|[57][0-9aA])'


def _escaped(key: str) -> str:
    return re.escape(json.dumps(key)[1:-1])


def found_in(values: pa.Array, pattern: str) -> Mask | None:
    """Return in which values a pattern is found; None if in none."""
    try:
        text = pl.Series(values.cast(pa.string()))
        found: Mask = text.str.contains(pattern).to_numpy()
    except pa.ArrowInvalid:  # some text that is not wanted is no UTF-8
        found = _as_mask(pc.match_substring_regex(values, pattern))
    return found if found.any() else None


def _structs(column: pa.Array, fields: tuple[Field, ...]) -> tuple[pa.Array, Mask | None]:
    there = column.is_valid()
    children: list[pa.Array] = []
    undecided: Mask | None = None
    for field, child in zip(fields, column.flatten(), strict=True):
        plain, bad = converted(child, field.value_shape)
        children.append(plain)
        undecided = _either(undecided, bad)
        if child.null_count and (not field.takes_null or ambiguous(field)):
            undecided = _either(undecided, _as_mask(pc.and_(child.is_null(), there)))
    types = [pa.field(field.name, field.type) for field in fields]
    return pa.StructArray.from_arrays(children, fields=types, mask=pc.invert(there)), undecided


def _lists(column: pa.Array, shape: ListOf) -> tuple[pa.Array, Mask | None]:
    offsets = column.offsets.to_numpy()
    elements = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    plain, bad = converted(elements, shape.item)
    if elements.null_count and not shape.null:
        bad = _either(bad, _as_mask(elements.is_null()))
    undecided: Mask | None = None
    if bad is not None and bad.any():
        undecided = np.zeros(len(column), np.bool_)
        undecided[np.repeat(np.arange(len(column)), np.diff(offsets))[bad]] = True
    if plain is elements and not offsets[0]:
        return column, undecided
    rebuilt = pa.ListArray.from_arrays(
        pa.array(offsets - offsets[0], pa.int32()), plain, mask=column.is_null()
    )
    return rebuilt, undecided


def _scalars(column: pa.Array, kind: ScalarKind) -> tuple[pa.Array, Mask | None]:
    match kind:
        case "date":
            plain = _through_polars(column, _dates, pa.date32())
        case "time":
            plain = _through_polars(column, _times, pa.time64("us"))
        case "bytes":
            plain = _through_polars(column, _decoded_base64, pa.binary())
        case "uuid":
            plain = _through_polars(column, _uuids, pa.string())
        case "datetime":
            return column, _outside_the_years(column)
        case "float":
            finite = pc.is_finite(column)
            odd = None if pc.all(finite, min_count=0).as_py() else _as_mask(pc.invert(finite))
            return pc.add(column, 0.0), odd  # -0.0 becomes 0.0, as by row
        case _:
            return column, None
    if plain.null_count == column.null_count:
        return plain, None
    return plain, _as_mask(pc.and_(plain.is_null(), column.is_valid()))


def _outside_the_years(column: pa.Array) -> Mask | None:
    """Find times that Python's datetime cannot hold."""
    if len(column) == column.null_count:
        return None
    instants = column.view(pa.int64())
    seen = pc.min_max(instants)
    if pc.and_(
        pc.greater_equal(seen["min"], _FIRST_YEAR), pc.less(seen["max"], _AFTER_LAST_YEAR)
    ).as_py():
        return None
    inside = pc.and_(pc.greater_equal(instants, _FIRST_YEAR), pc.less(instants, _AFTER_LAST_YEAR))
    return _as_mask(pc.invert(inside))


def _broken(column: pa.Array, checks: tuple[Constraint, ...]) -> Mask | None:
    broken: Mask | None = None
    for check in checks:
        held = check.holds_in(column)
        if pc.all(held, min_count=0).as_py() is False:
            broken = _either(broken, _as_mask(pc.invert(held)))
    return broken


# ── text to other kinds; what cannot be read becomes null ───────────────────────────────────────


def _through_polars(
    column: pa.Array, convert: Callable[[pl.Series], pl.Series], kind: pa.DataType
) -> pa.Array:
    found = pl.Series(column).cast(pl.String)
    return convert(found).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(kind)


def _dates(text: pl.Series) -> pl.Series:
    exact = text.set(~text.str.contains(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), None)
    return exact.str.to_date("%Y-%m-%d", strict=False)


def _times(text: pl.Series) -> pl.Series:
    """Read hours, minutes and, if they are there, seconds to the microsecond."""
    parts = text.str.extract_groups(_TIME).struct.unnest()
    hour, minute, second = (parts.to_series(n).cast(pl.Int64) for n in range(3))
    second = second.fill_null(0)
    fraction = parts.to_series(3).str.pad_end(6, "0").cast(pl.Int64).fill_null(0)
    nanoseconds = (((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction) * 1000
    there = (hour < 24) & (minute < 60) & (second < 60)
    return nanoseconds.set(~there.fill_null(value=False), None).cast(pl.Time)


def _decoded_base64(text: pl.Series) -> pl.Series:
    return text.str.decode("base64", strict=False)


def _uuids(text: pl.Series) -> pl.Series:
    return text.set(~text.str.contains(_UUID), None).str.to_lowercase()


def _as_mask(found: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return mask


def _either(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other
