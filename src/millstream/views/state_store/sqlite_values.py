"""Between polars columns and the values that SQLite keeps, both ways, without loss.

SQLite has fewer kinds of values than a view. Times are kept as integers (µs since 1970 UTC, days
for dates), decimals as text of fixed scale, lists and structs as JSON text. Two things need care.
SQLite turns NaN into NULL, so NaN is kept as the text ``NaN``. And to SQLite two NULLs in a primary key
are different, while two rows whose key is null are the same row of a view; so a null in a key is kept as
a value that its column cannot otherwise hold: the empty blob, or, in a column of bytes, the integer 0.
(So nulls sort last without further care, except in bytes.) Columns are declared without a type, so SQLite
converts nothing.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.column_types import one_zero
from millstream.views.schema import ViewSchema, dtype_of

_NAN = "NaN"


def normalize(frame: pl.DataFrame, schema: ViewSchema, names: Sequence[str]) -> pl.DataFrame:
    """Return the named columns of a frame in the view's types, one row per key, in key order.

    The last row of a key counts. Key order makes the store write its B-tree in order, and makes the
    change log independent of how Spark split the batch.

    Raises:
        ConfigError: A column is missing, unexpected, or holds what its kind cannot; the message
            names view, column and value.
    """
    missing = [name for name in names if name not in frame.columns]
    extra = [name for name in frame.columns if name not in names]
    if missing or extra:
        raise ConfigError(
            f"The view {schema.name!r} expects the columns {', '.join(names)}; the rows given "
            f"lack {missing or 'none'} and have besides {extra or 'none'}. Give exactly the "
            "columns that the view was declared with."
        )
    kinds = schema.kinds
    # Numbers for names meanwhile: polars takes a name such as "^a.*$" in an expression for a pattern.
    numbered = {str(n): _cast(frame[c], kinds[c], schema.name) for n, c in enumerate(names)}
    out = pl.DataFrame(numbered)
    keys = [str(n) for n, name in enumerate(names) if name in schema.key]
    # As a key, -0.0 and 0.0 are one.
    out = out.with_columns(one_zero(pl.col(key), out[key].dtype) for key in keys)
    if keys:
        out = out.sort(keys, nulls_last=True, maintain_order=True)
        differs = [pl.col(key).ne_missing(pl.col(key).shift(-1)) for key in keys]
        last = out.select(pl.any_horizontal(differs)).to_series()
        if len(last):
            last[-1] = True
        out = out if last.all() else out.filter(last)
    else:
        out = out.tail(1)
    out.columns = list(names)
    return out


def in_kinds(frame: pl.DataFrame, schema: ViewSchema) -> pl.DataFrame:
    """Return all rows of a frame, in their order, with the values as views keep them.

    Raises:
        ConfigError: a column holds what its kind cannot.
    """
    return pl.DataFrame([_cast(frame[name], kind, schema.name) for name, kind in schema.columns])


def exclude_keys(deletes: pl.DataFrame, upserts: pl.DataFrame) -> pl.DataFrame:
    """Return the keys to delete that are not among the rows to upsert; both normalised."""
    keys = [str(n) for n in range(deletes.width)]
    kept = pl.DataFrame({str(n): upserts[name] for n, name in enumerate(deletes.columns)})
    deletes = deletes.clone()
    names, deletes.columns = deletes.columns, keys
    out = deletes.join(kept, on=keys, how="anti", nulls_equal=True, maintain_order="left")
    out.columns = names
    return out


def select_keys(rows: pl.DataFrame, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose keys are among ``keys``, in their order; both normalised."""
    # Numbers for names meanwhile: polars takes a name such as "^a.*$" in an expression for a pattern.
    numbers = [str(n) for n in range(keys.width)]
    own = pl.DataFrame([rows[name].alias(n) for n, name in zip(numbers, keys.columns, strict=True)])
    some = pl.DataFrame(
        [keys[name].alias(n) for n, name in zip(numbers, keys.columns, strict=True)]
    )
    found = own.with_row_index("at").join(some, on=numbers, how="semi", nulls_equal=True)
    return rows[found["at"].sort()]


def _cast(series: pl.Series, kind: str, view: str) -> pl.Series:
    """Return the series in the type of its kind; refuse values that do not fit exactly."""
    if kind == "json":
        return pl.Series(series.name, [_json_text(v, view) for v in series.to_list()], pl.String)
    dtype = dtype_of(kind)
    source = series.dtype
    if source == dtype:
        return series
    if not _convertible(source, kind):
        raise ConfigError(
            f"Column {series.name!r} of the view {view!r} keeps {kind}, and the rows given have "
            f"{source} there. Cast the column, or declare the view with its type."
        )
    try:
        if kind == "datetime":
            return _utc(series)
        cast = series.cast(dtype, strict=True)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(
            f"Column {series.name!r} of the view {view!r} keeps {kind}, and a value does not fit: "
            f"{str(error).splitlines()[0]}. Cast or round it in the pipeline."
        ) from error
    if isinstance(source, pl.Decimal) and not cast.cast(source).equals(series):
        raise ConfigError(
            f"Column {series.name!r} of the view {view!r} keeps {kind}, and values of {source} "
            "have more decimal places than that. Round them, or declare more places."
        )
    return cast


def _convertible(source: pl.DataType, kind: str) -> bool:
    if source == pl.Null:
        return True
    if kind == "int":
        return source.is_integer()
    if kind == "float" or kind.startswith("decimal"):
        return source.is_numeric()
    allowed: dict[str, tuple[type[pl.DataType], ...]] = {
        "str": (pl.String,),
        "bool": (pl.Boolean,),
        "datetime": (pl.Datetime,),
        "date": (pl.Date,),
        "duration": (pl.Duration,),
        "bytes": (pl.Binary,),
    }
    return isinstance(source, allowed[kind])


def _utc(series: pl.Series) -> pl.Series:
    """Return times in UTC: those with a zone as the same instant, those without as they are."""
    if series.dtype == pl.Null:
        return series.cast(pl.Datetime("us", "UTC"))
    series = series.dt.cast_time_unit("us")
    zone = series.dtype.time_zone if isinstance(series.dtype, pl.Datetime) else None
    if zone is None:
        return series.dt.replace_time_zone("UTC")
    return series.dt.convert_time_zone("UTC")


def _json_text(value: Any, view: str) -> str | None:
    """Return lists and structs as JSON text; text must be JSON already and stays as it is."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"A json column of the view {view!r} was given the text {value[:80]!r}, which is "
                "not JSON. Declare the column as str, or give lists or structs."
            ) from error
        return value
    if isinstance(value, pl.Series):
        value = value.to_list()
    try:
        return _JSON.encode(value)
    except ValueError:  # numbers that are not finite, which JSON lacks, become null
        return _JSON.encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, pl.Series):
        value = value.to_list()
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_default(value: Any) -> Any:
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, pl.Series):
        return value.to_list()
    return str(value)


_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_default
)


def null_key(kind: str) -> Any:
    """Return the value that represents null in a key column of this kind."""
    return 0 if kind == "bytes" else b""


def encode_rows(frame: pl.DataFrame, schema: ViewSchema) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a normalised frame as tuples of SQLite values."""
    kinds = schema.kinds
    lists = [
        _encode(column, kinds[column.name], key=column.name in schema.key)
        for column in frame.iter_columns()
    ]
    return zip(*lists, strict=True)


def _encode(series: pl.Series, kind: str, *, key: bool) -> list[Any]:
    series = series.alias("0")  # polars takes a name such as "^a.*$" for a pattern
    if kind in ("datetime", "date", "duration"):
        series = series.to_physical()
    elif kind == "bool":
        series = series.cast(pl.Int8)
    elif kind.startswith("decimal"):
        series = series.cast(pl.String)
    values = series.to_list()
    if kind == "float" and series.is_nan().any():
        values = [_NAN if v is not None and v != v else v for v in values]  # noqa: PLR0124
    if key and series.null_count():
        null = null_key(kind)
        values = [null if v is None else v for v in values]
    return values


def decode_rows(rows: Sequence[Sequence[Any]], schema: ViewSchema) -> pl.DataFrame:
    """Return rows as read from SQLite (all columns of the view, in order) as a typed frame."""
    lists: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(schema.columns)
    columns = {}
    for values, (name, kind) in zip(lists, schema.columns, strict=True):
        if name in schema.key:
            null = null_key(kind)
            values = [None if _is_null_key(v, null) else v for v in values]  # noqa: PLW2901
        columns[name] = _decode(name, kind, values)
    return pl.DataFrame(columns)


def _is_null_key(value: Any, null: Any) -> bool:
    return type(value) is type(null) and bool(value == null)


def _decode(name: str, kind: str, values: Sequence[Any]) -> pl.Series:
    dtype = dtype_of(kind)
    if kind == "float":
        return pl.Series(name, [_number(v) for v in values], dtype)
    if kind in ("datetime", "date", "duration", "bool"):
        return pl.Series(name, values, pl.Int64()).cast(dtype)
    if kind.startswith("decimal"):
        return pl.Series(name, [None if v is None else Decimal(v) for v in values], dtype)
    return pl.Series(name, values, dtype)


def _number(value: Any) -> float | None:
    return value if value is None else float(value)


def parse_value(text: str, kind: str) -> Any:
    """Return the value of a text, from a command line or a request, for a column of this kind.

    Raises:
        ConfigError: The text is not such a value; the message shows the expected form.
    """
    forms: dict[str, tuple[str, Callable[[str], Any]]] = {
        "int": ("a whole number, such as 7", int),
        "float": ("a number, such as 0.5", float),
        "bool": ("true or false", lambda t: {"true": True, "false": False}[t.lower()]),
        "datetime": ("a time, such as 2019-11-24T00:00:00Z", dt.datetime.fromisoformat),
        "date": ("a day, such as 2019-11-24", dt.date.fromisoformat),
        "duration": ("a number of seconds", lambda t: dt.timedelta(seconds=float(t))),
        "decimal": ("a number, such as 0.50", Decimal),
        "bytes": ("bytes as hexadecimal digits", bytes.fromhex),
    }
    plain = kind.partition("(")[0]
    if plain not in forms:
        return text
    form, read = forms[plain]
    try:
        return read(text)
    except (ValueError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"{text!r} is not {form}, which a column of {kind} needs.") from error
