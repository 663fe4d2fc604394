"""The settings of share groups, described and altered by clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.broker.groups.coordinator import check_group_id
from millstream.broker.node import BrokerNode
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.broker.share.settings import describe_share_settings, parse_settings
from millstream.errors import ConfigError
from millstream.log.share_state import group_settings, put_group_settings

_SOURCE_DEFAULT, _SOURCE_GROUP = 5, 8
_BOOLEAN, _STRING, _INT = 1, 2, 3
_SET, _DELETE = 0, 1


def describe(node: BrokerNode, name: str, only: Iterable[str] | None) -> list[Message]:
    """Return the settings of a group as the protocol describes them. In a thread, or at once."""
    check_group_id(name)
    given = group_settings(node.log.writer.control, name)
    wanted = None if only is None else set(only)
    return [
        _entry(key, value, _SOURCE_GROUP if key in given else _SOURCE_DEFAULT)
        for key, value in sorted(describe_share_settings(given).items())
        if wanted is None or key in wanted
    ]


def _entry(name: str, value: str, source: int) -> Message:
    kind = _INT if value.isdigit() else _BOOLEAN if value in ("true", "false") else _STRING
    return {
        "name": name,
        "value": value,
        "config_source": source,
        "synonyms": [{"name": name, "value": value, "source": source}],
        "config_type": kind,
        "documentation": None,
    }


def replace(node: BrokerNode, resource: Message, *, validate_only: bool) -> None:
    """Replace the settings of a group; those that are not named are removed. In a thread.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    name = resource["resource_name"]
    wanted = {one["name"]: one["value"] for one in resource["configs"]}
    removed = dict.fromkeys(set(group_settings(node.log.writer.control, name)) - set(wanted))
    _change(node, name, {**removed, **wanted}, validate_only=validate_only)


def change(node: BrokerNode, resource: Message, *, validate_only: bool) -> None:
    """Change settings of a group; those that are not named keep their values. In a thread.

    Raises:
        ApiError: an operation is unknown.
        ConfigError: a setting is unknown or invalid.
    """
    changes: dict[str, str | None] = {}
    for one in resource["configs"]:
        if one["config_operation"] not in (_SET, _DELETE):
            raise ApiError(
                ErrorCode.INVALID_CONFIG, f"{one['name']} is not a list: set or delete it"
            )
        changes[one["name"]] = one["value"] if one["config_operation"] == _SET else None
    _change(node, resource["resource_name"], changes, validate_only=validate_only)


def _change(
    node: BrokerNode, name: str, changes: Mapping[str, str | None], *, validate_only: bool
) -> None:
    check_group_id(name)
    parse_settings({key: value for key, value in changes.items() if value is not None})
    unknown = set(changes) - set(describe_share_settings({}))
    if unknown:
        raise ConfigError(f"no setting {min(unknown)!r} of a group")
    if validate_only:
        return
    put_group_settings(node.log.writer.control, name, changes)
    node.loop.call_soon_threadsafe(node.shares.settings_changed, name)
