"""The settings of a share group, under Kafka's names.

Clients set them as the configuration of a group (``kafka-configs --group``, ``Admin``). The setting of
the dead-letter topic is named as in KIP-1191.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.broker.share.partition import ShareLimits
from millstream.errors import ConfigError
from millstream.log.reader import Isolation
from millstream.log.topics import check_topic_name

DEAD_LETTER_TOPIC = "errors.deadletterqueue.topic.name"
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,3})?)S)?)?")
_DAY_MS, _HOUR_MS, _MINUTE_MS, _SECOND_MS = 86_400_000, 3_600_000, 60_000, 1000
# Name, default, and the smallest and largest value. Some of Kafka's bounds are narrower.
_NUMBERS: Mapping[str, tuple[int, int, int]] = {
    "share.delivery.count.limit": (5, 1, 100),
    "share.heartbeat.interval.ms": (5000, 100, _MINUTE_MS),
    "share.partition.max.record.locks": (2000, 1, 10_000),
    "share.record.lock.duration.ms": (30_000, 100, _HOUR_MS),
    "share.session.timeout.ms": (45_000, 1000, 30 * _MINUTE_MS),
}
_TEXTS: Mapping[str, str] = {
    DEAD_LETTER_TOPIC: "",
    "share.auto.offset.reset": "latest",
    "share.isolation.level": "read_uncommitted",
    "share.renew.acknowledge.enable": "true",
}
NAMES = frozenset({*_NUMBERS, *_TEXTS})


@dataclass(frozen=True, slots=True)
class ShareGroupSettings:
    """The effective settings of a share group.

    Attributes:
        auto_offset_reset: Where the group begins in a partition that it has not read: ``earliest``,
            ``latest``, or so many milliseconds before now.
        isolation: Whether records of uncommitted transactions are delivered.
        dead_letter_topic: The topic for undeliverable records; "" for none.
    """

    limits: ShareLimits = field(default_factory=ShareLimits)
    session_timeout_ms: int = 45_000
    heartbeat_ms: int = 5000
    auto_offset_reset: str | int = "latest"
    isolation: Isolation = "read_uncommitted"
    renew_enabled: bool = True
    dead_letter_topic: str = ""


def parse_settings(given: Mapping[str, str]) -> ShareGroupSettings:
    """Return the settings of a group: those given, and defaults for the rest.

    Raises:
        ConfigError: a setting is unknown, or its value invalid.
    """
    numbers = {name: default for name, (default, _, _) in _NUMBERS.items()}
    texts = dict(_TEXTS)
    for name, value in given.items():
        if name in _NUMBERS:
            numbers[name] = _number(name, value)
        elif name in _TEXTS:
            texts[name] = value
        else:
            raise ConfigError(
                f"no setting {name!r} of a group; there are {', '.join(sorted(NAMES))}"
            )
    isolation = texts["share.isolation.level"]
    if isolation not in ("read_committed", "read_uncommitted"):
        raise ConfigError(
            f"share.isolation.level is {isolation!r}; give read_committed or read_uncommitted"
        )
    renew = texts["share.renew.acknowledge.enable"].lower()
    if renew not in ("true", "false"):
        raise ConfigError(f"share.renew.acknowledge.enable is {renew!r}; give true or false")
    if texts[DEAD_LETTER_TOPIC]:
        check_topic_name(texts[DEAD_LETTER_TOPIC])
    return ShareGroupSettings(
        limits=ShareLimits(
            lock_duration_ms=numbers["share.record.lock.duration.ms"],
            delivery_count_max=numbers["share.delivery.count.limit"],
            in_flight_max=numbers["share.partition.max.record.locks"],
        ),
        session_timeout_ms=numbers["share.session.timeout.ms"],
        heartbeat_ms=numbers["share.heartbeat.interval.ms"],
        auto_offset_reset=_reset(texts["share.auto.offset.reset"]),
        isolation="read_committed" if isolation == "read_committed" else "read_uncommitted",
        renew_enabled=renew == "true",
        dead_letter_topic=texts[DEAD_LETTER_TOPIC],
    )


def describe_share_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return every setting and its effective value."""
    defaults = {name: str(default) for name, (default, _, _) in _NUMBERS.items()}
    return {**defaults, **_TEXTS, **given}


def _number(name: str, value: str) -> int:
    _, low, high = _NUMBERS[name]
    if not re.fullmatch(r"\d{1,12}", value) or not low <= int(value) <= high:
        raise ConfigError(f"{name} is {value!r}; give a number from {low} to {high}")
    return int(value)


def _reset(value: str) -> str | int:
    if value in ("earliest", "latest"):
        return value
    found = _DURATION.fullmatch(value.removeprefix("by_duration:"))
    if value.startswith("by_duration:P") and found and any(found.groups()):
        days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
        milliseconds = days * _DAY_MS + hours * _HOUR_MS + minutes * _MINUTE_MS
        return round(milliseconds + seconds * _SECOND_MS)
    raise ConfigError(
        f"share.auto.offset.reset is {value!r}; give earliest, latest, or by_duration: and a duration "
        "such as PT1H"
    )
