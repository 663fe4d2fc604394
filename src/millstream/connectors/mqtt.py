"""``ms.mqtt``: a source of messages of an MQTT broker, whose client is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.access.secret_values import resolved_url
from millstream.access.server_address import server_address
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from millstream.connectors.mqtt_source import MqttSource

_SESSION_S_MAX = 2**32 - 1


def mqtt(url: str, *topics: str, client: str, session: Duration = "7 days") -> MqttSource:
    """Return a source of what is published to topics of an MQTT broker, at least once.

    A record's value is the message as it is; its key, and its header ``mqtt-topic``, is the topic.

    Args:
        url: ``mqtt://user@host:1883``, or ``mqtts://…`` for TLS. Leave a password to the variable
            MILLSTREAM_SOURCE_PASSWORD.
        topics: Which topics, with MQTT's ``+`` and ``#``; also ``$share/GROUP/TOPIC``.
        client: The name of the client, under which the broker keeps what was not read yet. It must be the same in each run,
            and no other client's.
        session: How long the broker keeps it while the source does not run.

    Raises:
        ConfigError: the URL is not one of MQTT, or an option is not possible.
        EnvironmentProblem: the client is not installed.
    """
    url = resolved_url(url, "the source's address")
    parts = server_address(url, ("mqtt", "mqtts"))
    if parts is None or parts.path.strip("/") or not topics or not all(topics):
        raise ConfigError(
            f"the source is no topic of MQTT: give mqtt://host:1883 and topics such as sensors/#, and not {topics!r}."
        )
    if not isinstance(client, str) or not client:
        raise ConfigError(f"client is {client!r}. Give a name that no other client has.")
    session_s = min(to_us(session, what="session") // 1_000_000, _SESSION_S_MAX)
    try:
        from millstream.connectors.mqtt_source import MqttSource  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to read MQTT needs paho-mqtt, which is not installed ({error}): pip install "millstream[mqtt]".'
        ) from error
    return MqttSource(url, topics, client, session_s)
