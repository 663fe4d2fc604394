"""Small files that are replaced as a whole: JSON on one line, and its CRC-32C on the next.

The JSON says which version of its layout it is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c


def pack_checked(values: Mapping[str, object], *, version: int) -> bytes:
    """Return the content of a file that holds ``values``, in this version of its layout."""
    line = json.dumps({"version": version, **values}, separators=(",", ":")).encode("ascii")
    return line + b"\n%08x\n" % google_crc32c.value(line)


def unpack_checked(content: bytes, *, version: int) -> dict[str, Any]:
    """Return what :func:`pack_checked` was given.

    Raises:
        ValueError: the content is damaged, of another version, or something else.
        KeyError, TypeError: it is something else.
    """
    line, _, rest = content.partition(b"\n")
    if rest != b"%08x\n" % google_crc32c.value(line):
        raise ValueError("its bytes do not match its CRC-32C")
    values: dict[str, Any] = json.loads(line)
    found = values.pop("version")
    if found != version:
        raise ValueError(f"it has version {found}, and this program reads {version}")
    return values
