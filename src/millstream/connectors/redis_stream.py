"""``ms.redis_stream``: a source of streams of Redis, whose driver is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from millstream.access.secret_values import resolved_url
from millstream.choices import choose
from millstream.connectors.record_fields import RecordFields
from millstream.errors import ConfigError, EnvironmentProblem
from millstream.redis_client import is_redis_address

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
    url = resolved_url(url, "the source's address")
    if not (is_redis_address(url) and streams and all(isinstance(s, str) and s for s in streams)):
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
