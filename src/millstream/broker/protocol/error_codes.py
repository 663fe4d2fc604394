"""The error codes of the protocol, and which of our errors each stands for.

Source: Kafka ``Errors``.
"""

from __future__ import annotations

from enum import IntEnum

from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    CorruptionError,
    DiskFullError,
    FencedError,
    MillstreamError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RecordTooLargeError,
    RetriableError,
    TopicExistsError,
    TopicRecreatedError,
    TransactionAbortedError,
    UnknownTopicError,
)


class ErrorCode(IntEnum):
    """The error codes that the broker uses, under Kafka's names."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    NOT_LEADER_OR_FOLLOWER = 6
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FENCED_MEMBER_EPOCH = 110
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    SHARE_SESSION_LIMIT_REACHED = 133


class ApiError(Exception):
    """A request is rejected; the response has this code, and the message if it has a field for it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StorageError(MillstreamError):
    """The system refused an operation on the files of the log. Retry, or check the broker's disk."""


# The first match counts, so a class comes before those that it is derived from.
_CODE_BY_ERROR: tuple[tuple[type[MillstreamError], ErrorCode], ...] = (
    (UnknownTopicError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (TopicRecreatedError, ErrorCode.UNKNOWN_TOPIC_ID),
    (TopicExistsError, ErrorCode.TOPIC_ALREADY_EXISTS),
    (RecordTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (OffsetOutOfRangeError, ErrorCode.OFFSET_OUT_OF_RANGE),
    (OutOfOrderSequenceError, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (ProducerFencedError, ErrorCode.INVALID_PRODUCER_EPOCH),
    (TransactionAbortedError, ErrorCode.INVALID_TXN_STATE),
    (FencedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (CorruptBatchError, ErrorCode.CORRUPT_MESSAGE),
    (DiskFullError, ErrorCode.KAFKA_STORAGE_ERROR),
    (CorruptionError, ErrorCode.KAFKA_STORAGE_ERROR),
    (StorageError, ErrorCode.KAFKA_STORAGE_ERROR),
    (RetriableError, ErrorCode.COORDINATOR_NOT_AVAILABLE),
    (ConfigError, ErrorCode.INVALID_REQUEST),
)


# The codes that a coordinator uses instead: every client retries after these. After other codes for
# disk errors, clients end their producer or fail the commit.
_COORDINATOR_CODES = {
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
}


def coordinator_code_of(error: Exception) -> ErrorCode:
    """Return the code that a coordinator of groups or transactions uses for an error.

    Source: Kafka ``TransactionStateManager.appendTransactionToLog``, ``GroupCoordinatorService``;
    librdkafka ``rdkafka_txnmgr.c``; Java's ``TransactionManager``.
    """
    code = code_of(error)
    return _COORDINATOR_CODES.get(code, code)


def code_of(error: Exception) -> ErrorCode:
    """Return the code of an error."""
    if isinstance(error, ApiError):
        return error.code
    for kind, code in _CODE_BY_ERROR:
        if isinstance(error, kind):
            return code
    return ErrorCode.UNKNOWN_SERVER_ERROR
