"""The commit of a batch: its result is collected and committed to its sinks, the state store last.

The rows of every output are concatenated, the counts of every step become ledger entries that must
balance, and the offsets that were read become the position. Then every sink commits its share in a
transaction of its own. Last, the app's state store commits its views, state, ledger, position and fence in
one transaction. A repeated batch finds its fences and changes nothing. The crash table in `views/sink.py`
shows why this holds across a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from millstream.errors import BadRecordError, ConfigError
from millstream.kernels.column_types import view_kind
from millstream.kernels.errors.dead_letters import DEAD_LETTER_KEY, DEAD_LETTER_SCHEMA
from millstream.kernels.frames import (
    PORT_DEAD_LETTERS,
    PORT_LEDGER,
    PORT_TIME,
    FrameRow,
    decode_frame,
    decode_message,
)
from millstream.kernels.plan import JobPlan, SinkPlan, ViewSinkSpec
from millstream.kernels.routing import LEDGER_COUNTS, LEDGER_NOTES, HotKey, OffsetRange
from millstream.kernels.time.log_order import in_log_order
from millstream.kernels.time.watermarks import NO_WATERMARK
from millstream.views.commit.ledger import (
    Position,
    check_edges,
    check_exits,
    check_ports,
    check_ranges,
    count_late_once,
)
from millstream.views.commit.pipeline_graph import pipeline_graph
from millstream.views.coverage import initial_coverage
from millstream.views.position import merge_positions
from millstream.views.retractions import view_change, view_schema
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart, Sink, SinkBatch, SizedRecordSink
from millstream.views.staging import PartitionStager, StagedChange, StagedRows, Stager
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_change import compare_programs
from millstream.views.state_store.program_state import ProgramOutputs
from millstream.views.state_store.program_switch import ProgramSwitch
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.state_store.view_fill import ViewFill, fill_views, view_paths

DEAD_LETTERS_VIEW = "dead_letters"
_VALUE_SHOWN_BYTES = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class BatchResult:
    """What the rows and reports of a batch add up to. ``steps`` are in the order of the graph."""

    steps: tuple[str, ...] = ()
    rows: dict[str, pl.DataFrame] = field(default_factory=dict)  # output → with hidden columns
    staged: dict[str, StagedRows] = field(default_factory=dict)  # output → what tasks have written
    dead_letters: pl.DataFrame | None = None
    step_counts: dict[str, Counter[str]] = field(default_factory=dict)
    # source → partition
    ranges: dict[str, dict[str, list[OffsetRange]]] = field(default_factory=dict)
    position: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → next
    arrived_ms: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → ms
    watermarks: dict[str, int] = field(default_factory=dict)  # operator → microseconds
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)  # operator → name
    state_bytes: int = 0
    state: dict[str, Counter[str]] = field(default_factory=dict)  # operator → bytes, and rows
    worked_ms: dict[str, float] = field(default_factory=dict)  # step → in all tasks
    # source → producers that are no longer followed, in all
    forgotten_producers: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, dict[str, Any]] = field(default_factory=dict)  # operator → input → its time
    late_by_us: dict[str, int] = field(default_factory=dict)  # step → the most that an event missed
    hot_keys: list[HotKey] = field(default_factory=list)  # as tasks found them
    sent: Counter[str] = field(default_factory=Counter)  # port → rows, and messages
    arrived: Counter[str] = field(default_factory=Counter)

    def late(self, plan: JobPlan) -> int:
        """Count the late events, each once: see :func:`millstream.views.commit.ledger.count_late_once`."""
        late = {step: line["late"] for step, line in self.step_counts.items() if line["late"]}
        return count_late_once(pipeline_graph(plan), late) if late else 0

    def total(self, count: str) -> int:
        """Sum one count over all steps."""
        return sum(line[count] for line in self.step_counts.values())

    def gauge(self, name: str) -> dict[str, float]:
        """Return one gauge of all operators that have it."""
        return {
            step: gauges[name] for step, gauges in sorted(self.gauges.items()) if name in gauges
        }

    def read(self, plan: JobPlan) -> int:
        """How many records the sources read."""
        names = [*(s.name for s in plan.sources), *(f.name for f in plan.frames)]
        return sum(self.step_counts[name]["read"] for name in names if name in self.step_counts)

    @property
    def watermark(self) -> datetime | None:
        """The lowest watermark of all operators; None before every partition has had an event."""
        low_us = min(self.watermarks.values(), default=NO_WATERMARK)
        return None if low_us <= NO_WATERMARK else _EPOCH + timedelta(microseconds=low_us)

    @property
    def emitted(self) -> int:
        """How many rows go to outputs."""
        staged = sum(each.rows for each in self.staged.values())
        return staged + sum(rows.height for rows in self.rows.values())

    def ledger_entries(self) -> list[dict[str, Any]]:
        """Return the ledger entry of each step: rows read, by exit; rows given on; notes."""
        at = {step: number for number, step in enumerate(self.steps)}
        return [
            {"step": step, **{name: line[name] for name in (*LEDGER_COUNTS, *LEDGER_NOTES)}}
            for step, line in sorted(
                self.step_counts.items(), key=lambda item: at.get(item[0], len(at))
            )
        ]

    def check_balance(self, plan: JobPlan, before: Position) -> None:
        """Make sure that no event was lost since the position ``before``: see `ledger.py`.

        Raises:
            CorruptionError: the ledger does not balance; the batch must not be committed.
        """
        check_exits(self.step_counts)
        check_ranges(plan, self.ranges, before)
        check_edges(plan, self.ranges, self.step_counts)
        # Rows that go to a native step are Spark's from there on, which has no ledger of ours.
        natives = {str(native.port) for native in plan.natives}
        check_ports({port: n for port, n in self.sent.items() if port not in natives}, self.arrived)


def collect_results(
    plan: JobPlan, rows: Iterable[FrameRow], staged: Mapping[str, StagedRows] | None = None
) -> BatchResult:
    """Collect the rows that a batch's sources and stages give to the sinks.

    ``staged`` are the outputs whose rows tasks have written, so that they are not among ``rows``.

    Raises:
        BadRecordError: there is a dead letter of a topic that was declared with ``bad="stop"``.
    """
    result = BatchResult(plan.steps, staged=dict(staged or {}))
    sinks = {sink.port: sink for sink in plan.sinks}
    frames: dict[int, list[pl.DataFrame]] = {}
    for row in rows:
        if row.port == PORT_LEDGER:
            _add_report(result, decode_message(row.frame))
        elif row.port != PORT_TIME:
            table = decode_frame(row.frame)
            frames.setdefault(row.port, []).append(table)
            result.arrived[str(row.port)] += table.height
    for port, tables in sorted(frames.items()):
        table = pl.concat(tables, how="diagonal")
        if port == PORT_DEAD_LETTERS:
            _stop_on_bad_records(plan, table)
            result.dead_letters = table
            continue
        # Of rows that replace one another, the last one in the log counts.
        result.rows[sinks[port].name] = in_log_order(table)
    for sink in plan.sinks:
        if sink.name in result.staged:
            result.arrived[str(sink.port)] += result.staged[sink.name].rows
    for source in plan.sources:
        offsets = result.position.setdefault(source.topic, {})
        for partition, read in result.ranges.get(source.name, {}).items():
            offsets[partition] = max(end for _, end, _ in read)
    result.position = {topic: ends for topic, ends in result.position.items() if ends}
    return result


def _stop_on_bad_records(plan: JobPlan, dead: pl.DataFrame) -> None:
    """Raise for the first dead letter of a topic that was declared with ``bad="stop"``."""
    stopping = [source.name for source in plan.sources if source.bad == "stop"]
    found = dead.filter(pl.col("step").is_in(stopping)).sort("topic", "partition", "offset")
    if found.height:
        first = found.row(0, named=True)
        seen = repr((first["value"] or b"")[:_VALUE_SHOWN_BYTES])
        raise BadRecordError(
            f"Record {first['topic']}/{first['partition']}/{first['offset']} cannot be decoded: "
            f"{first['reason']}. Its value begins with {seen}. Nothing of this batch was committed. "
            'Correct the schema of the topic, or declare it with bad="dead-letter" or "skip", and '
            "run again.",
            topic=first["topic"],
            partition=first["partition"],
            offset=first["offset"],
            reason=first["reason"],
        )


def _add_gauges(known: dict[str, float], gauges: Mapping[str, float]) -> None:
    """Add the gauges of a bucket to those of others: see :class:`~millstream.kernels.operator.OperatorResult`."""
    for name, value in gauges.items():
        if name.endswith("_rate"):
            known[name] = max(known.get(name, value), value)
        else:
            known[name] = known.get(name, 0.0) + value


def _add_report(result: BatchResult, report: Mapping[str, Any]) -> None:
    for step, counts in report["steps"].items():
        result.step_counts.setdefault(step, Counter()).update(counts)
    result.sent.update(report.get("sent", {}))
    result.arrived.update(report.get("arrived", {}))
    for source, partitions in report.get("ranges", {}).items():
        ranges = result.ranges.setdefault(source, {})
        for partition, read in partitions.items():
            ranges.setdefault(partition, []).extend((start, end, n) for start, end, n in read)
    for topic, numbers in report.get("arrived_ms", {}).items():
        known = result.arrived_ms.setdefault(topic, {})
        for partition, number in numbers.items():
            known[partition] = max(known.get(partition, 0), number)
    for operator, watermark_us in report.get("watermarks", {}).items():
        low_us = min(result.watermarks.get(operator, watermark_us), watermark_us)
        result.watermarks[operator] = low_us
    for operator, gauges in report.get("gauges", {}).items():
        _add_gauges(result.gauges.setdefault(operator, {}), gauges)
    result.state_bytes += report.get("state_bytes", 0)
    _add_cost(result, report)
    result.clocks.update(report.get("clocks", {}))
    for step, late_by_us in report.get("late_by_us", {}).items():
        result.late_by_us[step] = max(result.late_by_us.get(step, 0), late_by_us)
    result.hot_keys.extend(HotKey(*each) for each in report.get("hot_keys", ()))
    result.forgotten_producers.update(report.get("forgotten", {}))  # every bucket says the same


def _add_cost(result: BatchResult, report: Mapping[str, Any]) -> None:
    """Add for how long steps worked, and what they hold."""
    for operator, (size_bytes, rows) in report.get("state", {}).items():
        result.state.setdefault(operator, Counter()).update(bytes=size_bytes, rows=rows)
    for step, took_ms in report.get("worked_ms", {}).items():
        result.worked_ms[step] = result.worked_ms.get(step, 0.0) + took_ms


def view_schemas(plan: JobPlan) -> list[ViewSchema]:
    """Return the schemas of the views that the state store keeps: the plan's, and ``dead_letters``."""
    dead = tuple(
        (name, view_kind(pl.DataFrame(schema=DEAD_LETTER_SCHEMA).schema[name]))
        for name in DEAD_LETTER_SCHEMA
    )
    return [
        *(view_schema(sink) for sink in plan.sinks if _in_state_store(sink)),
        ViewSchema(DEAD_LETTERS_VIEW, dead, DEAD_LETTER_KEY),
    ]


def _in_state_store(sink: SinkPlan) -> bool:
    return sink.spec == ViewSinkSpec()


class BatchCommitter:
    """Commits the batches of a job to its sinks: see `views/sink.py` for the order.

    Begin a run, then commit batch after batch. The caller closes the state store and the other sinks.
    """

    def __init__(
        self,
        plan: JobPlan,
        state_store: StateStore,
        others: Sequence[Sink],
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.plan = plan
        self.state_store = state_store
        self.sinks = others
        self.run = 0
        self._job = ""
        self._position: Position | None = None  # what is committed, once it was read
        self._now = now

    def begin_run(
        self,
        job: str,
        checkpoint_id: str,
        *,
        partitioning: Mapping[str, int] | None = None,
        same_expressions: bool = False,
    ) -> int:
        """Take over from older runs everywhere; return the batch_id that is to be committed next.

        Args:
            partitioning: How the work is divided (``JobMetadata.partitioning``), for the next run.
            same_expressions: See :func:`millstream.views.state_store.program.check_same_program`.

        Raises:
            ConfigError: a sink and the state store do not hold the same batches, a view is declared
                differently from what is there, or the state is another program's.
            FencedError: a newer run has begun meanwhile.
        """
        beginning = self._beginning(partitioning, same_expressions=same_expressions)
        # Nothing is declared for a program that is refused.
        self.state_store.check_program(self.plan.app, job, beginning)
        fills = self._fills(job, beginning)
        for schema in view_schemas(self.plan):
            if schema.name not in fills:  # such a view is there with all its rows, or not at all
                self.state_store.declare(schema)
        start, next_batch_id = self._begin(job, checkpoint_id, beginning)
        store = self.state_store
        # Older runs are fenced from here on, so what the views are filled from stays as it is.
        filled = fill_views(fills.values(), store.outputs(self.plan.app, job), store.scan)
        # Last, so that a batch that another program began and did not commit is refused until it is.
        store.register_program(start, self._with_end_offsets(beginning), filled)
        self.state_store.put_description(self.plan.app, "graph", pipeline_graph(self.plan))
        return next_batch_id

    def _fills(self, job: str, beginning: RunProgram) -> dict[str, ViewFill]:
        """Return how views are filled that are new, or come back, of those that are there and have all their rows."""
        left = self.state_store.left_by(self.plan.app, job, beginning.at)
        paths = view_paths(self.plan)
        if left is None or not paths:
            return {}
        schemas = {schema.name: schema for schema in view_schemas(self.plan)}
        declared = ProgramOutputs(beginning.outputs, schemas, paths)
        change = compare_programs(
            left, beginning.program, declared, same_expressions=beginning.same_expressions
        )
        remade = {
            part.name for part in change.parts if part.filled_from and part.verdict != "keeps"
        }
        return {view: fill for view, fill in change.fills.items() if view not in remade}

    def switch_program(
        self,
        job: str,
        checkpoint_id: str,
        made: Callable[[RunStart, RunProgram], ProgramSwitch],
        *,
        partitioning: Mapping[str, int],
        same_expressions: bool = False,
    ) -> None:
        """Take over from older runs everywhere, and put the plan's program in the place of the one before.

        ``made`` returns what takes its place, for the run that has begun. No batch may follow in this run.

        Raises:
            ConfigError: as :meth:`begin_run`.
            ConflictError, FencedError: as :meth:`StateStore.switch_program`.
        """
        beginning = self._beginning(partitioning, same_expressions=same_expressions)
        start, _ = self._begin(job, checkpoint_id, beginning)
        switch = made(start, self._with_end_offsets(beginning))
        self.state_store.switch_program(start, switch)
        self.state_store.put_description(self.plan.app, "graph", pipeline_graph(self.plan))

    def _beginning(
        self, partitioning: Mapping[str, int] | None, *, same_expressions: bool
    ) -> RunProgram:
        program = StoredProgram.of(self.plan, partitioning or {})
        at = self._now().isoformat(timespec="seconds")
        return RunProgram(
            program, initial_coverage(self.plan), at, same_expressions=same_expressions
        )

    def _with_end_offsets(self, beginning: RunProgram) -> RunProgram:
        """Add where topics end, once the run has begun in all sinks: what it changes in one begins there."""
        ends = {output: at for sink in self.sinks for output, at in sink.end_offsets().items()}
        return replace(beginning, end_offsets=ends)

    def _begin(self, job: str, checkpoint_id: str, beginning: RunProgram) -> tuple[RunStart, int]:
        """Begin a run in the state store and all sinks; return it and the batch_id that comes next."""
        app = self.plan.app
        self.run, next_batch_id = self.state_store.begin_run(app, job, checkpoint_id)
        self._job = job
        coverage = {
            output: one.spans
            for output, one in self.state_store.next_coverage(app, job, beginning).items()
        }
        start = RunStart(app, job, self.run, checkpoint_id, coverage)
        known = KnownSinks(self.state_store.sinks(app, job), next_batch_id)
        for sink in self.sinks:
            last = sink.begin_run(start)
            if sink.has_fence:
                known.check(sink, last, start)
            if last == next_batch_id:
                self.state_store.check_interrupted_batch(start, beginning, sink.name)
        return start, next_batch_id

    def record_bytes_max(self, output: str) -> int | None:
        """Return how many bytes key and value of an output's record may have in all; None: no sink sets a limit."""
        sized = (sink for sink in self.sinks if isinstance(sink, SizedRecordSink))
        return next((most for sink in sized if (most := sink.record_bytes_max(output))), None)

    def is_next(self, batch_id: int) -> bool:
        """Return whether this batch is the next to be committed; False if it is committed already.

        Raises:
            FencedError: a newer run of the app has taken over.
            CorruptionError: the batch does not follow the last committed one.
        """
        return self.state_store.is_next(self._fence(batch_id))

    def check_not_fenced(self) -> None:
        """Make sure that no newer run has taken over. A newer run may have removed files of this one.

        Raises:
            FencedError: one has; it may be the cause of whatever else failed in this run.
        """
        last = self.state_store.last_batch_id(self.plan.app, self._job)
        self.state_store.is_next(self._fence(0 if last is None else last + 1))

    def commit(
        self,
        batch_id: int,
        result: BatchResult,
        status: Mapping[str, Any],
        state: Mapping[tuple[int, int], bytes] | None = None,
        record: Mapping[str, Any] | None = None,
        *,
        source_offsets: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> bool:
        """Commit a batch everywhere. False if it was committed before; then nothing changes.

        ``state`` holds the manifests of the state that it changed, by stage and bucket; ``record`` is what is
        kept of the batch (`batch_history.py`); ``source_offsets`` is as in :meth:`StateStore.commit`.

        Raises:
            CorruptionError: the ledger does not balance; nothing was committed.
            FencedError: a newer run of the app has taken over.
            UserCodeError: a function of the user's failed. The batch is not done.
        """
        fence = self._fence(batch_id)
        # Only a run that is not stale may reach sinks that cannot refuse it themselves.
        if not self.state_store.is_next(fence):
            return False
        result.check_balance(self.plan, self.position)
        if batch_id == 0:
            result.position = merge_positions(self.position, result.position)
        part = SinkBatch(result.rows, result.position, result.staged)
        participants = [sink for sink in self.sinks if sink.participates(part)]
        for sink in participants:
            sink.commit(fence, part)
        committed = self.state_store.commit(
            fence,
            self._view_changes(result),
            position=result.position,
            ledger=[{"batch_id": batch_id, **line} for line in result.ledger_entries()],
            status=status,
            sinks={sink.identity: sink.name for sink in participants if sink.has_fence},
            state=state,
            record=record,
            source_offsets=source_offsets,
        )
        self._position = merge_positions(self.position, result.position)
        return committed

    def begin_at(self, offsets: Mapping[str, Sequence[int]]) -> None:
        """Begin the first batch at some offsets, by topic and partition: they become a part of its position."""
        self._position = {
            topic: {str(number): offset for number, offset in enumerate(begins)}
            for topic, begins in offsets.items()
        }

    @property
    def position(self) -> Position:
        """What of the log the committed batches reflect."""
        if self._position is None:
            self._position = self.state_store.position(self.plan.app)
        return self._position

    def _fence(self, batch_id: int) -> Fence:
        return Fence(self.plan.app, self._job, self.run, batch_id)

    def stager(self, batch_id: int, sink: SinkPlan) -> Stager | PartitionStager | None:
        """Return what stages the rows of an output; None if the driver has to write them."""
        fence = self._fence(batch_id)
        if _in_state_store(sink):
            return self.state_store.stager(fence, sink)
        found = (each.stager(fence, sink.name) for each in self.sinks)
        return next((stager for stager in found if stager is not None), None)

    def _view_changes(self, result: BatchResult) -> list[ViewChange | StagedChange]:
        changes: list[ViewChange | StagedChange] = []
        for sink in filter(_in_state_store, self.plan.sinks):
            if sink.name in result.rows:
                changes.append(view_change(sink, result.rows[sink.name]))
            elif sink.name in result.staged:
                changes.append(StagedChange(sink.name, result.staged[sink.name]))
        if result.dead_letters is not None:
            changes.insert(0, ViewChange(DEAD_LETTERS_VIEW, result.dead_letters))
        return changes


class KnownSinks:
    """What the state store has recorded of the other sinks: identity, name and last batch of each."""

    def __init__(self, sinks: Sequence[tuple[str, str, int]], next_batch_id: int) -> None:
        self._by_identity = {identity: last for identity, _, last in sinks}
        self._names = {name: identity for identity, name, _ in sinks}
        self._next = next_batch_id

    def check(self, sink: Sink, last: int | None, start: RunStart) -> None:
        """Make sure that a sink holds the recorded batches, or one more.

        Raises:
            ConfigError: it was replaced, or it or the state store was restored from another time.
        """
        recorded = self._by_identity.get(sink.identity)
        if last in (recorded, self._next) and not (recorded is None and sink.name in self._names):
            return
        if recorded is None and sink.name in self._names:
            was = self._by_identity[self._names[sink.name]]
            what = f"is not the one that held batches up to {was}: it was deleted or replaced"
        elif last is None or (recorded is not None and last < recorded):
            held = "no batch" if last is None else f"batches up to {last}"
            what = f"holds {held}, and up to {recorded} were committed: it is older than the app's views"
        else:
            what = f"holds batches up to {last}, which the app's views do not know: they are older"
        raise ConfigError(
            f"{sink.name}, which {start.job_label} writes to, {what}. Restore both from the same time, "
            f"or give the app another name, and its outputs other places. {start.reset_advice}."
        )
