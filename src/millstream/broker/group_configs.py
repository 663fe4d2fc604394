"""The settings of share groups, as clients read and alter them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.broker.codes import Code, Refused
from millstream.broker.coordinator import check_name
from millstream.broker.node import Node
from millstream.broker.share_settings import described, parse
from millstream.broker.wire import Message
from millstream.errors import ConfigError
from millstream.log.shares import group_settings, put_group_settings

_SOURCE_DEFAULT, _SOURCE_GROUP = 5, 8
_BOOLEAN, _STRING, _INT = 1, 2, 3
_SET, _DELETE = 0, 1


def describe(node: Node, name: str, only: Iterable[str] | None) -> list[Message]:
    """Return the settings of a group as the protocol describes them. In a thread, or at once."""
    check_name(name)
    given = group_settings(node.writer.control, name)
    wanted = None if only is None else set(only)
    return [
        _entry(key, value, _SOURCE_GROUP if key in given else _SOURCE_DEFAULT)
        for key, value in sorted(described(given).items())
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


def replace(node: Node, resource: Message, *, validate_only: bool) -> None:
    """Give a group these settings, and take those away that are not named. In a thread.

    Raises:
        ConfigError: a setting is not known, or not possible.
    """
    name = resource["resource_name"]
    wanted = {one["name"]: one["value"] for one in resource["configs"]}
    gone = dict.fromkeys(set(group_settings(node.writer.control, name)) - set(wanted))
    _change(node, name, {**gone, **wanted}, validate_only=validate_only)


def change(node: Node, resource: Message, *, validate_only: bool) -> None:
    """Change settings of a group; those that are not named stay. In a thread.

    Raises:
        Refused: an operation is not known.
        ConfigError: a setting is not known, or not possible.
    """
    changes: dict[str, str | None] = {}
    for one in resource["configs"]:
        if one["config_operation"] not in (_SET, _DELETE):
            raise Refused(Code.INVALID_CONFIG, f"{one['name']} is no list: set or delete it")
        changes[one["name"]] = one["value"] if one["config_operation"] == _SET else None
    _change(node, resource["resource_name"], changes, validate_only=validate_only)


def _change(
    node: Node, name: str, changes: Mapping[str, str | None], *, validate_only: bool
) -> None:
    check_name(name)
    parse({key: value for key, value in changes.items() if value is not None})
    unknown = set(changes) - set(described({}))
    if unknown:
        raise ConfigError(f"no setting {min(unknown)!r} of a group")
    if validate_only:
        return
    put_group_settings(node.writer.control, name, changes)
    node.loop.call_soon_threadsafe(node.shares.settings_changed, name)
