"""Reads the token that requests must carry from a file, as every user of a machine sees a command line."""

from __future__ import annotations

from pathlib import Path

from millstream.errors import ConfigError

_LENGTH_MIN = 16


def read_token(path: Path) -> str:
    """Return the token that a file holds.

    Raises:
        ConfigError: there is no such file, or its content is not a token.
    """
    try:
        token = path.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The token cannot be read from {path} ({error}). Give a file with one line of ASCII, such "
            "as `openssl rand -hex 32` makes."
        ) from error
    if len(token) < _LENGTH_MIN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"The token in {path} has {len(token)} characters; give one line of {_LENGTH_MIN} or "
            "more without spaces, such as `openssl rand -hex 32` makes."
        )
    return token
