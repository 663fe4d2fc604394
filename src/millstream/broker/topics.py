"""Metadata and the requests that make, enlarge and remove topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from millstream.broker.codes import Code, Refused, code_of
from millstream.broker.configs import described, settings_from
from millstream.broker.node import Call, Node
from millstream.broker.wire import Message, distinct
from millstream.errors import ConfigError, MillstreamError, TopicExistsError
from millstream.log.config import TopicConfig
from millstream.log.topics import check_topic_name
from millstream.record import TopicInfo

_NO_ID = bytes(16)
_NULL_NAMES_FROM = 12  # the version of Metadata whose topics may have no name
_COPIES = 1  # of every record: there is one folder
PARTITIONS_MAX = 8160  # what a folder holds


async def metadata(node: Node, call: Call) -> Message:
    """Answer a Metadata request: this broker leads every partition."""
    request = call.request
    asked = request["topics"]
    if asked is None or (call.version == 0 and not asked):
        topics = [_described(node, info) for info in node.writer.topics().values()]
    else:
        creates = node.settings.auto_create and request["allow_auto_topic_creation"]
        nobody = None if call.version >= _NULL_NAMES_FROM else ""
        topics = [
            await _asked_for(node, one, creates=creates, nobody=nobody)
            for one in distinct(asked, "name", "topic_id")
        ]
    return {
        "brokers": [{"node_id": node.node_id, "host": call.host, "port": call.port}],
        "cluster_id": node.cluster_id,
        "controller_id": node.node_id,
        "topics": topics,
    }


async def _asked_for(node: Node, one: Message, *, creates: bool, nobody: str | None) -> Message:
    """Return what is known of a topic; ``nobody`` is the name of one whose id is not known."""
    name, topic_id = one["name"], one["topic_id"]
    topics = node.writer.topics()
    if name is None:
        info = _by_id(topics, topic_id)
        if info is None:
            return {"error_code": Code.UNKNOWN_TOPIC_ID, "name": nobody, "topic_id": topic_id}
        return _described(node, info)
    if name not in topics and creates:
        with suppress(MillstreamError):  # that it is not there is told below
            await node.change(
                lambda: node.writer.create_topic(name, partitions=node.settings.default_partitions)
            )
            topics = node.writer.topics()
    if name in topics:
        return _described(node, topics[name])
    try:
        check_topic_name(name)
    except ConfigError:
        return {"error_code": Code.INVALID_TOPIC_EXCEPTION, "name": name}
    return {"error_code": Code.UNKNOWN_TOPIC_OR_PARTITION, "name": name}


def _by_id(topics: Mapping[str, TopicInfo], topic_id: bytes) -> TopicInfo | None:
    wanted = topic_id.hex()
    return next((info for info in topics.values() if info.topic_id == wanted), None)


def _described(node: Node, info: TopicInfo) -> Message:
    return {
        "name": info.name,
        "topic_id": bytes.fromhex(info.topic_id),
        "partitions": [partition_described(node, number) for number in range(info.partitions)],
    }


def partition_described(node: Node, number: int) -> Message:
    """Return what clients are told of any partition: who leads it."""
    return {
        "partition_index": number,
        "leader_id": node.node_id,
        "replica_nodes": [node.node_id],
        "isr_nodes": [node.node_id],
    }


async def describe_cluster(node: Node, call: Call) -> Message:
    """Answer a DescribeCluster request."""
    return {
        "endpoint_type": call.request["endpoint_type"],
        "cluster_id": node.cluster_id,
        "controller_id": node.node_id,
        "brokers": [{"broker_id": node.node_id, "host": call.host, "port": call.port}],
    }


# -- making -----------------------------------------------------------------------------------


async def create_topics(node: Node, call: Call) -> Message:
    """Answer a CreateTopics request."""
    request = call.request
    names = [topic["name"] for topic in request["topics"]]

    def create(topic: Message) -> Message:
        if names.count(topic["name"]) > 1:
            raise Refused(Code.INVALID_REQUEST, f"topic {topic['name']!r} is named twice")
        return _create(node, topic, validate_only=request["validate_only"])

    return {"topics": await node.change(lambda: _each(request["topics"], create))}


def _each(topics: list[Message], do: Callable[[Message], Message]) -> list[Message]:
    """Return the outcome of each topic: what was done, or the code and message of its error."""
    outcomes = []
    for topic in topics:
        try:
            outcome = {"name": topic["name"], **do(topic)}
        except (MillstreamError, Refused) as error:
            outcome = {
                "name": topic["name"],
                "topic_id": topic.get("topic_id", _NO_ID),
                "error_code": code_of(error),
                "error_message": str(error),
                "configs": None,
            }
        outcomes.append(outcome)
    return outcomes


def _create(node: Node, topic: Message, *, validate_only: bool) -> Message:
    name = topic["name"]
    try:
        check_topic_name(name)
    except ConfigError as error:
        raise Refused(Code.INVALID_TOPIC_EXCEPTION, str(error)) from error
    partitions = _partitions(node, topic)
    try:
        settings = settings_from({one["name"]: one["value"] for one in topic["configs"]})
    except ConfigError as error:
        raise Refused(Code.INVALID_CONFIG, str(error)) from error
    topic_id = _NO_ID
    if validate_only:
        if name in node.writer.topics():
            raise TopicExistsError(f"there is a topic {name!r} already")
    else:
        info = node.writer.create_topic(name, partitions=partitions, settings=settings)
        topic_id = bytes.fromhex(info.topic_id)
    return {
        "topic_id": topic_id,
        "num_partitions": partitions,
        "replication_factor": _COPIES,
        "configs": described(TopicConfig.parse(settings).settings(), settings),
    }


def _partitions(node: Node, topic: Message) -> int:
    """Return how many partitions a topic is to have, whichever way that was said."""
    assignments, count = topic["assignments"], topic["num_partitions"]
    if assignments:
        numbers = sorted(one["partition_index"] for one in assignments)
        brokers = {tuple(one["broker_ids"]) for one in assignments}
        if numbers != list(range(len(numbers))) or brokers != {(node.node_id,)}:
            raise Refused(
                Code.INVALID_REPLICA_ASSIGNMENT,
                f"number the partitions from 0, and give each to broker {node.node_id}: the only one",
            )
        return len(numbers)
    if topic["replication_factor"] not in (-1, _COPIES):
        raise Refused(
            Code.INVALID_REPLICATION_FACTOR,
            f"replication factor {topic['replication_factor']}; there is one broker: give 1 or -1",
        )
    wanted: int = node.settings.default_partitions if count == -1 else count
    if not 0 < wanted <= PARTITIONS_MAX:
        raise Refused(
            Code.INVALID_PARTITIONS, f"{count} partitions; give 1 to {PARTITIONS_MAX}, or -1"
        )
    return wanted


async def create_partitions(node: Node, call: Call) -> Message:
    """Answer a CreatePartitions request."""
    request = call.request

    def enlarge(topic: Message) -> Message:
        name, count = topic["name"], topic["count"]
        there = node.writer.partition_count(name)
        if not there < count <= PARTITIONS_MAX:
            raise Refused(
                Code.INVALID_PARTITIONS,
                f"topic {name!r} has {there} partitions and cannot have {count}: they are added only",
            )
        assignments = topic["assignments"] or []
        if any(one["broker_ids"] != [node.node_id] for one in assignments) or (
            assignments and len(assignments) != count - there
        ):
            raise Refused(
                Code.INVALID_REPLICA_ASSIGNMENT, f"give each new partition to broker {node.node_id}"
            )
        if not request["validate_only"]:
            node.writer.alter_topic(name, partitions=count)
        return {}

    return {"results": await node.change(lambda: _each(request["topics"], enlarge))}


# -- removing ---------------------------------------------------------------------------------


async def delete_topics(node: Node, call: Call) -> Message:
    """Answer a DeleteTopics request: by name, or by id in newer versions."""
    asked = call.request["topics"] or [
        {"name": name, "topic_id": _NO_ID} for name in call.request["topic_names"]
    ]

    def delete(topic: Message) -> Message:
        name = topic["name"]
        if name is None:
            info = _by_id(node.writer.topics(), topic["topic_id"])
            if info is None:
                raise Refused(
                    Code.UNKNOWN_TOPIC_ID, f"no topic has the id {topic['topic_id'].hex()}"
                )
            name = info.name
        known = node.writer.topics().get(name)
        node.writer.delete_topic(name)
        return {"name": name, "topic_id": bytes.fromhex(known.topic_id) if known else _NO_ID}

    return {"responses": await node.change(lambda: _each(asked, delete))}
