"""The one commit: all that a batch gives, put together and handed to its targets, the state store last.

The rows of every output are put together, the books of every step become ledger lines that must
balance, and what was read becomes the position; then every target takes its part, each in one
transaction, and the app's state store takes the views that it keeps, and all the rest, in one
more. A repeated batch finds its fences and changes nothing. Why this holds across a crash is told
in `views/sink.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from millstream.kernels.routing import LEDGER_COUNTS, LEDGER_NOTES, OffsetRange
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
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.sink import RunStart, Sink, SinkBatch
from millstream.views.sinks.retractions import view_change, view_schema
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore

DEAD_LETTERS_VIEW = "dead_letters"
_VALUE_SHOWN_BYTES = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class BatchResult:
    """What the rows of a batch's last edge add up to. ``steps`` are in the order of the graph."""

    steps: tuple[str, ...] = ()
    rows: dict[str, pl.DataFrame] = field(default_factory=dict)  # output → with hidden columns
    dead_letters: pl.DataFrame | None = None
    step_counts: dict[str, Counter[str]] = field(default_factory=dict)
    # source → partition
    ranges: dict[str, dict[str, list[OffsetRange]]] = field(default_factory=dict)
    position: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → next
    arrived_ms: dict[str, dict[str, int]] = field(default_factory=dict)  # topic → partition → ms
    watermarks: dict[str, int] = field(default_factory=dict)  # operator → microseconds
    gauges: dict[str, dict[str, float]] = field(default_factory=dict)  # operator → name → largest
    state_bytes: int = 0
    # source → producers let go, in all
    forgotten_producers: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, dict[str, Any]] = field(default_factory=dict)  # operator → input → its time
    late_by_us: dict[str, int] = field(default_factory=dict)  # step → the most that an event missed
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
        """Give one fact of all operators that tell it."""
        return {step: told[name] for step, told in sorted(self.gauges.items()) if name in told}

    def read(self, plan: JobPlan) -> int:
        """How many records the sources read."""
        names = [*(s.name for s in plan.sources), *(f.name for f in plan.frames)]
        return sum(self.step_counts[name]["read"] for name in names if name in self.step_counts)

    @property
    def watermark(self) -> datetime | None:
        """The least advanced operator's watermark; None before every partition has spoken."""
        low_us = min(self.watermarks.values(), default=NO_WATERMARK)
        return None if low_us <= NO_WATERMARK else _EPOCH + timedelta(microseconds=low_us)

    def ledger_entries(self) -> list[dict[str, Any]]:
        """Give the ledger lines: what each step read, by which exit it left, what it made; notes."""
        at = {step: number for number, step in enumerate(self.steps)}
        return [
            {"step": step, **{name: line[name] for name in (*LEDGER_COUNTS, *LEDGER_NOTES)}}
            for step, line in sorted(
                self.step_counts.items(), key=lambda item: at.get(item[0], len(at))
            )
        ]

    def check_balance(self, plan: JobPlan, before: Position) -> None:
        """Make sure that no event was lost on its way since ``before``: see `ledger.py`.

        Raises:
            CorruptionError: the ledger does not balance; the batch must not be committed.
        """
        check_exits(self.step_counts)
        check_ranges(plan, self.ranges, before)
        check_edges(plan, self.ranges, self.step_counts)
        # What goes to a native step is taken over by Spark, which has no ledger of ours.
        natives = {str(native.port) for native in plan.natives}
        check_ports({port: n for port, n in self.sent.items() if port not in natives}, self.arrived)


def collect_results(plan: JobPlan, rows: Iterable[FrameRow]) -> BatchResult:
    """Put the rows of a batch's last edge together.

    Raises:
        BadRecordError: a record is dead, and its topic is to stop the job then.
    """
    outcome = BatchResult(plan.steps)
    sinks = {sink.port: sink for sink in plan.sinks}
    frames: dict[int, list[pl.DataFrame]] = {}
    for row in rows:
        if row.port == PORT_LEDGER:
            _add_report(outcome, decode_message(row.frame))
        elif row.port != PORT_TIME:
            table = decode_frame(row.frame)
            frames.setdefault(row.port, []).append(table)
            outcome.arrived[str(row.port)] += table.height
    for port, tables in sorted(frames.items()):
        table = pl.concat(tables, how="diagonal")
        if port == PORT_DEAD_LETTERS:
            _stop_on_bad_records(plan, table)
            outcome.dead_letters = table
            continue
        # Of rows that replace one another the last in the log shall stay.
        outcome.rows[sinks[port].name] = in_log_order(table)
    for source in plan.sources:
        reached = outcome.position.setdefault(source.topic, {})
        for partition, read in outcome.ranges.get(source.name, {}).items():
            reached[partition] = max(end for _, end, _ in read)
    outcome.position = {topic: ends for topic, ends in outcome.position.items() if ends}
    return outcome


def _stop_on_bad_records(plan: JobPlan, dead: pl.DataFrame) -> None:
    """Raise for the first dead record of a topic that was declared with ``bad="stop"``."""
    stopping = [source.name for source in plan.sources if source.bad == "stop"]
    found = dead.filter(pl.col("step").is_in(stopping)).sort("topic", "partition", "offset")
    if found.height:
        first = found.row(0, named=True)
        seen = repr((first["value"] or b"")[:_VALUE_SHOWN_BYTES])
        raise BadRecordError(
            f"Record {first['topic']}/{first['partition']}/{first['offset']} cannot be decoded: "
            f"{first['reason']}. Its value begins with {seen}. Nothing of this batch was committed. "
            'Mend the schema of the topic, or declare it with bad="dead-letter" or "skip", and '
            "run again.",
            topic=first["topic"],
            partition=first["partition"],
            offset=first["offset"],
            reason=first["reason"],
        )


def _add_report(outcome: BatchResult, report: Mapping[str, Any]) -> None:
    for step, counts in report["steps"].items():
        outcome.step_counts.setdefault(step, Counter()).update(counts)
    outcome.sent.update(report.get("sent", {}))
    outcome.arrived.update(report.get("arrived", {}))
    for source, partitions in report.get("ranges", {}).items():
        ranges = outcome.ranges.setdefault(source, {})
        for partition, read in partitions.items():
            ranges.setdefault(partition, []).extend((start, end, n) for start, end, n in read)
    for topic, numbers in report.get("arrived_ms", {}).items():
        known = outcome.arrived_ms.setdefault(topic, {})
        for partition, number in numbers.items():
            known[partition] = max(known.get(partition, 0), number)
    for operator, watermark_us in report.get("watermarks", {}).items():
        low_us = min(outcome.watermarks.get(operator, watermark_us), watermark_us)
        outcome.watermarks[operator] = low_us
    for operator, facts in report.get("metrics", {}).items():
        known_facts = outcome.gauges.setdefault(operator, {})
        for name, value in facts.items():
            known_facts[name] = max(known_facts.get(name, value), value)
    outcome.state_bytes += report.get("state_bytes", 0)
    outcome.clocks.update(report.get("clocks", {}))
    for step, late_by_us in report.get("late_by_us", {}).items():
        outcome.late_by_us[step] = max(outcome.late_by_us.get(step, 0), late_by_us)
    outcome.forgotten_producers.update(report.get("forgotten", {}))  # every bucket says the same


def view_schemas(plan: JobPlan) -> list[ViewSchema]:
    """Give the schemas of the views that the state store keeps: the plan's, and that of dead records."""
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
    """The targets of a job, from the start of a run to its end: see `views/sink.py` for the order.

    Begin a run, then commit batch after batch. The state store and the other targets are the caller's to
    close.
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
            partitioning: The numbers by which the work is divided, for the next run.
            same_expressions: See :func:`millstream.views.state_store.program.check_same_program`.

        Raises:
            ConfigError: a target or the state store does not hold what the other says that it holds, a view
                is declared differently from what is there, or the state is another program's.
            FencedError: a newer run has begun meanwhile.
        """
        app = self.plan.app
        program = StoredProgram.of(self.plan, partitioning or {})
        at = self._now().isoformat(timespec="seconds")
        beginning = RunProgram(
            program, initial_coverage(self.plan), at, same_expressions=same_expressions
        )
        # Nothing is declared for a program that is refused.
        self.state_store.check_program(app, job, beginning)
        for schema in view_schemas(self.plan):
            self.state_store.declare(schema)
        self.run, next_batch_id = self.state_store.begin_run(app, job, checkpoint_id)
        self._job = job
        fed = {
            where: one.spans
            for where, one in self.state_store.next_coverage(app, job, beginning).items()
        }
        start = RunStart(app, job, self.run, checkpoint_id, fed)
        noted = KnownSinks(self.state_store.sinks(self.plan.app, job), next_batch_id)
        for target in self.sinks:
            last = target.begin_run(start)
            if target.has_fence:
                noted.check(target, last, start)
            if last == next_batch_id:
                self.state_store.check_interrupted_batch(start, beginning, target.name)
        # Last, so that what was begun by another program and not committed is refused until it is.
        self.state_store.register_program(start, beginning)
        self.state_store.put_description(app, "graph", pipeline_graph(self.plan))
        return next_batch_id

    def is_next(self, batch_id: int) -> bool:
        """Say whether this batch is the next to be committed; False when it is in already.

        Raises:
            FencedError: a newer run of the app has taken over.
            CorruptionError: the batch does not follow the last committed one.
        """
        return self.state_store.is_next(self._fence(batch_id))

    def check_not_fenced(self) -> None:
        """Make sure that no newer run has taken over. One that has may have swept files of this one.

        Raises:
            FencedError: one has; whatever else fails in this run may fail by that.
        """
        last = self.state_store.last_batch_id(self.plan.app, self._job)
        self.state_store.is_next(self._fence(0 if last is None else last + 1))

    def commit(
        self,
        batch_id: int,
        outcome: BatchResult,
        status: Mapping[str, Any],
        state: Mapping[tuple[int, int], bytes] | None = None,
    ) -> bool:
        """Commit a batch everywhere. False when it was committed before; then nothing changes.

        ``state`` holds the manifests of state that it moved on, by stage and bucket.

        Raises:
            CorruptionError: the books do not balance; nothing was committed.
            FencedError: a newer run of the app has taken over.
            UserCodeError: a function of the user's failed. The batch is not done.
        """
        fence = self._fence(batch_id)
        # Only a run that is not stale may reach targets that cannot refuse it themselves.
        if not self.state_store.is_next(fence):
            return False
        outcome.check_balance(self.plan, self.position)
        part = SinkBatch(outcome.rows, outcome.position)
        taking = [target for target in self.sinks if target.participates(part)]
        for target in taking:
            target.commit(fence, part)
        committed = self.state_store.commit(
            fence,
            self._view_changes(outcome),
            position=outcome.position,
            ledger=[{"batch_id": batch_id, **line} for line in outcome.ledger_entries()],
            status=status,
            targets={target.identity: target.name for target in taking if target.has_fence},
            state=state,
        )
        self._position = merge_positions(self.position, outcome.position)
        return committed

    @property
    def position(self) -> Position:
        """What of the log the committed batches reflect."""
        if self._position is None:
            self._position = self.state_store.position(self.plan.app)
        return self._position

    def _fence(self, batch_id: int) -> Fence:
        return Fence(self.plan.app, self._job, self.run, batch_id)

    def _view_changes(self, outcome: BatchResult) -> list[ViewChange]:
        changes = [
            view_change(sink, outcome.rows[sink.name])
            for sink in self.plan.sinks
            if _in_state_store(sink) and sink.name in outcome.rows
        ]
        if outcome.dead_letters is not None:
            changes.insert(0, ViewChange(DEAD_LETTERS_VIEW, outcome.dead_letters))
        return changes


class KnownSinks:
    """What the state store has noted of the other targets: identity, name and last batch of each."""

    def __init__(self, targets: Sequence[tuple[str, str, int]], next_batch_id: int) -> None:
        self._by_identity = {identity: last for identity, _, last in targets}
        self._names = {name: identity for identity, name, _ in targets}
        self._next = next_batch_id

    def check(self, target: Sink, last: int | None, start: RunStart) -> None:
        """Make sure that a target holds what is noted, or the one batch more that comes next.

        Raises:
            ConfigError: it was replaced, or it or the state store was restored from another time.
        """
        noted = self._by_identity.get(target.identity)
        if last in (noted, self._next) and not (noted is None and target.name in self._names):
            return
        if noted is None and target.name in self._names:
            was = self._by_identity[self._names[target.name]]
            what = f"is not the one that held batches up to {was}: it was deleted or replaced"
        elif last is None or (noted is not None and last < noted):
            held = "no batch" if last is None else f"batches up to {last}"
            what = (
                f"holds {held}, and up to {noted} were committed: it is older than the app's views"
            )
        else:
            what = f"holds batches up to {last}, which the app's views do not know: they are older"
        raise ConfigError(
            f"{target.name}, which {start.job_label} writes to, {what}. Restore both from the same time, "
            f"or give the app another name, and its outputs other places. {start.reset_advice}."
        )
