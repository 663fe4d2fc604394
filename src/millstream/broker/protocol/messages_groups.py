"""The messages about consumer groups: their members, assignments and committed offsets."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

OFFSET_COMMIT = Api(
    8,
    "OffsetCommit",
    (2, 8),
    flexible=8,
    request="""
        group_id              string
        generation_id_or_member_epoch int32 1+ = -1
        member_id             string   1+
        group_instance_id     string   7+ null 7+ = null
        retention_time_ms     int64    2-4 = -1
        topics                []
          name                string
          partitions          []
            partition_index   int32
            committed_offset  int64
            committed_leader_epoch int32 6+ = -1
            committed_metadata string  0+ null 0+
    """,
    response="""
        throttle_time_ms      int32    3+
        topics                []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
    """,
)

OFFSET_FETCH = Api(
    9,
    "OffsetFetch",
    (1, 8),
    flexible=6,
    request="""
        group_id              string   0-7
        topics                []       0-7 null 2+
          name                string   0-7
          partition_indexes   []int32  0-7
        groups                []       8+
          group_id            string   8+
          topics              []       8+ null 8+
            name              string   8+
            partition_indexes []int32  8+
        require_stable        bool     7+
    """,
    response="""
        throttle_time_ms      int32    3+
        topics                []       0-7
          name                string   0-7
          partitions          []       0-7
            partition_index   int32    0-7
            committed_offset  int64    0-7
            committed_leader_epoch int32 5-7 = -1
            metadata          string   0-7 null 0+
            error_code        int16    0-7
        error_code            int16    2-7
        groups                []       8+
          group_id            string   8+
          topics              []       8+
            name              string   8+
            partitions        []       8+
              partition_index int32    8+
              committed_offset int64   8+
              committed_leader_epoch int32 8+ = -1
              metadata        string   8+ null 8+
              error_code      int16    8+
          error_code          int16    8+
    """,
)

FIND_COORDINATOR = Api(
    10,
    "FindCoordinator",
    (0, 4),
    flexible=3,
    request="""
        key                   string   0-3
        key_type              int8     1+
        coordinator_keys      []string 4+
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16    0-3
        error_message         string   1-3 null 1+
        node_id               int32    0-3
        host                  string   0-3
        port                  int32    0-3
        coordinators          []       4+
          key                 string   4+
          node_id             int32    4+
          host                string   4+
          port                int32    4+
          error_code          int16    4+
          error_message       string   4+ null 4+
    """,
)

JOIN_GROUP = Api(
    11,
    "JoinGroup",
    (0, 9),
    flexible=6,
    request="""
        group_id              string
        session_timeout_ms    int32
        rebalance_timeout_ms  int32    1+  = -1
        member_id             string
        group_instance_id     string   5+ null 5+ = null
        protocol_type         string
        protocols             []
          name                string
          metadata            bytes
        reason                string   8+ null 8+ = null
    """,
    response="""
        throttle_time_ms      int32    2+
        error_code            int16
        generation_id         int32    0+  = -1
        protocol_type         string   7+ null 7+ = null
        protocol_name         string   0+ null 7+
        leader                string
        skip_assignment       bool     9+
        member_id             string
        members               []
          member_id           string
          group_instance_id   string   5+ null 5+ = null
          metadata            bytes
    """,
)

HEARTBEAT = Api(
    12,
    "Heartbeat",
    (0, 4),
    flexible=4,
    request="""
        group_id              string
        generation_id         int32
        member_id             string
        group_instance_id     string   3+ null 3+ = null
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16
    """,
)

LEAVE_GROUP = Api(
    13,
    "LeaveGroup",
    (0, 5),
    flexible=4,
    request="""
        group_id              string
        member_id             string   0-2
        members               []       3+
          member_id           string   3+
          group_instance_id   string   3+ null 3+ = null
          reason              string   5+ null 5+ = null
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16
        members               []       3+
          member_id           string   3+
          group_instance_id   string   3+ null 3+
          error_code          int16    3+
    """,
)

SYNC_GROUP = Api(
    14,
    "SyncGroup",
    (0, 5),
    flexible=4,
    request="""
        group_id              string
        generation_id         int32
        member_id             string
        group_instance_id     string   3+ null 3+ = null
        protocol_type         string   5+ null 5+ = null
        protocol_name         string   5+ null 5+ = null
        assignments           []
          member_id           string
          assignment          bytes
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16
        protocol_type         string   5+ null 5+ = null
        protocol_name         string   5+ null 5+ = null
        assignment            bytes
    """,
)

DESCRIBE_GROUPS = Api(
    15,
    "DescribeGroups",
    (0, 5),
    flexible=5,
    request="""
        groups                []string
        include_authorized_operations bool 3+
    """,
    response="""
        throttle_time_ms      int32    1+
        groups                []
          error_code          int16
          group_id            string
          group_state         string
          protocol_type       string
          protocol_data       string
          members             []
            member_id         string
            group_instance_id string   4+ null 4+ = null
            client_id         string
            client_host       string
            member_metadata   bytes
            member_assignment bytes
          authorized_operations int32  3+ = -2147483648
    """,
)

LIST_GROUPS = Api(
    16,
    "ListGroups",
    (0, 5),
    flexible=3,
    request="""
        states_filter         []string 4+
        types_filter          []string 5+
    """,
    response="""
        throttle_time_ms      int32    1+
        error_code            int16
        groups                []
          group_id            string
          protocol_type       string
          group_state         string   4+
          group_type          string   5+
    """,
)

DELETE_GROUPS = Api(
    42,
    "DeleteGroups",
    (0, 2),
    flexible=2,
    request="""
        groups_names          []string
    """,
    response="""
        throttle_time_ms      int32
        results               []
          group_id            string
          error_code          int16
    """,
)

OFFSET_DELETE = Api(
    47,
    "OffsetDelete",
    (0, 0),
    request="""
        group_id              string
        topics                []
          name                string
          partitions          []
            partition_index   int32
    """,
    response="""
        error_code            int16
        throttle_time_ms      int32
        topics                []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
    """,
)

GROUP_APIS = (
    OFFSET_COMMIT,
    OFFSET_FETCH,
    FIND_COORDINATOR,
    JOIN_GROUP,
    HEARTBEAT,
    LEAVE_GROUP,
    SYNC_GROUP,
    DESCRIBE_GROUPS,
    LIST_GROUPS,
    DELETE_GROUPS,
    OFFSET_DELETE,
)
