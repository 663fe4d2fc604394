"""MqttSource: what is published to topics of an MQTT broker, at least once.

The broker keeps a session for the client's name, with the messages that it has not acknowledged, also while the source
does not run. A message is acknowledged when it is durable in the log:

====================================  ===================================================================
stopped                               the broker
====================================  ===================================================================
before the log's commit               sends the messages again
after it, before the acknowledgement  sends them again: they are in the topic twice
while the source does not run         keeps messages of quality 1 or 2, as many as it is configured to
restarted without its files,          has lost the session: what was published meanwhile is missing. The
or the session expired                next run says so, as an alarm
====================================  ===================================================================

Messages of quality 0 come at most once, as for every client.

Source: MQTT 5.0, 4.1 (session state), 4.3 (quality of service), 3.8.3.1 (retain handling).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from millstream.connectors.connector import (
    BYTES_MAX,
    RECORDS_MAX,
    Guarantee,
    Position,
    SourceBatch,
)
from millstream.connectors.source_password import source_password
from millstream.errors import ConfigError, RetriableError

_ANSWER_S = 30.0
_KEEP_ALIVE_S = 60
_IN_FLIGHT_MAX = 10_000  # messages that we let the broker send before they are acknowledged
_RETAINED_ONCE = 1  # retained messages come with a new subscription, and not with each connection
_QUALITY = 1
_PORTS = {"mqtt": 1883, "mqtts": 8883}
_REFUSED = (
    "Not authorized",
    "Bad user name or password",
    "Client identifier not valid",
    "Banned",
)


@dataclass(frozen=True)
class MqttSource:
    """A source connector, made by :func:`millstream.connectors.mqtt.mqtt`."""

    url: str = field(repr=False)  # it may have a password
    topics: tuple[str, ...]
    client: str
    session_s: int
    kind: str = "mqtt"
    guarantee: Guarantee = "at least once"
    records_max: int = RECORDS_MAX
    monotonic_s: Callable[[], float] = time.monotonic

    @property
    def origin(self) -> str:
        """The address, and the client's name, without secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS[parts.scheme]}, as {self.client}"

    def open(self, positions: Mapping[str, Position]) -> MqttReader:
        """Return what reads on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        return MqttReader(self, positions)


class MqttReader:
    """Receives messages; see :class:`~millstream.connectors.connector.SourceReader`."""

    def __init__(self, source: MqttSource, positions: Mapping[str, Position]) -> None:
        self.alarm = ""
        self._source = source
        self._said = (positions.get(source.client) or {}).get("topics")
        self._began = self._said is not None
        self._messages: list[paho.MQTTMessage] = []
        self._bytes = 0  # of these
        self._connected: Any = None
        self._subscribed: Any = None
        self._lost = ""
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, source.client, protocol=paho.MQTTv5, manual_ack=True
        )
        client.on_message = self._on_message
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the messages that have come; see the protocol. None says that none came in time."""
        deadline_s = self._source.monotonic_s() + wait_s
        while not self._messages:
            left_s = deadline_s - self._source.monotonic_s()
            self._loop(max(0.0, left_s))
            if left_s <= 0 and not self._messages:
                return self._first_batch()
        count = 0
        while count != len(self._messages) and not self._is_full:
            count = len(self._messages)
            self._loop(0)
        batch = self._first_batch() or SourceBatch()
        taken = self._take()
        batch.values = [bytes(message.payload) for message in taken]
        batch.keys = [message.topic.encode() for message in taken]
        batch.headers = [[("mqtt-topic", message.topic.encode())] for message in taken]
        batch.tag = [(message.mid, message.qos) for message in taken]
        return batch

    @property
    def _is_full(self) -> bool:
        return len(self._messages) >= self._source.records_max or self._bytes >= BYTES_MAX

    def _take(self) -> list[paho.MQTTMessage]:
        """Return the messages of a batch; those that are left begin the next one."""
        count = size = 0
        while count < min(len(self._messages), self._source.records_max) and size < BYTES_MAX:
            size += len(self._messages[count].payload)
            count += 1
        taken, self._messages = self._messages[:count], self._messages[count:]
        self._bytes -= size
        return taken

    def stored(self, batch: SourceBatch) -> None:
        """Acknowledge the messages of a batch."""
        for mid, quality in batch.tag or ():
            if quality and self._client.ack(mid, quality) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                raise self._unavailable("the connection was lost")

    def close(self) -> None:
        """End the connection; the broker keeps the session."""
        with suppress(OSError, ValueError):
            self._client.disconnect()

    # ── the connection ──────────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        parts = urlsplit(self._source.url)
        if parts.username:
            self._client.username_pw_set(unquote(parts.username), source_password(self._source.url))
        if parts.scheme == "mqtts":
            self._client.tls_set()
        asked: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        asked.SessionExpiryInterval = self._source.session_s
        asked.ReceiveMaximum = _IN_FLIGHT_MAX
        try:
            self._client.connect(
                parts.hostname or "",
                parts.port or _PORTS[parts.scheme],
                _KEEP_ALIVE_S,
                clean_start=False,
                properties=asked,
            )
        except OSError as error:
            raise self._unavailable(str(error)) from None
        flags, reason = self._wait_for(lambda: self._connected)
        if reason.is_failure:
            if str(reason) in _REFUSED:
                raise ConfigError(
                    f"{self._source.origin} refuses the source: {reason}. Correct its user, password or name."
                )
            raise self._unavailable(str(reason))
        if self._began and not flags.session_present:
            self.alarm = (
                f"{self._source.origin} had no session any more, so messages that were published while the source did not "
                "run are missing: the broker was restarted without its files, or the session expired"
            )
        options = SubscribeOptions(qos=_QUALITY, retainHandling=_RETAINED_ONCE)
        if left := sorted(set(self._said or ()) - set(self._source.topics)):
            self._client.unsubscribe(
                left
            )  # the session has them still, and its messages would come
        self._client.subscribe([(topic, options) for topic in self._source.topics])
        for topic, granted in zip(
            self._source.topics, self._wait_for(lambda: self._subscribed), strict=True
        ):
            if granted.is_failure:
                raise ConfigError(
                    f"{self._source.origin} refuses the topic {topic!r}: {granted}. Correct it, or what the user may read."
                )

    def _wait_for(self, found: Callable[[], Any]) -> Any:
        end_s = self._source.monotonic_s() + _ANSWER_S
        while (answer := found()) is None:
            if self._source.monotonic_s() > end_s:
                raise self._unavailable(f"no answer for {_ANSWER_S:.0f} s")
            try:
                self._loop(0.1)
            except RetriableError:
                if found() is None:  # a broker that refuses says so, and ends the connection
                    raise
        return answer

    def _loop(self, wait_s: float) -> None:
        """Send and receive; return when something came, or after ``wait_s``."""
        code = self._client.loop(wait_s)
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or self._lost:
            raise self._unavailable(self._lost or paho.error_string(code))

    def _unavailable(self, reason: str) -> RetriableError:
        return RetriableError(
            f"{self._source.origin} does not respond as it should: {reason}. It is tried again."
        )

    def _first_batch(self) -> SourceBatch | None:
        """Return a batch that says in the log that there is a session with these topics, if nothing says so yet."""
        topics = list(self._source.topics)
        if self._said == topics:
            return None
        self._said = topics
        return SourceBatch(positions={self._source.client: {"topics": topics}})

    # ── what paho calls ─────────────────────────────────────────────────────────────────────

    def _on_connect(
        self, _client: object, _data: object, flags: Any, reason: Any, _properties: object
    ) -> None:
        self._connected = (flags, reason)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self._messages.append(message)
        self._bytes += len(message.payload)

    def _on_subscribe(
        self, _client: object, _data: object, _mid: int, granted: Any, _properties: object
    ) -> None:
        self._subscribed = granted

    def _on_disconnect(
        self, _client: object, _data: object, _flags: Any, reason: Any, _properties: object
    ) -> None:
        self._lost = str(reason)
