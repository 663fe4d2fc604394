"""Amounts of bytes as people write and read them: ``10GiB``."""

from __future__ import annotations

import re

from millstream.errors import ConfigError

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("KB", "MB", "GB", "TB")
_UNITS: dict[str, int] = (
    {"b": 1}
    | {unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)}
    | {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)}
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, what: str) -> int:
    """Return a number of bytes; without a unit it is bytes. ``what`` names it in the error.

    Raises:
        ConfigError: it is not a number with a unit that is known.
    """
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get((found[2] or "b").lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(
            f"{what} is {text!r}; give a number of bytes such as 1048576, or a number and one of "
            f"the units {', '.join(_BINARY + _DECIMAL)}, such as 10GiB"
        )
    number = found[1]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def describe_bytes(size: int) -> str:
    """Say a number of bytes in the largest binary unit that it fills: ``12.4 MiB``."""
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_BINARY))
    return f"{size / 1024**power:.1f}".removesuffix(".0") + f" {_BINARY[power - 1]}"
