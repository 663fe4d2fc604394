"""AmqpSource: the messages of a queue of an AMQP 0-9-1 broker, at least once.

A message is acknowledged when it is durable in the log:

====================================  ===================================================================
stopped                               the broker
====================================  ===================================================================
before the log's commit               sends the messages again
after it, before the acknowledgement  sends them again: those with a message id are known, and left out;
                                      the others are in the topic twice
while the source does not run         keeps messages in the queue, as it is configured to
====================================  ===================================================================

Which messages were stored is told by the digests of the last ones, which are the positions (``amqp_stored``). That the
broker says "redelivered" is not asked for: after a crash it may not know.

Source: AMQP 0-9-1, 1.8.3 (class basic); RabbitMQ, "Consumer Acknowledgements and Publisher Confirms".
"""

from __future__ import annotations

import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import pika
from pika import exceptions

from millstream.connectors.amqp_message import AmqpMessage
from millstream.connectors.amqp_stored import StoredMessages
from millstream.connectors.connector import (
    BYTES_MAX,
    RECORDS_MAX,
    DeadInput,
    Guarantee,
    Position,
    SourceBatch,
)
from millstream.connectors.source_password import source_password
from millstream.errors import ConfigError, RetriableError
from millstream.log.clocks import wall_clock_ms

_ANSWER_S = 30.0
_HEARTBEAT_S = 60
_PORTS = {"amqp": 5672, "amqps": 5671}
_REFUSED, _NOT_FOUND, _NOT_ALLOWED = 403, 404, 530
# With these numbers a broker also says what passes: a node or a virtual host that is down, too many connections.
_PASSING = ("is down", "limit")
# How pika says that it could not decode headers that are not as AMQP has them, or times that Python does not have.
_UNDECODABLE = re.compile(
    r"Stream connection lost: (ValueError|OverflowError|OSError\(75|(\w*\.)?error\(|InvalidFieldTypeException)"
)
_MESSAGE_BYTES_MAX = 63 << 20  # a record has 64 MiB, with its headers


@dataclass(frozen=True)
class AmqpSource:
    """A source connector, made by :func:`millstream.connectors.amqp.amqp`."""

    url: str = field(repr=False)  # it may have a password
    queue: str
    prefetch: int
    kind: str = "amqp"
    guarantee: Guarantee = "at least once"
    records_max: int = RECORDS_MAX
    clock_ms: Callable[[], int] = wall_clock_ms
    monotonic_s: Callable[[], float] = time.monotonic

    @property
    def origin(self) -> str:
        """The address and the queue, without secrets."""
        parts = urlsplit(self.url)
        port = parts.port or _PORTS[parts.scheme]
        return f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}, {self.queue}"

    def open(self, positions: Mapping[str, Position]) -> AmqpReader:
        """Return what reads on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        return AmqpReader(self, positions)


class AmqpReader:
    """Receives messages; see :class:`~millstream.connectors.connector.SourceReader`."""

    alarm = ""

    def __init__(self, source: AmqpSource, positions: Mapping[str, Position]) -> None:
        self._source = source
        self._stored = StoredMessages(source.queue, positions)
        self._messages: deque[AmqpMessage] = deque()
        self._bytes = 0  # of these
        self._is_drained = self._is_cancelled = False
        self._connection: Any = None
        try:
            with self._translated():
                self._open()
        except BaseException:
            self.close()
            raise

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the messages that have come; see the protocol. None says that the queue has no more for us."""
        with self._translated():
            if not self._messages:
                self._receive(wait_s)
            count = 0
            while count != len(self._messages) and not self._is_full:
                count = len(self._messages)
                self._receive(0)
            if not self._messages and not self._is_cancelled:
                return None if self._is_empty() else SourceBatch()
        if self._messages:
            return self._batch()
        raise RetriableError(
            f"{self._source.origin} has cancelled the source: the queue was deleted, or has moved. It is tried again."
        )

    def stored(self, batch: SourceBatch) -> None:
        """Acknowledge the messages of a batch."""
        with self._translated():
            self._channel.basic_ack(batch.tag, multiple=True)

    def close(self) -> None:
        """End the connection; the broker sends what was not acknowledged again."""
        if self._connection is not None:
            with suppress(exceptions.AMQPError, OSError, ValueError):
                self._connection.close()

    # ── batches ─────────────────────────────────────────────────────────────────────────────

    @property
    def _is_full(self) -> bool:
        return len(self._messages) >= self._source.records_max or self._bytes >= BYTES_MAX

    def _batch(self) -> SourceBatch:
        """Return messages that were not stored before, and the digests of what is stored after them."""
        taken: list[AmqpMessage] = []
        dead: list[DeadInput] = []
        count = size = tag = 0
        while self._messages and count < self._source.records_max and size < BYTES_MAX:
            message = self._messages.popleft()
            self._bytes -= len(message.body)
            tag, count, size = message.tag, count + 1, size + len(message.body)
            digest = message.digest
            if digest is not None and not self._stored.is_new(digest):
                continue
            if len(message.body) > _MESSAGE_BYTES_MAX:
                dead.append(self._too_large(message))
            else:
                taken.append(message)
        now_ms = self._source.clock_ms()
        return SourceBatch(
            [message.body for message in taken],
            [message.routing_key for message in taken],
            [message.time_ms or now_ms for message in taken],
            [message.headers for message in taken],
            self._stored.positions(),
            dead,
            tag=tag,
        )

    def _too_large(self, message: AmqpMessage) -> DeadInput:
        return DeadInput(
            message.body,
            f"queue {self._source.queue}, message {message.shown_id}",
            f"it has {len(message.body):,} bytes; a record has up to {_MESSAGE_BYTES_MAX:,}",
        )

    # ── the connection ──────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        source = self._source
        parts = urlsplit(source.url)
        user = unquote(parts.username or "guest")
        password = source_password(source.url) or "guest"
        options: dict[str, Any] = {}
        if parts.scheme == "amqps":
            options["ssl_options"] = pika.SSLOptions(ssl.create_default_context(), parts.hostname)
        self._connection = pika.BlockingConnection(
            pika.ConnectionParameters(
                parts.hostname,
                parts.port or _PORTS[parts.scheme],
                unquote(parts.path[1:]) or "/",
                pika.PlainCredentials(user, password),
                heartbeat=_HEARTBEAT_S,
                socket_timeout=_ANSWER_S,
                stack_timeout=_ANSWER_S,
                blocked_connection_timeout=_ANSWER_S,
                **options,
            )
        )
        self._channel = self._connection.channel()
        self._channel.queue_declare(source.queue, passive=True)
        self._channel.basic_qos(prefetch_count=source.prefetch)
        self._channel.add_on_cancel_callback(self._on_cancel)
        self._channel.basic_consume(source.queue, self._on_message)

    def _receive(self, wait_s: float) -> None:
        self._connection.process_data_events(wait_s)

    def _is_empty(self) -> bool:
        """Ask the broker whether the queue has no message for us; once, as it sends later ones."""
        if not self._is_drained:
            # What was on its way when the queue was counted is here after a second answer.
            left = [
                self._channel.queue_declare(self._source.queue, passive=True).method.message_count
                for _ in range(2)
            ]
            self._receive(0)
            self._is_drained = not any(left) and not self._messages
        return self._is_drained

    def _on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        message = AmqpMessage(method, properties, body)
        if message.is_of_a_stream:
            raise ConfigError(
                f"{self._source.origin} is a stream, which gives its messages from now on and not those before. "
                "Give a queue of another type, which is bound to the same exchange."
            )
        self._messages.append(message)
        self._bytes += len(body)
        self._is_drained = False

    def _on_cancel(self, _frame: Any) -> None:
        self._is_cancelled = True

    @contextmanager
    def _translated(self) -> Iterator[None]:
        origin = self._source.origin
        try:
            yield
        except (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError):
            raise ConfigError(
                f"{origin} refuses the source. Correct the user in the URL, or the password in MILLSTREAM_SOURCE_PASSWORD."
            ) from None
        except (exceptions.ChannelClosedByBroker, exceptions.ConnectionClosedByBroker) as error:
            raise self._refused(error.reply_code, error.reply_text) from None
        except exceptions.ProbableAccessDeniedError as error:
            raise self._refused(_NOT_ALLOWED, str(error)) from None
        except (exceptions.AMQPError, OSError) as error:
            cause = _cause(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{origin} has a certificate that is not trusted: {cause.verify_message}. Give the name that it is for, "
                    "and its authority in SSL_CERT_FILE."
                ) from None
            if _UNDECODABLE.match(str(cause)):
                raise ConfigError(
                    f"{origin} has a message whose headers cannot be decoded: {cause}. Take it out of the queue."
                ) from None
            raise self._unavailable(str(cause) or type(cause).__name__) from None

    def _refused(self, code: int, text: str) -> ConfigError | RetriableError:
        if code not in (_REFUSED, _NOT_FOUND, _NOT_ALLOWED) or any(
            word in text for word in _PASSING
        ):
            return self._unavailable(text)
        return ConfigError(
            f"{self._source.origin} refuses the source: {text}. Correct the queue or the virtual host, or what the user may read."
        )

    def _unavailable(self, reason: str) -> RetriableError:
        return RetriableError(
            f"{self._source.origin} does not respond as it should: {reason}. It is tried again."
        )


def _cause(error: BaseException) -> BaseException:
    """Return the error that pika's own is about, at the end of its wrappings."""
    inner = [getattr(error, "exception", None), *error.args]
    return next((_cause(each) for each in inner if isinstance(each, BaseException)), error)
