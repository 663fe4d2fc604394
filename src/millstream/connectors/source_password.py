"""The password of a source: that of its URL, else that of the environment."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

PASSWORD_VARIABLE = "MILLSTREAM_SOURCE_PASSWORD"  # noqa: S105 - its name


def source_password(url: str) -> str | None:
    """Return the password for the server at a URL; None if none is given."""
    given = urlsplit(url).password
    return unquote(given) if given else os.environ.get(PASSWORD_VARIABLE) or None
