"""Reads headers of requests from a file, as every user of a machine can see a command line."""

from __future__ import annotations

import re
from pathlib import Path

from millstream.access.secret_values import resolved
from millstream.errors import ConfigError

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
_RESERVED_PREFIXES = ("webhook-", "millstream-")
_RESERVED = frozenset(
    {"content-length", "content-type", "host", "idempotency-key", "transfer-encoding"}
)


def read_headers(path: Path) -> dict[str, str]:
    """Return the headers that a file holds, one ``NAME: VALUE`` a line.

    Raises:
        ConfigError: there is no such file, a line is not a header, or the webhook sets that header itself.
    """
    try:
        lines = path.read_text("latin-1").splitlines()
    except OSError as error:
        raise ConfigError(f"The headers cannot be read from {path} ({error}).") from error
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise ConfigError(
                f"Line {number} of {path} is no header; give NAME: VALUE, such as Authorization: Bearer …"
            )
        if name.lower() in _RESERVED or name.lower().startswith(_RESERVED_PREFIXES):
            raise ConfigError(
                f"The header {name} in {path} is set by the webhook itself; leave it out."
            )
        headers[name] = resolved(value.strip(), f"the header {name} in {path}")
    return headers
