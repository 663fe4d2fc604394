"""Requests about a cluster, handled by a single broker: one replica, one folder, no ACLs.

The broker describes partitions page by page, their sizes and their producers. Requests that have no effect
here (elections, reassignments, ACLs) get the responses of a Kafka with one broker and no authorizer.

Source: Kafka ``KafkaApis``, ``ReplicationControlManager``, ``DescribeTopicPartitionsRequestHandler``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ErrorCode, StorageError, code_of
from millstream.broker.protocol.wire import Message
from millstream.broker.requests.list_offsets import for_each_partition
from millstream.broker.requests.topics import describe_partition
from millstream.log.partition import Partition
from millstream.log.retention import PartitionContents
from millstream.record import TopicInfo, TopicPartition

PAGE_PARTITIONS_MAX = 2000
_NO_AUTHORIZER = {
    "error_code": ErrorCode.SECURITY_DISABLED,
    "error_message": "there are no ACLs: an authenticated client may do everything",
}
_UNKNOWN = {
    "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    "error_message": "there is no such partition",
}

# -- permissions ------------------------------------------------------------------------------


async def describe_acls(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle a DescribeAcls request."""
    return dict(_NO_AUTHORIZER)


async def create_acls(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle a CreateAcls request."""
    return {"results": [_NO_AUTHORIZER for _ in call.request["creations"]]}


async def delete_acls(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Handle a DeleteAcls request."""
    return {"filter_results": [_NO_AUTHORIZER for _ in call.request["filters"]]}


# -- leaders and replicas ---------------------------------------------------------------------


def _each(numbers: Iterable[int], describe: Callable[[int], Message]) -> list[Message]:
    return [{"partition_index": number, **describe(number)} for number in numbers]


def _has(topics: Mapping[str, TopicInfo], topic: str, number: int) -> bool:
    return topic in topics and 0 <= number < topics[topic].partitions


async def elect_leaders(node: BrokerNode, call: Call) -> Message:
    """Handle an ElectLeaders request: this broker leads each partition already."""
    topics = node.log.writer.topics()
    not_needed = {
        "error_code": ErrorCode.ELECTION_NOT_NEEDED,
        "error_message": f"broker {node.node_id} leads it, and there is no other",
    }
    requested = call.request["topic_partitions"]
    return {
        "replica_election_results": [
            {
                "topic": one["topic"],
                "partition_result": [
                    {
                        "partition_id": number,
                        **(not_needed if _has(topics, one["topic"], number) else _UNKNOWN),
                    }
                    for number in one["partitions"]
                ],
            }
            for one in requested
            or []  # for all partitions, the response names those that were elected: none
        ]
    }


async def alter_partition_reassignments(node: BrokerNode, call: Call) -> Message:
    """Handle an AlterPartitionReassignments request: only this broker can be a replica."""
    topics = node.log.writer.topics()

    def respond(topic: str, one: Message) -> Message:
        replicas = one["replicas"]
        if not _has(topics, topic, one["partition_index"]):
            return _UNKNOWN
        if replicas is None:
            return {
                "error_code": ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
                "error_message": "there is no reassignment that could be cancelled",
            }
        if replicas != [node.node_id]:
            return {
                "error_code": ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                "error_message": f"replicas {replicas}; give [{node.node_id}]: the only broker",
            }
        return {}

    return {"responses": for_each_partition(call.request["topics"], respond)}


async def list_partition_reassignments(node: BrokerNode, call: Call) -> Message:  # noqa: ARG001
    """Handle a ListPartitionReassignments request: there are none."""
    return {}


# -- folders ----------------------------------------------------------------------------------


def _folder(node: BrokerNode) -> str:
    return str(node.log.writer.folder.absolute())


async def describe_log_dirs(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeLogDirs request: the one folder, and the sizes of partitions in it."""
    requested = call.request["topics"]
    wanted = None
    if requested is not None:
        wanted = {TopicPartition(one["topic"], n) for one in requested for n in one["partitions"]}

    def look() -> Message:
        contents: list[PartitionContents] = []
        for partition in node.log.writer.partitions():

            def measure(partition: Partition = partition) -> None:
                if not partition.closed:
                    contents.append(partition.contents())

            if wanted is None or partition.name in wanted:
                node.log.writer.exclusively(measure)  # one at a time: appends wait meanwhile
        sizes: dict[str, dict[int, int]] = {}
        for one in contents:
            sizes.setdefault(one.name.topic, {})[one.name.partition] = one.size_bytes
        try:
            with storage_errors():
                disk = shutil.disk_usage(node.log.writer.folder)
        except StorageError as error:
            return {"results": [{"log_dir": _folder(node), "error_code": code_of(error)}]}
        topics = [
            {"name": topic, "partitions": _each(of_topic, lambda n, s=of_topic: _size(s[n]))}  # type: ignore[misc]
            for topic, of_topic in sizes.items()
        ]
        folder = {
            "log_dir": _folder(node),
            "topics": topics,
            "total_bytes": disk.total,
            "usable_bytes": disk.free,
        }
        return {"results": [folder]}

    return await node.log.run_write(look)


def _size(size: int) -> Message:
    return {"partition_size": size}


async def alter_replica_log_dirs(node: BrokerNode, call: Call) -> Message:
    """Handle an AlterReplicaLogDirs request: partitions cannot move to another folder."""
    topics, here = node.log.writer.topics(), _folder(node)

    def respond(path: str, topic: str, number: int) -> Message:
        if not _has(topics, topic, number):
            return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        return {} if path == here else {"error_code": ErrorCode.LOG_DIR_NOT_FOUND}

    return {
        "results": [
            {
                "topic_name": one["name"],
                "partitions": _each(
                    one["partitions"],
                    lambda n, path=at["path"], name=one["name"]: respond(path, name, n),  # type: ignore[misc]
                ),
            }
            for at in call.request["dirs"]
            for one in at["topics"]
        ]
    }


# -- describing -------------------------------------------------------------------------------


async def describe_producers(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeProducers request: the producers of partitions, and their open transactions."""

    def producers(topic: str, number: int) -> Message:
        partition = node.log.writer.partition(TopicPartition(topic, number))
        found: list[Message] = []
        node.log.writer.exclusively(lambda: found.extend(_producers(partition)))
        return {"active_producers": found}

    def look() -> list[Message]:
        return for_each_partition(
            [
                {
                    "name": topic["name"],
                    "partitions": [
                        {"partition_index": one}
                        for one in dict.fromkeys(topic["partition_indexes"])
                    ],
                }
                for topic in call.request["topics"]
            ],
            lambda topic, one: producers(topic, one["partition_index"]),
        )

    return {"topics": await node.log.run_write(look)}


def _producers(partition: Partition) -> list[Message]:
    return [
        {
            "producer_id": producer_id,
            "producer_epoch": entry.producer_epoch,
            "last_sequence": entry.batches[-1].last_sequence if entry.batches else -1,
            "last_timestamp": entry.last_used_ms,
            "coordinator_epoch": -1,
            "current_txn_start_offset": -1 if entry.open_since is None else entry.open_since,
        }
        for producer_id, entry in partition.producers.entries().items()
    ]


async def describe_topic_partitions(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeTopicPartitions request: one page of partitions, and a cursor to the next."""
    request, known = call.request, node.log.writer.topics()
    names = sorted({one["name"] for one in request["topics"]} or known)
    cursor = request["cursor"]
    since, first = ("", 0) if cursor is None else (cursor["topic_name"], cursor["partition_index"])
    left = max(1, min(request["response_partition_limit"], PAGE_PARTITIONS_MAX))
    topics: list[Message] = []
    for name in names:
        if name < since:
            continue
        info = known.get(name)
        if info is None:
            topics.append({"name": name, "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})
            continue
        start = max(first, 0) if name == since else 0
        if not left:
            return {"topics": topics, "next_cursor": _cursor(name, start)}
        stop = min(start + left, info.partitions)
        left -= max(stop - start, 0)
        topics.append(
            {
                "name": name,
                "topic_id": bytes.fromhex(info.topic_id),
                "partitions": [_describe(node, number) for number in range(start, stop)],
            }
        )
        if stop < info.partitions:
            return {"topics": topics, "next_cursor": _cursor(name, stop)}
    return {"topics": topics}


def _describe(node: BrokerNode, number: int) -> Message:
    # Java's clients fail on null.
    return {
        **describe_partition(node, number),
        "eligible_leader_replicas": [],
        "last_known_elr": [],
    }


def _cursor(topic: str, partition: int) -> Message:
    return {"topic_name": topic, "partition_index": partition}
