"""Metadata, DescribeCluster, and the requests that create, enlarge and delete topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, code_of
from millstream.broker.protocol.wire import Message, distinct
from millstream.broker.requests.configs import describe_settings, topic_settings
from millstream.errors import ConfigError, MillstreamError
from millstream.log.config import TopicConfig
from millstream.log.topics import check_topic_name, topic_exists
from millstream.record import TopicInfo

_NO_ID = bytes(16)
_NULL_NAMES_FROM = 12  # the version of Metadata whose topics may have no name
_REPLICATION_FACTOR = 1  # of every record: there is one folder
PARTITIONS_MAX = 8160  # of one topic


async def metadata(node: BrokerNode, call: Call) -> Message:
    """Handle a Metadata request: this broker leads every partition."""
    request = call.request
    requested = request["topics"]
    if requested is None or (call.version == 0 and not requested):
        topics = [_describe(node, info) for info in node.log.writer.topics().values()]
    else:
        creates = node.settings.auto_create and request["allow_auto_topic_creation"]
        unknown_name = None if call.version >= _NULL_NAMES_FROM else ""
        topics = [
            await _topic_response(node, one, creates=creates, unknown_name=unknown_name)
            for one in distinct(requested, "name", "topic_id")
        ]
    return {
        "brokers": [{"node_id": node.node_id, "host": call.host, "port": call.port}],
        "cluster_id": node.cluster_id,
        "controller_id": node.node_id,
        "topics": topics,
    }


async def _topic_response(
    node: BrokerNode, one: Message, *, creates: bool, unknown_name: str | None
) -> Message:
    """Return the metadata of a topic; ``unknown_name`` is the name for an unknown topic id."""
    name, topic_id = one["name"], one["topic_id"]
    topics = node.log.writer.topics()
    if name is None:
        info = _by_id(topics, topic_id)
        if info is None:
            return {
                "error_code": ErrorCode.UNKNOWN_TOPIC_ID,
                "name": unknown_name,
                "topic_id": topic_id,
            }
        return _describe(node, info)
    if name not in topics and creates:
        with suppress(MillstreamError):  # a missing topic is an error below
            await node.log.run_write(
                lambda: node.log.writer.create_topic(
                    name, partitions=node.settings.default_partitions
                )
            )
            topics = node.log.writer.topics()
    if name in topics:
        return _describe(node, topics[name])
    try:
        check_topic_name(name)
    except ConfigError:
        return {"error_code": ErrorCode.INVALID_TOPIC_EXCEPTION, "name": name}
    return {"error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "name": name}


def _by_id(topics: Mapping[str, TopicInfo], topic_id: bytes) -> TopicInfo | None:
    wanted = topic_id.hex()
    return next((info for info in topics.values() if info.topic_id == wanted), None)


def _describe(node: BrokerNode, info: TopicInfo) -> Message:
    return {
        "name": info.name,
        "topic_id": bytes.fromhex(info.topic_id),
        "partitions": [describe_partition(node, number) for number in range(info.partitions)],
    }


def describe_partition(node: BrokerNode, number: int) -> Message:
    """Return the metadata of a partition: this broker leads it."""
    return {
        "partition_index": number,
        "leader_id": node.node_id,
        "replica_nodes": [node.node_id],
        "isr_nodes": [node.node_id],
    }


async def describe_cluster(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeCluster request."""
    return {
        "endpoint_type": call.request["endpoint_type"],
        "cluster_id": node.cluster_id,
        "controller_id": node.node_id,
        "brokers": [{"broker_id": node.node_id, "host": call.host, "port": call.port}],
    }


# -- creating ---------------------------------------------------------------------------------


async def create_topics(node: BrokerNode, call: Call) -> Message:
    """Handle a CreateTopics request."""
    request = call.request
    names = [topic["name"] for topic in request["topics"]]

    def create(topic: Message) -> Message:
        if names.count(topic["name"]) > 1:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"topic {topic['name']!r} is named twice")
        return _create(node, topic, validate_only=request["validate_only"])

    return {"topics": await node.log.run_write(lambda: _each(request["topics"], create))}


def _each(topics: list[Message], do: Callable[[Message], Message]) -> list[Message]:
    """Return the result for each topic: what was done, or the code and message of its error."""
    results = []
    for topic in topics:
        try:
            with storage_errors():
                result = {"name": topic["name"], **do(topic)}
        except (MillstreamError, ApiError) as error:
            result = {
                "name": topic["name"],
                "topic_id": topic.get("topic_id", _NO_ID),
                "error_code": code_of(error),
                "error_message": str(error),
                "configs": None,
            }
        results.append(result)
    return results


def _create(node: BrokerNode, topic: Message, *, validate_only: bool) -> Message:
    name = topic["name"]
    try:
        check_topic_name(name)
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, str(error)) from error
    partitions = _partitions(node, topic)
    try:
        settings = topic_settings({one["name"]: one["value"] for one in topic["configs"]})
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from error
    topic_id = _NO_ID
    if validate_only:
        if name in node.log.writer.topics():
            raise topic_exists(name)
    else:
        info = node.log.writer.create_topic(name, partitions=partitions, settings=settings)
        topic_id = bytes.fromhex(info.topic_id)
    return {
        "topic_id": topic_id,
        "num_partitions": partitions,
        "replication_factor": _REPLICATION_FACTOR,
        "configs": describe_settings(TopicConfig.parse(settings).settings(), settings),
    }


def _partitions(node: BrokerNode, topic: Message) -> int:
    """Return how many partitions a new topic gets: from its assignments, or their number."""
    assignments, count = topic["assignments"], topic["num_partitions"]
    if assignments:
        numbers = sorted(one["partition_index"] for one in assignments)
        brokers = {tuple(one["broker_ids"]) for one in assignments}
        if numbers != list(range(len(numbers))) or brokers != {(node.node_id,)}:
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"number the partitions from 0, and give each to broker {node.node_id}: the only one",
            )
        return len(numbers)
    if topic["replication_factor"] not in (-1, _REPLICATION_FACTOR):
        raise ApiError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"replication factor {topic['replication_factor']}; there is one broker: give 1 or -1",
        )
    wanted: int = node.settings.default_partitions if count == -1 else count
    if not 0 < wanted <= PARTITIONS_MAX:
        raise ApiError(
            ErrorCode.INVALID_PARTITIONS, f"{count} partitions; give 1 to {PARTITIONS_MAX}, or -1"
        )
    return wanted


async def create_partitions(node: BrokerNode, call: Call) -> Message:
    """Handle a CreatePartitions request."""
    request = call.request

    def enlarge(topic: Message) -> Message:
        name, count = topic["name"], topic["count"]
        count_now = node.log.writer.partition_count(name)
        if not count_now < count <= PARTITIONS_MAX:
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {name!r} has {count_now} partitions and cannot have {count}: partitions can only be added",
            )
        assignments = topic["assignments"] or []
        if any(one["broker_ids"] != [node.node_id] for one in assignments) or (
            assignments and len(assignments) != count - count_now
        ):
            raise ApiError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"give each new partition to broker {node.node_id}",
            )
        if not request["validate_only"]:
            node.log.writer.alter_topic(name, partitions=count)
        return {}

    return {"results": await node.log.run_write(lambda: _each(request["topics"], enlarge))}


# -- deleting ---------------------------------------------------------------------------------


async def delete_topics(node: BrokerNode, call: Call) -> Message:
    """Handle a DeleteTopics request: by name, or by id in newer versions."""
    requested = call.request["topics"] or [
        {"name": name, "topic_id": _NO_ID} for name in call.request["topic_names"]
    ]

    def delete(topic: Message) -> Message:
        name = topic["name"]
        if name is None:
            info = _by_id(node.log.writer.topics(), topic["topic_id"])
            if info is None:
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_ID, f"no topic has the id {topic['topic_id'].hex()}"
                )
            name = info.name
        known = node.log.writer.topics().get(name)
        node.log.writer.delete_topic(name)
        return {"name": name, "topic_id": bytes.fromhex(known.topic_id) if known else _NO_ID}

    return {"responses": await node.log.run_write(lambda: _each(requested, delete))}
