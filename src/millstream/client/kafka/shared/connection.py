"""One connection to a broker: requests are sent and responses received, in the order of the requests.

Several requests may be sent before the first response is received. After an error the connection is of no
use: what became of requests without a response is not known.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from typing import Self

from millstream.broker.protocol.messages import API_VERSIONS, REQUEST_HEADER
from millstream.broker.protocol.messages_security import SASL_AUTHENTICATE, SASL_HANDSHAKE
from millstream.broker.protocol.schema import Api
from millstream.broker.protocol.wire import ByteReader, BytesLike, MalformedError, Message
from millstream.client.address import KafkaAddress
from millstream.client.kafka.shared.security import sasl_exchange, tls_context
from millstream.errors import BrokerUnavailableError, ConfigError

_SIZE_BYTES = 4
_RESPONSE_BYTES_MAX = 64 << 20
_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}


class BrokerConnection:
    """An authenticated connection. Not thread-safe.

    ``timeout_s`` is how long it waits for the broker, each time.

    Raises:
        BrokerUnavailableError: the broker cannot be reached.
        ConfigError: it refuses the client, or the client it.
    """

    def __init__(self, host: str, port: int, address: KafkaAddress) -> None:
        self.place = f"{host}:{port}"
        self._client_id = dict(address.settings).get("client.id", "millstream")
        self._timeout_s = address.timeout_s
        self._number = 0
        self._waiting: deque[tuple[int, Api, int]] = deque()  # number, request and its version
        self._socket = self._connect(host, port, address)
        try:
            self._versions = self._negotiate()
            self._authenticate(address)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, host: str, port: int, address: KafkaAddress) -> socket.socket:
        context = tls_context(address)
        host = host.strip("[]")  # of an IPv6 address, which a certificate has without them
        try:
            plain = self._connect_plain(host, port, address)
        except (OSError, UnicodeError) as error:  # the latter: no name that can be looked up
            raise self._unavailable(error) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return plain if context is None else context.wrap_socket(plain, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise ConfigError(
                f"the certificate of {self.place} is not one to trust ({error.verify_message}); correct the "
                "option ssl.ca.location, or the address"
            ) from error
        except OSError as error:
            plain.close()
            raise self._unavailable(error) from error

    def _connect_plain(self, host: str, port: int, address: KafkaAddress) -> socket.socket:
        wanted = dict(address.settings).get("broker.address.family", "any")
        family = _FAMILIES.get(wanted, socket.AF_UNSPEC)
        failed: OSError | None = None
        for kind, type_, protocol, _, where in socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM
        ):
            made = socket.socket(kind, type_, protocol)
            try:
                made.settimeout(self._timeout_s)
                made.connect(where)
            except OSError as error:
                made.close()
                failed = error
            else:
                return made
        raise failed or OSError("it has no address of this family")

    def _unavailable(self, why: object) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"the broker at {self.place} does not respond ({why}); start it, or correct the address"
        )

    def _negotiate(self) -> dict[int, tuple[int, int]]:
        """Return the versions that the broker supports, by request."""
        # Every broker knows the first version, and answers in it.
        self._send(API_VERSIONS, 0, {})
        return {
            one["api_key"]: (one["min_version"], one["max_version"])
            for one in self.receive()["api_keys"]
        }

    def _authenticate(self, address: KafkaAddress) -> None:
        found = sasl_exchange(address)
        if found is None:
            return
        mechanism, exchange = found
        said = self.request(SASL_HANDSHAKE, {"mechanism": mechanism})
        if said["error_code"]:
            raise ConfigError(
                f"{self.place} does not accept the SASL mechanism {mechanism}, but "
                f"{', '.join(said['mechanisms']) or 'none'}; correct the option sasl.mechanism"
            )
        token = next(exchange)
        while True:
            answer = self.request(SASL_AUTHENTICATE, {"auth_bytes": token})
            if answer["error_code"]:
                raise ConfigError(
                    f"{self.place} refused the user ({answer['error_message'] or answer['error_code']}); "
                    "correct the options sasl.username and sasl.password"
                )
            try:
                token = exchange.send(answer["auth_bytes"])
            except StopIteration:
                return

    # -- requests -----------------------------------------------------------------------------

    def supports(self, api: Api, version: int) -> bool:
        """Return whether the broker supports a version of a request, ours or not."""
        low, high = self._versions.get(api.key, (0, -1))
        return low <= version <= high

    def request(self, api: Api, message: Message) -> Message:
        """Send a request and return the response.

        Raises:
            BrokerUnavailableError: there was none.
        """
        self.send(api, message)
        return self.receive()

    def send(self, api: Api, message: Message) -> None:
        """Send a request, whose response :meth:`receive` returns in its turn.

        Raises:
            ConfigError: the broker has no version of it in common with us.
            BrokerUnavailableError: the connection is torn.
        """
        low, high = self._versions.get(api.key, (0, -1))
        version = min(high, api.versions[1])
        if version < max(low, api.versions[0]):
            raise ConfigError(
                f"{self.place} supports versions {low} to {high} of {api.name}, and this client "
                f"{api.versions[0]} to {api.versions[1]}; run a broker of Kafka 2.5 or later"
            )
        self._send(api, version, message)

    def _send(self, api: Api, version: int, message: Message) -> None:
        self._number += 1
        header = {
            "api_key": api.key,
            "api_version": version,
            "correlation_id": self._number,
            "client_id": self._client_id,
        }
        out: list[BytesLike] = []
        REQUEST_HEADER.write(header, out)
        if api.flexible(version):
            out.append(b"\0")  # no tagged fields
        api.encode_request(message, version, out)
        data = b"".join(out)
        try:
            self._socket.sendall(len(data).to_bytes(_SIZE_BYTES, "big") + data)
        except OSError as error:
            raise self._unavailable(error) from error
        self._waiting.append((self._number, api, version))

    def receive(self) -> Message:
        """Return the response to the oldest request that has none.

        Raises:
            BrokerUnavailableError: the connection is torn, or too slow.
        """
        number, api, version = self._waiting.popleft()
        size = int.from_bytes(self._read(_SIZE_BYTES), "big", signed=True)
        if not _SIZE_BYTES <= size <= _RESPONSE_BYTES_MAX:
            raise self._unavailable(f"it sent a response of {size} bytes")
        source = ByteReader(self._read(size))
        try:
            found = int.from_bytes(source.take(_SIZE_BYTES), "big", signed=True)
            if found != number:
                raise self._unavailable(f"it responded to request {found} instead of {number}")
            if api.flexible(version) and api is not API_VERSIONS:
                _skip_tags(source)
            return api.decode_response(source, version)
        except MalformedError as error:
            raise self._unavailable(f"its {api.name} response cannot be read: {error}") from error

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                got = self._socket.recv_into(view[at:])
            except OSError as error:
                raise self._unavailable(error) from error
            if not got:
                raise self._unavailable("it closed the connection")
            at += got
        return bytes(data)

    def close(self) -> None:
        """Close the connection; requests without a response may be carried out, or not."""
        self._socket.close()


def _skip_tags(source: ByteReader) -> None:
    for _ in range(source.uvarint()):
        source.uvarint()
        source.take(source.uvarint())
