"""The address of a server, as a URL that somebody has written."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit


def server_address(url: object, schemes: Collection[str]) -> SplitResult | None:
    """Return the parts of a URL that has one of these schemes and names a host; None if it is none.

    A port may be missing, and is a number otherwise.
    """
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, or a port that is no number
        return None
    return parts if is_one else None
