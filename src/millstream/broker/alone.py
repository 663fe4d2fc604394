"""What tools ask of a cluster, answered by a broker that is alone: one replica, one folder, no ACLs.

What there is, is told: partitions page by page, how large they are, who writes into them. What there is
nothing to do about (electing, moving, permitting) is answered as a Kafka of one broker without an authorizer does.

Source: Kafka ``KafkaApis``, ``ReplicationControlManager``, ``DescribeTopicPartitionsRequestHandler``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping

from millstream.broker.codes import Code
from millstream.broker.listing import for_each_partition
from millstream.broker.node import Call, Node
from millstream.broker.topics import partition_described
from millstream.broker.wire import Message
from millstream.log.partition import Partition
from millstream.log.retention import Holding
from millstream.record import TopicInfo, TopicPartition

PAGE_PARTITIONS_MAX = 2000
_NO_AUTHORIZER = {
    "error_code": Code.SECURITY_DISABLED,
    "error_message": "there are no ACLs: whoever may come in, may do everything",
}
_UNKNOWN = {
    "error_code": Code.UNKNOWN_TOPIC_OR_PARTITION,
    "error_message": "there is no such partition",
}

# -- permissions ------------------------------------------------------------------------------


async def describe_acls(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer a DescribeAcls request."""
    return dict(_NO_AUTHORIZER)


async def create_acls(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer a CreateAcls request."""
    return {"results": [_NO_AUTHORIZER for _ in call.request["creations"]]}


async def delete_acls(node: Node, call: Call) -> Message:  # noqa: ARG001 - a handler
    """Answer a DeleteAcls request."""
    return {"filter_results": [_NO_AUTHORIZER for _ in call.request["filters"]]}


# -- leaders and replicas ---------------------------------------------------------------------


def _each(numbers: Iterable[int], tell: Callable[[int], Message]) -> list[Message]:
    return [{"partition_index": number, **tell(number)} for number in numbers]


def _has(topics: Mapping[str, TopicInfo], topic: str, number: int) -> bool:
    return topic in topics and 0 <= number < topics[topic].partitions


async def elect_leaders(node: Node, call: Call) -> Message:
    """Answer an ElectLeaders request: each partition has the only leader that it can have."""
    topics = node.writer.topics()
    needless = {
        "error_code": Code.ELECTION_NOT_NEEDED,
        "error_message": f"broker {node.node_id} leads it, and there is no other",
    }
    asked = call.request["topic_partitions"]
    return {
        "replica_election_results": [
            {
                "topic": one["topic"],
                "partition_result": [
                    {
                        "partition_id": number,
                        **(needless if _has(topics, one["topic"], number) else _UNKNOWN),
                    }
                    for number in one["partitions"]
                ],
            }
            for one in asked or []  # of all, it would name those that were elected
        ]
    }


async def alter_partition_reassignments(node: Node, call: Call) -> Message:
    """Answer an AlterPartitionReassignments request: a partition may go where it is."""
    topics = node.writer.topics()

    def tell(topic: str, one: Message) -> Message:
        replicas = one["replicas"]
        if not _has(topics, topic, one["partition_index"]):
            return _UNKNOWN
        if replicas is None:
            return {
                "error_code": Code.NO_REASSIGNMENT_IN_PROGRESS,
                "error_message": "nothing is on its way, so nothing can be called back",
            }
        if replicas != [node.node_id]:
            return {
                "error_code": Code.INVALID_REPLICA_ASSIGNMENT,
                "error_message": f"replicas {replicas}; give [{node.node_id}]: the only broker",
            }
        return {}

    return {"responses": for_each_partition(call.request["topics"], tell)}


async def list_partition_reassignments(node: Node, call: Call) -> Message:  # noqa: ARG001
    """Answer a ListPartitionReassignments request: none is ever on its way."""
    return {}


# -- folders ----------------------------------------------------------------------------------


def _folder(node: Node) -> str:
    return str(node.writer.folder.absolute())


async def describe_log_dirs(node: Node, call: Call) -> Message:
    """Answer a DescribeLogDirs request: the one folder, and how large partitions are in it."""
    asked = call.request["topics"]
    wanted = None
    if asked is not None:
        wanted = {TopicPartition(one["topic"], n) for one in asked for n in one["partitions"]}

    def look() -> Message:
        holdings: list[Holding] = []
        for partition in node.writer.partitions():

            def measure(partition: Partition = partition) -> None:
                if not partition.closed:
                    holdings.append(partition.holding())

            if wanted is None or partition.name in wanted:
                node.writer.exclusively(measure)  # one at a time: appends wait for this
        sizes: dict[str, dict[int, int]] = {}
        for one in holdings:
            sizes.setdefault(one.name.topic, {})[one.name.partition] = one.size_bytes
        disk = shutil.disk_usage(node.writer.folder)
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

    return await node.change(look)


def _size(size: int) -> Message:
    return {"partition_size": size}


async def alter_replica_log_dirs(node: Node, call: Call) -> Message:
    """Answer an AlterReplicaLogDirs request: partitions are in the one folder, and stay there."""
    topics, here = node.writer.topics(), _folder(node)

    def tell(path: str, topic: str, number: int) -> Message:
        if not _has(topics, topic, number):
            return {"error_code": Code.UNKNOWN_TOPIC_OR_PARTITION}
        return {} if path == here else {"error_code": Code.LOG_DIR_NOT_FOUND}

    return {
        "results": [
            {
                "topic_name": one["name"],
                "partitions": _each(
                    one["partitions"],
                    lambda n, path=at["path"], name=one["name"]: tell(path, name, n),  # type: ignore[misc]
                ),
            }
            for at in call.request["dirs"]
            for one in at["topics"]
        ]
    }


# -- looking ----------------------------------------------------------------------------------


async def describe_producers(node: Node, call: Call) -> Message:
    """Answer a DescribeProducers request: who has written into partitions, and what is open."""

    def producers(topic: str, number: int) -> Message:
        partition = node.writer.partition(TopicPartition(topic, number))
        found: list[Message] = []
        node.writer.exclusively(lambda: found.extend(_producers(partition)))
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

    return {"topics": await node.change(look)}


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


async def describe_topic_partitions(node: Node, call: Call) -> Message:
    """Answer a DescribeTopicPartitions request: so many partitions, and where the next page begins."""
    request, known = call.request, node.writer.topics()
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
            topics.append({"name": name, "error_code": Code.UNKNOWN_TOPIC_OR_PARTITION})
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
                "partitions": [_described(node, number) for number in range(start, stop)],
            }
        )
        if stop < info.partitions:
            return {"topics": topics, "next_cursor": _cursor(name, stop)}
    return {"topics": topics}


def _described(node: Node, number: int) -> Message:
    # Java's clients take null for an error of theirs.
    return {
        **partition_described(node, number),
        "eligible_leader_replicas": [],
        "last_known_elr": [],
    }


def _cursor(topic: str, partition: int) -> Message:
    return {"topic_name": topic, "partition_index": partition}
