"""The messages that create, alter, describe and delete topics, and describe the broker."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

CREATE_TOPICS = Api(
    19,
    "CreateTopics",
    (2, 7),
    flexible=5,
    request="""
        topics                []
          name                string
          num_partitions      int32
          replication_factor  int16
          assignments         []
            partition_index   int32
            broker_ids        []int32
          configs             []
            name              string
            value             string   0+ null 0+
        timeout_ms            int32    0+  = 60000
        validate_only         bool     1+
    """,
    response="""
        throttle_time_ms      int32    2+
        topics                []
          name                string
          topic_id            uuid     7+
          error_code          int16
          error_message       string   1+ null 0+ = null
          topic_config_error_code int16 5+ tag 0
          num_partitions      int32    5+  = -1
          replication_factor  int16    5+  = -1
          configs             []       5+ null 5+
            name              string   5+
            value             string   5+ null 5+
            read_only         bool     5+
            config_source     int8     5+  = -1
            is_sensitive      bool     5+
    """,
)

DELETE_TOPICS = Api(
    20,
    "DeleteTopics",
    (1, 6),
    flexible=4,
    request="""
        topics                []       6+
          name                string   6+ null 6+ = null
          topic_id            uuid     6+
        topic_names           []string 0-5
        timeout_ms            int32
    """,
    response="""
        throttle_time_ms      int32    1+
        responses             []
          name                string   0+ null 6+
          topic_id            uuid     6+
          error_code          int16
          error_message       string   5+ null 5+ = null
    """,
)

DELETE_RECORDS = Api(
    21,
    "DeleteRecords",
    (0, 2),
    flexible=2,
    request="""
        topics                []
          name                string
          partitions          []
            partition_index   int32
            offset            int64
        timeout_ms            int32
    """,
    response="""
        throttle_time_ms      int32
        topics                []
          name                string
          partitions          []
            partition_index   int32
            low_watermark     int64
            error_code        int16
    """,
)

DESCRIBE_CONFIGS = Api(
    32,
    "DescribeConfigs",
    (1, 4),
    flexible=4,
    request="""
        resources             []
          resource_type       int8
          resource_name       string
          configuration_keys  []string 0+ null 0+
        include_synonyms      bool     1+
        include_documentation bool     3+
    """,
    response="""
        throttle_time_ms      int32
        results               []
          error_code          int16
          error_message       string   0+ null 0+
          resource_type       int8
          resource_name       string
          configs             []
            name              string
            value             string   0+ null 0+
            read_only         bool
            config_source     int8     1+  = -1
            is_sensitive      bool
            synonyms          []       1+
              name            string   1+
              value           string   1+ null 0+
              source          int8     1+
            config_type       int8     3+
            documentation     string   3+ null 0+
    """,
)

ALTER_CONFIGS = Api(
    33,
    "AlterConfigs",
    (0, 2),
    flexible=2,
    request="""
        resources             []
          resource_type       int8
          resource_name       string
          configs             []
            name              string
            value             string   0+ null 0+
        validate_only         bool
    """,
    response="""
        throttle_time_ms      int32
        responses             []
          error_code          int16
          error_message       string   0+ null 0+
          resource_type       int8
          resource_name       string
    """,
)

CREATE_PARTITIONS = Api(
    37,
    "CreatePartitions",
    (0, 3),
    flexible=2,
    request="""
        topics                []
          name                string
          count               int32
          assignments         []       0+ null 0+
            broker_ids        []int32
        timeout_ms            int32
        validate_only         bool
    """,
    response="""
        throttle_time_ms      int32
        results               []
          name                string
          error_code          int16
          error_message       string   0+ null 0+ = null
    """,
)

INCREMENTAL_ALTER_CONFIGS = Api(
    44,
    "IncrementalAlterConfigs",
    (0, 1),
    flexible=1,
    request="""
        resources             []
          resource_type       int8
          resource_name       string
          configs             []
            name              string
            config_operation  int8
            value             string   0+ null 0+
        validate_only         bool
    """,
    response="""
        throttle_time_ms      int32
        responses             []
          error_code          int16
          error_message       string   0+ null 0+
          resource_type       int8
          resource_name       string
    """,
)

DESCRIBE_CLUSTER = Api(
    60,
    "DescribeCluster",
    (0, 1),
    flexible=0,
    request="""
        include_cluster_authorized_operations bool
        endpoint_type         int8     1+  = 1
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        endpoint_type         int8     1+  = 1
        cluster_id            string
        controller_id         int32    0+  = -1
        brokers               []
          broker_id           int32
          host                string
          port                int32
          rack                string   0+ null 0+ = null
        cluster_authorized_operations int32 0+ = -2147483648
    """,
)

ADMIN_APIS = (
    CREATE_TOPICS,
    DELETE_TOPICS,
    DELETE_RECORDS,
    DESCRIBE_CONFIGS,
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    INCREMENTAL_ALTER_CONFIGS,
    DESCRIBE_CLUSTER,
)
