"""AmqpMessage: what a message of AMQP becomes in a record, and what tells it from another one."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 8  # that two of 16,000 messages have the same is as likely as 1 in 10^11
_LAST_S = 253_402_300_799  # of the year 9999


@dataclass(frozen=True, slots=True)
class AmqpMessage:
    """A message as pika gives it."""

    method: Any
    properties: Any
    body: bytes

    @property
    def tag(self) -> int:
        """Its number in the channel."""
        return int(self.method.delivery_tag)

    @property
    def is_of_a_stream(self) -> bool:
        """Whether it comes from a stream of RabbitMQ, which does not send again what was not acknowledged."""
        return "x-stream-offset" in (self.properties.headers or ())

    @property
    def routing_key(self) -> bytes:
        """What it was routed by."""
        return _bytes(self.method.routing_key)

    @property
    def shown_id(self) -> str:
        """Its message id, for people."""
        given = self.properties.message_id
        return "without an id" if given is None else repr(given)

    @property
    def digest(self) -> bytes | None:
        """What is the same for it and what the broker sends again; None for a message without an id.

        The bytes are in it: a publisher that gives all its messages one id loses none.
        """
        given = self.properties.message_id
        if given is None:
            return None
        digest = blake2b(digest_size=DIGEST_BYTES)
        for part in (_bytes(given), _bytes(self.method.exchange), self.routing_key, self.body):
            digest.update(len(part).to_bytes(8))
            digest.update(part)
        return digest.digest()

    @property
    def time_ms(self) -> int | None:
        """When it was made, as it says, in milliseconds; None: it does not say it."""
        said_s = self.properties.timestamp
        return said_s * 1000 if isinstance(said_s, int) and 0 < said_s <= _LAST_S else None

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """Its headers, then what the broker and the publisher say of it."""
        given = self.properties.headers or {}
        headers = [(_bytes(name).decode(errors="replace"), _value(given[name])) for name in given]
        of_it = {
            "exchange": self.method.exchange,
            "routing-key": self.method.routing_key,
            "message-id": self.properties.message_id,
            "content-type": self.properties.content_type,
            "content-encoding": self.properties.content_encoding,
            "redelivered": "true" if self.method.redelivered else None,
        }
        said = [(f"amqp-{name}", _bytes(of_it[name])) for name in of_it if of_it[name] is not None]
        return headers + said


def _bytes(text: str | bytes) -> bytes:
    """Return the bytes of a short string, which pika gives as bytes where it is no UTF-8."""
    return text.encode() if isinstance(text, str) else text


def _value(given: Any) -> bytes:
    """Return the value of a header: text and bytes as they are, others as JSON."""
    if isinstance(given, str | bytes):
        return _bytes(given)
    return json.dumps(given, default=_plain).encode()


def _plain(given: Any) -> str:
    """Return what JSON has no form for as text: times, decimal numbers, bytes in base64."""
    if isinstance(given, bytes):
        return base64.b64encode(given).decode()
    return given.isoformat() if isinstance(given, datetime) else str(given)
