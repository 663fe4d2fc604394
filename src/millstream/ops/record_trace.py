"""What became of one record: through every step to its exits, and to the rows of views that it is in.

See `record_replay.py` for how that is computed. Of what is held, event time is moved on in the copy, to see which rows
it would come out in; these are then looked up in the views as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.durations import format_us
from millstream.errors import ConfigError
from millstream.kernels.routing import LEDGER_EXITS
from millstream.ops.reading_order import ReadAt, RecordId, reading_order
from millstream.ops.record_replay import (
    PlanOverLog,
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

_SHOWN = 10


@dataclass(frozen=True)
class StepTrace:
    """What a step did with the rows of one record. ``exits`` has the counts that are not 0."""

    step: str
    read: int
    rows_out: int
    exits: Mapping[str, int]
    late_by_us: int = 0
    reason: str = ""  # of a dead letter

    def sentence(self) -> str:
        """Return what the step did, in words."""
        read = "1 row" if self.read == 1 else f"{self.read:,} rows"
        parts = [f"{name} {count:,}" for name, count in self.exits.items()]
        said = f"{self.step}: read {read}: {', '.join(parts) or 'none left'}"
        if self.rows_out and self.rows_out != self.exits.get("emitted"):
            said += f"; passed on {self.rows_out:,}"
        if self.late_by_us:
            said += f"; it missed by {format_us(self.late_by_us)}"
        return f"{said}; {self.reason}" if self.reason else said


@dataclass(frozen=True)
class RowTrace:
    """A row of an output that a record is in, or that it took back (``removed``).

    ``at_once``: it came out in the record's batch; otherwise when its window closes, its partner comes, or its time has
    come. ``now``: of a view with a key in the app's store (``kept``), the row as it is; None if it is not there. In a
    topic, a file or a view without a key, it isn't looked for.
    """

    output: str
    key: Mapping[str, Any]
    at_once: bool
    now: Mapping[str, Any] | None
    removed: bool = False
    kept: bool = True

    def sentence(self) -> str:
        """Return where the row is, in words."""
        key = ", ".join(f"{name}={_shown(value)}" for name, value in self.key.items())
        came = "gave" if self.at_once else "is held for"
        if self.removed:
            came = "took back" if self.at_once else "is held to take back"
        if not self.kept:
            return f"{self.output}: the record {came} the row {key}"
        if self.now is not None:
            rest = {name: value for name, value in self.now.items() if name not in self.key}
            values = ", ".join(f"{name}={_shown(value)}" for name, value in rest.items())
            return f"{self.output}: the record {came} the row {key}, which is there now: {values}"
        absent = (
            "which is not there"
            if self.removed
            else "which is not there any more: later records have taken it back"
            if self.at_once
            else "which is not there yet, or was taken back"
        )
        return f"{self.output}: the record {came} the row {key}, {absent}"


@dataclass(frozen=True)
class RecordTrace:
    """What became of a record. ``outcome`` is one word for it, see :func:`trace_record`."""

    record: str
    outcome: str
    batch_id: int | None = None
    steps: tuple[StepTrace, ...] = ()
    rows: tuple[RowTrace, ...] = ()
    notes: tuple[str, ...] = ()
    dead: Mapping[str, str] = field(default_factory=dict)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What became of it, in words; the first is the sum."""
        batch = "" if self.batch_id is None else f" It was read in batch {self.batch_id}."
        first = f"{self.record}: {self.outcome}.{batch}"
        steps = [step.sentence() for step in self.steps]
        rows = [row.sentence() for row in self.rows[:_SHOWN]]
        if len(self.rows) > _SHOWN:
            rows.append(f"… and {len(self.rows) - _SHOWN:,} further rows")
        return (first, *steps, *rows, *self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "record": self.record,
            "outcome": self.outcome,
            "batch_id": self.batch_id,
            "steps": [
                {
                    "step": step.step,
                    "read": step.read,
                    "rows_out": step.rows_out,
                    **step.exits,
                    "late_by_us": step.late_by_us,
                    "reason": step.reason,
                }
                for step in self.steps
            ],
            "rows": [
                {
                    "output": row.output,
                    "key": _plain(row.key),
                    "at_once": row.at_once,
                    "removed": row.removed,
                    "now": None if row.now is None else _plain(row.now),
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }


def trace_record(app: App, record: RecordId) -> RecordTrace:
    """Follow one record of the log through the app as it is declared.

    The outcome is ``no longer in the log``, ``not in the log yet``, ``no record`` (its offset has none), ``unread``,
    ``not read`` (the app began behind it), ``late``, ``dead``, ``filtered``, ``duplicate`` (where it ended, if nothing of it went further), ``held`` (it waits in
    a step), or ``in the outputs``.

    Raises:
        ConfigError: the app does not read the topic, has not run, or a step cannot be computed again.
    """
    with open_state_store(app.state_store, readonly=True) as store:
        over = PlanOverLog.of(app, store)
        name = "/".join(map(str, record))
        missing = _not_processed(app, over, store, record)
        if missing is not None:
            return RecordTrace(name, *missing)
        read_at = reading_order(store.batches(app.name), over.starts, [record])
        return _traced(over, store, record, read_at)


def _not_processed(
    app: App, over: PlanOverLog, store: StateStore, record: RecordId
) -> tuple[str, None, tuple[()], tuple[()], tuple[str, ...]] | None:
    """Return why a record was not processed: the outcome, and notes; None if it was."""
    topic, partition, offset = record
    if topic not in over.starts or not 0 <= partition < len(over.starts[topic]):
        topics = ", ".join(f"{t} ({len(p)} partitions)" for t, p in over.starts.items())
        raise ConfigError(
            f"{app.name} reads no {topic}/{partition}. It reads {topics}. Correct the record."
        )
    start, end = over.reader.offsets(topic)[partition]
    if offset < start:
        gone = f"The log holds {topic}/{partition} from offset {start:,} on; its retention, or a command, removed it."
        return "no longer in the log", None, (), (), (gone,)
    if offset < over.began(topic, partition):
        before = f"{app.name} began to read {topic}/{partition} at offset {over.began(topic, partition):,}, behind it."
        return "not read", None, (), (), (before,)
    if offset >= end:
        ends = f"{topic}/{partition} ends at offset {end:,}: no record has this offset yet."
        return "not in the log yet", None, (), (), (ends,)
    if not sum(batch.num_rows for batch in over.reader.read(topic, partition, offset, offset + 1)):
        none = "Its offset has no record: a marker of a transaction, or a record that was aborted or compacted away."
        return "no record", None, (), (), (none,)
    read = over.position(store.position(app.name))[topic][partition]
    if offset >= read:
        waits = f"{app.name} has read {topic}/{partition} up to offset {read:,}: {offset - read:,} records are before it."
        return "unread", None, (), (), (waits,)
    return None


def _before(over: PlanOverLog, record: RecordId, at: ReadAt | None) -> dict[str, list[int]]:
    """Return what had been read before a record; where that is not known, of other partitions what had arrived before it."""
    if at is not None and at.before is not None:
        return at.before
    topic, partition, offset = record
    stamp_ms = _arrived_ms(over, record)
    before = {
        name: [
            max(start, over.reader.offset_for_time(name, number, stamp_ms))
            for number, start in enumerate(starts)
        ]
        for name, starts in over.starts.items()
    }
    before[topic][partition] = offset
    return before


def _arrived_ms(over: PlanOverLog, record: RecordId) -> int:
    topic, partition, offset = record
    for batch in over.reader.read(topic, partition, offset, offset + 1, columns=("timestamp",)):
        return int(batch.column(0)[0].value)
    return 0


def _traced(
    over: PlanOverLog,
    store: StateStore,
    record: RecordId,
    read_at: Mapping[RecordId, ReadAt],
) -> RecordTrace:
    topic, partition, offset = record
    at = read_at.get(record)
    before = _before(over, record, at)
    until = over.position(store.position(over.plan.app))
    replay = RecordReplay.begin(over, until)
    for _ in replay.advance(before):
        pass
    ends = {**before, topic: list(before[topic])}
    ends[topic][partition] = offset + 1
    without = replay.copy()
    with_it = [replay.process(replay.read(ends))]
    alone = [without.process(without.read(ends, [over.order(*record)], all_others=True))]
    later = replay.copy().close_windows(), without.copy().close_windows()
    if any(_late_counts(*later).values()):
        # Whether it is late is decided once all partitions are as far as its own: what comes until then may matter.
        with_it += replay.advance(until)
        alone += without.advance(until)
        later = replay.close_windows(), without.close_windows()
    steps = tuple(_steps(over, with_it, alone))
    rows = list(_rows(over, store, [*with_it, later[0]], [*alone, later[1]]))
    return RecordTrace(
        "/".join(map(str, record)),
        _outcome(steps, rows),
        None if at is None else at.batch_id,
        steps,
        tuple(rows),
        tuple(_notes(over, store, steps, record, read_at)),
    )


def _late_counts(with_it: BatchResult, without: BatchResult) -> Counter[str]:
    """Return how many more rows each step has left out as late with the record than without it, where there are more."""
    late = Counter({step: line["late"] for step, line in with_it.step_counts.items()})
    return late - Counter({step: line["late"] for step, line in without.step_counts.items()})


def _steps(
    over: PlanOverLog, with_it: Sequence[BatchResult], without: Sequence[BatchResult]
) -> Iterator[StepTrace]:
    """Yield what the steps did with the record, in their order: in its batch, the first of the results.

    What a step has held then, and has left out as late since, is late.
    """
    sources = {source.name for source in over.plan.sources}
    reasons = _dead_reasons(with_it[0], without[0])
    late_since = Counter[str]()
    for results in zip(with_it[1:], without[1:], strict=True):
        late_since.update(_late_counts(*results))
    for step in over.plan.steps:
        counts = Counter(with_it[0].step_counts.get(step, Counter()))
        if step not in sources:  # at a source both have read it
            counts.subtract(without[0].step_counts.get(step, Counter()))
        if not counts["read"] and not counts["rows_out"]:
            continue
        late = min(late_since[step], counts["held"])
        counts.update(late=late, held=-late)
        yield StepTrace(
            step,
            counts["read"],
            counts["rows_out"],
            {name: counts[name] for name in LEDGER_EXITS if counts[name]},
            with_it[0].late_by_us.get(step, 0) if counts["late"] else 0,
            reasons.get(step, "") if counts["dead"] else "",
        )


def _dead_reasons(with_it: BatchResult, without: BatchResult) -> dict[str, str]:
    """Return the reasons of the dead letters, by step. A source that fails on the record has it in both."""
    found: dict[str, str] = {}
    for result in (without, with_it):
        if result.dead_letters is not None:
            rows = result.dead_letters.select("step", "reason").iter_rows()
            found |= {step: reason for step, reason in rows if step is not None}
    return found


def _rows(
    over: PlanOverLog,
    store: StateStore,
    with_it: Sequence[BatchResult],
    without: Sequence[BatchResult],
) -> Iterator[RowTrace]:
    """Yield the rows of outputs that are there, or are others, because of the record.

    Of the results the first has what came out at once. A row that only comes sooner or later without the record is there anyway.
    """
    views = {schema.name for schema in store.views()}
    for sink in over.plan.sinks:
        kept = sink.name in views and bool(sink.key)
        keys: dict[str, tuple[dict[str, Any], bool, bool]] = {}
        others = {
            found: Counter(repr(row) for one in without for row in found(over.plan, one, sink.name))
            for found in (output_rows, deleted_keys)
        }
        for result in with_it:
            for found, anyway in others.items():
                for row in found(over.plan, result, sink.name):
                    if anyway[repr(row)]:
                        anyway[repr(row)] -= 1
                        continue
                    key = {column: row[column] for column in sink.key} if sink.key else dict(row)
                    how = result is with_it[0], found is deleted_keys
                    keys.setdefault(repr(key), (key, *how))
        for key, at_once, removed in keys.values():
            now = _row_of(store, sink.name, key) if kept else None
            yield RowTrace(sink.name, key, at_once, now, removed, kept)


def _row_of(store: StateStore, view: str, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    there = store.select(view, Query(where=key)).rows
    return there.row(0, named=True) if there.height else None


def _outcome(steps: Sequence[StepTrace], rows: Sequence[RowTrace]) -> str:
    """Return one word for what became of a record: of several exits, the furthest that it came."""
    if any(row.at_once for row in rows):
        return "in the outputs"
    if any(row.now is not None for row in rows):
        return "in the outputs"
    exits = Counter[str]()
    for step in steps:
        exits.update(step.exits)
    for name in ("held", "late", "duplicate", "dead", "filtered"):
        if exits[name]:
            return name
    return "in the outputs"


def _notes(
    over: PlanOverLog,
    store: StateStore,
    steps: Sequence[StepTrace],
    record: RecordId,
    read_at: Mapping[RecordId, ReadAt],
) -> Iterator[str]:
    """Yield what qualifies the answer."""
    times = store.status(over.plan.app).get("time", {})
    for step in steps:
        if step.exits.get("held") and step.step in times:
            watermark_us = times[step.step]["watermark_us"]
            yield f"The watermark of {step.step} is now at {_time(watermark_us)} (millstream why open)."
    if over.gone:
        yield (
            f"The log no longer holds the first {over.gone:,} records: what they left in joins, tables and deduplication "
            "is not known here."
        )
    yield from replay_notes(over, store, [record], read_at)


def _time(at_us: int) -> str:
    try:
        return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "no time yet"


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ").replace("+00:00", "Z")
    return str(value)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else _shown(value)
        for name, value in values.items()
    }
