"""The settings of a topic as users write them, under Kafka's names."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.durations import Duration, to_us
from millstream.errors import ConfigError


def topic_settings(
    retention: Duration | None,
    retention_bytes: int | None,
    cleanup: str,
    others: Mapping[str, str] | None,
) -> dict[str, str]:
    """Return the settings that were given, by Kafka's names.

    Raises:
        ConfigError: one was given twice, or a duration cannot be read.
    """
    given: dict[str, str] = {}
    if retention is not None:
        given["retention.ms"] = str(max(1, to_us(retention, what="retention") // 1000))
    if retention_bytes is not None:
        given["retention.bytes"] = str(retention_bytes)
    if cleanup != "delete":
        given["cleanup.policy"] = cleanup
    for name, value in (others or {}).items():
        if name in given:
            raise ConfigError(
                f"{name} was given twice, as {given[name]!r} and as {value!r}; give it once"
            )
        given[name] = value
    return given
