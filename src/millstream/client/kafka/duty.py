"""A duty that one member of a consumer group has: the one to whom partition 0 of a topic is assigned.

Nothing is read by way of this group, and nothing is committed for it: its members are all that counts.
When one leaves, the broker assigns the partition to another once it has agreed to let go; when one says
nothing for the time of a session, without. The group is one of its own, as brokers let nobody commit for
a group from outside while that has members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_END, KafkaException
from confluent_kafka import TopicPartition as KafkaPlace

from millstream.client.kafka.address import kafka_address
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.failures import AWAY, PASSING, as_ours, error_of, told
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from confluent_kafka import Consumer

SESSION_MS = 6_000  # the least that Apache Kafka lets a member ask for
_HEARTBEAT_MS = 500  # a member learns that it is to let go, or may take it, with its next heartbeat
_RELIEF_MS_MAX = 300_000  # for how long a group waits for one that is told to let go
_QUIET_S = (
    4.0  # without any word a group waits for one that died; Kafka lets a new one wait for 3 s
)


def group_of(group: str, topic: str) -> str:
    """Return the group whose members share a duty for ``group``."""
    return f"{group}.webhook.{topic}"


class KafkaDuty:
    """The duty to deliver ``topic`` for ``group``. Of one thread.

    Args:
        relieve: Called by :meth:`poll` before the duty goes to another (True), or when another may
            have it already (False).

    Raises:
        ConfigError: an option of the address is not possible.
        BrokerAwayError: no broker answers.
    """

    def __init__(
        self, address: str, group: str, topic: str, relieve: Callable[[bool], None]
    ) -> None:
        self._topic = topic
        self._relieve = relieve
        self._what = f"the webhooks of group {group!r} cannot agree on who delivers"
        self._another = f"Another webhook of group {group!r} delivers"
        self._held = False
        self._left_out = False  # what was assigned last is not the duty
        self._since_s = time.monotonic()
        self._closed = False
        self._cluster = Cluster(kafka_address(address))
        self._client = self._cluster.consumer(
            {
                "group.id": group_of(group, topic),
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": _HEARTBEAT_MS,
                "max.poll.interval.ms": _RELIEF_MS_MAX,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
            }
        )
        with told(self._what):
            self._client.subscribe(
                [topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )

    @property
    def held(self) -> bool:
        return self._held

    @property
    def stands_by(self) -> str | None:
        if self._held:
            return None
        if self._left_out:
            return f"{self._another}; standing by until it ends"
        if time.monotonic() - self._since_s > _QUIET_S:
            return f"{self._another}, or died a moment ago; standing by until it is gone"
        return None

    def poll(self, timeout_s: float) -> None:
        try:
            message = self._client.poll(timeout_s)
            error = None if message is None else message.error()
        except KafkaException as raised:
            error = error_of(raised)
        if error is not None and error.code() not in (*AWAY, *PASSING):
            ours = as_ours(error, self._what)
            if error.fatal() or isinstance(ours, ConfigError):
                raise ours  # anything else passes: the client joins again by itself

    def close(self) -> None:
        # To leave is to tell the broker, which then assigns the duty to another at once.
        if not self._closed:
            self._closed = True
            self._held = False  # whoever closes it has ended what it was held for
            with told(self._what):
                self._client.close()
            self._cluster.close()

    # -- what the broker decides, as poll() tells it ------------------------------------------

    def _assigned(self, client: Consumer, places: Sequence[KafkaPlace]) -> None:
        ours = [KafkaPlace(place.topic, place.partition, OFFSET_END) for place in places]
        client.incremental_assign(ours)
        client.pause(ours)  # nothing is to be read
        if any(place.partition == 0 for place in places):
            self._held = True
        self._left_out = not self._held

    def _revoked(self, client: Consumer, places: Sequence[KafkaPlace]) -> None:
        self._end(places, in_order=True)
        client.incremental_unassign(list(places))

    def _lost(self, client: Consumer, places: Sequence[KafkaPlace]) -> None:
        self._end(places, in_order=False)
        client.incremental_unassign(list(places))

    def _end(self, places: Sequence[KafkaPlace], *, in_order: bool) -> None:
        if self._held and any(place.partition == 0 for place in places):
            self._relieve(in_order)
            self._held = False
            self._since_s = time.monotonic()
