"""The settings of a broker, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The settings of a broker.

    Attributes:
        request_bytes_max: A larger request ends its connection.
        requests_bytes_max: How much all requests together may hold in memory; more of them wait.
        response_bytes_max: How many bytes of records one response has, unless one batch is larger.
        responses_bytes_max: How much responses may hold in memory before they get smaller.
        members_bytes_max: How much the metadata and assignments of all members of groups may hold.
        group_members_max: How many members one group of consumers has.
        batch_plain_bytes_max, batch_records_max: How large one batch may be, decompressed.
        transactional_ids_max: How many transactional ids there may be; one that is not used for a week
            is deleted.
        connections_max: More connections are closed as soon as they are accepted.
        stalled_s: A request that is not complete within this time ends its connection, and so does a
            response of which the client reads nothing for so long.
        contended_s: The same for a request of more than 64 KiB, while others wait for room.
        login_s: A connection that does not authenticate within this time, where the broker has users,
            is closed; so is one whose TLS handshake takes longer.
        certificate_every_s: How often the broker checks whether the certificate has been replaced.
        idle_s: A connection without any request for so long is closed.
        broker_id: The id of this broker for clients.
        default_partitions: Of topics that are created without a number of partitions.
        auto_create: Whether a missing topic is created when a client requests its metadata.
        rebalance_delay_ms: How long an empty group waits for more members after the first.
        session_timeout_ms_min, session_timeout_ms_max: The range for members of groups.
        offsets_retention_ms: For how long the offsets of a group without members are kept after its
            last commit; None: until they are deleted.
    """

    request_bytes_max: int = 100 * _MIB
    requests_bytes_max: int = 256 * _MIB
    response_bytes_max: int = 16 * _MIB
    responses_bytes_max: int = 256 * _MIB
    members_bytes_max: int = 128 * _MIB
    group_members_max: int = 5000
    batch_plain_bytes_max: int = 128 * _MIB
    batch_records_max: int = 1_000_000
    transactional_ids_max: int = 100_000
    connections_max: int = 4096
    stalled_s: float = 60.0
    contended_s: float = 5.0
    login_s: float = 10.0
    certificate_every_s: float = 60.0
    idle_s: float = 600.0
    broker_id: int = 1
    default_partitions: int = 1
    auto_create: bool = False
    rebalance_delay_ms: int = 100
    session_timeout_ms_min: int = 1000
    session_timeout_ms_max: int = 30 * 60_000
    offsets_retention_ms: int | None = None
