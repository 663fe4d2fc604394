"""``ms.redis_stream``: a source of streams of Redis, whose driver is an extra."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import urlsplit

from millstream.choices import choose
from millstream.connectors.record_fields import RecordFields
from millstream.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from millstream.connectors.redis_stream_source import RedisStreamSource


def redis_stream(
    url: str,
    *streams: str,
    field: str | None = None,
    key: str | None = None,
    time: str | None = None,
    lost: Literal["stop", "skip"] = "stop",
) -> RedisStreamSource:
    """Return a source of streams of Redis: each entry is read once, and in order.

    Args:
        url: ``redis://host:6379/0``, ``rediss://…``. Leave a password to the variable MILLSTREAM_SOURCE_PASSWORD.
        streams: Their names.
        field: The field that is the record's value, as its bytes are; by default the value is a JSON object of all fields,
            as text.
        key: The field that is the record's key. With ``field``, a field of the JSON in it.
        time: The same for the record's time; by default that of the entry's id.
        lost: What happens when entries were trimmed before they were read: "stop" (with an error), "skip" (with an alarm).

    Raises:
        ConfigError: the URL is not one of Redis, or an option is not possible.
        EnvironmentProblem: the driver is not installed.
    """
    choose("lost", lost, get_args(Literal["stop", "skip"]))
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
        # Options of the driver would change what is read, and a path that is no number is read as 0 by it.
        is_one = is_one and not (parts.query or parts.fragment)
        is_one = is_one and re.fullmatch(r"/?|/[0-9]{1,9}", parts.path, re.ASCII) is not None
    except ValueError:
        is_one = False
    if not is_one or not streams or not all(isinstance(name, str) and name for name in streams):
        raise ConfigError(
            f"the source is no stream of Redis: give redis://host:6379/0, without options, with the database as a number "
            f"(? # / in a password as %3F %23 %2F), and the names of streams, and not {streams!r}."
        )
    try:
        from millstream.connectors.redis_stream_source import RedisStreamSource  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to read Redis needs redis, which is not installed ({error}): pip install "millstream[redis]".'
        ) from error
    return RedisStreamSource(url, streams, field, RecordFields(key, time), lost)
