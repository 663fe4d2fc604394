"""The inputs of a test: the rows of topics, with ticks and watermarks between them.

Rows are encoded as their topic declares, and get a partition and a time of arrival. The result is a list in
the given order: see :class:`InputRecord`, :class:`WatermarkAdvance` and :class:`Tick`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from millstream.client.json_values import plain_value
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.kernels.decode.avro_values import AvroFormat
from millstream.kernels.decode.registry_values import RegistryFormat
from millstream.log.murmur2 import partition_of
from millstream.pipeline.topic import Topic

_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Tick:
    """Between rows: time passes without records.

    ``after``: for how long. ``at``: until when. It advances the job's running time, by which partitions and
    producers become idle, and the clock of processing time. The n-th Ticks of all topics are one and the
    same.
    """

    after: Duration | None = None
    at: datetime | None = None

    def __post_init__(self) -> None:
        if (self.after is None) == (self.at is None):
            raise ConfigError("Tick takes after= or at=, and not both. Give one of them.")

    def milliseconds(self, now_ms: int) -> int:
        """Return how much time passes from ``now_ms`` on."""
        if self.at is None:
            assert self.after is not None
            return to_us(self.after, what="Tick's after") // 1000
        passing_ms = milliseconds(self.at, what="Tick's at") - now_ms
        if passing_ms < 0:
            now = _START + timedelta(milliseconds=now_ms)
            raise ConfigError(
                f"Tick's at is {self.at.isoformat()}, and it is {now.isoformat()} by then: rows had "
                "arrived, or Ticks gone, so far. Time does not go back."
            )
        return passing_ms


@dataclasses.dataclass(frozen=True)
class Row:
    """A row with its time of arrival, partition, key and headers.

    ``values`` is a mapping, a dataclass instance or bytes; None with a ``key`` is a tombstone. ``at``: when it arrives; by default with the row
    before it. ``partition``: by default by its ``key``, by the field that is the topic's key, or at random.
    ``headers`` are names with bytes.
    """

    values: Any
    at: datetime | None = None
    partition: int | None = None
    key: str | bytes | None = None
    headers: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Watermark:
    """Between rows of ``topic``: no event earlier than ``at`` comes after this one.

    In the given partition, or in all of them, whatever rule the app has for its watermark. Once all
    partitions have it, windows that end by ``at`` close.
    """

    topic: str
    partition: int | None = None
    _: dataclasses.KW_ONLY
    at: datetime


InputRow = Mapping[str, Any] | bytes | Any
Inputs = Mapping[str, Sequence[InputRow | Row | Tick | Watermark]]


@dataclasses.dataclass(frozen=True)
class InputRecord:
    """One record as it arrives."""

    partition: int
    value: bytes | None
    at_ms: int | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclasses.dataclass(frozen=True)
class WatermarkAdvance:
    """Between records: a partition's watermark (all partitions': None) is at least this."""

    partition: int | None
    at_us: int


Item = InputRecord | WatermarkAdvance | Tick


def items_of(topic: Topic, rows: Iterable[Any], partition_count: int, seed: int) -> list[Item]:
    """Encode a topic's rows and choose their partitions.

    Raises:
        ConfigError: a row is invalid or cannot be encoded, or its partition does not exist.
    """
    dice = random.Random(f"{seed}/{topic.name}")  # noqa: S311 - a test's choice, to be repeated
    items: list[Item] = []
    for row in rows:
        if isinstance(row, Tick):
            items.append(row)
        elif isinstance(row, Watermark):
            items.append(_mark(row, topic.name, partition_count))
        else:
            given = row if isinstance(row, Row) else Row(row)
            items.append(_record(given, topic, partition_count, dice))
    return items


def _mark(given: Watermark, topic: str, partition_count: int) -> WatermarkAdvance:
    if given.topic != topic:
        raise ConfigError(
            f"Among the rows of topic {topic!r} stands a Watermark of topic {given.topic!r}. Put it "
            "among that topic's rows."
        )
    if given.partition is not None:
        _check_partition(given.partition, partition_count, topic)
    return WatermarkAdvance(given.partition, milliseconds(given.at, what="Watermark's at") * 1000)


def _record(row: Row, topic: Topic, partition_count: int, dice: random.Random) -> InputRecord:
    deletes = row.values is None and row.key is not None
    values = None if deletes else _as_mapping(row.values)
    key = row.key.encode() if isinstance(row.key, str) else row.key
    if row.partition is not None:
        _check_partition(row.partition, partition_count, topic.name)
        partition = row.partition
    elif key is not None:
        partition = partition_of(key, partition_count)
    else:
        key = None if values is None else _key_of(values, topic)
        partition = (
            dice.randrange(partition_count) if key is None else partition_of(key, partition_count)
        )
    return InputRecord(
        partition,
        row.values if deletes or isinstance(row.values, bytes) else _encode(values, topic),
        None if row.at is None else milliseconds(row.at, what="Row's at"),
        key,
        tuple(row.headers.items()),
    )


def _check_partition(partition: int, count: int, topic: str) -> None:
    if not 0 <= partition < count:
        raise ConfigError(
            f"Topic {topic!r} has no partition {partition} in this run; it has {count}. Choose one "
            f"of 0 to {count - 1}."
        )


def milliseconds(at: datetime, *, what: str) -> int:
    """Return a time in milliseconds since 1970.

    Raises:
        ConfigError: it is no datetime with a time zone.
    """
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise ConfigError(f"{what} is {at!r}. Give a datetime with a time zone, such as UTC.")
    return (at - _START) // timedelta(milliseconds=1)


def _as_mapping(row: InputRow) -> Mapping[str, Any] | None:
    if isinstance(row, bytes):
        return None
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "model_dump"):  # a pydantic model
        dumped: Mapping[str, Any] = row.model_dump(by_alias=True)
        return dumped
    raise ConfigError(
        f"An input row is {row!r}. Give mappings, instances of dataclasses or models, bytes, or "
        "testing.Row, Tick and Watermark."
    )


def _key_of(values: Mapping[str, Any], topic: Topic) -> bytes | None:
    found = next((values.get(f.key) for f in topic.fields if f.name == topic.key), None)
    if found is None or isinstance(found, bytes):
        return found
    return _text_of(found).encode()


def _text_of(value: Any) -> str:
    """Return a key as text: text as it is, anything else as JSON has it."""
    try:
        written = json.loads(json.dumps(value, default=plain_value))
    except TypeError:
        return str(value)
    return written if isinstance(written, str) else json.dumps(written, separators=(",", ":"))


def _encode(values: Mapping[str, Any] | None, topic: Topic) -> bytes:
    if isinstance(topic.values, AvroFormat):
        return topic.values.encode(values or {})
    if isinstance(topic.values, RegistryFormat):
        raise ConfigError(
            f"Topic {topic.name!r} has values of a schema registry, and an input row is {values!r:.100}. Give bytes, as a "
            "producer writes them."
        )
    try:
        return json.dumps(values, default=plain_value, separators=(",", ":")).encode()
    except TypeError as error:
        raise ConfigError(f"An input row for {topic.name!r} cannot be JSON: {error}.") from error
