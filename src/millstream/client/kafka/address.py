"""Addresses of logs behind Kafka's protocol: ``kafka://host:port[,host:port][?options]``.

An option may be a secret. What is shown of an address, in errors and elsewhere, is the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from millstream.choices import choose
from millstream.durations import to_us
from millstream.errors import ConfigError

SCHEME = "kafka://"
TIMEOUT_S = 10.0
_PORT = 9092
_SHAPE = "kafka://host:9092"
_SERVER = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s\[\]/@]+)(?::(?P<port>\d{1,5}))?")
# What says how to reach the brokers, under the names that librdkafka gives it. What a client does
# there is not the address's business.
SETTINGS = (
    "broker.address.family",
    "client.id",
    "client.rack",
    "enable.ssl.certificate.verification",
    "sasl.mechanism",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
)


@dataclass(frozen=True)
class KafkaAddress:
    """Where brokers are, and how to reach them. ``timeout_s``: how long to wait for an answer."""

    servers: str
    settings: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = TIMEOUT_S

    @property
    def shown(self) -> str:
        """The address without its options."""
        return SCHEME + self.servers


def is_kafka(address: object) -> bool:
    """Say whether an address leads to brokers rather than to a folder."""
    return str(address).startswith(SCHEME)


def shown(address: object) -> str:
    """Return an address as it may be shown: that of brokers without its options."""
    text = str(address)
    return text.partition("?")[0] if is_kafka(text) else text


def kafka_address(text: str) -> KafkaAddress:
    """Take an address apart.

    Raises:
        ConfigError: it names no server, or an option that there is not.
    """
    rest, _, query = text.removeprefix(SCHEME).partition("?")
    servers = ",".join(_server(part) for part in rest.rstrip("/").split(","))
    rest = servers
    settings: dict[str, str] = {}
    timeout_s = TIMEOUT_S
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in settings:
            raise ConfigError(f"the option {name} of {SCHEME}{rest} is given twice; give it once")
        if name == "timeout":
            timeout_s = to_us(value, what=f"the option timeout of {SCHEME}{rest}") / 1e6
        else:
            settings[choose(f"an option of {SCHEME}{rest}", name, ("timeout", *SETTINGS))] = value
    return KafkaAddress(servers, tuple(sorted(settings.items())), timeout_s)


def _server(part: str) -> str:
    found = _SERVER.fullmatch(part)
    port = int((found and found["port"]) or _PORT)
    if found is None or not 0 < port < 65536:
        # What stands before an @ may be a password.
        raise ConfigError(
            f"a log's address names no broker in {part.rpartition('@')[2]!r}; give host and port, such as "
            f"{_SHAPE}, several of them with commas between; user and password are the options "
            "sasl.username and sasl.password"
        )
    return f"{found['host']}:{port}"
