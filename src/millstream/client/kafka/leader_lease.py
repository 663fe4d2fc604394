"""A leader lease over brokers: the member of a consumer group that has partition 0 of a topic holds it.

The group exists only for its membership: its members read and commit nothing. When the leader leaves, it
releases the partition, and the broker assigns it to another member. When the leader sends no heartbeat for
the session timeout, the broker assigns the partition without waiting for it. The group is separate from the
one that commits offsets, as brokers reject commits from non-members while a group has members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_END, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from millstream.client.address import kafka_address
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.errors import (
    RETRIABLE,
    UNAVAILABLE,
    kafka_error_of,
    to_millstream_error,
    translate_errors,
)
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from confluent_kafka import Consumer

SESSION_MS = 6_000  # the least that Apache Kafka accepts
_HEARTBEAT_MS = 500  # a member learns of a revocation or an assignment with its next heartbeat
_REVOKE_MS_MAX = 300_000  # for how long a group waits for a member that is to release it
_QUIET_S = 4.0  # a group waits this long for a silent member; Kafka makes a new one wait for 3 s


def lease_group(group: str, topic: str) -> str:
    """Return the group whose members compete for the lease of ``group``."""
    return f"{group}.webhook.{topic}"


class KafkaLeaderLease:
    """The lease to deliver ``topic`` for ``group``. It belongs to one thread.

    Args:
        on_revoked: Called by :meth:`poll` before another member gets the lease (True), or when
            another may have it already (False).

    Raises:
        ConfigError: an option of the address is not possible.
        BrokerUnavailableError: no broker responds.
    """

    def __init__(
        self, address: str, group: str, topic: str, on_revoked: Callable[[bool], None]
    ) -> None:
        self._topic = topic
        self._on_revoked = on_revoked
        self._what = f"the webhooks of group {group!r} cannot agree on who delivers"
        self._another = f"Another webhook of group {group!r} delivers"
        self._held = False
        self._assigned_others = False  # the last assignment was not partition 0
        self._since_s = time.monotonic()
        self._closed = False
        self._cluster = Cluster(kafka_address(address))
        self._client = self._cluster.consumer(
            {
                "group.id": lease_group(group, topic),
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": _HEARTBEAT_MS,
                "max.poll.interval.ms": _REVOKE_MS_MAX,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
            }
        )
        with translate_errors(self._what):
            self._client.subscribe(
                [topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )

    @property
    def held(self) -> bool:
        return self._held

    @property
    def standby_reason(self) -> str | None:
        if self._held:
            return None
        if self._assigned_others:
            return f"{self._another}; on standby until it ends"
        if time.monotonic() - self._since_s > _QUIET_S:
            return f"{self._another}, or died a moment ago; on standby until it is gone"
        return None

    def poll(self, timeout_s: float) -> None:
        try:
            message = self._client.poll(timeout_s)
            error = None if message is None else message.error()
        except KafkaException as raised:
            error = kafka_error_of(raised)
        if error is not None and error.code() not in (*UNAVAILABLE, *RETRIABLE):
            ours = to_millstream_error(error, self._what)
            if error.fatal() or isinstance(ours, ConfigError):
                raise ours  # the client recovers from anything else by itself

    def close(self) -> None:
        # The broker then assigns the partition to another member at once.
        if not self._closed:
            self._closed = True
            self._held = False  # the caller has stopped its work
            with translate_errors(self._what):
                self._client.close()
            self._cluster.close()

    # -- what the broker decides: called by poll() --------------------------------------------

    def _assigned(self, client: Consumer, places: Sequence[KafkaTopicPartition]) -> None:
        ours = [KafkaTopicPartition(place.topic, place.partition, OFFSET_END) for place in places]
        client.incremental_assign(ours)
        client.pause(ours)  # nothing is to be read
        if any(place.partition == 0 for place in places):
            self._held = True
        self._assigned_others = not self._held

    def _revoked(self, client: Consumer, places: Sequence[KafkaTopicPartition]) -> None:
        self._end(places, in_order=True)
        client.incremental_unassign(list(places))

    def _lost(self, client: Consumer, places: Sequence[KafkaTopicPartition]) -> None:
        self._end(places, in_order=False)
        client.incremental_unassign(list(places))

    def _end(self, places: Sequence[KafkaTopicPartition], *, in_order: bool) -> None:
        if self._held and any(place.partition == 0 for place in places):
            self._on_revoked(in_order)
            self._held = False
            self._since_s = time.monotonic()
