"""A request and its context, as a handler receives it."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.broker.protocol.schema import Api
from millstream.broker.protocol.wire import Message
from millstream.broker.security.authentication import SaslSession


@dataclass(slots=True)
class Call:
    """A request, and what the broker knows about its sender.

    ``host`` and ``port`` are the address at which the client reached the broker: responses name it as
    the address of the broker. ``connection`` is the number of the connection, in the order in which they were
    opened. ``login`` is the state of authentication, if the broker has users. ``held_bytes`` is how much of the memory for responses
    the response holds until it is sent.
    """

    api: Api
    version: int
    correlation_id: int
    client_id: str
    request: Message
    host: str
    port: int
    client_host: str
    connection: int = 0
    login: SaslSession | None = None
    held_bytes: int = 0
