"""Secrets that are named where they are needed, instead of written there: ``${env:NAME}`` and ``${file:/path}``.

======================  ==============================================================================
``${env:NAME}``         the value of a variable of the environment
``${file:/path}``       the content of a file, without the end of its line; such as a container mounts
======================  ==============================================================================

A reference may be a part of a text, and a text may have several: ``postgresql://app:${env:DB_PASSWORD}@db/shop``. In a URL the
value is written as URLs have it (``@`` as ``%40``), so it is given as it is; only where a reference is the whole URL, its value is
the URL. A value is read once, is not searched for references itself, and is in no error and no log.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from millstream.access.tokens import warn_if_exposed
from millstream.choices import did_you_mean
from millstream.errors import ConfigError

_REFERENCE = re.compile(r"\$\{(?P<kind>[a-z]+):(?P<name>[^}]*)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE_BYTES_MAX = 1 << 16
_WRITTEN = re.compile(
    r"[a-z][a-z0-9+.-]*://[^\s/?#@:]*:(?P<password>(?!\$\{)[^\s/?#@]+)@"
    r"|[?&](?:sasl\.password|ssl\.key\.password|sslpassword|password)=(?P<option>(?!\$\{)[^&\s]+)",
    re.IGNORECASE,
)
_log = logging.getLogger(__name__)
_warned: set[Path] = set()


def has_reference(text: str) -> bool:
    """Return whether a text names a secret, so that what becomes of it must not be shown."""
    return _REFERENCE.search(text) is not None


def resolved(text: str, what: str) -> str:
    """Return a text with its secrets. ``what`` names it in errors: "The header Authorization".

    Raises:
        ConfigError: a secret is not there, or cannot be read.
    """
    return _REFERENCE.sub(lambda found: _value(found, what), text)


def resolved_url(url: str, what: str) -> str:
    """Return a URL with its secrets, which are written as URLs have them; as they are, if one is the whole URL.

    Raises:
        ConfigError: a secret is not there, or cannot be read.
    """
    if _REFERENCE.fullmatch(url):
        return resolved(url, what)
    return _REFERENCE.sub(lambda found: quote(_value(found, what), safe=""), url)


def has_written_secret(argument: str) -> bool:
    """Return whether an argument of a command has a password in it, which every user of the machine can then see."""
    return _WRITTEN.search(argument) is not None


def _value(found: re.Match[str], what: str) -> str:
    kind, name = found["kind"], found["name"]
    read: Callable[[str, str], str] | None = {"env": _of_variable, "file": _of_file}.get(kind)
    if read is None:
        near = did_you_mean(kind, ("env", "file"))
        raise ConfigError(
            f"{what} has the reference ${{{kind}:…}}. Give ${{env:NAME}} or ${{file:/path}}.{near}"
        )
    return read(name, what)


def _of_variable(name: str, what: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            f"{what} has the reference ${{env:{name[:80]}}}, which names no variable. Give a name such as DB_PASSWORD."
        )
    value = os.environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise ConfigError(f"{what} needs the variable {name}, which is {state}. Set it.")
    return value


def _of_file(name: str, what: str) -> str:
    path = Path(name)
    if not path.is_absolute():
        raise ConfigError(
            f"{what} has the reference ${{file:{name[:80]}}}. Give an absolute path, such as ${{file:/run/secrets/db}}."
        )
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        value = content.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ConfigError(
            f"{what} needs the file {path}, which cannot be read ({error.strerror}). Correct the path or its rights."
        ) from None
    except UnicodeDecodeError:  # its text has what the file has
        raise ConfigError(
            f"{what} needs the file {path}, which is not UTF-8. Correct it."
        ) from None
    if not value or len(content) > _FILE_BYTES_MAX or "\n" in value or "\0" in value:
        raise ConfigError(
            f"{what} needs the file {path}, which does not have one line of 1 to {_FILE_BYTES_MAX:,} bytes. Correct it."
        )
    if path not in _warned:
        _warned.add(path)
        warn_if_exposed(path, "a secret", _log.warning)
    return value
