"""The records behind a row of a view: those without which the row would be another, or would not be there.

1. Of the records in the log, those whose rows have the row's key at the first operator (or the view) are candidates. Names
   of columns decide, so this may be too few where a step gives a name to something else; step 2 notices.
2. The app's plan is replayed with the candidates alone, all others moving only the clocks (`record_replay.py`). It must
   give the row.
3. It is replayed once more for each candidate without it. Where the row is another then, the record is behind it.

So the answer holds for every kind of step. A record that can be missed is not behind a row: one that is not the maximum,
came late, was a duplicate, or was replaced since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import ORDER, TIME, FrameRow
from millstream.kernels.plan import ConsumerEdge, JobPlan, OperatorPlan, PlanEdge, StepEdge
from millstream.kernels.steps import ColumnNames, StepResult
from millstream.kernels.time.log_order import offset_in, partition_in, topic_in
from millstream.kernels.windows.window_operator import WindowOperator
from millstream.ops.reading_order import ReadAt, RecordId, reading_order
from millstream.ops.record_replay import (
    PlanOverLog,
    Positions,
    RecordReplay,
    deleted_keys,
    output_rows,
)
from millstream.ops.replay_notes import replay_notes
from millstream.views.commit.committer import BatchResult
from millstream.views.query import Query
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import open_state_store

if TYPE_CHECKING:
    from millstream.pipeline.app import App

RECORDS_MAX = 50
"""How many candidates are examined one by one: the work grows with the square of their number."""

_START = datetime(1970, 1, 1)  # noqa: DTZ001 - to count from; zones are removed before
_OBSERVER = "\0observer"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RecordBehind:
    """A record behind a row. ``without`` is the row as it would be without it; None: it would not be there."""

    record: str
    without: Row | None


@dataclass(frozen=True)
class ValueReport:
    """The records behind a row of a view.

    ``same``: the records that the log holds give the row as it is. ``others`` is how many further records have its
    key and do not change it. ``examined``: there were few enough to examine; otherwise ``records`` is empty.
    """

    view: str
    row: Row
    records: tuple[RecordBehind, ...]
    others: int
    same: bool
    examined: bool
    notes: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in words; the first is the sum."""
        values = ", ".join(f"{name}={value}" for name, value in self.row.items())
        count = len(self.records)
        behind = "1 record is" if count == 1 else f"{count:,} records are"
        first = f"{self.view}: {values}. "
        first += f"{behind} behind it." if self.examined else "Its records were not examined."
        lines = [
            f"{one.record}: without it "
            + (
                "there would be no such row"
                if one.without is None
                else ", ".join(f"{name}={value}" for name, value in self._changed(one.without))
            )
            for one in self.records
        ]
        return (first, *lines, *self.notes)

    def _changed(self, without: Row) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in without.items() if self.row.get(name) != value]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "view": self.view,
            "row": _plain(self.row),
            "records": [
                {
                    "record": one.record,
                    "without": None if one.without is None else _plain(one.without),
                }
                for one in self.records
            ],
            "others": self.others,
            "same": self.same,
            "examined": self.examined,
            "notes": list(self.notes),
        }


def records_behind(app: App, view: str, key: Mapping[str, Any]) -> ValueReport:
    """Return the records behind the row of a view that has this key, as far as the log has them.

    Raises:
        ConfigError: the view has no key or no such row, is not of the app, or a step cannot be computed again.
        UnknownViewError: there is no such view.
    """
    with open_state_store(app.state_store, readonly=True) as store:
        schema = store.schema(view)
        if not schema.key or set(key) != set(schema.key):
            named = ", ".join(schema.key) or "none, so a row cannot be named"
            raise ConfigError(
                f"The key of the view {view!r} is {named}. Give each as COLUMN=VALUE."
            )
        over = PlanOverLog.of(app, store, view)
        found = store.select(view, Query(where=key))
        if not found.rows.height:
            raise ConfigError(
                f"The view {view!r} has no row with {dict(key)}. `millstream why record` says what became of a record."
            )
        row = found.rows.row(0, named=True)
        until = over.position(found.position)
        return _ValueReplay(over, store, view, row, schema.key, until).report()


@dataclass(frozen=True)
class _Observer:
    """Notes the records whose rows have a key, and lets nothing pass."""

    key: Mapping[str, Any]
    between_us: tuple[int, int] | None
    found: set[int]
    name: str = _OBSERVER

    def apply(self, table: pl.DataFrame) -> StepResult:
        chosen = table
        for name, value in self.key.items():
            same = chosen[name].is_null() if value is None else chosen[name] == value
            chosen = chosen.filter(same)
        if self.between_us is not None:
            start_us, end_us = self.between_us
            chosen = chosen.filter((chosen[TIME] >= start_us) & (chosen[TIME] < end_us))
        self.found.update(chosen[ORDER].to_list())
        return StepResult(table.clear(), table.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return wanted


@dataclass
class _ValueReplay:
    """The replays for one row of a view."""

    over: PlanOverLog
    store: StateStore
    view: str
    row: Row
    key: Sequence[str]
    until: Positions
    closes: bool = False
    _turns: list[tuple[int, list[FrameRow], list[FrameRow]]] = field(default_factory=list)
    _tail: list[FrameRow] = field(default_factory=list)

    def report(self) -> ValueReport:
        """Return the records behind the row."""
        candidates = sorted(self._candidates())
        if len(candidates) > RECORDS_MAX:
            many = f"{len(candidates):,} records have its key, and at most {RECORDS_MAX} are examined one by one."
            notes = (many, *self._gone(), *replay_notes(self.over, self.store, (), {}))
            return ValueReport(self.view, self.row, (), len(candidates), False, False, notes)
        records = [self._place(order) for order in candidates]
        read_at = reading_order(self.store.batches(self.over.plan.app), self.over.starts, records)
        notes = (*self._gone(), *replay_notes(self.over, self.store, records, read_at))
        end = self._read(dict(zip(candidates, records, strict=True)), read_at)
        befores, now = self._forward(end)
        same = _same(now, self.row)
        if not same:
            self.closes = True
            befores, now = self._forward(end)
            same = _same(now, self.row)
        behind = []
        for number, (order, _, without) in enumerate(self._turns):
            replay, row = befores[number]
            other = self._onward(replay, without, number, row)
            if not _same(other, now):
                behind.append(RecordBehind(self._name(order), other))
        others = len(candidates) - len(behind)
        return ValueReport(
            self.view,
            self.row,
            tuple(behind),
            others,
            same,
            True,
            (*self._said(same=same, others=others, now=now), *notes),
        )

    # The candidates.

    def _candidates(self) -> set[int]:
        found: set[int] = set()
        plan = self.over.plan
        sources = tuple(
            replace(source, edges=tuple(self._observed(source.edges, found)))
            for source in plan.sources
        )
        watched = replace(self.over, plan=replace(plan, sources=sources, stages=()))
        for _ in RecordReplay.begin(watched, self.until).advance(self.until):
            pass
        return found

    def _observed(self, edges: Iterable[PlanEdge], found: set[int]) -> Iterator[PlanEdge]:
        """Yield the edges that lead to the view, each with an observer in the place of its consumer."""
        for edge in edges:
            if not self._leads(edge):
                continue
            if isinstance(edge, StepEdge):
                yield replace(edge, downstream=tuple(self._observed(edge.downstream, found)))
                continue
            operator = self._operator(edge.port)
            names = self.key if operator is None else operator.kernel.by
            key = {name: self.row[name] for name in self.key if name in names}
            observer = _Observer(key, self._between(operator), found)
            yield StepEdge(observer, (), UserCode(_OBSERVER), ())

    def _leads(self, edge: PlanEdge) -> bool:
        if isinstance(edge, StepEdge):
            return any(map(self._leads, edge.downstream))
        operator = self._operator(edge.port)
        if operator is None:
            return edge.port == _port_of(self.over.plan, self.view)
        return any(map(self._leads, (*operator.edges, *operator.late_edges)))

    def _operator(self, port: int) -> OperatorPlan | None:
        operators = (one for stage in self.over.plan.stages for one in stage.operators)
        return next((one for one in operators if port in one.ports), None)

    def _between(self, operator: OperatorPlan | None) -> tuple[int, int] | None:
        """Return the event times of a window, where the view has the rows of this operator."""
        names = ("window_start", "window_end")
        if operator is None or not isinstance(operator.kernel, WindowOperator):
            return None
        if not all(isinstance(self.row.get(name), datetime) for name in names):
            return None
        if not any(map(_is_direct, operator.edges)):
            return None
        start, end = (self.row[name].replace(tzinfo=None) - _START for name in names)
        return start // timedelta(microseconds=1), end // timedelta(microseconds=1)

    # The replays.

    def _read(
        self, candidates: Mapping[int, RecordId], read_at: Mapping[RecordId, ReadAt]
    ) -> RecordReplay:
        """Read the log: for each candidate the frames up to it, with its rows and without; and the rest.

        The candidates are taken in the order in which the job has read them, as far as that is known of all.
        """
        replay = RecordReplay.begin(self.over, self.until)
        self._turns = []
        known = {
            order: at
            for order, record in candidates.items()
            if (at := read_at.get(record)) is not None and at.before is not None
        }
        in_order = sorted(candidates)
        if len(known) == len(candidates):
            in_order.sort(key=lambda order: known[order].batch_id)
        else:
            known = {}
        for order in in_order:
            topic, partition, offset = candidates[order]
            ends = {name: list(at) for name, at in replay.position.items()}
            if order in known:
                ends = _later(ends, known[order].before)
            ends[topic][partition] = offset + 1
            without = replay.copy().read(ends, [])
            self._turns.append((order, replay.read(ends, [order]), without))
        self._tail = replay.read(self.until, [])
        return replay

    def _forward(
        self, end: RecordReplay
    ) -> tuple[list[tuple[RecordReplay, Row | None]], Row | None]:
        """Run all turns; return the replay and the row before each of them, and the row in the end."""
        replay = replace(end, states={})
        row: Row | None = None
        befores: list[tuple[RecordReplay, Row | None]] = []
        for _, with_it, _ in self._turns:
            befores.append((replay.copy(), row))
            row = self._fold(row, replay.process(with_it))
        return befores, self._ended(replay, row)

    def _onward(
        self, before: RecordReplay, without: list[FrameRow], number: int, row: Row | None
    ) -> Row | None:
        """Return the row in the end if one record is left out."""
        replay = before.copy()
        row = self._fold(row, replay.process(without))
        for _, with_it, _ in self._turns[number + 1 :]:
            row = self._fold(row, replay.process(with_it))
        return self._ended(replay, row)

    def _ended(self, replay: RecordReplay, row: Row | None) -> Row | None:
        row = self._fold(row, replay.process(self._tail))
        return self._fold(row, replay.close_windows()) if self.closes else row

    def _fold(self, row: Row | None, result: BatchResult) -> Row | None:
        """Return the row after a batch."""
        plan = self.over.plan
        for key in deleted_keys(plan, result, self.view):
            if self._is_it(key):
                row = None
        for one in output_rows(plan, result, self.view):
            if self._is_it(one):
                row = one
        return row

    def _is_it(self, row: Row) -> bool:
        return all(_equal(row[name], self.row[name]) for name in self.key)

    # Words.

    def _place(self, order: int) -> tuple[str, int, int]:
        number, partition, offset = (
            int(of(order))  # type: ignore[arg-type]
            for of in (topic_in, partition_in, offset_in)
        )
        sources = self.over.plan.sources
        return next(one.topic for one in sources if one.topic_number == number), partition, offset

    def _name(self, order: int) -> str:
        return "/".join(map(str, self._place(order)))

    def _gone(self) -> list[str]:
        gone = [
            f"{topic}/{number} from offset {start:,} on"
            for topic, starts in self.over.starts.items()
            for number, start in enumerate(starts)
            if start > self.over.began(topic, number)
        ]
        if not gone:
            return []
        return [f"The log holds only {', '.join(gone)}: earlier records are not among these."]

    def _said(self, *, same: bool, others: int, now: Row | None) -> Iterator[str]:
        if others:
            yield (
                f"{others:,} further records have its key, and without any one of them the row is the same (millstream why record "
                "says what became of each)."
            )
        if not same:
            given = "no such row" if now is None else ", ".join(f"{n}={v}" for n, v in now.items())
            yield (
                f"The records that the log holds give {given} instead. The others are gone from the log, or a step "
                "between gives the key another name, or the app was edited since, or what is said below has mattered."
            )


def _later(one: Positions, other: Positions | None) -> dict[str, list[int]]:
    """Return of each partition the later of two positions."""
    assert other is not None, "it is known"
    return {topic: [*map(max, at, other[topic])] for topic, at in one.items()}


def _port_of(plan: JobPlan, view: str) -> int:
    return next(sink.port for sink in plan.sinks if sink.name == view)


def _is_direct(edge: PlanEdge) -> bool:
    """Return whether an edge leads to sinks alone, without a further operator."""
    if isinstance(edge, ConsumerEdge):
        return edge.operator is None
    return all(map(_is_direct, edge.downstream))


def _same(one: Row | None, other: Row | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(_equal(one.get(name), value) for name, value in other.items())


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)


def _plain(values: Row) -> dict[str, Any]:
    plain = (int, float, str, bool, type(None))
    return {name: v if isinstance(v, plain) else str(v) for name, v in values.items()}
