"""The messages of idempotent and transactional producers."""

from __future__ import annotations

from millstream.broker.protocol.schema import Api

INIT_PRODUCER_ID = Api(
    22,
    "InitProducerId",
    (0, 4),
    flexible=2,
    request="""
        transactional_id      string   0+ null 0+
        transaction_timeout_ms int32
        producer_id           int64    3+  = -1
        producer_epoch        int16    3+  = -1
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        producer_id           int64    0+  = -1
        producer_epoch        int16
    """,
)

ADD_PARTITIONS_TO_TXN = Api(
    24,
    "AddPartitionsToTxn",
    (0, 3),
    flexible=3,
    request="""
        v3_and_below_transactional_id string 0-3
        v3_and_below_producer_id int64 0-3
        v3_and_below_producer_epoch int16 0-3
        v3_and_below_topics   []       0-3
          name                string
          partitions          []int32
    """,
    response="""
        throttle_time_ms      int32
        results_by_topic_v3_and_below [] 0-3
          name                string
          results_by_partition []
            partition_index   int32
            partition_error_code int16
    """,
)

ADD_OFFSETS_TO_TXN = Api(
    25,
    "AddOffsetsToTxn",
    (0, 3),
    flexible=3,
    request="""
        transactional_id      string
        producer_id           int64
        producer_epoch        int16
        group_id              string
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
    """,
)

END_TXN = Api(
    26,
    "EndTxn",
    (0, 3),
    flexible=3,
    request="""
        transactional_id      string
        producer_id           int64
        producer_epoch        int16
        committed             bool
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
    """,
)

TXN_OFFSET_COMMIT = Api(
    28,
    "TxnOffsetCommit",
    (0, 3),
    flexible=3,
    request="""
        transactional_id      string
        group_id              string
        producer_id           int64
        producer_epoch        int16
        generation_id         int32    3+  = -1
        member_id             string   3+
        group_instance_id     string   3+ null 3+ = null
        topics                []
          name                string
          partitions          []
            partition_index   int32
            committed_offset  int64
            committed_leader_epoch int32 2+ = -1
            committed_metadata string  0+ null 0+
    """,
    response="""
        throttle_time_ms      int32
        topics                []
          name                string
          partitions          []
            partition_index   int32
            error_code        int16
    """,
)

DESCRIBE_TRANSACTIONS = Api(
    65,
    "DescribeTransactions",
    (0, 0),
    flexible=0,
    request="""
        transactional_ids     []string
    """,
    response="""
        throttle_time_ms      int32
        transaction_states    []
          error_code          int16
          transactional_id    string
          transaction_state   string
          transaction_timeout_ms int32
          transaction_start_time_ms int64
          producer_id         int64
          producer_epoch      int16
          topics              []
            topic             string
            partitions        []int32
    """,
)

LIST_TRANSACTIONS = Api(
    66,
    "ListTransactions",
    (0, 1),
    flexible=0,
    request="""
        state_filters         []string
        producer_id_filters   []int64
        duration_filter       int64    1+  = -1
    """,
    response="""
        throttle_time_ms      int32
        error_code            int16
        unknown_state_filters []string
        transaction_states    []
          transactional_id    string
          producer_id         int64
          transaction_state   string
    """,
)

TRANSACTION_APIS = (
    INIT_PRODUCER_ID,
    ADD_PARTITIONS_TO_TXN,
    ADD_OFFSETS_TO_TXN,
    END_TXN,
    TXN_OFFSET_COMMIT,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
)
