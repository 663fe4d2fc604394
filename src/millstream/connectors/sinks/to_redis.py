"""``ms.to_redis``: a sink to Redis, whose driver is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ConfigError, EnvironmentProblem
from millstream.redis_client import is_redis_address

if TYPE_CHECKING:
    from millstream.connectors.sinks.redis_sink import RedisSink


def to_redis(
    url: str, *, hashes: str | None = None, stream: str | None = None, length: int | None = None
) -> RedisSink:
    """Return a sink to Redis: a hash for each key, or entries of a stream. A repeated batch changes nothing.

    Args:
        url: ``redis://host:6379/0``, ``rediss://…``. Leave a password to the variable MILLSTREAM_SINK_PASSWORD.
        hashes: What the names of hashes begin with: ``"user:"`` and the record's key. A tombstone deletes its hash.
        stream: The name of a stream that rows are added to.
        length: About how many entries the stream keeps; by default all.

    Raises:
        ConfigError: the URL is not one of Redis, or an option is not possible.
        EnvironmentProblem: the driver is not installed.
    """
    if not is_redis_address(url):
        raise ConfigError(
            "the sink's URL is none of Redis: give redis://host:6379/0, without options, with the database as a number (? # / in "
            "a password as %3F %23 %2F)."
        )
    if (hashes is None) == (stream is None) or stream == "":
        raise ConfigError(
            f"hashes is {hashes!r} and stream {stream!r}. Give one of them: what the names of hashes begin with, or the name of a "
            "stream."
        )
    if length is not None and (stream is None or isinstance(length, bool) or length < 1):
        raise ConfigError(
            f"length is {length!r}. Give how many entries of a stream= are kept, 1 or more."
        )
    try:
        from millstream.connectors.sinks.redis_sink import RedisSink  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to write to Redis needs redis, which is not installed ({error}): pip install "millstream[redis]".'
        ) from error
    return RedisSink(url, hashes, stream, length)
