"""Translates Kafka's errors to ours: by what the caller must do, with the broker's message.

No error of the library leaves ``client.kafka``. Its names of the client's own codes begin with an underscore,
and are public.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from millstream.errors import (
    BrokerUnavailableError,
    ConfigError,
    ConflictError,
    MillstreamError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    RetriableError,
    TopicExistsError,
    TransactionAbortedError,
    UnknownTopicError,
)

OUT_OF_RANGE = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)
UNAVAILABLE = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._NOENT,  # "No leaders found": of a broker that has just come back
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.REQUEST_TIMED_OUT,
)
# Passing errors: after a topic was created, after a broker started. A broker that has not taken up a new
# partition yet finds the client's knowledge of the leader newer than its own.
RETRIABLE = (
    KafkaError._NOENT,
    KafkaError._WAIT_COORD,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)
_UNKNOWN_TOPIC = (
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
)
_FENCED = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)
_PURGED = (KafkaError._PURGE_INFLIGHT, KafkaError._PURGE_QUEUE)
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
_CONFIG = (
    KafkaError._AUTHENTICATION,
    KafkaError._INVALID_ARG,
    KafkaError._SSL,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._UNSUPPORTED_FEATURE,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_GROUP_ID,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_REQUEST,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.ILLEGAL_SASL_STATE,
    KafkaError.OFFSET_METADATA_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.UNSUPPORTED_VERSION,
)
_IN_USE = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.UNKNOWN_MEMBER_ID,
)


# Codes, our error, and the remedy in its message. The first row with the code counts.
_TABLE: tuple[tuple[tuple[int, ...], type[MillstreamError], str], ...] = (
    (
        UNAVAILABLE,
        BrokerUnavailableError,
        "no broker responded in time; check that it runs, or correct the address",
    ),
    ((KafkaError.TOPIC_ALREADY_EXISTS,), TopicExistsError, "use it, or choose another name"),
    (_UNKNOWN_TOPIC, UnknownTopicError, "create the topic, or correct the name"),
    (
        _FENCED,
        ProducerFencedError,
        "a newer one of its transactional id has begun, or it was open for too long; close this one",
    ),
    (_PURGED, TransactionAbortedError, "its transaction was aborted first; begin another"),
    (
        _TOO_LARGE,
        RecordTooLargeError,
        "send a smaller record, or raise max.message.bytes of the topic",
    ),
    (
        (KafkaError.INVALID_RECORD,),
        ConfigError,
        "the broker takes no such record; a compacted topic takes only those with a key",
    ),
    (_CONFIG, ConfigError, "correct it"),
    (_IN_USE, ConflictError, "the group has members at work; stop them first"),
    (
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,),
        OutOfOrderSequenceError,
        "start over with a new producer",
    ),
)


def to_millstream_error(error: KafkaError, what: str) -> MillstreamError:
    """Return the error to raise; ``what`` is a sentence's beginning: "the topic 't' was not made"."""
    code, said = error.code(), error.str()
    for codes, kind, remedy in _TABLE:
        if code in codes:
            return kind(f"{what} ({said}): {remedy}")
    if error.retriable():
        return RetriableError(f"{what} ({said}): retry")
    return MillstreamError(f"{what} ({said})")


def kafka_error_of(raised: KafkaException) -> KafkaError:
    """Return the error in an exception of the library."""
    error = raised.args[0]
    assert isinstance(error, KafkaError), "it holds nothing else"
    return error


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate exceptions of the library in the block.

    Raises:
        MillstreamError: in its place; see :func:`to_millstream_error`.
    """
    try:
        yield
    except KafkaException as raised:
        raise to_millstream_error(kafka_error_of(raised), what) from raised
