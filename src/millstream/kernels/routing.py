"""From a node's rows to the frames of its outgoing edges: steps, partials, buckets, ledger.

The paths from a node are a tree. A table goes through a shared step once, and is counted there once. The
rows that the step passes on are counted as ``rows_out``, and as ``read`` by the next steps, so that an event
can be followed through the ledger from its source to its sink. Rows on which the user's code fails
become dead letters: see :mod:`millstream.kernels.errors.user_code`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import polars as pl

from millstream.errors import UserCodeError
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.frames import (
    ARRIVED,
    DIFF,
    HIDDEN_PREFIX,
    ORDER,
    PORT_LEDGER,
    PORT_TIME,
    RELEASED,
    RELEASED_TIE,
    REPLACED,
    WATERMARK_SEEN,
    Frame,
    FrameRow,
    cut_for_frames,
    encode_frame,
    encode_message,
    visible,
)
from millstream.kernels.plan import ConsumerEdge, PlanEdge, StepEdge, Updates
from millstream.kernels.state.keyhash import (
    Buckets,
    Hashes,
    buckets_of,
    frequent_hash,
    hash_columns,
)
from millstream.kernels.steps import StepResult
from millstream.kernels.time.log_order import in_log_order

_BUCKET = "__bucket"
LEDGER_EXITS = ("emitted", "held", "late", "dead", "filtered", "duplicate")
LEDGER_COUNTS = ("read", *LEDGER_EXITS, "rows_out")
# What a line reports in addition, without a part in its balance: ``windows_missed`` counts pairs of
# an event and a window that had expired for it, ``windows_closed`` those of an event and a window that had
# fired once before it. An event that missed some of its windows is held.
LEDGER_NOTES = ("windows_missed", "windows_closed")
SIDE_OUTPUT = "side_output"  # how many late rows a step passed on to other steps


HOT_SHARE = 0.5  # of a step's rows in a batch: a key that has so many holds the other buckets up
_HOT_ROWS_MIN = 10_000  # of one task
_KEY_SHOWN = 80  # characters of a value


class HotKey(NamedTuple):
    """A key that many of the rows of a task have that go to a port: its hash, what it reads, and how many rows."""

    port: str
    step: str
    hash: str
    key: str
    rows: int


OffsetRange = tuple[int, int, int]  # of offsets: start, end, and how many records there were


@dataclass
class TaskLedger:
    """What a task reports: counts per step, positions and watermarks.

    At every step read = the sum of the exits; ``rows_out`` counts the rows that it passed on, which are
    not always those that it read. ``ranges`` is source → partition → the ranges of offsets that
    were read, each as start, end and the number of records; ``arrived_ms`` is topic → partition → the
    timestamp in the log of the last record, ``event_times`` likewise the largest event time in the
    batch. ``watermarks`` is operator → microseconds; ``gauges`` are
    numbers by operator and name, none of them events; ``forgotten`` is source → producers evicted,
    in all, because there were more than the maximum. ``clocks`` is operator → input → the status
    of its clock; ``late_by_us`` is step → the most that an event missed by; ``hot_keys`` are keys that most of
    the rows have that go to a step. ``state`` is operator → the bytes and rows of its state; ``worked_ms``
    is step → for how long it worked: of a source, until its rows were ready for the next steps. ``sent`` and
    ``arrived`` are rows by port, and messages: another process must report as many as one has sent.
    """

    step_counts: dict[str, Counter[str]] = field(default_factory=dict)
    ranges: dict[str, dict[str, list[OffsetRange]]] = field(default_factory=dict)
    arrived_ms: dict[str, dict[str, int]] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    event_times: dict[str, dict[str, int]] = field(default_factory=dict)
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)
    state_bytes: int = 0
    forgotten: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    late_by_us: dict[str, int] = field(default_factory=dict)
    hot_keys: list[HotKey] = field(default_factory=list)
    state: dict[str, tuple[int, int]] = field(default_factory=dict)
    worked_ms: dict[str, float] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    arrived: Counter[str] = field(default_factory=Counter)
    clock: Callable[[], float] = perf_counter

    def frames(self, port: int, bucket: int, table: pl.DataFrame) -> Iterator[FrameRow]:
        """Yield the frames of a table that goes to a port: one, or several of a large one. Its rows count as sent."""
        self.sent[str(port)] += table.height
        for part in cut_for_frames(table):
            yield FrameRow(port, bucket, encode_frame(part))

    def time_message(self, to: int, bucket: int, message: Frame) -> FrameRow:
        """Send a message about time to an operator, and count it."""
        self.sent[f"time of {to}"] += 1
        return FrameRow(PORT_TIME, bucket, message)

    @contextmanager
    def working(self, step: str) -> Iterator[None]:
        """Measure the block as work of a step."""
        began = self.clock()
        yield
        self.worked_ms[step] = self.worked_ms.get(step, 0.0) + (self.clock() - began) * 1000

    def note_lateness(self, step: str, late_by_us: int) -> None:
        """Note by how much an event came too late."""
        if late_by_us > 0:
            self.late_by_us[step] = max(self.late_by_us.get(step, 0), late_by_us)

    def note_event_time(self, topic: str, partition: int, at_us: int) -> None:
        """Note an event time."""
        times = self.event_times.setdefault(topic, {})
        times[str(partition)] = max(times.get(str(partition), at_us), at_us)

    def count(self, step: str, **rows: int) -> None:
        """Add to a step's counts."""
        self.step_counts.setdefault(step, Counter()).update(rows)

    def report_row(self, bucket: int) -> FrameRow:
        """Return the report as a row of the ledger port."""
        report = {
            "steps": self.step_counts,
            "ranges": self.ranges,
            "arrived_ms": self.arrived_ms,
            "watermarks": self.watermarks,
            "event_times": self.event_times,
            "gauges": self.gauges,
            "state_bytes": self.state_bytes,
            "forgotten": self.forgotten,
            "clocks": self.clocks,
            "late_by_us": self.late_by_us,
            "hot_keys": self.hot_keys,
            "state": self.state,
            "worked_ms": self.worked_ms,
            "sent": self.sent,
            "arrived": self.arrived,
        }
        return FrameRow(PORT_LEDGER, bucket, encode_message(report))


class RowRouter(Protocol):
    """Takes the rows of one edge, table by table, and gives its frames at the end of the batch."""

    def take(self, rows: pl.DataFrame) -> None: ...
    def frames(self, first_bucket: int) -> Iterator[FrameRow]: ...


@dataclass
class StepRouter:
    """Takes rows through a stateless step, and on."""

    edge: StepEdge
    ledger: TaskLedger
    dead_letters: DeadLetterCollector
    downstream: list[RowRouter]

    def take(self, rows: pl.DataFrame) -> None:
        """Run the step over a table, count, and pass on what comes out."""
        done = self.edge.code.run(self._apply, rows)
        self.dead_letters.add(self.edge.step.name, done)
        table, kept = done.result or (None, 0)
        self.ledger.count(
            self.edge.step.name,
            read=rows.height,
            emitted=kept,
            dead=done.failing.height,
            filtered=done.passing.height - kept,
            rows_out=0 if table is None else table.height,
        )
        if table is not None and table.height:
            for route in self.downstream:
                route.take(table)

    def frames(self, first_bucket: int) -> Iterator[FrameRow]:
        """Return the frames of all edges below."""
        for route in self.downstream:
            yield from route.frames(first_bucket)

    def _apply(self, rows: pl.DataFrame) -> StepResult:
        passed = self.edge.step.apply(rows)
        schema = passed.table.schema
        wrong = [
            name for name, dtype in self.edge.schema_out if name in schema and schema[name] != dtype
        ]
        return self._with_declared_types(passed, wrong) if wrong else passed

    def _with_declared_types(self, passed: StepResult, wrong: list[str]) -> StepResult:
        """Return columns of nulls their type; refuse other types than those that were declared."""
        declared = dict(self.edge.schema_out)
        for name in wrong:
            if passed.table.schema[name] != pl.Null:
                step = self.edge.step.name
                raise UserCodeError(
                    f"step {step!r} gave the column {name!r} as {passed.table.schema[name]}. It is "
                    f"declared as {declared[name]}: cast it, or say return_dtype=.",
                    step=step,
                )
        return passed._replace(table=passed.table.cast({name: declared[name] for name in wrong}))


@dataclass
class ConsumerRouter:
    """Takes the rows of one edge, table by table, and gives its frames at the end of the batch."""

    edge: ConsumerEdge
    buckets: Buckets
    ledger: TaskLedger
    dead_letters: DeadLetterCollector
    tables: list[pl.DataFrame] = field(default_factory=list)

    def take(self, rows: pl.DataFrame) -> None:
        """Prepare a table for what takes it."""
        self.ledger.count(self.edge.step, read=rows.height)
        if self.edge.updates is not None:
            rows, read = _updates(rows, self.edge.updates), rows.height
            self.ledger.count(self.edge.step, filtered=read - rows.height)
        if self.edge.signed and DIFF not in rows.columns:
            rows = rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
        operator = self.edge.operator
        columns = self._columns(rows.columns)
        if operator is None:
            self.ledger.count(self.edge.step, emitted=rows.height)
            self._keep(rows[columns])
        elif rows.height:
            done = self.edge.code.run(
                lambda table: operator.prepare(table[columns], self.edge.number), rows
            )
            self.dead_letters.add(self.edge.step, done)
            self.ledger.count(self.edge.step, dead=done.failing.height)
            if done.result is not None:
                self.ledger.count(self.edge.step, late=done.result.late, **done.result.counts)
                self.ledger.note_lateness(self.edge.step, done.result.late_by_us)
                self._keep(done.result.table)

    def _columns(self, there: list[str]) -> list[str]:
        """Select the columns to send, in an order that is the same on all edges to the consumer."""
        wanted = self.edge.columns
        kept = sorted(visible(there)) if wanted is None else [c for c in wanted if c in there]
        left_out = {REPLACED, *(name for name, kept in self._optional() if not kept)}
        hidden = [c for c in there if c.startswith(HIDDEN_PREFIX) and c not in left_out]
        return [*kept, *(sorted(hidden) if self.edge.signed else hidden)]

    def _optional(self) -> list[tuple[str, bool]]:
        """List the hidden columns that not all consumers want, and whether this one does."""
        at_sink = self.edge.operator is None
        return [
            (ORDER, self.edge.ordered),
            (ARRIVED, self.edge.arrived),
            (RELEASED, at_sink),
            (RELEASED_TIE, at_sink or self.edge.released),
        ]

    def _keep(self, table: pl.DataFrame) -> None:
        if table.height:
            self.tables.append(table)

    def _latest(self, table: pl.DataFrame) -> pl.DataFrame:
        """Leave out the rows that later ones of the table would replace in the view anyway."""
        if not self.edge.latest_by or ORDER not in table.columns or DIFF in table.columns:
            return table
        table = in_log_order(table)
        # Numbers for names: polars takes a name such as "^a.*$" for a pattern.
        keys = pl.DataFrame({str(n): table[key] for n, key in enumerate(self.edge.latest_by)})
        return table.filter(keys.to_struct("key").is_last_distinct())

    def frames(self, first_bucket: int) -> Iterator[FrameRow]:
        """Return the edge's frames: by bucket for an operator, all to ``first_bucket`` for a sink."""
        if not self.tables:
            return
        operator = self.edge.operator
        if operator is None:
            table = pl.concat(self.tables).drop(WATERMARK_SEEN, strict=False)
            yield from self.ledger.frames(self.edge.port, first_bucket, self._latest(table))
            return
        table = operator.pack(self.tables, self.edge.number)
        hashes = hash_columns(table, operator.by, self.buckets.seed)
        self._note_hot_key(table, operator.by, hashes)
        buckets = buckets_of(hashes, self.buckets.count)
        divided = table.hstack([pl.Series(_BUCKET, buckets)]).partition_by(
            _BUCKET, as_dict=True, include_key=False
        )
        for (bucket,), part in divided.items():
            yield from self.ledger.frames(self.edge.port, int(bucket), part)

    def _note_hot_key(self, table: pl.DataFrame, by: Sequence[str], hashes: Hashes) -> None:
        """Note a key that most rows have: they all go to one bucket."""
        if not by or self.buckets.count == 1 or table.height < _HOT_ROWS_MIN:
            return
        found = frequent_hash(hashes, HOT_SHARE)
        if found is not None:
            key = table.row(int((hashes == found[0]).argmax()), named=True)
            text = ", ".join(f"{name}={key[name]!r}"[:_KEY_SHOWN] for name in by)
            self.ledger.hot_keys.append(
                HotKey(str(self.edge.port), self.edge.step, str(found[0]), text, found[1])
            )


def _updates(rows: pl.DataFrame, updates: Updates) -> pl.DataFrame:
    """Leave out the retractions of rows that others replace."""
    kept = rows.filter(~pl.col(REPLACED))
    return kept if updates.signed else kept.drop(DIFF)


def make_routers(
    edges: Iterable[PlanEdge],
    buckets: Buckets,
    ledger: TaskLedger,
    dead_letters: DeadLetterCollector,
) -> list[RowRouter]:
    """Make one router per edge."""
    made: list[RowRouter] = []
    for edge in edges:
        if isinstance(edge, ConsumerEdge):
            made.append(ConsumerRouter(edge, buckets, ledger, dead_letters))
        else:
            onward = make_routers(edge.downstream, buckets, ledger, dead_letters)
            made.append(StepRouter(edge, ledger, dead_letters, onward))
    return made
