"""Which connector a URL is of: what ``millstream source`` and ``ms.source`` take beside connectors themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from millstream.access.secret_values import resolved_url
from millstream.choices import choose, did_you_mean
from millstream.connectors.amqp import amqp
from millstream.connectors.connector import SourceConnector
from millstream.connectors.folder.folder_source import folder
from millstream.connectors.http_poll import http_poll
from millstream.connectors.mqtt import mqtt
from millstream.connectors.redis_stream import redis_stream
from millstream.errors import ConfigError

_FOLDER_OPTIONS = (
    "pattern",
    "format",
    "key",
    "time",
    "delimiter",
    "columns",
    "changed",
    "settled",
    "every",
)
_HTTP_OPTIONS = (
    "rows",
    "every",
    "cursor",
    "since",
    "start",
    "id",
    "next",
    "next_param",
    "key",
    "time",
    "timeout_s",
)
_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def connector_of(url: str, options: Mapping[str, str] | None = None) -> SourceConnector:
    """Return the connector of a URL, with options as text.

    They may also be in the URL's query, unless it is of HTTP: there the query is what the server is asked.

    Raises:
        ConfigError: there is none. The message never has a password.
    """
    url = resolved_url(url, "the source's address")
    try:
        parts = urlsplit(url)
        scheme = parts.scheme
    except ValueError:
        scheme = ""
    make = _MAKERS.get(scheme)
    if make is None:
        shown = f"{scheme}://…" if scheme else "one without a scheme"
        raise ConfigError(
            f"the source has a URL that is not known: {shown}. Give one that begins with "
            f"{', '.join(f'{known}://' for known in _MAKERS)}; docs/connectors.md describes them."
        )
    if scheme in ("http", "https"):
        return make(url, dict(options or {}))
    plain, _, query = url.partition("?")
    return make(plain, {**dict(parse_qsl(query, keep_blank_values=True)), **(options or {})})


def _folder(url: str, given: Mapping[str, str]) -> SourceConnector:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or "\0" in path or parts.fragment:
        raise ConfigError(
            f"{url!r} is no folder. Give folder:///relative/path or folder:////absolute/path, with ? # % written as "
            "%3F %23 %25."
        )
    absolute = Path("/", path)
    if not Path(path).is_dir() and absolute.is_dir():  # as file:// would have it
        raise ConfigError(
            f"{path!r} is no folder here. If {absolute} is meant, give folder:///{absolute}."
        )
    return folder(path, **_folder_options(given))


def _objects(url: str, given: Mapping[str, str]) -> SourceConnector:
    return folder(url, **_folder_options(given))


def _folder_options(given: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = _known(given, _FOLDER_OPTIONS)
    if "columns" in options:
        options["columns"] = dict(map(_column, options["columns"].split(",")))
    return options


def _column(text: str) -> tuple[str, type]:
    name, colon, type_ = text.rpartition(":")
    if not colon or not name:
        raise ConfigError(
            f"columns has {text!r}. Give NAME:TYPE, such as columns=id:int,paid:bool."
        )
    return name, _TYPES[choose(f"the type of the column {name!r}", type_, tuple(_TYPES))]


def _redis(url: str, given: Mapping[str, str]) -> SourceConnector:
    options = _known(given, ("streams", "field", "key", "time", "lost"))
    streams = options.pop("streams", "").split(",")
    return redis_stream(url, *streams, **options)


def _mqtt(url: str, given: Mapping[str, str]) -> SourceConnector:
    options = _known(given, ("topics", "client", "session"))
    topics = options.pop("topics", "").split(",")
    return mqtt(url, *topics, client=options.pop("client", ""), **options)


def _amqp(url: str, given: Mapping[str, str]) -> SourceConnector:
    options: dict[str, Any] = _known(given, ("queue", "prefetch"))
    if options.get("prefetch", "").isdecimal():
        options["prefetch"] = int(options["prefetch"])
    return amqp(url, options.pop("queue", ""), **options)


def _http(url: str, given: Mapping[str, str]) -> SourceConnector:
    options: dict[str, Any] = _known(given, _HTTP_OPTIONS)
    if "timeout_s" in options:
        try:
            options["timeout_s"] = float(options["timeout_s"])
        except ValueError:
            raise ConfigError(
                f"timeout_s is {options['timeout_s']!r}. Give seconds, up to 3,600."
            ) from None
    return http_poll(url, **options)


def _known(given: Mapping[str, str], known: tuple[str, ...]) -> dict[str, Any]:
    for name in given.keys() - set(known):
        shown = repr(name) if name.isidentifier() else "…"  # it may be part of a password with a ?
        raise ConfigError(
            f"the source has the option {shown}. Those that it may have are {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    return dict(given)


_MAKERS: dict[str, Callable[[str, Mapping[str, str]], SourceConnector]] = {
    "folder": _folder,
    **dict.fromkeys(("s3", "gs", "az", "hdfs"), _objects),
    **dict.fromkeys(("http", "https"), _http),
    "redis": _redis,
    "rediss": _redis,
    "mqtt": _mqtt,
    "mqtts": _mqtt,
    "amqp": _amqp,
    "amqps": _amqp,
}
