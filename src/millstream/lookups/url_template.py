"""Addresses with places for values: ``https://example.org/users/{user}?key={token}``.

A value stays where its place is: it is escaped as a whole, so a ``/``, ``?``, ``#`` or ``%`` of it is no part of the
address's own structure. A place cannot be in the scheme, host or port. A value that would make a step of the
path empty, ``.`` or ``..`` is refused, also where only a server that unescapes ``%2F`` would see that: such an
address is another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from urllib.parse import quote, unquote, urlsplit

from millstream.errors import ConfigError
from millstream.kernels.enrichment.calls import LookupCallError
from millstream.lookups.http_client import DEFAULT_PORTS, Origin

_EXAMPLE = "https://api.example.org/users/{user}"
_BEGINNING = re.compile(r"(https?)://[^/?#\\]+")
_STEPS = re.compile(r"[/\\]")


@dataclass(frozen=True)
class UrlTemplate:
    """A parsed template: texts, each with the name of the place that follows it."""

    text: str
    origin: Origin
    parts: tuple[tuple[str, str | None], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.parts if name is not None)

    def target(self, values: Mapping[str, str]) -> str:
        """Return path and query with the values in their places.

        Raises:
            LookupCallError: a value cannot be in a path.
        """
        path, query = "", None
        for text, name in self.parts:
            value = "" if name is None else quote(values[name], safe="")
            if query is not None:
                query += text + value
            elif "?" in text:
                path, query = path + text.partition("?")[0], text.partition("?")[2] + value
            else:
                path += text + value
                if name is not None:
                    _require_plain(name, values[name])
        self._require_steps(path)
        path = path or "/"
        return path if query is None else f"{path}?{query}"

    def _require_steps(self, path: str) -> None:
        """Make sure that the path has the steps of the template, and no others."""
        own = "".join(f"{text}{'' if name is None else 'x'}" for text, name in self.parts)
        expected = own.partition("?")[0].split("/")
        for filled, step in zip(path.split("/"), expected, strict=True):
            if filled != step and filled in ("", ".", ".."):
                raise LookupCallError(
                    f"a value makes a step of the path of {self.text} {filled!r}, which is another address",
                    retriable=False,
                )
            # Also of two values side by side: "x/" and "..".
            within = _STEPS.split(unquote(filled))
            if filled != step and len(within) > 1 and not {".", ".."}.isdisjoint(within):
                raise LookupCallError(
                    f"the values make a step of the path of {self.text} that leads elsewhere",
                    retriable=False,
                )


def _require_plain(name: str, value: str) -> None:
    if any(step in (".", "..") for step in _STEPS.split(value)[1:]) or (
        _STEPS.search(value) and _STEPS.split(value)[0] in (".", "..")
    ):
        raise LookupCallError(
            f"the value of {{{name}}} has a step of a path in it that leads elsewhere, and cannot be asked for",
            retriable=False,
        )


def parse_template(text: str, what: str) -> UrlTemplate:
    """Parse a template.

    Raises:
        ConfigError: it is no address of HTTP, or has places where none may be. The message does not have
            the address where that may have a password in it.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{what}'s address is {text!r}. Give a text, such as {_EXAMPLE}.")
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"{what}'s address has a bracket that is not closed or opened ({error}). Write a brace that is "
            f"no place twice, and a place as in {_EXAMPLE}."
        ) from None
    parts = [(before, name) for before, name, _, _ in parsed]
    first = parts[0][0] if parts else ""
    begun = _BEGINNING.match(first)
    if (
        begun is None
        or (begun.end() == len(first) and len(parts) > 1)
        or (begun.end() == len(first) and parts[0][1] is not None)
    ):
        raise ConfigError(
            f"{what}'s address must begin with http:// or https:// and a host, without a place in them: whom "
            f"it asks must not follow from a row. Give one such as {_EXAMPLE}."
        )
    if "@" in begun.group():
        raise ConfigError(
            f"{what}'s address has a name or password in it, which would be in the definition of the step. "
            'Give them as a header: headers={"Authorization": …}.'
        )
    for _, name, spec, conversion in parsed:
        if name == "" or spec or conversion:
            raise ConfigError(
                f"{what}'s address has a place that is not just a name in braces. Write it as in {_EXAMPLE}."
            )
    _require_url("".join(before for before, _ in parts), what)
    origin = _origin(begun.group(), what)
    rest = first[begun.end() :]
    return UrlTemplate(text, origin, ((rest, parts[0][1]), *parts[1:]))


def _require_url(literal: str, what: str) -> None:
    if "#" in literal or "\\" in literal:
        raise ConfigError(
            f"{what}'s address has a # or a \\ in it, which no server gets. Write %23 or %5C if it is a part "
            "of a name."
        )
    if not literal.isascii() or any(c <= " " or c == "\x7f" for c in literal):
        raise ConfigError(
            f"{what}'s address has a blank or a character outside ASCII in it. Write it escaped: %20."
        )


def _origin(begun: str, what: str) -> Origin:
    try:
        url = urlsplit(begun)
        port = url.port
    except ValueError as error:
        raise ConfigError(
            f"{what}'s address is no URL: {error}. Give one such as {_EXAMPLE}."
        ) from None
    if not url.hostname or port == 0:
        raise ConfigError(f"{what}'s address names no host or port. Give one such as {_EXAMPLE}.")
    return Origin(url.scheme, url.hostname, port or DEFAULT_PORTS[url.scheme])
