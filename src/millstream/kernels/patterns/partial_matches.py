"""Partial matches as people look at them: the rows that one has, what it waits for, and when its time is over.

They are those of the state after a batch. Rows that the watermark has not passed yet wait outside of all matches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from millstream.kernels.errors.user_code import plain_value
from millstream.kernels.frames import HASH, TIME
from millstream.kernels.patterns.keyed_matches import Known

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)
_LAST_US = (_LAST - _EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True)
class BoundRow:
    """A row of a partial match: the step, or variable, that took it, its event time, and the columns that state has of it."""

    variable: str
    time: datetime
    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = _plain(self.values)
        return {"variable": self.variable, "time": self.time.isoformat(), "values": values}


@dataclass(frozen=True)
class PartialMatch:
    """A match that is not decided yet, of a key of a step.

    ``rows`` are in their order; ``since`` is the time of the first one. ``waits_for`` says in words what decides it, the
    preferred first. It is decided at the latest once the watermark is after ``ends`` by more than the lateness; None:
    it has no ``within``. Where that is after the year 9999, ``ends`` is the last instant of it. ``complete``: its rows are a match already, which counts unless what it waits for goes before it.
    """

    step: str
    key: Mapping[str, Any]
    since: datetime
    rows: tuple[BoundRow, ...]
    waits_for: tuple[str, ...]
    ends: datetime | None
    complete: bool

    def by_variable(self) -> dict[str, list[BoundRow]]:
        """Return the rows by the step, or variable, that took them."""
        found: dict[str, list[BoundRow]] = {}
        for row in self.rows:
            found.setdefault(row.variable, []).append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "step": self.step,
            "key": _plain(self.key),
            "since": self.since.isoformat(),
            "rows": [row.to_dict() for row in self.rows],
            "waits_for": list(self.waits_for),
            "ends": None if self.ends is None else self.ends.isoformat(),
            "complete": self.complete,
        }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(dict(values), default=plain_value))
    return made


@dataclass(frozen=True)
class ShownRows:
    """Stored rows, as partial matches show them: ``shown`` are the columns of the stream that state has of them."""

    rows: pl.DataFrame
    by: tuple[str, ...]
    shown: tuple[str, ...]

    @classmethod
    def of(cls, rows: pl.DataFrame, by: tuple[str, ...], columns: Sequence[str]) -> ShownRows:
        """Choose the columns of the stream among what is stored."""
        return cls(rows, by, tuple(name for name in columns if name in rows.columns))

    def bound(self, place: int, variable: str) -> BoundRow:
        """Return a row as one of a match."""
        values = self.rows[place].select(self.shown).row(0, named=True)
        return BoundRow(variable, to_time(self.time_us(place)), values)

    def time_us(self, place: int) -> int:
        """Return the event time of a row."""
        return int(self.rows[TIME][place])

    def key(self, place: int) -> dict[str, Any]:
        """Return the key of a row."""
        return self.rows[place].select(self.by).row(0, named=True)


def to_time(time_us: int) -> datetime:
    """Return an event time, in UTC."""
    return _EPOCH + timedelta(microseconds=time_us)


def to_end(first_us: int, within_us: int | None) -> datetime | None:
    """Return when ``within`` is over, which began with a first row; None if there is none."""
    return None if within_us is None else to_time(min(first_us + within_us, _LAST_US))


def known_by_key(known: Known, by: Sequence[str]) -> Iterator[Known]:
    """Yield what is known of each key, in the order of the keys' hashes."""
    if known.rows is None or known.entries is None:
        return
    key = [HASH, *by]
    entries = known.entries.partition_by(key, as_dict=True, maintain_order=True)
    for values, rows in known.rows.partition_by(key, as_dict=True, maintain_order=True).items():
        yield Known(rows, entries.get(values))
