"""Replays an app's plan over its log, in memory and record by record, to see what becomes of one record.

The same sources and stages run as in a job, and results do not depend on how records are divided into batches. So a
record can have a batch of its own. It is run twice from the same state: once with the record, and once with a record
that moves the clocks as it does and goes no further. What differs between the two, in the ledger and in what comes out,
is what the record did. This says nothing of any kind of step, and so holds for all of them.

Nothing is written. What a job decided by running time (which partitions were idle) is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.engine.first_offsets import FirstOffsets, load_first_offsets
from millstream.engine.source.split_reader import SplitReader
from millstream.errors import ConfigError, TopicRecreatedError
from millstream.kernels.enrichment.operator import Enrichment
from millstream.kernels.errors.user_code import UserCode
from millstream.kernels.frames import ORDER, PORT_LEDGER, FrameRow, decode_message
from millstream.kernels.ingest import Ingest, RecordCount, SplitInput
from millstream.kernels.joins.lookup import Lookup
from millstream.kernels.plan import JobPlan, SinkPlan, SourcePlan, StepEdge
from millstream.kernels.stage import run_stage
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.memory_bucket import MemoryBucketState
from millstream.kernels.steps import ColumnNames, StepResult
from millstream.kernels.time.log_order import log_order_of
from millstream.kernels.time.split_clocks import PartitionPunctuation
from millstream.kernels.time.watermarks import SourceTime
from millstream.ops.plan import edited_parts
from millstream.pipeline.compiler import compile_plan
from millstream.views.commit.committer import BatchResult, collect_results
from millstream.views.position import TOPIC_IDS
from millstream.views.retractions import view_change
from millstream.views.schema import JOB
from millstream.views.state_store.program import buckets_of_state
from millstream.views.state_store.store import StateStore

if TYPE_CHECKING:
    from millstream.pipeline.app import App

ROWS_PER_BATCH = 100_000
_DETAILS = ("offset", "key", "headers", "value")
_GATE = "\0gate"  # the name of no step
_CLOSING_US = 31 * 86_400_000_000  # how far event time is moved on, to see what a record leads to

Positions = Mapping[str, Sequence[int]]  # topic → the next offset of each partition


@dataclass(frozen=True)
class _Gate:
    """Lets pass the rows of some records, or of all others."""

    orders: pl.Series
    all_others: bool
    name: str = _GATE

    def apply(self, table: pl.DataFrame) -> StepResult:
        chosen = table[ORDER].is_in(self.orders.implode())
        passed = table.filter(~chosen if self.all_others else chosen)
        return StepResult(passed, passed.height)

    def columns_before(self, wanted: ColumnNames) -> ColumnNames:
        return wanted


@dataclass(frozen=True)
class PlanOverLog:
    """The plan of an app that has run, and the topics of its log as it reads them."""

    plan: JobPlan
    reader: Reader
    first: FirstOffsets = field(default_factory=dict)
    """Where the app began to read topics, if not at their first record."""
    edited: tuple[str, ...] = ()
    """The parts of the app that are not as they ran: what is said of them is of the app as it is declared now."""

    @classmethod
    def of(cls, app: App, store: StateStore, view: str | None = None) -> PlanOverLog:
        """Return the plan, with the hash seed of the app's state; with ``view``, of what leads to that alone.

        Raises:
            ConfigError: the app has not run, has no such view, or has steps whose results cannot be computed again here.
            TopicRecreatedError: a topic was deleted and created again since the app read it.
        """
        stored = store.program(app.name, JOB)
        if stored is None:
            raise ConfigError(
                f"{app.name} has not run yet. Run it (millstream run), and ask again."
            )
        buckets = Buckets(1, buckets_of_state(stored).seed)
        outputs = [output for output in app.outputs if view in (None, output.name)]
        if not outputs:
            raise ConfigError(f"{app.name} as it is declared now does not write the view {view!r}.")
        plan = compile_plan(app.name, outputs, buckets, app.on_error, stored.topics)
        asked = [
            operator.kernel.name
            for stage in plan.stages
            for operator in stage.operators
            if isinstance(operator.kernel, Enrichment)
        ]
        for name in [*plan.spark_steps, *asked]:
            raise ConfigError(
                f"{name!r} gets its rows from Spark or from a service, which may give others now. So what became of a "
                f"record of {app.name} cannot be computed again. The ledger (millstream ledger {app.name}) has the "
                "counts of each step."
            )
        ids = _topic_ids(app.name, plan, store, reader := open_reader(app.log))
        now = plan.program.given
        tables = (name for name in now if stored.given.get(name, now[name]) != now[name])
        edited = (*edited_parts(app, store), *(f"the rows of {name}" for name in sorted(tables)))
        return cls(plan, reader.pinned(ids), load_first_offsets(store, app.name), edited)

    @cached_property
    def starts(self) -> dict[str, list[int]]:
        """Where the log begins, or the app began to read it, by topic and partition."""
        return {
            topic: [
                max(start, self.began(topic, number))
                for number, (start, _) in enumerate(self.reader.offsets(topic))
            ]
            for topic in sorted({source.topic for source in self.plan.sources})
        }

    def began(self, topic: str, partition: int) -> int:
        """Return the offset at which the app began to read a partition; 0 for its first record."""
        first = self.first.get(topic, ())
        return first[partition] if partition < len(first) else 0

    @cached_property
    def gone(self) -> int:
        """How many records the log no longer holds of those that the app has read."""
        return sum(
            start - self.began(topic, number)
            for topic, starts in self.starts.items()
            for number, start in enumerate(starts)
        )

    def said_of_edits(self) -> list[str]:
        """Say which parts of the app are not as they ran."""
        if not self.edited:
            return []
        names = ", ".join(self.edited)
        said = f"Edited since {self.plan.app} ran: {names}. This is what the app does as it is declared now, which "
        return [f"{said}is not what ran (millstream plan)."]

    def said_of_lookups(self) -> list[str]:
        """Say of which steps the batches of the job mattered, which are not repeated."""
        operators = (one.kernel for stage in self.plan.stages for one in stage.operators)
        return [
            f"{kernel.name} takes what its table has when a row arrives, so its rows depend on the batches of the job: "
            "here it may find another version. join_asof depends on the records alone."
            for kernel in operators
            if isinstance(kernel, Lookup)
        ]

    def position(self, known: Mapping[str, Mapping[str, int]]) -> dict[str, list[int]]:
        """Return a position of the app's for every partition: at least where the log begins."""
        return {
            topic: [
                max(start, int(known.get(topic, {}).get(str(number), start)))
                for number, start in enumerate(starts)
            ]
            for topic, starts in self.starts.items()
        }

    def order(self, topic: str, partition: int, offset: int) -> int:
        """Return the place of a record in the order of the log."""
        number = next(one.topic_number for one in self.plan.sources if one.topic == topic)
        return log_order_of(number, partition, offset)


@dataclass
class RecordReplay:
    """A replay of a plan, at a position of the log. ``until`` is where it will end."""

    over: PlanOverLog
    until: Positions
    position: dict[str, list[int]]
    states: dict[tuple[int, int], MemoryBucketState] = field(default_factory=dict)
    latest_us: int | None = None  # the latest event time so far

    @classmethod
    def begin(cls, over: PlanOverLog, until: Positions) -> RecordReplay:
        """Begin where the log begins."""
        return cls(over, until, {topic: list(starts) for topic, starts in over.starts.items()})

    def copy(self) -> RecordReplay:
        """Return an independent copy."""
        return replace(
            self,
            position={topic: list(at) for topic, at in self.position.items()},
            states={place: state.copy() for place, state in self.states.items()},
        )

    def advance(self, ends: Positions, gate: Iterable[int] | None = None) -> Iterator[BatchResult]:
        """Read up to some offsets, in batches; yield the result of each.

        ``gate`` are the places of records whose rows pass; None: all. The others only move the clocks.
        """
        while any(
            at < end
            for topic in ends
            for at, end in zip(self.position[topic], ends[topic], strict=True)
        ):
            left = ROWS_PER_BATCH
            goals: dict[str, list[int]] = {}
            for topic, offsets in ends.items():
                goals[topic] = []
                for at, end in zip(self.position[topic], offsets, strict=True):
                    goals[topic].append(min(max(at, end), at + left))
                    left -= goals[topic][-1] - at
            yield self.process(self.read(goals, gate))

    def read(
        self, ends: Positions, gate: Iterable[int] | None = None, *, all_others: bool = False
    ) -> list[FrameRow]:
        """Read up to some offsets; return the frames of the sources. See :meth:`advance`.

        With ``all_others`` the records of ``gate`` are those that do not pass.
        """
        start = self.position
        self.position = {topic: list(ends.get(topic, start[topic])) for topic in start}
        rows: list[FrameRow] = []
        for source in self.over.plan.sources:
            gated = source if gate is None else _gated(source, gate, all_others=all_others)
            splits = [
                self._split(source, number, at, end)
                for number, (at, end) in enumerate(
                    zip(start[source.topic], self.position[source.topic], strict=True)
                )
                if at < end
            ]
            rows += Ingest(gated, self.over.plan.buckets).run(splits, self._planned(source))
        return rows

    def close_windows(self) -> BatchResult:
        """Move event time on in all partitions, so that what is held comes out."""
        until_us = (self.latest_us or 0) + _CLOSING_US
        rows: list[FrameRow] = []
        for source in self.over.plan.sources:
            splits = [
                SplitInput(number, 0, at, at, [PartitionPunctuation(until_us)])
                for number, at in enumerate(self.position[source.topic])
            ]
            rows += Ingest(source, self.over.plan.buckets).run(splits, self._planned(source))
        return self.process(rows)

    def process(self, rows: list[FrameRow]) -> BatchResult:
        """Run frames of the sources through the stages."""
        plan = self.over.plan
        for depth, stage in enumerate(plan.stages):
            state = self.states.setdefault((depth, 0), MemoryBucketState())
            rows = list(run_stage(stage, 0, plan.buckets, rows, state))
        for row in rows:
            if row.port == PORT_LEDGER:
                self._note_times(decode_message(row.frame).get("event_times", {}))
        result = collect_results(plan, rows)
        result.step_counts.pop(_GATE, None)
        return result

    def _note_times(self, times: Mapping[str, Mapping[str, int]]) -> None:
        known = [] if self.latest_us is None else [self.latest_us]
        found = [at_us for partitions in times.values() for at_us in partitions.values()]
        self.latest_us = max([*known, *found], default=None)

    def _split(self, source: SourcePlan, partition: int, start: int, end: int) -> SplitInput:
        tally = RecordCount()
        reader = SplitReader(self.over.reader, source)
        details = partial(self.over.reader.read, source.topic, partition, columns=_DETAILS)
        batches = reader.read(partition, start, end, tally)
        arrived_ms = self._arrived_ms(source, partition, start)
        return SplitInput(partition, 0, start, end, batches, arrived_ms, details, tally)

    def _arrived_ms(self, source: SourcePlan, partition: int, end: int) -> int:
        """Return the latest arrival before a split, where the event time is the time of arrival."""
        if source.rule.settle_us is None:
            return 0
        begin = self.over.starts[source.topic][partition]
        read = self.over.reader.read(source.topic, partition, begin, end, columns=("timestamp",))
        stamps = (batch.column(0).cast(pa.int64()).to_numpy().max() for batch in read)
        return int(max(stamps, default=0))

    def _planned(self, source: SourcePlan) -> SourceTime:
        at, until = self.position[source.topic], self.until[source.topic]
        behind = frozenset(n for n, end in enumerate(until) if at[n] < end)
        return SourceTime((), len(at), frozenset(), 0, behind)


def _topic_ids(app: str, plan: JobPlan, store: StateStore, reader: Reader) -> dict[str, str]:
    """Return the ids of the topics that a plan reads, which are those that the app has read."""
    known = store.description(app, TOPIC_IDS) or {}
    found = {topic: reader.topic_id(topic) for topic in {one.topic for one in plan.sources}}
    for topic in sorted(found):
        if known.get(topic, found[topic]) != found[topic]:
            raise TopicRecreatedError(
                f"The topic {topic!r} was deleted and created again since {app} read it, so its records are others. "
                f"What {app} made of the old ones cannot be computed again. To start over: millstream reset {app}."
            )
    return found


def _gated(source: SourcePlan, orders: Iterable[int], *, all_others: bool) -> SourcePlan:
    """Return a source of which only some records go further."""
    gate = _Gate(pl.Series(list(orders), dtype=pl.Int64), all_others)
    return replace(source, edges=(StepEdge(gate, (), UserCode(_GATE), source.edges),))


def output_rows(plan: JobPlan, result: BatchResult, output: str) -> list[dict[str, Any]]:
    """Return the rows that a batch gives to an output: those of a view that it sets."""
    if output not in result.rows:
        return []
    return view_change(_sink(plan, output), result.rows[output]).upserts.to_dicts()


def deleted_keys(plan: JobPlan, result: BatchResult, output: str) -> list[dict[str, Any]]:
    """Return the keys of the rows that a batch deletes from an output; none of one without a key."""
    sink = _sink(plan, output)
    if output not in result.rows or not sink.key:
        return []
    deletes = view_change(sink, result.rows[output]).deletes
    return [] if deletes is None else deletes.to_dicts()


def _sink(plan: JobPlan, output: str) -> SinkPlan:
    return next(sink for sink in plan.sinks if sink.name == output)
