"""The messages about share groups: members, acquired records, and acknowledgements."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

SHARE_GROUP_HEARTBEAT = Api(
    76,
    "ShareGroupHeartbeat",
    (1, 1),
    flexible=0,
    request="""
        group_id              string
        member_id             string
        member_epoch          int32
        rack_id               string   0+ null 0+ = null
        subscribed_topic_names []string 0+ null 0+ = null
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        member_id             string   0+ null 0+ = null
        member_epoch          int32
        heartbeat_interval_ms int32
        assignment            {}       0+ null 0+ = null
          topic_partitions    []
            topic_id          uuid
            partitions        []int32
    """,
)

SHARE_GROUP_DESCRIBE = Api(
    77,
    "ShareGroupDescribe",
    (1, 1),
    flexible=0,
    request="""
        group_ids             []string
        include_authorized_operations bool
    """,
    response="""
        throttle_time_ms      int32
        groups                []
          error_code          int16
          error_message       string   0+ null 0+ = null
          group_id            string
          group_state         string
          group_epoch         int32
          assignment_epoch    int32
          assignor_name       string
          members             []
            member_id         string
            rack_id           string   0+ null 0+ = null
            member_epoch      int32
            client_id         string
            client_host       string
            subscribed_topic_names []string
            assignment        {}
              topic_partitions []
                topic_id      uuid
                topic_name    string
                partitions    []int32
          authorized_operations int32  0+ = -2147483648
    """,
)

SHARE_FETCH = Api(
    78,
    "ShareFetch",
    (1, 2),
    flexible=0,
    request="""
        group_id              string   0+ null 0+ = null
        member_id             string   0+ null 0+
        share_session_epoch   int32
        max_wait_ms           int32
        min_bytes             int32
        max_bytes             int32    0+ = 2147483647
        max_records           int32
        batch_size            int32
        share_acquire_mode    int8     2+
        is_renew_ack          bool     2+
        topics                []
          topic_id            uuid
          partitions          []
            partition_index   int32
            acknowledgement_batches []
              first_offset    int64
              last_offset     int64
              acknowledge_types []int8
        forgotten_topics_data []
          topic_id            uuid
          partitions          []int32
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        acquisition_lock_timeout_ms int32
        responses             []
          topic_id            uuid
          partitions          []
            partition_index   int32
            error_code        int16
            error_message     string   0+ null 0+ = null
            acknowledge_error_code int16
            acknowledge_error_message string 0+ null 0+ = null
            current_leader    {}
              leader_id       int32
              leader_epoch    int32
            records           records
            acquired_records  []
              first_offset    int64
              last_offset     int64
              delivery_count  int16
        node_endpoints        []
          node_id             int32
          host                string
          port                int32
          rack                string   0+ null 0+ = null
    """,
)

SHARE_ACKNOWLEDGE = Api(
    79,
    "ShareAcknowledge",
    (1, 2),
    flexible=0,
    request="""
        group_id              string   0+ null 0+ = null
        member_id             string   0+ null 0+
        share_session_epoch   int32
        is_renew_ack          bool     2+
        topics                []
          topic_id            uuid
          partitions          []
            partition_index   int32
            acknowledgement_batches []
              first_offset    int64
              last_offset     int64
              acknowledge_types []int8
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        acquisition_lock_timeout_ms int32 2+
        responses             []
          topic_id            uuid
          partitions          []
            partition_index   int32
            error_code        int16
            error_message     string   0+ null 0+ = null
            current_leader    {}
              leader_id       int32
              leader_epoch    int32
        node_endpoints        []
          node_id             int32
          host                string
          port                int32
          rack                string   0+ null 0+ = null
    """,
)

DESCRIBE_SHARE_GROUP_OFFSETS = Api(
    90,
    "DescribeShareGroupOffsets",
    (0, 1),
    flexible=0,
    request="""
        groups                []
          group_id            string
          topics              []       0+ null 0+
            topic_name        string
            partitions        []int32
    """,
    response="""
        throttle_time_ms      int32
        groups                []
          group_id            string
          topics              []
            topic_name        string
            topic_id          uuid
            partitions        []
              partition_index int32
              start_offset    int64
              leader_epoch    int32
              lag             int64    1+ = -1
              error_code      int16
              error_message   string   0+ null 0+ = null
          error_code          int16
          error_message       string   0+ null 0+ = null
    """,
)

ALTER_SHARE_GROUP_OFFSETS = Api(
    91,
    "AlterShareGroupOffsets",
    (0, 0),
    flexible=0,
    request="""
        group_id              string
        topics                []
          topic_name          string
          partitions          []
            partition_index   int32
            start_offset      int64
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        responses             []
          topic_name          string
          topic_id            uuid
          partitions          []
            partition_index   int32
            error_code        int16
            error_message     string   0+ null 0+ = null
    """,
)

DELETE_SHARE_GROUP_OFFSETS = Api(
    92,
    "DeleteShareGroupOffsets",
    (0, 0),
    flexible=0,
    request="""
        group_id              string
        topics                []
          topic_name          string
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        error_message         string   0+ null 0+ = null
        responses             []
          topic_name          string
          topic_id            uuid
          error_code          int16
          error_message       string   0+ null 0+ = null
    """,
)

SHARE_APIS = (
    SHARE_GROUP_HEARTBEAT,
    SHARE_GROUP_DESCRIBE,
    SHARE_FETCH,
    SHARE_ACKNOWLEDGE,
    DESCRIBE_SHARE_GROUP_OFFSETS,
    ALTER_SHARE_GROUP_OFFSETS,
    DELETE_SHARE_GROUP_OFFSETS,
)
