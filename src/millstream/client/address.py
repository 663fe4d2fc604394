"""Addresses of logs: a folder, or ``kafka://host:port[,host:port][?options]``.

The one module that tells them apart. An option may be a secret: an address is shown, in errors and elsewhere,
without its options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from millstream.access.secret_values import resolved_url
from millstream.choices import choose, format_choices, nearest
from millstream.durations import to_us
from millstream.errors import ConfigError

SCHEME = "kafka://"
TIMEOUT_S = 10.0
_PORT = 9092
_SHAPE = "kafka://host:9092"
_SERVER = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s\[\]/@]+)(?::(?P<port>\d{1,5}))?")
_OPTION = re.compile(r"[a-z]+(\.[a-z]+)+")
# How to reach the brokers, under librdkafka's names. How a client behaves is not part of an address.
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
    """Where brokers are, and how to reach them. ``timeout_s``: how long to wait for a response."""

    servers: str
    settings: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = TIMEOUT_S

    @property
    def shown(self) -> str:
        """The address without its options."""
        return SCHEME + self.servers


def is_kafka(address: object) -> bool:
    """Return whether an address is one of brokers, and not of a folder.

    Raises:
        ConfigError: the scheme is not in lower case.
    """
    text = str(address)
    begins = text[: len(SCHEME)]
    if begins != SCHEME and begins.lower() == SCHEME:  # this is meant as an address of brokers
        raise ConfigError(f"a log's address begins with {begins!r}; write {SCHEME}")
    return begins == SCHEME


def shown(address: object) -> str:
    """Return an address as text to show: that of brokers without its options.

    Nothing of an address that cannot be parsed is shown: any part of it could be a password.
    """
    text = str(address)
    if not is_kafka(text):
        return text
    servers = text.removeprefix(SCHEME).partition("?")[0]
    whole = all(map(_SERVER.fullmatch, servers.rstrip("/").split(",")))
    return SCHEME + (servers if whole else "…")


def log_folder(address: Path | str) -> Path | None:
    """Return the folder of a log; None where the log is behind brokers.

    Raises:
        ConfigError: the address of brokers is not possible.
    """
    if not is_kafka(address):
        return Path(address)
    kafka_address(str(address))
    return None


def absolute_address(address: Path | str) -> Path | str:
    """Return an address that is the same in another process of this machine."""
    return str(address) if is_kafka(address) else Path(address).absolute()


def kafka_address(text: str) -> KafkaAddress:
    """Parse the address of brokers.

    Raises:
        ConfigError: it names no server, or an option that does not exist.
    """
    rest, _, query = resolved_url(text, "a log's address").removeprefix(SCHEME).partition("?")
    if _named_user(rest, query):
        raise ConfigError(
            f"a log's address has something before an @, which may be a password; give it as {_SHAPE}, with "
            "user and password as the options sasl.username and sasl.password"
        )
    rest = servers = ",".join(_server(part) for part in rest.rstrip("/").split(","))
    settings: dict[str, str] = {}
    timeout_s = TIMEOUT_S
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in settings:
            raise ConfigError(f"the option {name} of {SCHEME}{rest} is given twice; give it once")
        if name == "timeout":
            timeout_s = to_us(value, what=f"the option timeout of {SCHEME}{rest}") / 1e6
        else:
            settings[_option(name, f"{SCHEME}{rest}")] = value
    return KafkaAddress(servers, tuple(sorted(settings.items())), timeout_s)


def _named_user(rest: str, query: str) -> bool:
    """Return whether the text before an @ is not a broker; an option may have an @ in its value."""
    return "@" in rest or "@" in query.partition("=")[0]


def _option(name: str, address: str) -> str:
    """Return the name of an option; an unknown one may be a part of a password."""
    allowed = ("timeout", *SETTINGS)
    if not _OPTION.fullmatch(name) and nearest(name, allowed) is None:
        raise ConfigError(
            f"{address} has an option that there is not; it is not shown here, as it may be a part of a password: "
            f"in values write & as %26, + as %2B and % as %25. Choose {format_choices(allowed)}."
        )
    return choose(f"an option of {address}", name, allowed)


def _server(part: str) -> str:
    found = _SERVER.fullmatch(part)
    port = int((found and found["port"]) or _PORT)
    if found is None or not 0 < port < 65536:
        raise ConfigError(
            f"a log's address names no broker in {part!r}; give host and port, such as {_SHAPE}, several of "
            "them with commas between"
        )
    return f"{found['host']}:{port}"
