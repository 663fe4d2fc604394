"""What sources and sinks of HTTP are given alike: an address without secrets, and headers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Literal

from millstream.access.server_address import server_address
from millstream.errors import ConfigError

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)


def check_http_url(url: str, side: Literal["source", "sink"], variable: str) -> None:
    """Check that a URL is one of HTTP that can be asked as it is.

    Args:
        variable: The environment variable that takes the secret.

    Raises:
        ConfigError: it is not, or it holds a user or a password.
    """
    parts = server_address(url, ("http", "https"))
    if parts is None or not url.isascii() or not url.isprintable() or " " in url or "#" in url:
        raise ConfigError(
            f"the {side}'s address is no URL of HTTP. Give https://host/path, with other characters than letters and digits as "
            "%20 is for a space."
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"the {side}'s address has a user or a password in it. Give them as a header: ${variable} is Authorization."
        )


def request_headers(
    given: Mapping[str, str], ours: Collection[str], variable: str
) -> dict[str, str]:
    """Return the headers of each request: those that were given, and Authorization from a variable of the environment.

    Args:
        ours: Names, in small letters, that cannot be given.

    Raises:
        ConfigError: one cannot be sent.
    """
    for name, text in given.items():
        if not _HEADER.fullmatch(name) or name.lower() in ours or not _is_header_text(text):
            raise ConfigError(
                f"the header {name!r} cannot be sent. Give names of letters, digits and -, other than {', '.join(ours)}, and "
                "text in one line of ASCII."
            )
    secret = os.environ.get(variable)
    if not secret or "authorization" in map(str.lower, given):
        return dict(given)
    if not _is_header_text(secret):
        raise ConfigError(f"${variable} cannot be a header. Give text in one line of ASCII.")
    return {**given, "Authorization": secret}


def _is_header_text(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isprintable()
