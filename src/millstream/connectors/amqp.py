"""``ms.amqp``: a source of a queue of an AMQP broker, whose client is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.access.secret_values import resolved_url
from millstream.access.server_address import server_address
from millstream.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from millstream.connectors.amqp_source import AmqpSource

_PREFETCH_MAX = 10_000
_NAME_BYTES = 255  # AMQP has a byte for the length


def amqp(url: str, queue: str, *, prefetch: int = 1000) -> AmqpSource:
    """Return a source of a queue of an AMQP 0-9-1 broker, such as RabbitMQ: each message at least once.

    A record's value is the message as it is; its key is the routing key; its time is that of the message, if it has one.
    Its headers are those of the message, then ``amqp-exchange``, ``amqp-routing-key`` and, where the message has them,
    ``amqp-message-id``, ``amqp-content-type``, ``amqp-content-encoding``; and ``amqp-redelivered``, if the broker has sent it
    before. A message with a message id that was stored among the last ones, with the same bytes, is left out and counted.

    Args:
        url: ``amqp://user@host:5672/vhost``, or ``amqps://…`` for TLS. Leave a password to the variable
            MILLSTREAM_SOURCE_PASSWORD.
        queue: Its name. It must be there, and is not changed.
        prefetch: How many messages the broker sends before they are acknowledged, 1 to 10,000. They are in memory.

    Raises:
        ConfigError: the URL is not one of AMQP, or an option is not possible.
        EnvironmentProblem: the client is not installed.
    """
    url = resolved_url(url, "the source's address")
    parts = server_address(url, ("amqp", "amqps"))
    if parts is None or parts.query or parts.fragment or "/" in parts.path[1:]:
        raise ConfigError(
            "the source is no broker of AMQP: give amqp://user@host:5672/vhost, with ? # / in a name as %3F %23 %2F."
        )
    if not isinstance(queue, str) or not 1 <= len(queue.encode(errors="replace")) <= _NAME_BYTES:
        raise ConfigError(f"queue is {queue!r}. Give the name of a queue, 1 to 255 bytes of UTF-8.")
    if type(prefetch) is not int or not 1 <= prefetch <= _PREFETCH_MAX:
        raise ConfigError(f"prefetch is {prefetch!r}. Give 1 to {_PREFETCH_MAX:,} messages.")
    try:
        from millstream.connectors.amqp_source import AmqpSource  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to read AMQP needs pika, which is not installed ({error}): pip install "millstream[amqp]".'
        ) from error
    return AmqpSource(url, queue, prefetch)
