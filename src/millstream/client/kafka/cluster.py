"""The brokers behind one address: their clients, their topics, and changes of these.

Clients of the library print nothing: errors of their connections are kept, and reported when a call fails
because of them. Lookups never create a topic, and a change returns once the broker shows it.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
)
from confluent_kafka import (
    TopicPartition as KafkaTopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from millstream.client.address import KafkaAddress
from millstream.client.kafka.errors import (
    RETRIABLE,
    UNAVAILABLE,
    kafka_error_of,
    to_millstream_error,
    translate_errors,
)
from millstream.errors import (
    BrokerUnavailableError,
    ConfigError,
    FencedError,
    OffsetOutOfRangeError,
    RetriableError,
    UnknownTopicError,
)
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.fork_guard import guard
from millstream.log.reader import Isolation
from millstream.log.topics import check_topic_id, check_topic_name, unknown_topic
from millstream.record import TopicInfo

FENCE_TOPIC = "__millstream_fences"
"""The topic of the fences: their committed offsets belong to it, and it stores them by key."""

_CACHE_S = 5.0  # for how long metadata of a topic is cached
_POLL_AGAIN_S = 0.02
_TRY_S = 1.0  # after which a first request checks whether any broker can be reached
_SETTINGS_S = 1.0
_PRODUCER_BYTES = RECORD_BYTES_MAX + (1 << 20)
_NO_MECHANISM = "No provider for SASL mechanism"  # librdkafka's words
_LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}
_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())
_T = TypeVar("_T")


class Cluster:
    """The clients and the metadata of one connection. Thread-safe.

    Raises:
        ConfigError: an option is not possible.
        BrokerUnavailableError: no broker responds.
    """

    def __init__(self, address: KafkaAddress) -> None:
        self.address = address
        self.shown = address.shown
        self.timeout_s = address.timeout_s
        self._said = ""  # the last error of a client's connections
        self._refused: KafkaError | None = None  # why waiting for the brokers is useless
        self._closed = ""
        self._fences = False
        self._known: dict[str, tuple[TopicInfo, float]] = {}  # and until when it is cached
        timeout_ms = max(int(1000 * self.timeout_s), 1000)
        self._admin = self._made(AdminClient, {"socket.timeout.ms": timeout_ms})
        self._keep = self._admin  # a fork's child must not destroy it
        self.identity = f"kafka:{self._first_contact()}"
        guard(self)

    def _first_contact(self) -> str:
        """Return the cluster's name for itself, once a broker responds."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try_s = min(max(deadline_s - time.monotonic(), 0.1), _TRY_S)
            try:
                found = self._admin.describe_cluster(request_timeout=try_s)
                return str(found.result(2 * try_s).cluster_id)
            except (KafkaException, TimeoutError) as error:
                if (
                    isinstance(error, KafkaException)
                    and kafka_error_of(error).code() not in UNAVAILABLE
                ):
                    raise to_millstream_error(
                        kafka_error_of(error), f"{self.shown} refused us"
                    ) from None
                self._admin.poll(0)
                if self._refused is not None:
                    raise to_millstream_error(self._refused, f"{self.shown} refused us") from None
                if time.monotonic() >= deadline_s:
                    raise self.unavailable_error() from None
                time.sleep(_POLL_AGAIN_S)

    def unavailable_error(self) -> BrokerUnavailableError:
        """Return the error for brokers that do not respond."""
        self._admin.poll(0)
        said = f" ({self._said})" if self._said else ""
        return BrokerUnavailableError(
            f"no broker responded at {self.shown} within {self.timeout_s:g} s{said}; start it, or correct the "
            "address, or wait longer with ?timeout=1+minute"
        )

    # -- clients ------------------------------------------------------------------------------

    def consumer(self, settings: Mapping[str, object]) -> Consumer:
        """Return a new consumer with these settings beside the address's."""
        self._check_open()
        return self._made(Consumer, settings)

    def producer(self, settings: Mapping[str, object]) -> Producer:
        """Return a new producer with these settings beside the address's."""
        self._check_open()
        return self._made(Producer, {"message.max.bytes": _PRODUCER_BYTES, **settings})

    def _made(self, kind: Callable[[dict[str, object]], _T], settings: Mapping[str, object]) -> _T:
        given = {
            "bootstrap.servers": self.address.servers,
            "client.id": "millstream",
            "log_level": 0,  # what matters comes by error_cb ...
            "logger": _log,  # ... and what is fatal, which it prints whatever the level
            "error_cb": self._note,
            "socket.nagle.disable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            **dict(self.address.settings),
            **settings,
        }
        try:
            with translate_errors(f"no client could be made for {self.shown}"):
                return kind(given)
        except ConfigError as error:
            if _NO_MECHANISM not in str(error):
                raise
            mechanism = given.get("sasl.mechanism", "GSSAPI, its default")
            raise ConfigError(
                f"the option sasl.mechanism of {self.shown} is {mechanism}, and the client library here lacks it; the packages of "
                "confluent-kafka that pip brings have no GSSAPI (Kerberos). Choose PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, or build "
                "confluent-kafka on this machine, with a librdkafka that has libsasl2"
            ) from error

    def _note(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
            self._refused = error
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._said:
            self._said = error.str()

    def close(self) -> None:
        """Refuse every later call."""
        self._closed = f"this connection to {self.shown} was closed; connect again"

    def disable_after_fork(self) -> None:
        """Refuse every call in a forked child: the threads of the clients are the parent's."""
        self._closed = (
            f"this connection to {self.shown} was made before a fork; connect again in the child"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise FencedError(self._closed)

    def call(self, send: Callable[[], Future[_T]], what: str, *, reads: bool = False) -> _T:
        """Return the result of a request; retry it after passing errors.

        ``what`` begins the error message. A request that only ``reads`` is retried after a broken connection,
        too.

        Raises:
            MillstreamError: it failed; see ``errors``.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            self._check_open()
            try:
                return send().result(2 * self.timeout_s)
            except KafkaException as raised:
                error = kafka_error_of(raised)
                away = error.code() in UNAVAILABLE
                passes = error.code() in RETRIABLE or (away and reads)
                if not passes or time.monotonic() >= deadline_s:
                    raise (
                        self.unavailable_error() if away else to_millstream_error(error, what)
                    ) from raised
            except TimeoutError:
                raise self.unavailable_error() from None
            except (TypeError, ValueError) as refused:
                raise ConfigError(f"{what}: {refused}") from refused
            time.sleep(_POLL_AGAIN_S)

    @property
    def admin(self) -> AdminClient:
        """The client of administration."""
        self._check_open()
        return self._admin

    # -- topics -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        with translate_errors("the topics could not be listed"):
            try:
                return sorted(self.admin.list_topics(timeout=self.timeout_s).topics)
            except KafkaException as raised:
                if kafka_error_of(raised).code() in UNAVAILABLE:
                    raise self.unavailable_error() from raised
                raise

    def has_fences(self) -> bool:
        """Return whether the topic of fences exists; once it does, it stays."""
        self._fences = self._fences or FENCE_TOPIC in self.names()
        return self._fences

    def topics(self) -> dict[str, TopicInfo]:
        """Return the topics of users, by name."""
        names = [name for name in self.names() if name != FENCE_TOPIC]
        if not names:
            return {}
        told_of = self._admin.describe_topics(TopicCollection(names))
        found = ((name, self._describe_topic(name, told_of[name])) for name in names)
        return {name: info for name, info in found if info is not None}

    def _describe_topic(
        self, name: str, asked: Future[TopicDescription] | None = None
    ) -> TopicInfo | None:
        """Return the metadata of a topic; None if it is internal or deleted.

        ``asked`` is the response to a request about several topics, which is not sent twice.
        """
        answers = [] if asked is None else [asked]

        def ask() -> Future[TopicDescription]:
            if answers:
                return answers.pop()
            futures: dict[str, Future[TopicDescription]] = self._admin.describe_topics(
                TopicCollection([name])
            )
            return futures[name]

        try:
            found = self.call(ask, f"the topic {name!r} could not be looked up", reads=True)
        except UnknownTopicError:
            self._known.pop(name, None)
            return None
        info = TopicInfo(name, _hexadecimal(str(found.topic_id)), len(found.partitions))
        self._known[name] = (info, time.monotonic() + _CACHE_S)
        return None if found.is_internal else info

    def topic(self, name: str) -> TopicInfo:
        """Return the current metadata of one topic.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        info = self._describe_topic(name)
        if info is None:
            raise unknown_topic(name, self.topics())
        return info

    def cached_topic(self, topic: str) -> TopicInfo:
        """Return the metadata of a topic, a few seconds old at most.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        info, until_s = self._known.get(topic, (None, 0.0))
        self._check_open()
        return info if info is not None and time.monotonic() < until_s else self.topic(topic)

    def partition_count(self, topic: str) -> int:
        """Return how many partitions a topic has; see :meth:`cached_topic`."""
        return self.cached_topic(topic).partitions

    def check_partition(self, topic: str, partition: int) -> None:
        """Check that a partition exists.

        Raises:
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        if 0 <= partition < self.partition_count(topic):
            return
        count = self.topic(topic).partitions  # it may have been added since
        if not 0 <= partition < count:
            raise ConfigError(
                f"topic {topic!r} has no partition {partition}; choose one of 0 to {count - 1}"
            )

    def create_topic(self, name: str, partitions: int, settings: Mapping[str, str]) -> TopicInfo:
        """Create a topic, and wait until the broker shows it.

        Raises:
            TopicExistsError: the name is taken.
            ConfigError: the name, the number of partitions or a setting is not possible.
        """
        check_topic_name(name)
        if partitions < 1:
            raise ConfigError(f"topic {name!r} cannot have {partitions} partitions; give 1 or more")
        kept = {"max.message.bytes": str(RECORD_BYTES_MAX), "retention.ms": "-1", **settings}
        new = NewTopic(name, partitions, config=kept)
        self.call(
            lambda: self._admin.create_topics([new])[name], f"the topic {name!r} was not made"
        )
        return self._wait_until_visible(lambda: self._created_topic(name, partitions))

    def _created_topic(self, name: str, partitions: int) -> TopicInfo | None:
        info = self._describe_topic(name)
        return info if info is not None and info.partitions >= partitions else None

    def _wait_until_visible(self, look: Callable[[], _T | None]) -> _T:
        """Return the result of ``look``, once it is not None."""
        deadline_s = time.monotonic() + self.timeout_s
        while (found := look()) is None:
            if time.monotonic() >= deadline_s:
                raise RetriableError(
                    f"{self.shown} has accepted the change, and does not show it after "
                    f"{self.timeout_s:g} s; look again later"
                )
            time.sleep(_POLL_AGAIN_S)
        return found

    def alter_topic(
        self, name: str, partitions: int | None, settings: Mapping[str, str | None]
    ) -> TopicInfo:
        """Add partitions, or change settings, and wait until the broker shows it.

        Raises:
            UnknownTopicError: there is no such topic.
            ConfigError: a setting is not possible, or there would be fewer partitions.
        """
        info = self.topic(name)
        wanted = info.partitions if partitions is None else partitions
        if wanted < info.partitions:
            raise ConfigError(
                f"topic {name!r} has {info.partitions} partitions and cannot have {wanted}: they can "
                "be added, not removed; make another topic and copy the records"
            )
        if settings:
            self._set(name, settings)
        if wanted > info.partitions:
            more = NewPartitions(name, wanted)
            self.call(
                lambda: self._admin.create_partitions([more])[name],
                f"the topic {name!r} got no more partitions",
            )
        return self._wait_until_visible(lambda: self._created_topic(name, wanted))

    def _set(self, name: str, settings: Mapping[str, str | None]) -> None:
        entries = [
            ConfigEntry(
                setting,
                value or "",
                incremental_operation=(
                    AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
                ),
            )
            for setting, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        self.call(
            lambda: self._admin.incremental_alter_configs([resource])[resource],
            f"the settings of {name!r} were not changed",
        )
        # It shows after a moment. The wait is short, as a broker may write a value in another form.
        wanted = {setting: value for setting, value in settings.items() if value is not None}
        deadline_s = time.monotonic() + _SETTINGS_S
        while not wanted.items() <= self.settings(name).items() and time.monotonic() < deadline_s:
            time.sleep(_POLL_AGAIN_S)

    def settings(self, name: str) -> dict[str, str]:
        """Return every setting of a topic.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        self.topic(name)
        resource = ConfigResource(ResourceType.TOPIC, name)
        found = self.call(
            lambda: self._admin.describe_configs([resource])[resource],
            f"the settings of {name!r} could not be read",
            reads=True,
        )
        return {setting: str(entry.value) for setting, entry in found.items()}

    def delete_topic(self, name: str) -> None:
        """Remove a topic, and wait until it is gone.

        Raises:
            UnknownTopicError: there is no such topic.
        """
        self.topic(name)
        self.call(
            lambda: self._admin.delete_topics([name])[name], f"the topic {name!r} was not removed"
        )
        self._wait_until_visible(lambda: self._created_topic(name, 0) is None or None)
        self._known.pop(name, None)

    # -- offsets ------------------------------------------------------------------------------

    def offsets(
        self, topic: str, isolation: Isolation, topic_id: str | None = None
    ) -> list[tuple[int, int]]:
        """Return for each partition ``[log start, end)``: what a reader can read now.

        Raises:
            UnknownTopicError: there is no such topic.
            TopicRecreatedError: it does not have this ``topic_id``.
        """
        info = self.topic(topic)
        check_topic_id(topic, topic_id, info.topic_id)
        places = [KafkaTopicPartition(topic, number) for number in range(info.partitions)]
        low, high = (self.list_offsets(places, spec, isolation) for spec in _BOTH_ENDS)
        return list(zip(low, high, strict=True))

    def list_offsets(
        self, places: Sequence[KafkaTopicPartition], spec: OffsetSpec, isolation: Isolation
    ) -> list[int]:
        """Return one offset of each of these partitions; -1 if there is none."""
        asked, level = dict.fromkeys(places, spec), _LEVELS[isolation]
        found = self.call(
            lambda: _all_of(self._admin.list_offsets(asked, isolation_level=level)),
            "the offsets could not be read",
            reads=True,
        )
        return [found[place].offset for place in places]

    def offset_for_time(self, topic: str, partition: int, at_ms: int, isolation: Isolation) -> int:
        """Return the first offset of this time or later; the end if there is none."""
        self.check_partition(topic, partition)
        if (
            at_ms < 0
        ):  # brokers take -1 for the end and -2 for the start; no record is older than that
            return self.offsets(topic, isolation)[partition][0]
        spec = OffsetSpec.for_timestamp(at_ms)
        (found,) = self.list_offsets([KafkaTopicPartition(topic, partition)], spec, isolation)
        return found if found >= 0 else self.offsets(topic, isolation)[partition][1]

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Delete the records below an offset; return the new log start.

        Raises:
            OffsetOutOfRangeError: the offset is above the end.
            UnknownTopicError, ConfigError: there is no such topic or partition.
        """
        self.check_partition(topic, partition)
        low, end = self.offsets(topic, "read_uncommitted")[partition]
        if before_offset > end:
            raise OffsetOutOfRangeError(
                f"offset {before_offset} of {topic}/{partition} cannot become its start: it holds "
                f"[{low}, {end}); give an offset within",
                start=low,
                end=end,
            )
        place = KafkaTopicPartition(topic, partition, before_offset)
        deleted = self.call(
            lambda: self._admin.delete_records([place])[place],
            f"records of {topic}/{partition} stay",
        )
        return int(deleted.low_watermark)


def _all_of(
    futures: Mapping[KafkaTopicPartition, Future[_T]],
) -> Future[dict[KafkaTopicPartition, _T]]:
    """Return the results of several futures, or the error of one."""
    whole: Future[dict[KafkaTopicPartition, _T]] = Future()
    try:
        whole.set_result({place: future.result() for place, future in futures.items()})
    except KafkaException as raised:
        whole.set_exception(raised)
    return whole


_BOTH_ENDS = (OffsetSpec.earliest(), OffsetSpec.latest())


def _hexadecimal(topic_id: str) -> str:
    """Return Kafka's name for an id, 22 characters of base 64, as our 32 digits."""
    return base64.urlsafe_b64decode(topic_id + "==").hex()
