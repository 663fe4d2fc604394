"""Values of every type that polars has, and which of them are one key: what tests of types share.

``EVERY`` says how many of the cases are taken: every so many; in the lane of types, all.
"""

from datetime import date, time
from decimal import Decimal

import polars as pl

EVERY = 6
NAN = float("nan")
LONG = "".join(chr(33 + n * 7919 % 90) for n in range(10_000))


def _times(dtype, *values):
    return pl.Series([0, 1, -1, None, 0, *values], dtype=pl.Int64).cast(dtype)


SAMPLES = {
    "Boolean": pl.Series([True, False, None, True]),
    **{
        name: pl.Series([low, high, 0, None, low], dtype=getattr(pl, name))
        for name, low, high in [
            ("Int8", -(2**7), 2**7 - 1),
            ("Int16", -(2**15), 2**15 - 1),
            ("Int32", -(2**31), 2**31 - 1),
            ("Int64", -(2**63), 2**63 - 1),
            ("UInt8", 1, 2**8 - 1),
            ("UInt16", 1, 2**16 - 1),
            ("UInt32", 1, 2**32 - 1),
            ("UInt64", 2**63, 2**64 - 1),
            ("Int128", -(2**127), 2**127 - 1),
            ("UInt128", 1, 2**127),
        ]
    },
    "Float32": pl.Series([0.0, -0.0, NAN, -NAN, None, float("inf"), 1.5], dtype=pl.Float32),
    "Float64": pl.Series([0.0, -0.0, NAN, -NAN, None, -float("inf"), 5e-324, 1e308]),
    "Decimal": pl.Series(
        [Decimal("1.50"), Decimal("-1.50"), None, Decimal("1.5"), Decimal(10**30)],
        dtype=pl.Decimal(38, 2),
    ),
    "String": pl.Series(["", None, "é", "e\u0301", "E", LONG, LONG + "!", "\0", "a/b=c", ""]),
    "Binary": pl.Series([b"", None, b"\xff\xfe", b"\0", LONG.encode(), LONG.encode() + b"!", b""]),
    "Categorical": pl.Series(["b", "a", None, "b"], dtype=pl.Categorical),
    "Enum": pl.Series(["b", "a", None, "b"], dtype=pl.Enum(["b", "a"])),
    "Date": pl.Series([date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31), None, date(1, 1, 1)]),
    "Time": pl.Series([time(0), time(23, 59, 59, 999999), None, time(0)]),
    "Datetime": _times(pl.Datetime("us", "UTC"), -62_135_596_800_000_000, 253_402_300_799_999_999),
    "Datetime, no zone": _times(pl.Datetime("us")),
    "Datetime, ms in Tokyo": _times(pl.Datetime("ms", "Asia/Tokyo")),
    "Datetime, ns": _times(pl.Datetime("ns")),
    "Duration": _times(pl.Duration("us"), 2**62),
    "Duration, ns": _times(pl.Duration("ns")),
    "List": pl.Series([[1, None], [], None, [1, None]], dtype=pl.List(pl.Int64)),
    "Array": pl.Series([[1, 2], None, [1, 2]], dtype=pl.Array(pl.Int64, 2)),
    "Struct": pl.Series([{"a": 1.5}, {"a": NAN}, None, {"a": None}]),
    "List of Categorical": pl.Series([["a"], None], dtype=pl.List(pl.Categorical)),
    "Struct with an Enum": pl.Series([{"a": "b"}], dtype=pl.Struct({"a": pl.Enum(["b"])})),
    "Null": pl.Series([None, None], dtype=pl.Null),
    "Object": pl.Series([object(), object()], dtype=pl.Object),
    "Float16": pl.Series([0.5, None], dtype=getattr(pl, "Float16", pl.Float32)),
}


def table_name(name):
    """Name the row of the table of types that a sample belongs to."""
    return name.partition(",")[0].partition(" ")[0]


def key_of(value):
    """Give what stands for a key: equal where the keys are one."""
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    return (type(value).__name__, value)


def keys_of(values):
    """Give what stands for the key of each value; nanoseconds, which Python lacks, count too."""
    if values.dtype.is_temporal():
        values = values.to_physical()
    return [key_of(value) for value in values.to_list()]


def some_of(cases):
    """Give the share of the cases that this run takes."""
    return cases[::EVERY]
