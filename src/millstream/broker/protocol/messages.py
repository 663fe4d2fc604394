"""The requests for records and topics, field by field, and the table of all requests of the broker.

The other fields are in the modules ``messages_…`` beside this one; ``schema`` says how to read them. The
version ranges begin where Apache Kafka 4 begins, or a little before, and end where a newer version would
promise what the broker does not support: topic ids in Produce, the newer group and transaction protocols.
"""

from __future__ import annotations

from millstream.broker.protocol.messages_admin import ADMIN_APIS
from millstream.broker.protocol.messages_cluster import CLUSTER_APIS
from millstream.broker.protocol.messages_groups import GROUP_APIS
from millstream.broker.protocol.messages_security import SECURITY_APIS
from millstream.broker.protocol.messages_share import SHARE_APIS
from millstream.broker.protocol.messages_transactions import TRANSACTION_APIS
from millstream.broker.protocol.schema import Api, parse, structure_of

PRODUCE = Api(
    0,
    "Produce",
    (0, 8),
    request="""
        transactional_id      string  3+  null 3+  = null
        acks                  int16
        timeout_ms            int32
        topic_data            []
          name                string
          partition_data      []
            index             int32
            records           records  0+ null 0+
    """,
    response="""
        responses             []
          name                string
          partition_responses []
            index             int32
            error_code        int16
            base_offset       int64
            log_append_time_ms int64   2+  = -1
            log_start_offset  int64    5+  = -1
            record_errors     []       8+
              batch_index     int32    8+
              batch_index_error_message string 8+ null 8+ = null
            error_message     string   8+ null 8+ = null
        throttle_time_ms      int32    1+
    """,
)

FETCH = Api(
    1,
    "Fetch",
    (4, 13),
    flexible=12,
    request="""
        replica_id            int32
        max_wait_ms           int32
        min_bytes             int32
        max_bytes             int32    3+  = 2147483647
        isolation_level       int8     4+
        session_id            int32    7+
        session_epoch         int32    7+  = -1
        topics                []
          topic               string   0-12
          topic_id            uuid     13+
          partitions          []
            partition         int32
            current_leader_epoch int32 9+  = -1
            fetch_offset      int64
            last_fetched_epoch int32   12+ = -1
            log_start_offset  int64    5+  = -1
            partition_max_bytes int32
        forgotten_topics_data []       7+
          topic               string   7-12
          topic_id            uuid     13+
          partitions          []int32  7+
        rack_id               string   11+
        cluster_id            string   12+ null 12+ tag 0 = null
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16    7+
        session_id            int32    7+
        responses             []
          topic               string   0-12
          topic_id            uuid     13+
          partitions          []
            partition_index   int32
            error_code        int16
            high_watermark    int64
            last_stable_offset int64   4+  = -1
            log_start_offset  int64    5+  = -1
            aborted_transactions []    4+ null 4+
              producer_id     int64    4+
              first_offset    int64    4+
            preferred_read_replica int32 11+ = -1
            records           records  0+ null 0+
    """,
)

LIST_OFFSETS = Api(
    2,
    "ListOffsets",
    (1, 10),
    flexible=6,
    request="""
        replica_id            int32
        isolation_level       int8     2+
        topics                []
          name                string
          partitions          []
            partition_index   int32
            current_leader_epoch int32 4+ = -1
            timestamp         int64
        timeout_ms            int32    10+
    """,
    response="""
        throttle_time_ms      int32    2+
        topics                []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
            timestamp         int64    1+  = -1
            offset            int64    1+  = -1
            leader_epoch      int32    4+  = -1
    """,
)

METADATA = Api(
    3,
    "Metadata",
    (0, 12),
    flexible=9,
    request="""
        topics                []       0+ null 1+
          topic_id            uuid     10+
          name                string   0+ null 10+
        allow_auto_topic_creation bool 4+  = true
        include_cluster_authorized_operations bool 8-10
        include_topic_authorized_operations bool 8+
    """,
    response="""
        throttle_time_ms      int32    3+
        brokers               []
          node_id             int32
          host                string
          port                int32
          rack                string   1+ null 1+ = null
        cluster_id            string   2+ null 2+ = null
        controller_id         int32    1+  = -1
        topics                []
          error_code          int16
          name                string   0+ null 12+
          topic_id            uuid     10+
          is_internal         bool     1+
          partitions          []
            error_code        int16
            partition_index   int32
            leader_id         int32
            leader_epoch      int32    7+  = -1
            replica_nodes     []int32
            isr_nodes         []int32
            offline_replicas  []int32  5+
          topic_authorized_operations int32 8+ = -2147483648
        cluster_authorized_operations int32 8-10 = -2147483648
    """,
)

API_VERSIONS = Api(
    18,
    "ApiVersions",
    (0, 4),
    flexible=3,
    request="""
        client_software_name  string   3+
        client_software_version string 3+
    """,
    response="""
        error_code            int16
        api_keys              []
          api_key             int16
          min_version         int16
          max_version         int16
        throttle_time_ms      int32    1+
        supported_features    []       3+ tag 0
          name                string   3+
          min_version         int16    3+
          max_version         int16    3+
        finalized_features_epoch int64 3+ tag 1 = -1
        finalized_features    []       3+ tag 2
          name                string   3+
          max_version_level   int16    3+
          min_version_level   int16    3+
        zk_migration_ready    bool     3+ tag 3
    """,
)

_APIS = (
    PRODUCE,
    FETCH,
    LIST_OFFSETS,
    METADATA,
    API_VERSIONS,
    *GROUP_APIS,
    *TRANSACTION_APIS,
    *ADMIN_APIS,
    *CLUSTER_APIS,
    *SECURITY_APIS,
    *SHARE_APIS,
)
APIS = {one.key: one for one in sorted(_APIS, key=lambda one: one.key)}

# What of a request's header is of fixed form in all versions, and what a flexible one adds.
_REQUEST_HEADER = parse("""
    api_key           int16
    api_version       int16
    correlation_id    int32
    client_id         string  0+ null 0+
""")
REQUEST_HEADER = structure_of(_REQUEST_HEADER, 0, flexible=False)
