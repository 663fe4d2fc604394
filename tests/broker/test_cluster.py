"""What tools ask of a cluster: replicas, folders, producers, permissions, offsets by time."""

from __future__ import annotations

from pathlib import Path

import pytest
from broker.broker_process import InProcess
from broker.raw_client import RawClient, batch, create, only, produce, produced, raw

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records


@pytest.fixture
def broker(folder: Path):
    with InProcess(folder, broker_id=7) as running:
        yield running


@pytest.fixture
def raw_client(broker: InProcess):
    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create("t", 3))
        yield client


def test_the_broker_has_the_number_that_it_was_given(raw_client) -> None:
    told = raw_client.request("Metadata", 4, {"topics": None})
    assert [one["node_id"] for one in told["brokers"]] == [told["controller_id"]] == [7]
    (topic,) = told["topics"]
    assert {one["leader_id"] for one in topic["partitions"]} == {7}
    found = raw_client.request("FindCoordinator", 3, {"key": "g", "key_type": 0})
    assert found["node_id"] == 7
    enlarge = {"name": "t", "count": 4, "assignments": [{"broker_ids": [7]}]}
    response = raw_client.request("CreatePartitions", 2, {"topics": [enlarge], "timeout_ms": 1000})
    assert only(response, "results")["error_code"] == 0


def test_the_address_for_clients_is_among_the_settings(broker, raw_client) -> None:
    request = {
        "resources": [{"resource_type": 4, "resource_name": "7", "configuration_keys": None}]
    }
    (response,) = raw_client.request("DescribeConfigs", 4, request)["results"]
    (found,) = (one for one in response["configs"] if one["name"] == "advertised.listeners")
    assert (found["value"], found["read_only"]) == (f"CLIENTS://{broker.address}", True)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_requests_about_permissions_are_rejected_without_an_authorizer(raw_client, version) -> None:
    described = raw_client.request("DescribeAcls", version, {"pattern_type_filter": 3})
    acl = {"resource_name": "t", "principal": "User:a", "host": "*"}
    made = only(raw_client.request("CreateAcls", version, {"creations": [acl]}), "results")
    gone = only(raw_client.request("DeleteAcls", version, {"filters": [{}]}), "filter_results")
    assert {one["error_code"] for one in (described, made, gone)} == {ErrorCode.SECURITY_DISABLED}


def test_leaders_and_replicas_stay_where_they_are(raw_client) -> None:
    request = {"topic_partitions": [{"topic": "t", "partitions": [0, 9]}]}
    elected = only(raw_client.request("ElectLeaders", 2, request), "replica_election_results")
    assert [one["error_code"] for one in elected["partition_result"]] == [
        ErrorCode.ELECTION_NOT_NEEDED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    moves = [
        {"partition_index": number, "replicas": replicas}
        for number, replicas in [(0, [7]), (0, [8]), (0, None), (9, [7])]
    ]
    request = {"topics": [{"name": "t", "partitions": moves}]}
    moved = only(raw_client.request("AlterPartitionReassignments", 0, request), "responses")
    assert [one["error_code"] for one in moved["partitions"]] == [
        0,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert raw_client.request("ListPartitionReassignments", 0, {})["topics"] == []


def test_the_folder_is_described_with_the_sizes_of_its_partitions(raw_client, folder) -> None:
    data = batch(b"v")
    assert produced(raw_client.request("Produce", 7, produce(data)))["error_code"] == 0
    found = only(raw_client.request("DescribeLogDirs", 4, {"topics": None}), "results")
    assert found["log_dir"] == str(folder.absolute())
    assert 0 < found["usable_bytes"] <= found["total_bytes"]
    sizes = {
        one["partition_index"]: one["partition_size"] for one in only(found, "topics")["partitions"]
    }
    assert sizes == {0: len(data), 1: 0, 2: 0}
    request = {"topics": [{"topic": "t", "partitions": [2, 9]}]}
    some = only(raw_client.request("DescribeLogDirs", 1, request), "results", "topics")
    assert [one["partition_index"] for one in some["partitions"]] == [2]

    def moved(path: str) -> list[int]:
        dirs = [{"path": path, "topics": [{"name": "t", "partitions": [0, 9]}]}]
        response = raw_client.request("AlterReplicaLogDirs", 2, {"dirs": dirs})
        return [one["error_code"] for one in only(response, "results")["partitions"]]

    assert moved(found["log_dir"]) == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert moved("/elsewhere") == [
        ErrorCode.LOG_DIR_NOT_FOUND,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_producers_of_a_partition_are_described(raw_client) -> None:
    request = {"transactional_id": "x", "transaction_timeout_ms": 60_000}
    who = raw_client.request("InitProducerId", 4, request)
    identity = who["producer_id"], who["producer_epoch"]
    topics = [{"name": "t", "partitions": [0]}]
    begin = {"transactional_id": "x", "producer_id": identity[0], "producer_epoch": identity[1]}
    begin = {f"v3_and_below_{key}": value for key, value in begin.items()}
    raw_client.request("AddPartitionsToTxn", 3, {**begin, "v3_and_below_topics": topics})
    sent = stamp(
        encode_records([SimpleRecord(5, b"k", b"v")] * 3),
        ProducerStamp(*identity, 0),
        transactional=True,
    )
    assert produced(raw_client.request("Produce", 7, produce(raw(sent))))["error_code"] == 0
    asked = {"topics": [{"name": "t", "partition_indexes": [0, 0, 1, 9]}]}
    response = only(raw_client.request("DescribeProducers", 0, asked), "topics")["partitions"]
    assert [one["error_code"] for one in response] == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    (found,) = response[0]["active_producers"]
    assert (found["producer_id"], found["producer_epoch"]) == identity
    assert (found["last_sequence"], found["current_txn_start_offset"]) == (2, 0)
    assert response[1]["active_producers"] == []


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 2000])
@pytest.mark.parametrize("named", [True, False])
def test_partitions_are_described_page_by_page(raw_client, limit, named) -> None:
    raw_client.request("CreateTopics", 4, create("a", 1))
    raw_client.request("CreateTopics", 4, create("u", 2))
    topics = [{"name": name} for name in ("u", "t", "a", "t")] if named else []
    found: list[tuple[str, int]] = []
    cursor = None
    for _ in range(20):
        request = {"topics": topics, "response_partition_limit": limit, "cursor": cursor}
        response = raw_client.request("DescribeTopicPartitions", 0, request)
        page = [
            (t["name"], p["partition_index"]) for t in response["topics"] for p in t["partitions"]
        ]
        assert 0 < len(page) <= limit
        assert {
            (*p["eligible_leader_replicas"], *p["last_known_elr"])
            for t in response["topics"]
            for p in t["partitions"]
        } == {()}  # Java's clients cannot do with null
        found += page
        cursor = response["next_cursor"]
        if cursor is None:
            break
    assert found == [("a", 0), ("t", 0), ("t", 1), ("t", 2), ("u", 0), ("u", 1)]
    missing = raw_client.request("DescribeTopicPartitions", 0, {"topics": [{"name": "nope"}]})
    assert only(missing, "topics")["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_record_with_the_largest_timestamp_is_found(raw_client) -> None:
    def request(timestamp: int, version: int = 10) -> tuple[int, int, int]:
        partition = {"partition_index": 0, "timestamp": timestamp}
        response = raw_client.request(
            "ListOffsets", version, {"topics": [{"name": "t", "partitions": [partition]}]}
        )
        one = only(response, "topics", "partitions")
        return one["error_code"], one["offset"], one["timestamp"]

    assert request(-3, 7) == (0, -1, -1)
    for times in ([5, 3], [9, 2], [9, 1], [4, 8]):
        rows = encode_records([SimpleRecord(time, b"k", b"v") for time in times])
        assert produced(raw_client.request("Produce", 7, produce(raw(rows))))["error_code"] == 0
    assert request(-3) == (0, 2, 9)
    records = {"name": "t", "partitions": [{"partition_index": 0, "offset": 3}]}
    raw_client.request("DeleteRecords", 2, {"topics": [records]})
    assert request(-3) == (0, 4, 9)
    assert request(-4) == (0, 3, -1)  # all that there is, is local
    assert request(-5) == (0, -1, -1)
    assert request(-6)[0] == ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("by_transaction", [False, True])
def test_a_committed_leader_epoch_comes_back(raw_client, by_transaction) -> None:
    partition = {
        "partition_index": 0,
        "committed_offset": 4,
        "committed_leader_epoch": 3,
        "committed_metadata": "m",
    }
    request = {"group_id": "g", "topics": [{"name": "t", "partitions": [partition]}]}
    if by_transaction:
        init = {"transactional_id": "x", "transaction_timeout_ms": 60_000}
        told = raw_client.request("InitProducerId", 4, init)
        who = {key: told[key] for key in ("producer_id", "producer_epoch")}
        who["transactional_id"] = "x"
        raw_client.request("AddOffsetsToTxn", 3, {**who, "group_id": "g"})
        response = raw_client.request("TxnOffsetCommit", 3, {**who, **request, "generation_id": -1})
        assert raw_client.request("EndTxn", 3, {**who, "committed": True})["error_code"] == 0
    else:
        response = raw_client.request(
            "OffsetCommit", 8, {**request, "generation_id_or_member_epoch": -1}
        )
    assert only(response, "topics", "partitions")["error_code"] == 0
    asked = {"groups": [{"group_id": "g", "topics": None}]}
    found = only(raw_client.request("OffsetFetch", 8, asked), "groups", "topics", "partitions")
    assert (found["committed_offset"], found["committed_leader_epoch"]) == (4, 3)
