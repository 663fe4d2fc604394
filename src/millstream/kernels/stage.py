"""One batch of one bucket in a stage: frames in, frames out, state updated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import polars as pl

from millstream.errors import ConfigError, CorruptionError
from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.frames import (
    PORT_DEAD_LETTERS,
    PORT_TIME,
    SPLIT,
    FrameRow,
    decode_frame,
    decode_message,
    encode_message,
)
from millstream.kernels.operator import BatchContext, OperatorResult
from millstream.kernels.plan import OperatorPlan, PlanEdge, StagePlan
from millstream.kernels.routing import SIDE_OUTPUT, TaskLedger, make_routers
from millstream.kernels.state.journal import Journal
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import RunStore
from millstream.kernels.time.watermarks import NO_WATERMARK, InputClock, SourceTime


class BucketState(Protocol):
    """The state of one stage in one bucket: a manifest, the runs that it names, and the batch's journals."""

    def manifest(self) -> bytes | None: ...
    def put_manifest(self, manifest: bytes) -> None: ...
    def runs(self, key: str) -> RunStore: ...
    def journal(self, key: str) -> Journal: ...


@dataclass
class OperatorBatch:
    """The input of one operator in one batch and bucket: frames by input, and messages."""

    frames: dict[int, list[pl.DataFrame]] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


def run_stage(
    stage: StagePlan,
    bucket: int,
    buckets: Buckets,
    rows: Iterable[FrameRow],
    state: BucketState,
) -> Iterator[FrameRow]:
    """Run one batch of one bucket through a stage; rows for later stages and sinks pass through."""
    ledger = TaskLedger()
    batches = {operator.port: OperatorBatch() for operator in stage.operators}
    inputs = {
        port: (batches[operator.port], number)
        for operator in stage.operators
        for number, port in enumerate(operator.ports)
    }
    for row in rows:
        if row.port == PORT_TIME:
            message = decode_message(row.frame)
            if message["to"] in batches:
                batches[message["to"]].messages.append(message)
                ledger.arrived[f"time of {message['to']}"] += 1
                continue
        elif row.port in inputs:
            batch, number = inputs[row.port]
            table = decode_frame(row.frame)
            batch.frames.setdefault(number, []).append(table)
            ledger.arrived[str(row.port)] += table.height
            continue
        yield row
    stored = state.manifest()
    manifest: dict[str, Any] = json.loads(stored) if stored else {}
    _require_same_operators(manifest, stage)
    for operator in stage.operators:
        runs, journal = state.runs(operator.key), state.journal(operator.key)
        run = OperatorRun(operator, bucket, buckets, runs, journal, ledger, stage.topics)
        frames, updated = run(batches[operator.port], manifest.get(operator.key))
        manifest[operator.key] = updated
        yield from frames
    state.put_manifest(json.dumps(manifest, separators=(",", ":")).encode())
    yield ledger.report_row(bucket)


def in_stream_order(frames: Mapping[int, list[pl.DataFrame]]) -> dict[int, list[pl.DataFrame]]:
    """Sort the frames of streams by stream, whichever task finished first.

    Rows that several streams of a topic made of one record have the same log order, and keep theirs.
    """

    def split(rows: pl.DataFrame) -> int:
        return int(rows[SPLIT][0]) if rows.height and SPLIT in rows.columns else -1

    return {number: sorted(tables, key=split) for number, tables in frames.items()}


def _require_same_operators(manifest: Mapping[str, Any], stage: StagePlan) -> None:
    """Make sure that a manifest has exactly the stage's operators: a missing one would start empty.

    Raises:
        ConfigError: it has others.
    """
    own = {operator.key: operator.kernel.name for operator in stage.operators}
    if manifest and manifest.keys() != own.keys():
        new = ", ".join(repr(name) for key, name in own.items() if key not in manifest)
        raise ConfigError(
            f"The state belongs to other steps: {new or 'some'} of this program's "
            f"{'is' if new else 'are'} not among them. Undo the change, or rebuild the state: with "
            "another checkpoint, or under another name of the app."
        )


@dataclass(frozen=True)
class OperatorRun:
    """Runs one operator over one batch of one bucket."""

    operator: OperatorPlan
    bucket: int
    buckets: Buckets
    store: RunStore
    journal: Journal
    ledger: TaskLedger
    topics: tuple[str, ...]

    def __call__(
        self, batch: OperatorBatch, stored: dict[str, Any] | None
    ) -> tuple[list[FrameRow], dict[str, Any]]:
        """Return the frames that go out, and the operator's part of the manifest."""
        kernel = self.operator.kernel
        state = OperatorState.from_message(self._check_hash_seed(stored), self.store, self.journal)
        clocks = self._clocks(stored)
        before_us = NO_WATERMARK if stored is None else stored["watermark"]
        split_watermarks_us, clock_ms, idle = self._advance(clocks, batch.messages, before_us)
        context = BatchContext(
            before_us,
            _watermark(clocks, before_us),
            split_watermarks_us,
            clock_ms,
            self.buckets.seed,
            self.bucket,
            self.buckets.count,
            max(map(_wall_ms, batch.messages), default=0),
        )
        if self.bucket == 0 and clocks:  # the same in all buckets, so one reports it
            self.ledger.clocks[kernel.name] = {
                name: {**clock.to_status(), "idle": sorted(idle.get(name, ()))}
                for name, clock in clocks.items()
            }
        frames_in = in_stream_order(batch.frames) if kernel.ordered else batch.frames
        with self.ledger.working(kernel.name):
            result = kernel.process(state, frames_in, context)
        self.ledger.count(kernel.name, **result.counts)
        if result.rows is not None:
            self.ledger.count(kernel.name, rows_out=result.rows.height)
        if result.late is not None:
            self.ledger.count(kernel.name, **{SIDE_OUTPUT: result.late.height})
        self.ledger.note_lateness(kernel.name, result.late_by_us)
        if result.gauges:
            self.ledger.gauges[kernel.name] = result.gauges
        if clocks:  # what follows no input holds nobody's watermark
            self.ledger.watermarks[kernel.name] = context.watermark_us
        self.ledger.state_bytes += state.size_bytes
        if state.families:
            self.ledger.state[kernel.name] = (state.size_bytes, state.rows)
        frames = [
            *self._emit(result.rows, self.operator.edges),
            *self._emit(result.late, self.operator.late_edges),
            *self._letters(result),
            *self._time_messages(context, clocks),
        ]
        message = state.to_message()
        message["watermark"] = context.watermark_us
        message["clocks"] = {
            plan.key: clocks[plan.name].to_message() for plan in self.operator.clocks
        }
        message["seed"] = context.seed
        return frames, message

    def _check_hash_seed(self, stored: dict[str, Any] | None) -> dict[str, Any] | None:
        """Make sure that the state was partitioned with the app's hash seed.

        Raises:
            CorruptionError: the state was partitioned with another seed than the app's.
        """
        if stored is None or stored["seed"] == self.buckets.seed:
            return stored
        raise CorruptionError(
            f"The state of {self.operator.kernel.name!r} was partitioned with another hash seed than "
            "the one stored for this app: one of the two was restored from elsewhere. Restore the one "
            "that belongs to the state, or restart from the log (millstream reset)."
        )

    def _clocks(self, stored: dict[str, Any] | None) -> dict[str, InputClock]:
        if stored is None:
            return {plan.name: InputClock.initial() for plan in self.operator.clocks}
        clocks = stored["clocks"]
        return {
            plan.name: InputClock.from_message(clocks[plan.key]) for plan in self.operator.clocks
        }

    def _advance(
        self, clocks: dict[str, InputClock], messages: list[dict[str, Any]], before_us: int
    ) -> tuple[dict[int, int], int, dict[str, frozenset[int]]]:
        """Advance the clocks by the messages of the batch.

        Return the watermark of each split before its first row, the running time, and which partitions are
        idle, by input.
        """
        split_watermarks_us: dict[int, int] = {}
        idle: dict[str, frozenset[int]] = {}
        clock_ms = 0
        for plan in self.operator.clocks:
            received = [message for message in messages if message["input"] == plan.name]
            if plan.rule is None:
                for message in received:
                    clocks[plan.name] = clocks[plan.name].advanced_to(
                        message["watermark"],
                        active=message["active"],
                        advances=message["advances"],
                    )
                    clock_ms = max(clock_ms, message["clock_ms"])
            elif received:
                assert plan.source is not None
                seen = SourceTime.merge(message["source"] for message in received)
                clock, splits = clocks[plan.name].advanced(seen, plan.rule, plan.source, before_us)
                clocks[plan.name] = clock
                split_watermarks_us |= splits
                if clock.forgotten:
                    self.ledger.forgotten[plan.name] = clock.forgotten
                clock_ms = max(clock_ms, seen.clock_ms)
                idle[plan.name] = seen.idle
        return split_watermarks_us, clock_ms, idle

    def _emit(
        self, emitted: pl.DataFrame | None, edges: tuple[PlanEdge, ...]
    ) -> Iterator[FrameRow]:
        if emitted is not None and emitted.height:
            dead_letters = DeadLetterCollector()
            for route in make_routers(edges, self.buckets, self.ledger, dead_letters):
                route.take(emitted)
                yield from route.frames(self.bucket)
            if dead := dead_letters.drain_rows(self.topics):
                yield from self.ledger.frames(PORT_DEAD_LETTERS, self.bucket, pl.concat(dead))

    def _letters(self, result: OperatorResult) -> Iterator[FrameRow]:
        """Yield the rows on which the operator itself failed, as dead letters."""
        if result.failed:
            letters = DeadLetterCollector([*result.failed]).drain_rows(self.topics)
            yield from self.ledger.frames(PORT_DEAD_LETTERS, self.bucket, pl.concat(letters))

    def _time_messages(
        self, context: BatchContext, clocks: Mapping[str, InputClock]
    ) -> Iterator[FrameRow]:
        for port in self.operator.time_ports:
            message = {
                "to": port,
                "input": self.operator.kernel.name,
                "watermark": self.operator.kernel.output_watermark(context.watermark_us),
                "active": any(clock.active for clock in clocks.values()),
                "advances": any(clock.advances for clock in clocks.values()),
                "clock_ms": context.clock_ms,
                "wall_ms": context.wall_ms,
            }
            yield self.ledger.time_message(port, self.bucket, encode_message(message))


def _watermark(clocks: Mapping[str, InputClock], before_us: int) -> int:
    """Return the minimum over the active inputs; if there are none, over those in idle advance.

    It never goes back, and holds if there are neither.
    """
    followed = [clock for clock in clocks.values() if clock.active]
    followed = followed or [clock for clock in clocks.values() if clock.advances]
    return max(before_us, min((clock.watermark_us for clock in followed), default=NO_WATERMARK))


def _wall_ms(message: Mapping[str, Any]) -> int:
    """Return the time of day that a message about time has, from a source or from another operator."""
    source = message.get("source")
    wall_ms: int = message["wall_ms"] if source is None else (source["wall_us"] or 0) // 1000
    return wall_ms
