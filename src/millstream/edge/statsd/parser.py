"""Parses StatsD's lines: ``name:value|type|@rate|#tag:value,…``, one or more in a datagram.

Pure. Tags, several values (``name:1:2:3|ms``), a time (``|T1656581400``) and a container (``|c:…``) are
DogStatsD's. Any other line is malformed, and gets a reason; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

TYPES = {
    "c": "counter",
    "g": "gauge",
    "ms": "timer",
    "h": "histogram",
    "d": "distribution",
    "s": "set",
}
SEQUENCE = "datagram.sequence"
"""The gauge by which a sender numbers its datagrams: see ``sequences``."""

_SHOWN = 200


class Metric(NamedTuple):
    """One value of one metric."""

    name: str
    value: float | str  # text for a set
    type: str
    rate: float
    tags: dict[str, str]
    relative: bool  # a gauge that is moved, not set
    timestamp_ms: int | None

    def to_json(self) -> bytes:
        """Return it as the value of a record."""
        value = {
            "name": self.name,
            "value": self.value,
            "type": self.type,
            "rate": self.rate,
            "tags": self.tags,
        }
        if self.relative:
            value["relative"] = True
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Malformed(NamedTuple):
    """One line that is not a metric, and why."""

    line: bytes
    reason: str


def parse_datagram(datagram: bytes) -> tuple[list[Metric], list[Malformed]]:
    """Return the metrics of a datagram, and its malformed lines."""
    metrics: list[Metric] = []
    malformed: list[Malformed] = []
    for line in datagram.split(b"\n"):
        stripped = line.strip()
        if stripped:
            try:
                metrics += _parse_line(stripped)
            except _MalformedError as bad:
                malformed.append(Malformed(stripped[:_SHOWN], str(bad)))
    return metrics, malformed


class _MalformedError(Exception):
    """A line is not a metric; the message says why."""


class _Sections(NamedTuple):
    """The parts of a line after the type."""

    rate: float = 1.0
    tags: Mapping[str, str] = MappingProxyType({})
    timestamp_ms: int | None = None


def _parse_line(line: bytes) -> list[Metric]:
    """Return the metrics of a line.

    Raises:
        _MalformedError: it has none.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise _MalformedError("it is not UTF-8") from None
    if text.startswith(("_e{", "_sc|")):
        raise _MalformedError("events and service checks are not taken")
    head, *sections = text.split("|")
    name, colon, values = head.partition(":")
    if not name or not colon:
        raise _MalformedError("it has no NAME:VALUE")
    if not sections:
        raise _MalformedError("it has no |TYPE")
    kind = TYPES.get(sections[0])
    if kind is None:
        raise _MalformedError(f"the type {sections[0][:20]!r} is not one of {', '.join(TYPES)}")
    parts = _sections(sections[1:])
    metrics = []
    for one in [values] if kind == "set" else values.split(":"):
        value = one if kind == "set" else _number(one)
        if value is None or value == "":
            raise _MalformedError(f"the value {one[:20]!r} is no number")
        relative = kind == "gauge" and one[0] in "+-"
        metrics.append(
            Metric(name, value, kind, parts.rate, dict(parts.tags), relative, parts.timestamp_ms)
        )
    return metrics


def _sections(sections: Sequence[str]) -> _Sections:
    parts = _Sections()
    for section in sections:
        rest = section[1:]
        if section.startswith("@"):
            rate = _number(rest)
            if rate is None or not 0 < rate <= 1:
                raise _MalformedError(f"the rate {rest[:20]!r} is not above 0 and at most 1")
            parts = parts._replace(rate=rate)
        elif section.startswith("#"):
            parts = parts._replace(tags=_tags(rest))
        elif section.startswith("T") and rest.isascii() and rest.isdigit() and len(rest) < 11:
            parts = parts._replace(timestamp_ms=int(rest) * 1000)
        elif not section.startswith("c:"):  # the container is of no use here
            raise _MalformedError(f"the part {section[:20]!r} is not known")
    return parts


def _number(text: str) -> float | None:
    """Return a finite number, whole numbers as int; None if the text is none."""
    if "_" in text or text != text.strip() or not text.isascii():  # only Python accepts these
        return None
    try:
        whole = int(text)
    except ValueError:
        pass
    else:
        return whole if abs(whole) < 1 << 63 else float(whole) if len(text) < 300 else None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _tags(text: str) -> dict[str, str]:
    """Return tags by name; a tag without a value has "", the values of a repeated tag are joined."""
    tags: dict[str, str] = {}
    for tag in text.split(","):
        if tag:
            name, _, value = tag.partition(":")
            tags[name] = f"{tags[name]},{value}" if name in tags else value
    return tags
