"""GeneratedSource: events that a function or a schema makes, at a rate; event ``n`` is always the same.

Each event has a random generator of its own, seeded with the seed and the event's number. So an event does not depend on
how often the source was stopped, nor on the events before it.
"""

from __future__ import annotations

import random
import time as system_time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from millstream.client.json_values import ENCODER
from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.connector import Guarantee, Position, SourceBatch
from millstream.connectors.record_fields import RecordFields
from millstream.errors import ConfigError, ConflictError, UserCodeError
from millstream.log.clocks import wall_clock_ms

GeneratedEvent: TypeAlias = Mapping[str, Any]
EventMaker: TypeAlias = Callable[[int, random.Random], GeneratedEvent]
_SPLIT = "events"
_BATCH = 1_000  # events at once: what is stored at a rate is at most so far behind
_WORDS = 100  # different texts of a column of text


@dataclass(frozen=True)
class GeneratedSource:
    """A source connector, made by :func:`generate`."""

    make: EventMaker
    rate: float | None
    count: int | None
    seed: int
    fields: RecordFields
    batch: int = _BATCH
    monotonic_s: Callable[[], float] = system_time.monotonic
    sleep_s: Callable[[float], None] = system_time.sleep
    kind: str = "generate"
    guarantee: Guarantee = "each once"

    @property
    def origin(self) -> str:
        """Which events these are."""
        return f"events of seed {self.seed}"

    def open(self, positions: Mapping[str, Position]) -> GeneratedReader:
        """Return what goes on; see :class:`~millstream.connectors.connector.SourceConnector`."""
        number = positions.get(_SPLIT, 0)
        if type(number) is not int or number < 0:
            raise ConflictError(
                f"the position of generated events is {number!r}, which is no number of events. Give the source another name."
            )
        return GeneratedReader(self, number)


class GeneratedReader:
    """Makes events, as many as are due; see :class:`~millstream.connectors.connector.SourceReader`."""

    alarm = ""

    def __init__(self, source: GeneratedSource, number: int) -> None:
        self._source, self._next = source, number
        self._first, self._begun_s = number, source.monotonic_s()

    def read(self, wait_s: float) -> SourceBatch | None:
        """Return the events that are due; see the protocol. The rate counts from where the reader began."""
        source = self._source
        if source.count is not None and self._next >= source.count:
            return None
        due = self._due()
        if due <= self._next:
            source.sleep_s(min(wait_s, self._due_in_s()))
            due = self._due()
        rows = BatchRows(source.fields)
        end = min(due, self._next + source.batch)
        while self._next < end and not rows.is_full:
            self._add(rows, self._next)
            self._next += 1
        if not rows.count:
            return SourceBatch()
        return rows.take({_SPLIT: self._next})

    def stored(self, batch: SourceBatch) -> None:
        """Do nothing: the position is in the log."""

    def close(self) -> None:
        """Do nothing."""

    def _due(self) -> int:
        """Return the number behind the last event that is due."""
        rate, count = self._source.rate, self._source.count
        due = self._next + self._source.batch
        if rate is not None:
            due = self._first + int((self._source.monotonic_s() - self._begun_s) * rate)
        return due if count is None else min(due, count)

    def _due_in_s(self) -> float:
        assert self._source.rate is not None
        due_s = self._begun_s + (self._next - self._first + 1) / self._source.rate
        return max(0.0, due_s - self._source.monotonic_s())

    def _add(self, rows: BatchRows, number: int) -> None:
        source = self._source
        try:
            chance = random.Random(f"{source.seed}:{number}")  # noqa: S311 - to be repeatable
            event = source.make(number, chance)
            rows.add(ENCODER.encode(event).encode(), event)
        except Exception as error:
            raise UserCodeError(
                f"event {number} could not be generated: {type(error).__name__}: {error}. Correct the function, or "
                "the schema, and start the source again."
            ) from error


@dataclass(frozen=True)
class SchemaEvents:
    """Makes events of a schema: a type, or the values to choose from, for each field."""

    schema: Mapping[str, Any]
    start_ms: int | None
    rate: float | None
    clock_ms: Callable[[], int]

    def __call__(self, number: int, chance: random.Random) -> GeneratedEvent:
        """Return event ``number``."""
        return {name: self._value(kind, number, chance) for name, kind in self.schema.items()}

    def _value(self, kind: Any, number: int, chance: random.Random) -> Any:
        if kind is datetime:
            return self._time(number)
        made = _OF_TYPES.get(kind) if isinstance(kind, type) else None
        return chance.choice(kind) if made is None else made(number, chance)

    def _time(self, number: int) -> datetime:
        begun_ms = self.clock_ms() if self.start_ms is None else self.start_ms
        passed_ms = 0.0 if self.start_ms is None else number * 1000 / (self.rate or 1000)
        return datetime.fromtimestamp((begun_ms + passed_ms) / 1000, UTC)


_OF_TYPES: Mapping[type, Callable[[int, random.Random], Any]] = {
    int: lambda number, _: number,
    float: lambda _, chance: chance.random(),
    bool: lambda _, chance: chance.random() < 0.5,
    str: lambda _, chance: f"text-{chance.randrange(_WORDS)}",
}


def generate(
    event: EventMaker | Mapping[str, Any],
    *,
    rate: float | None = None,
    count: int | None = None,
    seed: int = 0,
    start: datetime | None = None,
    key: str | None = None,
    time: str | None = None,
) -> GeneratedSource:
    """Return a source of generated events: for trying out, tests and measurements.

    ::

        clicks = ms.generate({"id": int, "user": range(1000), "page": ["home", "cart"]}, rate=100)
        ms.source(clicks, topic="clicks").run()

    Args:
        event: A function of the event's number and a ``random.Random`` of its own, which returns a mapping. Or a schema:
            ``int`` is the event's number, ``float`` from 0 to 1, ``bool``, ``str`` one of a hundred texts, ``datetime`` the
            event's time; a range or a list is what to choose from.
        rate: Events in a second, on average; as many as possible, if not given.
        count: How many there are; without end, if not given.
        seed: Event ``n`` of a seed is always the same.
        start: The time of the first event, for fields that are a ``datetime``: the others follow by the rate, or by a
            millisecond each. Now, if not given; then events differ in that field.
        key: The field that is the record's key.
        time: The field that is the record's time.

    Raises:
        ConfigError: an option is not possible.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"rate is {rate!r}. Give events in a second, above 0.")
    if count is not None and count < 0:
        raise ConfigError(f"count is {count!r}. Give 0 or more.")
    if start is not None and start.tzinfo is None:
        raise ConfigError(
            f"start is {start!r}, without a time zone. Give one, such as datetime.now(UTC)."
        )
    start_ms = None if start is None else round(start.timestamp() * 1000)
    make = event if callable(event) else _schema_events(event, start_ms, rate)
    return GeneratedSource(make, rate, count, seed, RecordFields(key, time))


def _schema_events(
    schema: Mapping[str, Any], start_ms: int | None, rate: float | None
) -> SchemaEvents:
    for name, kind in schema.items():
        if kind in (int, float, bool, str, datetime):
            continue
        if not isinstance(kind, Sequence) or isinstance(kind, str) or not len(kind):
            raise ConfigError(
                f"the field {name!r} is {kind!r:.100}. Give int, float, bool, str, datetime, a range, or a list of values to "
                "choose from."
            )
    return SchemaEvents(schema, start_ms, rate, wall_clock_ms)
