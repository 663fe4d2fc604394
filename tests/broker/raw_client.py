"""A client that sends exactly the requests of a test, valid or not, over one connection."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Self

from millstream.broker.protocol.messages import APIS
from millstream.broker.protocol.schema import Api
from millstream.broker.protocol.wire import ByteReader, Message
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records

BY_NAME = {api.name: api for api in APIS.values()}
WAIT_S = 60


class RawClient:
    """One connection. Responses come in the order of the requests."""

    def __init__(self, address: str, *, tls: ssl.SSLContext | None = None, **options: int) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        if "receive_bytes" in options:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_bytes"])
        self.socket.settimeout(WAIT_S)
        self.socket.connect((host, int(port)))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self._number = 0
        self._sent: list[tuple[Api, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self, name: str, version: int, message: Message) -> bytes:
        """Return a request as it is sent."""
        api = BY_NAME[name]
        self._number += 1
        self._sent.append((api, version))
        out = [struct.pack(">hhih", api.key, version, self._number, 4), b"test"]
        if api.flexible(version):
            out.append(b"\0")
        api.encode_request(message, version, out)
        data = b"".join(out)
        return struct.pack(">i", len(data)) + data

    def send(self, name: str, version: int, message: Message) -> None:
        """Send a request."""
        self.socket.sendall(self.frame(name, version, message))

    def receive(self) -> Message:
        """Return the next response."""
        api, version = self._sent.pop(0)
        (size,) = struct.unpack(">i", self._read(4))
        data = self._read(size)
        flexible = api.flexible(version) and api.name != "ApiVersions"
        return api.decode_response(ByteReader(data, 4 + flexible), version)

    def request(self, name: str, version: int, message: Message) -> Message:
        """Send a request and return its response."""
        self.send(name, version, message)
        return self.receive()

    def is_closed(self) -> bool:
        """Return whether the broker has ended the connection; waits for it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            assert part, "the broker ended the connection"
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def raw(batch: EncodedBatch) -> bytes:
    """Return a batch as a client sends it."""
    return batch.prefix(0, -1) + batch.tail


def batch(*values: bytes, producer: ProducerStamp | None = None) -> bytes:
    """Return a batch of values."""
    made = encode_records(
        [SimpleRecord(1000 + number, b"k", value) for number, value in enumerate(values)]
    )
    return raw(made if producer is None else stamp(made, producer, transactional=False))


def produce(*parts: bytes, topic: str = "t", acks: int = -1) -> Message:
    """Return a Produce request of one batch for each partition from 0 on."""
    data = [{"index": number, "records": part} for number, part in enumerate(parts)]
    return {
        "acks": acks,
        "timeout_ms": 1000,
        "topic_data": [{"name": topic, "partition_data": data}],
    }


def fetch(
    offset: int,
    *,
    topic: str = "t",
    topic_id: bytes = bytes(16),
    partition: int = 0,
    **options: int,
) -> Message:
    """Return a Fetch request of one partition; the version says whether its topic has name or id."""
    return {
        "max_wait_ms": 0,
        "min_bytes": 1,
        **options,
        "topics": [
            {
                "topic": topic,
                "topic_id": topic_id,
                "partitions": [
                    {
                        "partition": partition,
                        "fetch_offset": offset,
                        "partition_max_bytes": 1 << 30,
                    }
                ],
            }
        ],
    }


def create(name: str = "t", partitions: int = 1) -> Message:
    """Return a CreateTopics request."""
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1}
    return {"topics": [topic]}


def only(response: Message, *names: str) -> Message:
    """Return the only partition of a response."""
    for name in names:
        (response,) = response[name]
    return response


def produced(response: Message) -> Message:
    """Return the result of the only batch."""
    return only(response, "responses", "partition_responses")


def fetched(response: Message) -> Message:
    """Return what was found of the only partition."""
    return only(response, "responses", "partitions")
