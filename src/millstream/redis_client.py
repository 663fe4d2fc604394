"""Redis, as the source of its streams and the target of copies both reach it: the address, the client, and what fails.

The driver is an extra: only opening a client, and translating its errors, imports it.

Source: Redis, "Redis serialization protocol specification" (errors); redis-py, ``redis.exceptions``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from millstream.access.server_address import server_address
from millstream.errors import ConfigError, RetriableError

if TYPE_CHECKING:
    import redis

_SOCKET_S = 30.0


def is_redis_address(url: str) -> bool:
    """Whether a URL says where a database of Redis is, and nothing else.

    Options of the driver would change what is read, and a path that is no number is read as 0 by it.
    """
    parts = server_address(url, ("redis", "rediss"))
    return (
        parts is not None
        and not (parts.query or parts.fragment)
        and re.fullmatch(r"/?|/[0-9]{1,9}", parts.path, re.ASCII) is not None
    )


def shown_redis_address(url: str) -> str:
    """Return an address without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"


def open_redis(url: str, password: str | None) -> redis.Redis:
    """Return a client that has reached the server. ``password`` is for a URL that has none.

    What fails is not tried again by the driver: the caller tries again all that belongs together.
    """
    import redis  # noqa: PLC0415 - an extra
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    given: dict[str, Any] = {}
    if password and not urlsplit(url).password:
        given["password"] = password
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_timeout=_SOCKET_S,
        socket_connect_timeout=_SOCKET_S,
        retry=Retry(NoBackoff(), 0),
        **given,
    )
    client.ping()
    return client


@contextmanager
def translated_redis_errors(
    shown: str, *, who: str, password_variable: str, refused: str
) -> Iterator[None]:
    """Raise errors of ours for those of the driver.

    Args:
        shown: The address, without secrets.
        who: What reads or writes there.
        refused: What the server says no to, and what to do, with the place ``{error}`` for its words.

    Raises:
        RetriableError: the server does not respond, or cannot yet.
        ConfigError: it refuses who asks, or what is asked.
    """
    from redis import exceptions  # noqa: PLC0415 - an extra

    try:
        yield
    # The driver takes these two for a lost connection, and trying again would have no end.
    except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
        raise ConfigError(
            f"{shown} refuses {who}: {error}. Give the user in the URL, and the password in {password_variable}."
        ) from None
    except (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.BusyLoadingError,
        exceptions.MasterDownError,
        exceptions.ReadOnlyError,
    ) as error:
        raise RetriableError(
            f"{shown} does not respond as it should: {type(error).__name__}. It is tried again."
        ) from None
    except exceptions.RedisError as error:
        raise ConfigError(f"{shown} {refused.format(error=error)}") from None
