"""The state of keys as it is stored: a row for each key, in columns of the types that were declared.

Rows are read and replaced key by key (:mod:`millstream.kernels.state.keyed_rows`). A row has the columns of the key,
what each state holds (of a list a list, of a map a list of its items), when each state with a ``ttl`` was last
written, the event time of the key's last call, and its timers. A key of which there is nothing to know has no row.

State has the version of the function that wrote it. State of an older version is read, migrated and written as a
whole, in parts of some hundred thousand keys, in the first batch of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from millstream.errors import CorruptionError, UserCodeError
from millstream.kernels.arrays import Int64s
from millstream.kernels.changes import group_numbers
from millstream.kernels.column_types import of_one_zero
from millstream.kernels.errors.user_code import FAILURES, UnusableRowError, error_reason
from millstream.kernels.frames import HASH, HIDDEN_PREFIX, WEIGHT
from millstream.kernels.process.context import EMITTED_ROWS
from millstream.kernels.process.declarations import StateDeclaration, StateKind
from millstream.kernels.process.emitted_rows import HELD_ROWS
from millstream.kernels.process.key_state import EMPTY, KeyStates
from millstream.kernels.process.values import column_of
from millstream.kernels.state.hash_order import sorted_distinct
from millstream.kernels.state.keyed_rows import KeyedRows, Usual
from millstream.kernels.state.keyhash import Hashes
from millstream.kernels.state.operator_state import OperatorState

FORMAT = 2  # of what is stored; a change of it needs a way from the one before
_FORMATS_READ = (1, FORMAT)  # in the first one, each run has all columns
_FORMAT_VALUE = "process.format"
_VERSION_VALUE = "process.state_version"  # of the function
_KINDS_VALUE = "process.kinds"  # of its states, by name: how a column is read by a later version
_NOW = "__now"  # Int64: the event time of the key's last call
_TIMERS, _PROCESSING_TIMERS = "__timers", "__processing_timers"  # List(Int64)
_USUAL: tuple[Usual, ...] = (
    (_TIMERS, pl.List(pl.Int64()), []),
    (_PROCESSING_TIMERS, pl.List(pl.Int64()), []),
    (WEIGHT, pl.Int64(), 1),
)
_MIGRATED_KEYS = 200_000  # at a time

Migration = Callable[[int, dict[str, Any]], dict[str, Any]]


def _state_column(name: str) -> str:
    return f"__state.{name}"


def _written_column(name: str) -> str:
    return f"__written.{name}"


def keyed_rows(state: OperatorState, version: int) -> KeyedRows:
    """Return the rows that a version of a function has stored."""
    return KeyedRows(state, f"keys.{version}", WEIGHT, usual=_USUAL)


@dataclass(frozen=True)
class StoredKey:
    """What is held of one key: its states, when they were last written, the time of its last call, its timers."""

    values: Sequence[Any]
    written_us: Sequence[int | None]
    now_us: int
    timers_us: list[int]
    processing_timers_ms: list[int]


@dataclass(frozen=True)
class StateColumns:
    """The columns of stored keys: those of the key, with their types, and those of its states."""

    key: tuple[tuple[str, pl.DataType], ...]
    states: tuple[tuple[str, StateDeclaration], ...]

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """All columns."""
        written = {_written_column(n): pl.Int64() for n, one in self.states if one.ttl_us}
        return {
            **dict(self.key),
            **{_state_column(name): one.stored_dtype for name, one in self.states},
            **written,
            _NOW: pl.Int64(),
            **{name: dtype for name, dtype, _ in _USUAL},
            HASH: pl.UInt64(),
        }

    @property
    def without_timers(self) -> list[str]:
        """The columns that are read of keys that have no timers: lists take longer than all others together."""
        return [name for name in self.schema if name not in (_TIMERS, _PROCESSING_TIMERS, WEIGHT)]

    def shown(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the key and what each state of the user's holds.

        A state that has the name of a key's column is ``state.<name>``.
        """
        key = [name for name, _ in self.key]
        users = [name for name, _ in self.states if not name.startswith(HIDDEN_PREFIX)]
        named = {name: f"state.{name}" if name in key else name for name in users}
        return pl.DataFrame(
            [
                *(rows[name] for name in key),
                *(rows[_state_column(name)].alias(shown) for name, shown in named.items()),
            ]
        )

    def keys_of(self, rows: pl.DataFrame) -> list[StoredKey]:
        """Return what rows hold, in their order."""
        columns = [held_values(rows[_state_column(n)], one.kind) for n, one in self.states]
        written = [
            rows[_written_column(name)].to_list() if one.ttl_us else [None] * rows.height
            for name, one in self.states
        ]
        values_of = zip(*columns, strict=True) if columns else iter([()] * rows.height)
        written_of = zip(*written, strict=True) if written else iter([()] * rows.height)
        rest = (rows[name].to_list() for name in (_NOW, _TIMERS, _PROCESSING_TIMERS))
        return [StoredKey(*one) for one in zip(values_of, written_of, *rest, strict=True)]


def keys_of_batch(
    known: pl.DataFrame | None, due: pl.DataFrame | None, columns: StateColumns
) -> tuple[pl.DataFrame, Int64s]:
    """Return the key of each stored row, and then of each row of a batch, with its hash; and the number of that key."""
    key = [HASH, *(name for name, _ in columns.key)]
    every = pl.concat([table[key] for table in (known, due) if table is not None])
    every = every.with_columns(map(of_one_zero, every.get_columns()))
    return every, group_numbers(every, key)


def held_values(column: pl.Series, kind: StateKind) -> list[Any]:
    """Return what a column of states holds, as the user's code sees it; None where there is nothing."""
    values = column.to_list()
    if kind != "map":
        return values
    return [
        None if items is None else {item["key"]: item["value"] for item in items}
        for items in values
    ]


@dataclass
class StoredRows:
    """Collects what is to be stored of keys, column by column."""

    columns: StateColumns
    parts: dict[str, list[Any]] = field(init=False)
    places: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = {name for name, _ in self.columns.key} | {WEIGHT, HASH}
        self.parts = {name: [] for name in self.columns.schema if name not in own}

    def add(
        self,
        place: int,
        states: KeyStates,
        now_us: int,
        timers_us: list[int],
        processing_timers_ms: list[int],
    ) -> None:
        """Add a key that is at a place among others."""
        self.places.append(place)
        parts, cells = self.parts, states.cells
        for number, (name, one) in enumerate(self.columns.states):
            value = cells.values[number]
            if one.kind == "map":
                value = [{"key": key, "value": item} for key, item in value.items()]
            parts[_state_column(name)].append(value)
            if one.ttl_us:
                parts[_written_column(name)].append(cells.written_us[number])
        parts[_NOW].append(now_us)
        parts[_TIMERS].append(timers_us)
        parts[_PROCESSING_TIMERS].append(processing_timers_ms)

    def frame(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows; ``keys`` are those among which the places are, with their hashes."""
        schema = self.columns.schema
        made = [column_of(name, values, schema[name]) for name, values in self.parts.items()]
        rows = keys[self.places].hstack(made).with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
        return rows[[*schema]]


def stored_parts(
    known: pl.DataFrame | None, columns: StateColumns, *, timers: bool
) -> tuple[pl.DataFrame, pl.Series, pl.Series | None]:
    """Return what stored rows hold in states, the event times of the last calls, and the timers, if they are wanted."""
    rows = pl.DataFrame(schema=columns.schema) if known is None else known
    states = pl.DataFrame([rows[_state_column(name)].alias(name) for name, _ in columns.states])
    return states, rows[_NOW], rows[_TIMERS] if timers else None


def stored_frame(
    keys: pl.DataFrame,
    states: pl.DataFrame,
    now_us: pl.Series,
    timers_us: pl.Series | None,
    columns: StateColumns,
) -> pl.DataFrame:
    """Return the rows to store of keys, with their hashes, whose states have no ``ttl`` and that no clock wakes.

    Columns are left out that have their usual value in all of them.
    """
    timers = [] if timers_us is None else [timers_us.alias(_TIMERS)]
    made = [
        *(states[name].alias(_state_column(name)) for name, _ in columns.states),
        now_us.alias(_NOW),
        *timers,
    ]
    rows = keys.hstack(made)
    return rows[[name for name in columns.schema if name in rows.columns]]


@dataclass(frozen=True)
class StoredKeys:
    """The stored keys of one step in one bucket. ``migration`` is what an older version's state goes through.

    ``timers_taken``, ``processing_timers_taken``: there is a method for those that an older version has set.
    """

    step: str
    state: OperatorState
    columns: StateColumns
    version: int
    migration: Migration
    timers_taken: bool = True
    processing_timers_taken: bool = True

    def open(self) -> list[tuple[int, int]]:
        """Make sure that what is stored is of this version; migrate it, if it is of an older one.

        Return when state that was migrated expires, with the hash of its key.

        Raises:
            CorruptionError: it has another format.
        """
        values = self.state.values
        stored = values.get(_FORMAT_VALUE, FORMAT)
        if stored not in _FORMATS_READ:
            raise CorruptionError(
                f"The state of step {self.step!r} has format {stored}, and this version of Millstream reads formats "
                f"up to {FORMAT}. Run the version that wrote it, or rebuild the state (millstream reset)."
            )
        values[_FORMAT_VALUE] = FORMAT
        before = values.setdefault(_VERSION_VALUE, self.version)
        kinds = values.get(_KINDS_VALUE, {})
        expiries: list[tuple[int, int]] = []
        if before != self.version:
            self._migrate(before, kinds, expiries)
        values[_VERSION_VALUE] = self.version
        values[_KINDS_VALUE] = {name: one.kind for name, one in self.columns.states}
        return expiries

    @property
    def rows(self) -> KeyedRows:
        return self._rows(self.version)

    def _rows(self, version: int) -> KeyedRows:
        """Return the rows of a version: in a family of their own, as runs of one family have the same columns."""
        return keyed_rows(self.state, version)

    def _migrate(
        self, version: int, kinds: Mapping[str, StateKind], expiries: list[tuple[int, int]]
    ) -> None:
        old = self._rows(version)
        for hashes in _in_parts(_hashes(old)):
            held = old.get(hashes)
            if held is not None:
                there = sorted_distinct(held[HASH].to_numpy())
                self.rows.put(there, self._migrated(held, version, kinds, expiries))
        for slot in [*old.runs.slots]:
            old.runs.drop_slot(slot)
        self.state.families.pop(old.family, None)
        self.state.values.pop(f"{old.family}.version", None)

    def _migrated(
        self,
        held: pl.DataFrame,
        version: int,
        kinds: Mapping[str, StateKind],
        expiries: list[tuple[int, int]],
    ) -> pl.DataFrame:
        """Return rows of an older version as this one has them."""
        before = {
            name: held_values(held[_state_column(name)], kind) for name, kind in kinds.items()
        }
        states, made = KeyStates(self.columns.states), StoredRows(self.columns)
        others = [held[name].to_list() for name in (HASH, _NOW, _TIMERS, _PROCESSING_TIMERS)]
        for place, (key_hash, now_us, timers, processing) in enumerate(zip(*others, strict=True)):
            was = {
                name: EMPTY[kinds[name]]() if values[place] is None else values[place]
                for name, values in before.items()
            }
            # What the operator itself has noted of the key is none of the user's, and stays.
            own = {name: was.pop(name) for name in [*was] if name.startswith(HIDDEN_PREFIX)}
            states.load_nothing()
            states.begin(now_us)
            try:
                self._require_taken(timers, processing)
                self._assign(states, {**self.migration(version, was), **own})
            except FAILURES as error:
                raise self._refusal(error, held[place], version) from error
            if not states.is_empty() or timers or processing:
                made.add(place, states, now_us, timers, processing)
                if (expires_us := states.expires_us()) is not None:
                    expiries.append((expires_us, key_hash))
        return made.frame(held[[*(name for name, _ in self.columns.key), HASH]])

    def _require_taken(self, timers: Sequence[int], processing: Sequence[int]) -> None:
        if timers and not self.timers_taken:
            raise UnusableRowError("the key has timers, and the function has no on_timers for them")
        if processing and not self.processing_timers_taken:
            raise UnusableRowError(
                "the key has processing-time timers, for which a FrameFunction has no method"
            )

    def _assign(self, states: KeyStates, given: Mapping[str, Any]) -> None:
        names = [name for name, _ in self.columns.states]
        for name, value in given.items():
            if name not in names and name.startswith(HIDDEN_PREFIX):
                if value and {name, *names} >= {EMITTED_ROWS, HELD_ROWS}:
                    raise UnusableRowError(
                        "the key has rows that hold and that were emitted row by row or in frames, which this version does "
                        "in the other way, so it could not take them back. Keep to one, or compute the step anew"
                    )
                continue  # this version takes nothing back
            if name not in names:
                raise UnusableRowError(
                    f"it returns a state {name!r}, and those that are declared are {', '.join(names)}"
                )
            setattr(states.state, name, value)

    def _refusal(self, error: BaseException, held: pl.DataFrame, version: int) -> UserCodeError:
        key = held.select([name for name, _ in self.columns.key]).row(0, named=True)
        return UserCodeError(
            f"migrate of step {self.step!r} failed on the state of version {version} of the key {key}: "
            f"{error_reason(error)}. Correct it; nothing was changed.",
            step=self.step,
        )


def _hashes(rows: KeyedRows) -> Hashes:
    found = [part[HASH].to_numpy() for slot in rows.runs.slots for part in rows.runs.scan(slot)]
    return sorted_distinct(np.concatenate(found)) if found else np.empty(0, np.uint64)


def _in_parts(hashes: Hashes) -> list[Hashes]:
    return [hashes[at : at + _MIGRATED_KEYS] for at in range(0, len(hashes), _MIGRATED_KEYS)]
