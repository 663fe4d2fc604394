"""A pool of sending clients, each with the thread that completes the futures.

An idempotent client takes half a second until it can send its first record, so a client that is no longer
used is kept for the next producer with the same settings.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from confluent_kafka import KafkaException

from millstream.client.address import KafkaAddress
from millstream.client.kafka.cluster import Cluster
from millstream.client.kafka.errors import translate_errors

_POLL_S = 0.1
_log = logging.getLogger(__name__)
_KEPT_MAX = 4  # of one kind
_shared: dict[KafkaAddress, ProducerPool] = {}
_shared_lock = threading.Lock()


class ProducerClient:
    """A client of the library, and the thread in which its callbacks run."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, object]) -> None:
        self.library = cluster.producer(settings)
        self._cluster = cluster
        self._topic_ids: dict[str, str] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="millstream-kafka", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            try:
                self.library.poll(_POLL_S)
            except KafkaException:
                pass  # a fatal error is raised again by the next call
            except Exception:  # noqa: BLE001 - of a callback; those after it must still be called
                _log.exception("the future of a record could not be completed")

    def refresh_topic(self, topic: str, topic_id: str) -> None:
        """Refresh the client's metadata of a topic if it may be that of an older topic id."""
        before = self._topic_ids.get(topic)
        if before != topic_id:
            self._topic_ids[topic] = topic_id
            if before is not None:
                with translate_errors(f"the topic {topic!r} could not be looked up"):
                    self.library.list_topics(topic, self._cluster.timeout_s)

    def close(self) -> None:
        """End the thread; every record must have its result."""
        self._ended = True
        self._thread.join()


class ProducerPool:
    """The clients for one address, shared by this process's connections to it. Thread-safe."""

    def __init__(self) -> None:
        self.users = 0
        self._lock = threading.Lock()
        self._kept: dict[tuple[tuple[str, object], ...], list[ProducerClient]] = {}

    def acquire(self, cluster: Cluster, settings: Mapping[str, object]) -> ProducerClient:
        """Return a client with these settings: an unused one, or a new one."""
        with self._lock:
            kept = self._kept.get(_key(settings))
            if kept:
                return kept.pop()
        return ProducerClient(cluster, settings)

    def release(self, settings: Mapping[str, object], client: ProducerClient) -> None:
        """Keep a client for the next producer, unless there are enough."""
        with self._lock:
            kept = self._kept.setdefault(_key(settings), [])
            if len(kept) < _KEPT_MAX and self.users:
                kept.append(client)
                return
        client.close()

    def close(self) -> None:
        """Close the unused clients."""
        with self._lock:
            ending = [client for kept in self._kept.values() for client in kept]
            self._kept.clear()
        for client in ending:
            client.close()


def acquire_pool(address: KafkaAddress) -> ProducerPool:
    """Return this process's clients for an address; the connection releases them at its end."""
    with _shared_lock:
        clients = _shared.setdefault(address, ProducerPool())
        clients.users += 1
        return clients


def release_pool(address: KafkaAddress, clients: ProducerPool) -> None:
    """Close the clients when the last connection of this process releases them."""
    with _shared_lock:
        clients.users -= 1
        if clients.users or _shared.get(address) is not clients:
            return
        del _shared[address]
    clients.close()


def _key(settings: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(settings.items()))


def _forget_in_child() -> None:
    global _shared_lock  # noqa: PLW0603 - a thread of the parent may have held it at the fork
    _shared_lock = threading.Lock()
    _of_the_parent.extend(_shared.values())
    _shared.clear()


_of_the_parent: list[
    ProducerPool
] = []  # a child must not destroy clients: their threads are not here
os.register_at_fork(after_in_child=_forget_in_child)
