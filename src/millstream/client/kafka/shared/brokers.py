"""The brokers of one cluster, over connections of our own: leaders of partitions, coordinators, and retries.

What was looked up is kept until a request fails, as after a leader has moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Self, TypeVar

from confluent_kafka import KafkaError

from millstream.broker.protocol.messages import METADATA
from millstream.broker.protocol.messages_groups import FIND_COORDINATOR
from millstream.client.address import KafkaAddress
from millstream.client.kafka.errors import RETRIABLE, UNAVAILABLE, to_millstream_error
from millstream.client.kafka.shared.connection import BrokerConnection
from millstream.errors import (
    BrokerUnavailableError,
    MillstreamError,
    TransactionAbortedError,
    UnknownTopicError,
)

_PATIENCE = 3  # how many times the timeout of the address attempts go on
_UNKNOWN_TOPIC_S = (
    5.0  # a topic that brokers do not know for so long is not new to them, but deleted
)
_WAIT_FIRST_S = 0.005
_WAIT_MAX_S = 1.0
_PASSING = {
    *RETRIABLE,
    *UNAVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.KAFKA_STORAGE_ERROR,  # the leader moves away from a disk that fails
    KafkaError.UNKNOWN_TOPIC_OR_PART,  # of a broker that has not heard of a new one yet
}
CoordinatorKind = Literal["group", "transaction"]
_KINDS: dict[CoordinatorKind, int] = {"group": 0, "transaction": 1}
_T = TypeVar("_T")


class PassingError(Exception):
    """A broker refused a request for now; ``error`` is what to raise if it goes on refusing."""

    def __init__(self, error: MillstreamError) -> None:
        super().__init__(str(error))
        self.error = error


def check(code: int, what: str) -> None:
    """Return if a response has no error; ``what`` is the beginning of a sentence.

    Raises:
        PassingError: it has one that passes.
        TransactionAbortedError: there is no open transaction of this producer any more.
        MillstreamError: it has another one.
    """
    if not code:
        return
    if code == KafkaError.INVALID_TXN_STATE:
        raise TransactionAbortedError(
            f"{what} ({KafkaError(code).str()}): begin another transaction"
        )
    error = to_millstream_error(KafkaError(code), what)
    if code in _PASSING:
        raise PassingError(error)
    raise error


class BrokerPlace(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int


class Patience:
    """Waits between attempts, longer each time, and ends them after a time without success."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.renew()

    def renew(self) -> None:
        """Begin anew: something succeeded."""
        self._began_s = time.monotonic()
        self._wait_s = _WAIT_FIRST_S

    def wait(self, error: MillstreamError) -> None:
        """Wait before the next attempt.

        Raises:
            MillstreamError: ``error``, as there were attempts for long enough.
        """
        patience_s = self._patience_s
        if isinstance(error, UnknownTopicError):
            patience_s = min(patience_s, _UNKNOWN_TOPIC_S)
        if time.monotonic() - self._began_s >= patience_s:
            raise error.with_traceback(None)
        time.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _WAIT_MAX_S)


class Brokers:
    """Connections to the brokers of an address, made when they are needed. Not thread-safe."""

    def __init__(self, address: KafkaAddress) -> None:
        self.address = address
        self._connections: dict[BrokerPlace, BrokerConnection] = {}
        self._leaders: dict[tuple[str, int], BrokerPlace] = {}
        self._coordinators: dict[tuple[CoordinatorKind, str], BrokerPlace] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and forget what was looked up."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self.forget()

    def forget(self) -> None:
        """Look leaders and coordinators up again when they are needed."""
        self._leaders.clear()
        self._coordinators.clear()

    def patience(self) -> Patience:
        """Return what bounds attempts that have to do with these brokers."""
        return Patience(_PATIENCE * self.address.timeout_s)

    def retry(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of a call; call again after errors that pass, and look up brokers anew.

        Raises:
            MillstreamError: it failed, or did for too long.
        """
        patience = self.patience()
        while True:
            try:
                return attempt()
            except PassingError as passing:
                self.forget()
                patience.wait(passing.error)
            except BrokerUnavailableError as error:
                self.close()
                patience.wait(error)

    # -- which broker -------------------------------------------------------------------------

    def some_broker(self) -> BrokerConnection:
        """Return a connection to any of the brokers.

        Raises:
            BrokerUnavailableError: none responds.
        """
        for connection in self._connections.values():
            return connection
        failed: BrokerUnavailableError | None = None
        for server in self.address.servers.split(","):
            host, _, port = server.rpartition(":")
            try:
                return self._connection(BrokerPlace(host, int(port)))
            except BrokerUnavailableError as error:
                failed = error
        assert failed is not None, "an address names a server"
        raise failed

    def leader(self, topic: str, partition: int) -> BrokerConnection:
        """Return a connection to the leader of a partition.

        Raises:
            PassingError: it has none now.
            UnknownTopicError, BrokerUnavailableError: as the text says.
        """
        name = (topic, partition)
        if name not in self._leaders:
            self._find_leaders(topic)
        if name not in self._leaders:
            check(
                KafkaError.LEADER_NOT_AVAILABLE, f"the leader of {topic}/{partition} is not known"
            )
        return self._connection(self._leaders[name])

    def _find_leaders(self, topic: str) -> None:
        asked = {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
        found = self.some_broker().request(METADATA, asked)
        places = {
            broker["node_id"]: BrokerPlace(broker["host"], broker["port"])
            for broker in found["brokers"]
        }
        for one in found["topics"]:
            check(one["error_code"], f"the topic {topic!r} could not be looked up")
            for partition in one["partitions"]:
                if partition["leader_id"] in places:
                    name = (topic, partition["partition_index"])
                    self._leaders[name] = places[partition["leader_id"]]

    def coordinator(self, kind: CoordinatorKind, key: str) -> BrokerConnection:
        """Return a connection to the coordinator of a group or a transactional id.

        Raises:
            PassingError: it has none now.
            BrokerUnavailableError: no broker responds.
        """
        place = self._coordinators.get((kind, key))
        if place is None:
            asked = {"key": key, "key_type": _KINDS[kind], "coordinator_keys": [key]}
            found = self.some_broker().request(FIND_COORDINATOR, asked)
            one = found["coordinators"][0] if found["coordinators"] else found
            check(one["error_code"], f"the coordinator of {key!r} is not known")
            place = self._coordinators[kind, key] = BrokerPlace(one["host"], one["port"])
        return self._connection(place)

    def _connection(self, place: BrokerPlace) -> BrokerConnection:
        found = self._connections.get(place)
        if found is None:
            found = self._connections[place] = BrokerConnection(*place, self.address)
        return found
