"""What tools ask of a cluster: replicas, folders, producers, permissions, offsets by time."""

from __future__ import annotations

from pathlib import Path

import pytest
from broker.broker_process import InProcess
from broker.raw_client import Asking, batch, create, only, produce, produced, raw

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records


@pytest.fixture
def broker(folder: Path):
    with InProcess(folder, broker_id=7) as running:
        yield running


@pytest.fixture
def asking(broker: InProcess):
    with Asking(broker.address) as client:
        client.ask("CreateTopics", 4, create("t", 3))
        yield client


def test_the_broker_has_the_number_that_it_was_given(asking) -> None:
    told = asking.ask("Metadata", 4, {"topics": None})
    assert [one["node_id"] for one in told["brokers"]] == [told["controller_id"]] == [7]
    (topic,) = told["topics"]
    assert {one["leader_id"] for one in topic["partitions"]} == {7}
    found = asking.ask("FindCoordinator", 3, {"key": "g", "key_type": 0})
    assert found["node_id"] == 7
    enlarge = {"name": "t", "count": 4, "assignments": [{"broker_ids": [7]}]}
    answer = asking.ask("CreatePartitions", 2, {"topics": [enlarge], "timeout_ms": 1000})
    assert only(answer, "results")["error_code"] == 0


def test_the_address_that_clients_are_told_is_among_the_settings(broker, asking) -> None:
    asked = {"resources": [{"resource_type": 4, "resource_name": "7", "configuration_keys": None}]}
    (told,) = asking.ask("DescribeConfigs", 4, asked)["results"]
    (found,) = (one for one in told["configs"] if one["name"] == "advertised.listeners")
    assert (found["value"], found["read_only"]) == (f"CLIENTS://{broker.address}", True)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_permissions_are_answered_as_without_an_authorizer(asking, version) -> None:
    described = asking.ask("DescribeAcls", version, {"pattern_type_filter": 3})
    acl = {"resource_name": "t", "principal": "User:a", "host": "*"}
    made = only(asking.ask("CreateAcls", version, {"creations": [acl]}), "results")
    gone = only(asking.ask("DeleteAcls", version, {"filters": [{}]}), "filter_results")
    assert {one["error_code"] for one in (described, made, gone)} == {ErrorCode.SECURITY_DISABLED}


def test_leaders_and_replicas_stay_where_they_are(asking) -> None:
    asked = {"topic_partitions": [{"topic": "t", "partitions": [0, 9]}]}
    elected = only(asking.ask("ElectLeaders", 2, asked), "replica_election_results")
    assert [one["error_code"] for one in elected["partition_result"]] == [
        ErrorCode.ELECTION_NOT_NEEDED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    moves = [
        {"partition_index": number, "replicas": replicas}
        for number, replicas in [(0, [7]), (0, [8]), (0, None), (9, [7])]
    ]
    asked = {"topics": [{"name": "t", "partitions": moves}]}
    moved = only(asking.ask("AlterPartitionReassignments", 0, asked), "responses")
    assert [one["error_code"] for one in moved["partitions"]] == [
        0,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert asking.ask("ListPartitionReassignments", 0, {})["topics"] == []


def test_the_folder_is_told_with_what_partitions_take_in_it(asking, folder) -> None:
    data = batch(b"v")
    assert produced(asking.ask("Produce", 7, produce(data)))["error_code"] == 0
    told = only(asking.ask("DescribeLogDirs", 4, {"topics": None}), "results")
    assert told["log_dir"] == str(folder.absolute())
    assert 0 < told["usable_bytes"] <= told["total_bytes"]
    sizes = {
        one["partition_index"]: one["partition_size"] for one in only(told, "topics")["partitions"]
    }
    assert sizes == {0: len(data), 1: 0, 2: 0}
    asked = {"topics": [{"topic": "t", "partitions": [2, 9]}]}
    some = only(asking.ask("DescribeLogDirs", 1, asked), "results", "topics")
    assert [one["partition_index"] for one in some["partitions"]] == [2]

    def moved(path: str) -> list[int]:
        dirs = [{"path": path, "topics": [{"name": "t", "partitions": [0, 9]}]}]
        answer = asking.ask("AlterReplicaLogDirs", 2, {"dirs": dirs})
        return [one["error_code"] for one in only(answer, "results")["partitions"]]

    assert moved(told["log_dir"]) == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert moved("/elsewhere") == [
        ErrorCode.LOG_DIR_NOT_FOUND,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_producers_of_a_partition_are_described(asking) -> None:
    request = {"transactional_id": "x", "transaction_timeout_ms": 60_000}
    who = asking.ask("InitProducerId", 4, request)
    identity = who["producer_id"], who["producer_epoch"]
    topics = [{"name": "t", "partitions": [0]}]
    begin = {"transactional_id": "x", "producer_id": identity[0], "producer_epoch": identity[1]}
    begin = {f"v3_and_below_{key}": value for key, value in begin.items()}
    asking.ask("AddPartitionsToTxn", 3, {**begin, "v3_and_below_topics": topics})
    sent = stamp(
        encode_records([SimpleRecord(5, b"k", b"v")] * 3),
        ProducerStamp(*identity, 0),
        transactional=True,
    )
    assert produced(asking.ask("Produce", 7, produce(raw(sent))))["error_code"] == 0
    asked = {"topics": [{"name": "t", "partition_indexes": [0, 0, 1, 9]}]}
    told = only(asking.ask("DescribeProducers", 0, asked), "topics")["partitions"]
    assert [one["error_code"] for one in told] == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    (found,) = told[0]["active_producers"]
    assert (found["producer_id"], found["producer_epoch"]) == identity
    assert (found["last_sequence"], found["current_txn_start_offset"]) == (2, 0)
    assert told[1]["active_producers"] == []


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 2000])
@pytest.mark.parametrize("named", [True, False])
def test_partitions_are_described_page_by_page(asking, limit, named) -> None:
    asking.ask("CreateTopics", 4, create("a", 1))
    asking.ask("CreateTopics", 4, create("u", 2))
    topics = [{"name": name} for name in ("u", "t", "a", "t")] if named else []
    found: list[tuple[str, int]] = []
    cursor = None
    for _ in range(20):
        request = {"topics": topics, "response_partition_limit": limit, "cursor": cursor}
        told = asking.ask("DescribeTopicPartitions", 0, request)
        page = [(t["name"], p["partition_index"]) for t in told["topics"] for p in t["partitions"]]
        assert 0 < len(page) <= limit
        assert {
            (*p["eligible_leader_replicas"], *p["last_known_elr"])
            for t in told["topics"]
            for p in t["partitions"]
        } == {()}  # Java's clients cannot do with null
        found += page
        cursor = told["next_cursor"]
        if cursor is None:
            break
    assert found == [("a", 0), ("t", 0), ("t", 1), ("t", 2), ("u", 0), ("u", 1)]
    missing = asking.ask("DescribeTopicPartitions", 0, {"topics": [{"name": "nope"}]})
    assert only(missing, "topics")["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_record_with_the_largest_timestamp_is_found(asking) -> None:
    def asked(timestamp: int, version: int = 10) -> tuple[int, int, int]:
        partition = {"partition_index": 0, "timestamp": timestamp}
        answer = asking.ask(
            "ListOffsets", version, {"topics": [{"name": "t", "partitions": [partition]}]}
        )
        one = only(answer, "topics", "partitions")
        return one["error_code"], one["offset"], one["timestamp"]

    assert asked(-3, 7) == (0, -1, -1)
    for times in ([5, 3], [9, 2], [9, 1], [4, 8]):
        rows = encode_records([SimpleRecord(time, b"k", b"v") for time in times])
        assert produced(asking.ask("Produce", 7, produce(raw(rows))))["error_code"] == 0
    assert asked(-3) == (0, 2, 9)
    records = {"name": "t", "partitions": [{"partition_index": 0, "offset": 3}]}
    asking.ask("DeleteRecords", 2, {"topics": [records]})
    assert asked(-3) == (0, 4, 9)
    assert asked(-4) == (0, 3, -1)  # all that there is, is local
    assert asked(-5) == (0, -1, -1)
    assert asked(-6)[0] == ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("by_transaction", [False, True])
def test_a_committed_leader_epoch_comes_back(asking, by_transaction) -> None:
    partition = {
        "partition_index": 0,
        "committed_offset": 4,
        "committed_leader_epoch": 3,
        "committed_metadata": "m",
    }
    request = {"group_id": "g", "topics": [{"name": "t", "partitions": [partition]}]}
    if by_transaction:
        init = {"transactional_id": "x", "transaction_timeout_ms": 60_000}
        told = asking.ask("InitProducerId", 4, init)
        who = {key: told[key] for key in ("producer_id", "producer_epoch")}
        who["transactional_id"] = "x"
        asking.ask("AddOffsetsToTxn", 3, {**who, "group_id": "g"})
        answer = asking.ask("TxnOffsetCommit", 3, {**who, **request, "generation_id": -1})
        assert asking.ask("EndTxn", 3, {**who, "committed": True})["error_code"] == 0
    else:
        answer = asking.ask("OffsetCommit", 8, {**request, "generation_id_or_member_epoch": -1})
    assert only(answer, "topics", "partitions")["error_code"] == 0
    asked = {"groups": [{"group_id": "g", "topics": None}]}
    found = only(asking.ask("OffsetFetch", 8, asked), "groups", "topics", "partitions")
    assert (found["committed_offset"], found["committed_leader_epoch"]) == (4, 3)
