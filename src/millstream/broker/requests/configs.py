"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs: settings of topics, groups and the broker.

A topic's settings are those of ``log.config``. Kafka has more; ``FIXED_CONFIGS`` lists those that tools set
or read, with their one value here: it is accepted, and any other is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.broker.call import Call
from millstream.broker.log_access import storage_errors
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode, code_of
from millstream.broker.protocol.wire import Message, distinct
from millstream.broker.requests import group_configs
from millstream.errors import ConfigError, MillstreamError
from millstream.log.config import TopicConfig, change_settings

_TOPIC, _BROKER, _GROUP = 2, 4, 32  # kinds of resources
_SOURCE_TOPIC, _SOURCE_STATIC, _SOURCE_DEFAULT = 1, 4, 5
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_STRING, _INT, _LONG, _DOUBLE, _LIST = 2, 3, 5, 6, 7
_LISTS = frozenset({"cleanup.policy"})

FIXED_CONFIGS: Mapping[str, str] = {
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
    "preallocate": "false",
}


def topic_settings(given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the settings of a topic from a request, without the fixed ones.

    Raises:
        ConfigError: a setting is unknown, invalid, or null.
    """
    settings = {}
    for name, value in given.items():
        if name in FIXED_CONFIGS:
            if value != FIXED_CONFIGS[name]:
                raise ConfigError(f"{name} is {value!r}; here it is always {FIXED_CONFIGS[name]!r}")
        elif value is None:
            raise ConfigError(f"{name} has no value; give one, or leave it out")
        else:
            settings[name] = value
    TopicConfig.parse(settings)
    return settings


def describe_settings(
    settings: Mapping[str, str], given: Mapping[str, str], only: Iterable[str] | None = None
) -> list[Message]:
    """Return the settings of a topic as the protocol describes them.

    Args:
        given: Those of ``settings`` that were set, and are not defaults.
        only: Names to describe; all if not given.
    """
    wanted = None if only is None else set(only)
    every = {**settings, **FIXED_CONFIGS}
    return [
        _entry(
            name,
            value,
            source=_SOURCE_TOPIC if name in given else _SOURCE_DEFAULT,
            read_only=name in FIXED_CONFIGS,
        )
        for name, value in sorted(every.items())
        if wanted is None or name in wanted
    ]


def _entry(name: str, value: str, *, source: int, read_only: bool) -> Message:
    return {
        "name": name,
        "value": value,
        "read_only": read_only,
        "config_source": source,
        "synonyms": [{"name": name, "value": value, "source": source}],
        "config_type": _kind(name),
        "documentation": None,
    }


def _kind(name: str) -> int:
    if name in _LISTS:
        return _LIST
    if name.endswith((".ms", ".bytes")):
        return _LONG
    return _DOUBLE if name.endswith(".ratio") else _STRING


async def describe_configs(node: BrokerNode, call: Call) -> Message:
    """Handle a DescribeConfigs request."""
    synonyms = call.request["include_synonyms"]
    resources = distinct(call.request["resources"], "resource_type", "resource_name")

    def describe(resource: Message) -> Message:
        configs = _configs(node, call, resource)
        for config in [] if synonyms else configs:
            config["synonyms"] = []
        return {"configs": configs}

    return {"results": [_resource_response(one, describe) for one in resources]}


def _configs(node: BrokerNode, call: Call, resource: Message) -> list[Message]:
    kind, name, only = (
        resource["resource_type"],
        resource["resource_name"],
        resource["configuration_keys"],
    )
    if kind == _TOPIC:
        return describe_settings(
            node.log.writer.settings(name), node.log.writer.explicit_settings(name), only
        )
    if kind == _BROKER and name in (str(node.node_id), ""):
        return [
            _entry(key, value, source=_SOURCE_STATIC, read_only=True)
            for key, value in sorted(_broker_configs(node, call).items())
            if only is None or key in only
        ]
    if kind == _GROUP:
        return group_configs.describe(node, name, only)
    raise ApiError(
        ErrorCode.INVALID_REQUEST,
        f"resource {name!r} of kind {kind}; there are topics (2), broker {node.node_id} (4) and groups (32)",
    )


def _broker_configs(node: BrokerNode, call: Call) -> dict[str, str]:
    settings = node.settings
    host = f"[{call.host}]" if ":" in call.host else call.host
    retention_ms = settings.offsets_retention_ms
    return {
        "advertised.listeners": f"CLIENTS://{host}:{call.port}",
        "auto.create.topics.enable": str(settings.auto_create).lower(),
        "broker.id": str(node.node_id),
        "default.replication.factor": "1",
        "group.max.session.timeout.ms": str(settings.session_timeout_ms_max),
        "group.min.session.timeout.ms": str(settings.session_timeout_ms_min),
        "log.cleanup.policy": "delete",
        "message.max.bytes": str(TopicConfig().max_message_bytes),
        "num.partitions": str(settings.default_partitions),
        "offsets.retention.minutes": str(-1 if retention_ms is None else retention_ms // 60_000),
        "socket.request.max.bytes": str(settings.request_bytes_max),
    }


def _resource_response(resource: Message, do: object) -> Message:
    about = {key: resource[key] for key in ("resource_type", "resource_name")}
    try:
        with storage_errors():
            return {**about, "error_message": None, **do(resource)}  # type: ignore[operator]
    except (MillstreamError, ApiError) as error:
        code = code_of(error)
        if type(error) is ConfigError:
            code = ErrorCode.INVALID_CONFIG
        return {**about, "error_code": code, "error_message": str(error)}


async def alter_configs(node: BrokerNode, call: Call) -> Message:
    """Handle an AlterConfigs request: settings that are not named get their defaults."""

    def alter(resource: Message) -> Message:
        if resource["resource_type"] == _GROUP:
            group_configs.replace(node, resource, validate_only=call.request["validate_only"])
            return {}
        name = _topic_name(resource)
        wanted = topic_settings({one["name"]: one["value"] for one in resource["configs"]})
        removed = dict.fromkeys(set(node.log.writer.explicit_settings(name)) - set(wanted))
        return _alter(node, name, {**removed, **wanted}, call)

    resources = call.request["resources"]
    return {
        "responses": await node.log.run_write(
            lambda: [_resource_response(one, alter) for one in resources]
        )
    }


async def incremental_alter_configs(node: BrokerNode, call: Call) -> Message:
    """Handle an IncrementalAlterConfigs request: settings that are not named keep their values."""

    def alter(resource: Message) -> Message:
        if resource["resource_type"] == _GROUP:
            group_configs.change(node, resource, validate_only=call.request["validate_only"])
            return {}
        name = _topic_name(resource)
        now = node.log.writer.settings(name)
        changes: dict[str, str | None] = {}
        for one in resource["configs"]:
            changes |= _change(one, now)
        return _alter(node, name, changes, call)

    resources = call.request["resources"]
    return {
        "responses": await node.log.run_write(
            lambda: [_resource_response(one, alter) for one in resources]
        )
    }


def _change(one: Message, now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the setting after one operation; None for its default."""
    name, value, operation = one["name"], one["value"], one["config_operation"]
    if operation == _DELETE:
        return {name: None}
    if operation == _SET:
        return {**topic_settings({name: value})}
    if operation not in (_APPEND, _SUBTRACT) or name not in _LISTS:
        raise ApiError(
            ErrorCode.INVALID_CONFIG,
            f"operation {operation} on {name}; it is not a list: set or delete it",
        )
    items = now[name].split(",")
    given = (value or "").split(",")
    if operation == _APPEND:
        items += [item for item in given if item not in items]
    else:
        items = [item for item in items if item not in given]
    return {**topic_settings({name: ",".join(items)})}


def _topic_name(resource: Message) -> str:
    if resource["resource_type"] != _TOPIC:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "only settings of topics and groups can be altered; the broker's are options",
        )
    return str(resource["resource_name"])


def _alter(node: BrokerNode, name: str, changes: Mapping[str, str | None], call: Call) -> Message:
    if call.request["validate_only"]:
        change_settings(node.log.writer.explicit_settings(name), changes)
    else:
        node.log.writer.alter_topic(name, settings=changes)
    return {}
