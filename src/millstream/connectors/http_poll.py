"""``ms.http_poll``: a source of rows that a server gives by HTTP whenever it is asked."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.access.secret_values import resolved, resolved_url
from millstream.connectors.http_options import check_http_url, request_headers
from millstream.connectors.http_poll_source import HttpPollSource
from millstream.connectors.record_fields import RecordFields
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError

AUTHORIZATION_VARIABLE = "MILLSTREAM_SOURCE_AUTHORIZATION"
_OURS = ("accept-encoding", "host", "if-modified-since", "if-none-match")


def http_poll(
    url: str,
    *,
    rows: str = "",
    every: Duration = "1 minute",
    cursor: str | None = None,
    since: str | None = None,
    start: str | None = None,
    id: str | None = None,  # noqa: A002 - what it is called in rows
    next: str | None = None,  # noqa: A002 - what it is called in pages
    next_param: str | None = None,
    key: str | None = None,
    time: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> HttpPollSource:
    """Return a source of the rows of a JSON document, which is asked for again and again: each row is taken once.

    A record's value is the row as the server wrote it. The pages that the header ``Link`` leads to are asked for, too.

    ::

        ms.http_poll("https://api.example/orders?sort=changed", rows="data", cursor="changed", since="changed_after")

    Args:
        url: ``https://host/path?query``, without user and password; ``${env:NAME}`` is a secret.
        rows: The names that lead to the list of rows, such as ``data.items``; by default the document is the list, or the
            one row.
        every: How long to wait after each round.
        cursor: A field of the rows, by which the server gives them in order: rows up to the last value were taken. By
            default the server gives all that there is, and taken are rows that were not in its last answer, up to
            10,000.
        since: A parameter of the query, which gets the last value of the cursor.
        start: Its value in the first round.
        id: A field by which a row is the same one; by default it is the same if its text is.
        next: The names that lead to the address of the next page.
        next_param: A parameter of the query, which gets what ``next`` leads to, if that is no address.
        key: The field that is the record's key.
        time: The field that is the record's time; by default that is when it was read.
        headers: For each request. Leave a secret to the variable MILLSTREAM_SOURCE_AUTHORIZATION, which is the header
            Authorization, or write ``${env:NAME}``.
        timeout_s: How long a response may take.

    Raises:
        ConfigError: the URL is not one of HTTP, or an option is not possible.
    """
    url = resolved_url(url, "the source's address")
    check_http_url(url, "source", AUTHORIZATION_VARIABLE)
    if not 0 < timeout_s <= 3600:
        raise ConfigError(f"timeout_s is {timeout_s!r}. Give seconds, up to 3,600.")
    if (since is not None and cursor is None) or (start is not None and since is None):
        raise ConfigError(
            "since= is the parameter that gets the cursor, and start= its first value: give cursor= and since=, too."
        )
    if next_param is not None and next is None:
        raise ConfigError("next_param= gets what next= leads to: give next=, too.")
    every_s = to_us(every, what="every") / 1_000_000
    named = {
        name: resolved(text, f"the header {name}") if isinstance(text, str) else text
        for name, text in (headers or {}).items()
    }
    return HttpPollSource(
        url,
        rows,
        every_s,
        RecordFields(key, time),
        cursor,
        since,
        start,
        id,
        next,
        next_param,
        request_headers(named, _OURS, AUTHORIZATION_VARIABLE),
        timeout_s,
    )
