"""The value of `--at-least`: a position that an answer has to have reached."""

from __future__ import annotations

import json
from typing import Any

from millstream.errors import ConfigError


def read_position(text: str | None) -> dict[str, Any] | None:
    """Return topic → partition → offset; None if none was given.

    Raises:
        ConfigError: it is not that, as JSON.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--at-least is not JSON ({error}). Give a position as JSON.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--at-least is {text!r}. Give topic → partition → offset, as JSON.")
    return found
