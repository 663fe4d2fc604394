"""The password of a sink: that of its URL, else that of the environment."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

SINK_PASSWORD_VARIABLE = "MILLSTREAM_SINK_PASSWORD"  # noqa: S105 - its name


def sink_password(url: str) -> str | None:
    """Return the password for the server at a URL; None if none is given."""
    given = urlsplit(url).password
    return unquote(given) if given else os.environ.get(SINK_PASSWORD_VARIABLE) or None
