"""The messages about replicas, leaders, folders, producers and permissions of a whole cluster."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

DESCRIBE_ACLS = Api(
    29,
    "DescribeAcls",
    (1, 3),
    flexible=2,
    request="""
        resource_type_filter  int8
        resource_name_filter  string   0+ null 0+
        pattern_type_filter   int8     1+  = 3
        principal_filter      string   0+ null 0+
        host_filter           string   0+ null 0+
        operation             int8
        permission_type       int8
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        resources             []
          resource_type       int8
          resource_name       string
          pattern_type        int8     1+  = 3
          acls                []
            principal         string
            host              string
            operation         int8
            permission_type   int8
    """,
)

CREATE_ACLS = Api(
    30,
    "CreateAcls",
    (1, 3),
    flexible=2,
    request="""
        creations             []
          resource_type       int8
          resource_name       string
          resource_pattern_type int8   1+  = 3
          principal           string
          host                string
          operation           int8
          permission_type     int8
    """,
    response="""
        throttle_time_ms      int32
        results               []
          error_code          int16
          error_message       string   0+ null 0+ = null
    """,
)

DELETE_ACLS = Api(
    31,
    "DeleteAcls",
    (1, 3),
    flexible=2,
    request="""
        filters               []
          resource_type_filter int8
          resource_name_filter string  0+ null 0+
          pattern_type_filter int8     1+  = 3
          principal_filter    string   0+ null 0+
          host_filter         string   0+ null 0+
          operation           int8
          permission_type     int8
    """,
    response="""
        throttle_time_ms      int32
        filter_results        []
          error_code          int16
          error_message       string   0+ null 0+ = null
          matching_acls       []
            error_code        int16
            error_message     string   0+ null 0+ = null
            resource_type     int8
            resource_name     string
            pattern_type      int8     1+  = 3
            principal         string
            host              string
            operation         int8
            permission_type   int8
    """,
)

ALTER_REPLICA_LOG_DIRS = Api(
    34,
    "AlterReplicaLogDirs",
    (1, 2),
    flexible=2,
    request="""
        dirs                  []
          path                string
          topics              []
            name              string
            partitions        []int32
    """,
    response="""
        throttle_time_ms      int32
        results               []
          topic_name          string
          partitions          []
            partition_index   int32
            error_code        int16
    """,
)

DESCRIBE_LOG_DIRS = Api(
    35,
    "DescribeLogDirs",
    (1, 4),
    flexible=2,
    request="""
        topics                []       0+ null 0+
          topic               string
          partitions          []int32
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16    3+
        results               []
          error_code          int16
          log_dir             string
          topics              []
            name              string
            partitions        []
              partition_index int32
              partition_size  int64
              offset_lag      int64
              is_future_key   bool
          total_bytes         int64    4+  = -1
          usable_bytes        int64    4+  = -1
    """,
)

ELECT_LEADERS = Api(
    43,
    "ElectLeaders",
    (0, 2),
    flexible=2,
    request="""
        election_type         int8     1+
        topic_partitions      []       0+ null 0+
          topic               string
          partitions          []int32
        timeout_ms            int32    0+  = 60000
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16    1+
        replica_election_results []
          topic               string
          partition_result    []
            partition_id      int32
            error_code        int16
            error_message     string   0+ null 0+ = null
    """,
)

ALTER_PARTITION_REASSIGNMENTS = Api(
    45,
    "AlterPartitionReassignments",
    (0, 0),
    flexible=0,
    request="""
        timeout_ms            int32    0+  = 60000
        topics                []
          name                string
          partitions          []
            partition_index   int32
            replicas          []int32  0+ null 0+ = null
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        responses             []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
            error_message     string   0+ null 0+ = null
    """,
)

LIST_PARTITION_REASSIGNMENTS = Api(
    46,
    "ListPartitionReassignments",
    (0, 0),
    flexible=0,
    request="""
        timeout_ms            int32    0+  = 60000
        topics                []       0+ null 0+ = null
          name                string
          partition_indexes   []int32
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        topics                []
          name                string
          partitions          []
            partition_index   int32
            replicas          []int32
            adding_replicas   []int32
            removing_replicas []int32
    """,
)

DESCRIBE_PRODUCERS = Api(
    61,
    "DescribeProducers",
    (0, 0),
    flexible=0,
    request="""
        topics                []
          name                string
          partition_indexes   []int32
    """,
    response="""
        throttle_time_ms      int32
        topics                []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
            error_message     string   0+ null 0+ = null
            active_producers  []
              producer_id     int64
              producer_epoch  int32
              last_sequence   int32    0+  = -1
              last_timestamp  int64    0+  = -1
              coordinator_epoch int32
              current_txn_start_offset int64 0+ = -1
    """,
)

DESCRIBE_TOPIC_PARTITIONS = Api(
    75,
    "DescribeTopicPartitions",
    (0, 0),
    flexible=0,
    request="""
        topics                []
          name                string
        response_partition_limit int32 0+  = 2000
        cursor                {}       0+ null 0+ = null
          topic_name          string
          partition_index     int32
    """,
    response="""
        throttle_time_ms      int32
        topics                []
          error_code          int16
          name                string   0+ null 0+
          topic_id            uuid
          is_internal         bool
          partitions          []
            error_code        int16
            partition_index   int32
            leader_id         int32
            leader_epoch      int32    0+  = -1
            replica_nodes     []int32
            isr_nodes         []int32
            eligible_leader_replicas []int32 0+ null 0+ = null
            last_known_elr    []int32  0+ null 0+ = null
            offline_replicas  []int32
          topic_authorized_operations int32 0+ = -2147483648
        next_cursor           {}       0+ null 0+ = null
          topic_name          string
          partition_index     int32
    """,
)

CLUSTER_APIS = (
    DESCRIBE_ACLS,
    CREATE_ACLS,
    DELETE_ACLS,
    ALTER_REPLICA_LOG_DIRS,
    DESCRIBE_LOG_DIRS,
    ELECT_LEADERS,
    ALTER_PARTITION_REASSIGNMENTS,
    LIST_PARTITION_REASSIGNMENTS,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TOPIC_PARTITIONS,
)
