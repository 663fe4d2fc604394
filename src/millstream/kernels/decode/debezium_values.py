"""Values as Debezium's connectors write them to JSON, by the type of the column that takes them.

The schema of the table decides the type. Where the same JSON may mean two things (a whole number is a time in
milli-, micro- or nanoseconds; text is a decimal number in digits or its bytes in base64), the schema that the record
carries decides, else what was said of the connector; if neither does, the value cannot be read.

Source: Debezium 3.6, "Data type mappings" of the connectors; ``time.precision.mode``,
``decimal.handling.mode``; ``org.apache.kafka.connect.json.JsonConverter``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import ListOf, Scalar, ScalarKind, Shape
from millstream.kernels.decode.row_reader import parse_json

DecimalMode = Literal["precise", "string", "double"]
TimeUnit = Literal["ms", "us", "ns"]

PLACEHOLDER = "__debezium_unavailable_value"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_US = 86_400_000_000
_US_PER_UNIT: dict[TimeUnit, int] = {"ms": 1000, "us": 1}
_DAYS = {"io.debezium.time.Date", "org.apache.kafka.connect.data.Date"}
_UNITS: dict[str, TimeUnit] = {
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.time.Time": "ms",
    "io.debezium.time.MicroTime": "us",
    "io.debezium.time.NanoTime": "ns",
    "org.apache.kafka.connect.data.Time": "ms",
    "io.debezium.time.MicroDuration": "us",
    "io.debezium.time.NanoDuration": "ns",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_WITH_ZONE = re.compile(r"(?:Z|[+-]00:?00)\Z")


@dataclass(frozen=True)
class ColumnEncoding:
    """How a connector writes one column, as far as it was said: options of Debezium, by its names.

    ``duration_unit`` is what numbers in a column of durations count; ``days``: in one of dates and datetimes, days.
    """

    decimals: DecimalMode | None = None
    scale: int | None = None
    time_unit: TimeUnit | None = None
    duration_unit: TimeUnit = "us"
    days: bool = False

    def by_schema(self, schema: Mapping[str, Any] | None) -> ColumnEncoding:
        """Return the encoding that the record's own schema of the column says, or else this one."""
        if schema is None:
            return self
        name = schema.get("name")
        if name == _DECIMAL:
            return replace(self, decimals="precise", scale=_scale(schema))
        if name in _UNITS:
            return replace(self, time_unit=_UNITS[name], duration_unit=_UNITS[name])
        if name in _DAYS:
            return replace(self, days=True)
        if name is None and schema.get("type") == "string":
            return replace(self, decimals="string", scale=None)
        return self


def is_unavailable(value: Any, placeholder: str) -> bool:
    """Return whether a value stands for one that the connector did not get.

    It is text; in a column of bytes the base64 of it; in a column of lists a list with one of these, or with
    its bytes as numbers; in a map a key and a value, which may be text, as hstore's is.
    """
    encoded = placeholder.encode()
    if isinstance(value, str):
        in_map = json.dumps({placeholder: placeholder}, separators=(",", ":"), ensure_ascii=False)
        return value in (placeholder, base64.b64encode(encoded).decode(), in_map)
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str):
            return is_unavailable(value[0], placeholder)
        return len(value) == len(encoded) and value == list(encoded)
    return isinstance(value, dict) and value == {placeholder: placeholder}


def from_debezium(shape: Shape, value: Any, encoding: ColumnEncoding) -> Any:
    """Return a value (not null) of JSON as a value that readers of the shape take.

    Raises:
        DecodeError: it may mean two things, or is not what its encoding says.
    """
    if isinstance(shape, Scalar):
        read = _READERS.get(shape.kind)
        try:
            return value if read is None else read(value, encoding)
        except (OverflowError, ArithmeticError, ValueError) as error:
            raise DecodeError(f"out of range: {error}", value) from None
    if isinstance(value, str):  # JSON in text, as json and hstore come
        value = parse_json(value.encode())
    if isinstance(shape, ListOf) and isinstance(value, list):
        return [
            None if item is None else from_debezium(shape.item, item, encoding) for item in value
        ]
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _microseconds(value: int, encoding: ColumnEncoding) -> int:
    if encoding.time_unit is None:
        raise DecodeError("its unit is not known; say debezium(time_unit=…)", value)
    if encoding.time_unit == "ns":
        if value % 1000:
            raise DecodeError("has more than six digits of a second", value)
        return value // 1000
    return value * _US_PER_UNIT[encoding.time_unit]


def _date(value: Any, encoding: ColumnEncoding) -> Any:  # noqa: ARG001 - all have one encoding
    if _is_whole(value):
        return date(1970, 1, 1) + timedelta(days=value)
    return _WITH_ZONE.sub("", value) if isinstance(value, str) else value


def _datetime(value: Any, encoding: ColumnEncoding) -> Any:
    if not _is_whole(value):
        return value
    if encoding.days:
        return _EPOCH + timedelta(days=value)
    return _EPOCH + timedelta(microseconds=_microseconds(value, encoding))


def _time(value: Any, encoding: ColumnEncoding) -> Any:
    if not _is_whole(value):
        return _WITH_ZONE.sub("", value) if isinstance(value, str) else value
    microseconds = _microseconds(value, encoding)
    if not 0 <= microseconds < _DAY_US:
        raise DecodeError("not a time of day", value)
    return (_EPOCH + timedelta(microseconds=microseconds)).time()


def _timedelta(value: Any, encoding: ColumnEncoding) -> Any:
    if not _is_whole(value):
        return value
    known = replace(encoding, time_unit=encoding.duration_unit)
    return timedelta(microseconds=_microseconds(value, known))


def _decimal(value: Any, encoding: ColumnEncoding) -> Any:
    if isinstance(value, Mapping):  # io.debezium.data.VariableScaleDecimal
        scale, unscaled = value.get("scale"), value.get("value")
        if not isinstance(scale, int) or not isinstance(unscaled, str):
            raise DecodeError("not a decimal with scale and value", dict(value))
        return _from_bytes(unscaled, scale)
    if not isinstance(value, str) or encoding.decimals in ("string", "double"):
        return value
    if encoding.decimals is None:
        raise DecodeError("digits or base64 is not known; say debezium(decimals=…)", value)
    if encoding.scale is None:
        raise DecodeError("its scale is not known; say debezium(scale=…)", value)
    return _from_bytes(value, encoding.scale)


def _from_bytes(text: str, scale: int) -> Decimal:
    """Read a whole number in two's complement, the greatest byte first, and its scale."""
    try:
        unscaled = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise DecodeError("not base64 text", text) from None
    if not unscaled:
        raise DecodeError("not base64 of a number", text)
    # From text, which is exact: arithmetic would round to the digits of the context.
    return Decimal(f"{int.from_bytes(unscaled, 'big', signed=True)}E{-scale}")


def _float(value: Any, encoding: ColumnEncoding) -> Any:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(_NOT_FINITE[value])
    if not isinstance(value, (str, Mapping)):
        return value
    number = _decimal(value, encoding)
    return Decimal(number) if isinstance(number, str) else number


def _int(value: Any, encoding: ColumnEncoding) -> Any:
    if not isinstance(value, (str, Mapping)) or encoding.decimals != "precise":
        return value
    number = _decimal(value, encoding)
    return int(number) if isinstance(number, Decimal) and number == int(number) else value


def _bool(value: Any, encoding: ColumnEncoding) -> Any:  # noqa: ARG001 - all have one encoding
    return bool(value) if _is_whole(value) and value in (0, 1) else value


_READERS: dict[ScalarKind, Any] = {
    "date": _date,
    "datetime": _datetime,
    "time": _time,
    "timedelta": _timedelta,
    "decimal": _decimal,
    "float": _float,
    "int": _int,
    "bool": _bool,
}


def _scale(schema: Mapping[str, Any]) -> int | None:
    parameters = schema.get("parameters")
    text = parameters.get("scale") if isinstance(parameters, Mapping) else None
    return int(text) if isinstance(text, str) and text.removeprefix("-").isdecimal() else None
