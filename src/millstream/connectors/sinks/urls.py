"""Which sink a URL is of: what ``millstream sink`` and ``ms.sink`` take beside connectors themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from millstream.access.secret_values import resolved_url
from millstream.choices import did_you_mean
from millstream.connectors.sinks.connector import SinkConnector
from millstream.connectors.sinks.email_sink import to_email
from millstream.connectors.sinks.http_sink import to_http
from millstream.connectors.sinks.opensearch_sink import to_opensearch
from millstream.connectors.sinks.to_duckdb import to_duckdb
from millstream.connectors.sinks.to_mariadb import to_mariadb
from millstream.connectors.sinks.to_redis import to_redis
from millstream.errors import ConfigError

Options = Mapping[str, type]
_HTTP: Options = {"form": str, "content": str, "batch": int, "timeout_s": float}
_REDIS: Options = {"hashes": str, "stream": str, "length": int}
_EMAIL: Options = {
    "to": str,
    "sender": str,
    "subject": str,
    "text": str,
    "of": str,
    "batch": int,
    "every": str,
    "encryption": str,
}
_OPENSEARCH: Options = {"index": str, "batch": int, "timeout_s": float}
_TABLE: Options = {"table": str, "key": str, "columns": str, "extra": str}


def sink_connector_of(url: str, options: Mapping[str, str]) -> SinkConnector:
    """Return the connector of a URL, with options as text.

    Raises:
        ConfigError: there is none. The message never has a password.
    """
    url = resolved_url(url, "the sink's address")
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme not in _MAKERS:
        shown = f"{scheme}://…" if scheme else "one without a scheme"
        raise ConfigError(
            f"the sink has a URL that is not known: {shown}. Give one that begins with "
            f"{', '.join(f'{known}://' for known in _MAKERS)}; docs/connectors.md describes them."
        )
    make, known = _MAKERS[scheme]
    for needed, example in _NEEDED.items():
        if needed in known and needed not in options:
            raise ConfigError(f"the sink to {scheme}:// needs {needed}: -o {needed}={example}.")
    return make(url, **_parsed(options, known))


def _parsed(options: Mapping[str, str], known: Options) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise ConfigError(
                f"the sink has the option {name!r}. Those that it may have are {', '.join(known)}."
                f"{did_you_mean(name, tuple(known))}"
            )
        try:
            parsed[name] = known[name](text)
        except ValueError:
            raise ConfigError(f"the option {name} is {text!r}. Give a number.") from None
    return parsed


_NEEDED = {
    "table": "NAME",
    "index": "NAME",
    "to": "ops@example.com",
    "sender": "millstream@example.com",
}
_MAKERS: dict[str, tuple[Callable[..., SinkConnector], Options]] = {
    **dict.fromkeys(("http", "https"), (to_http, _HTTP)),
    **dict.fromkeys(("redis", "rediss"), (to_redis, _REDIS)),
    **dict.fromkeys(("mariadb", "mysql"), (to_mariadb, _TABLE)),
    "duckdb": (to_duckdb, _TABLE),
    **dict.fromkeys(("opensearch", "opensearchs"), (to_opensearch, _OPENSEARCH)),
    **dict.fromkeys(("smtp", "smtps"), (to_email, _EMAIL)),
}
