"""Topic settings: how long records are kept, and how files are rolled.

Settings have Kafka's names and units, so that a topic means the same here, on the wire, and on
Apache Kafka. Two defaults differ on purpose: records are kept for ever until a topic says otherwise,
because here the log is often the only copy; and segments are 128 MiB, so that retention and
compaction work on small logs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.log.batch import RECORD_BYTES_MAX

FOREVER = -1
SEGMENT_BYTES_MAX = 128 * 1024 * 1024
SEGMENT_BYTES_LIMIT = 1 << 32  # positions in the index are 32 bits wide
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of one topic. ``-1`` (FOREVER) switches a limit off.

    ``compact`` keeps the last record of each key; ``delete`` removes whole segments by age and
    size; both together do both. A tombstone remains ``delete_retention_ms`` after the first
    compaction that kept it, so that a running reader sees it.
    """

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    retention_ms: int = FOREVER
    retention_bytes: int = FOREVER
    segment_bytes: int = SEGMENT_BYTES_MAX
    segment_ms: int = 7 * _DAY_MS
    delete_retention_ms: int = _DAY_MS
    min_compaction_lag_ms: int = 0
    min_cleanable_dirty_ratio: float = 0.5
    max_message_bytes: int = RECORD_BYTES_MAX

    @property
    def compacts(self) -> bool:
        """Whether only the last record of each key is kept."""
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        """Whether old segments are removed."""
        return "delete" in self.cleanup_policy

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> TopicConfig:
        """Return the settings under Kafka's names (``retention.ms``) as values.

        Raises:
            ConfigError: a name is not known, or a value not possible.
        """
        values: dict[str, Any] = {}
        for name, text in settings.items():
            choose("a topic's setting", name, sorted(_READERS))
            values[name.replace(".", "_")] = _READERS[name](name, text)
        return cls(**values)

    def settings(self) -> dict[str, str]:
        """Return every setting under Kafka's name, as text."""
        out = {}
        for field in fields(self):
            value = getattr(self, field.name)
            text = ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)
            out[field.name.replace("_", ".")] = text
        return out


def change_settings(
    settings: Mapping[str, str], changes: Mapping[str, str | None]
) -> dict[str, str]:
    """Return settings with ``changes``; None takes one back to its default.

    Raises:
        ConfigError: a setting is not possible.
    """
    changed = {key: one for key, one in {**settings, **changes}.items() if one is not None}
    TopicConfig.parse(changed)
    return changed


def _whole(minimum: int, maximum: int = (1 << 63) - 1) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise ConfigError(
                f"{name} is {text!r}; give a whole number from {minimum} to {maximum}"
            )
        return number

    return read


def _ratio(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {text!r}; give a number from 0 to 1")
    return number


def _policy(name: str, text: str) -> frozenset[str]:
    return frozenset(choose(name, part.strip(), ("delete", "compact")) for part in text.split(","))


_READERS: dict[str, Callable[[str, str], Any]] = {
    "cleanup.policy": _policy,
    "retention.ms": _whole(FOREVER),
    "retention.bytes": _whole(FOREVER),
    "segment.bytes": _whole(1, SEGMENT_BYTES_LIMIT),
    "segment.ms": _whole(1),
    "delete.retention.ms": _whole(0),
    "min.compaction.lag.ms": _whole(0),
    "min.cleanable.dirty.ratio": _ratio,
    "max.message.bytes": _whole(1, RECORD_BYTES_MAX),
}
