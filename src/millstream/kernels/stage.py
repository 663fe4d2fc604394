"""An operator's part of a batch: the frames of one bucket in, its frames out, its state moved on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from millstream.kernels.frames import (
    LANE,
    PORT_TIME,
    FrameRow,
    decode_frame,
    decode_message,
    encode_message,
)
from millstream.kernels.plan import OperatorPlan, StagePlan
from millstream.kernels.routing import Books, routes, rows_in
from millstream.kernels.sorted_runs import RunStore, SortedRuns
from millstream.kernels.watermarks import UNSEEN, InputClock, SourceTime


class BucketState(Protocol):
    """The state of one stage in one bucket: a manifest, and the runs that it names."""

    def manifest(self) -> bytes | None: ...
    def put_manifest(self, manifest: bytes) -> None: ...
    def runs(self, port: int) -> RunStore: ...


@dataclass
class OperatorBatch:
    """What one operator takes in of one batch, in one bucket."""

    frames: list[pl.DataFrame]
    messages: list[dict[str, Any]]


def run_stage(
    stage: StagePlan,
    bucket: int,
    bucket_labels: tuple[int, ...],
    rows: Iterable[FrameRow],
    state: BucketState,
) -> Iterator[FrameRow]:
    """Run one batch of one bucket through a stage; rows for later stages and sinks pass through."""
    batches = {port: OperatorBatch([], []) for port in stage.ports}
    for row in rows:
        if row.port == PORT_TIME:
            message = decode_message(row.frame)
            if message["to"] in batches:
                batches[message["to"]].messages.append(message)
                continue
        elif row.port in batches:
            batches[row.port].frames.append(decode_frame(row.frame))
            continue
        yield row
    stored = state.manifest()
    manifest: dict[str, Any] = json.loads(stored) if stored else {}
    books = Books()
    for operator in stage.operators:
        run = OperatorRun(operator, bucket, bucket_labels, state.runs(operator.port), books)
        frames, moved_on = run(batches[operator.port], manifest.get(str(operator.port)))
        manifest[str(operator.port)] = moved_on
        yield from frames
    state.put_manifest(json.dumps(manifest, separators=(",", ":")).encode())
    yield books.frame_row(bucket)


@dataclass(frozen=True)
class OperatorRun:
    """Runs one operator over one batch of one bucket."""

    operator: OperatorPlan
    bucket: int
    bucket_labels: tuple[int, ...]
    store: RunStore
    books: Books

    def __call__(
        self, batch: OperatorBatch, stored: dict[str, Any] | None
    ) -> tuple[list[FrameRow], dict[str, Any]]:
        """Give the frames that go out, and the operator's part of the manifest."""
        kernel = self.operator.kernel
        runs = SortedRuns.from_message(stored["runs"] if stored else (), self.store)
        clocks = self._clocks(stored)
        before_us = _watermark(clocks)
        baselines = self._advance(clocks, batch.messages)
        after_us = _watermark(clocks)
        partials = self._in_time(batch.frames, baselines, before_us)
        emitted = kernel.process(runs, partials, after_us, before_us)
        self.books.watermarks[kernel.name] = after_us
        self.books.state_bytes += runs.size_bytes
        frames = [*self._emit(emitted), *self._tell_time(kernel.holds_back(after_us))]
        return frames, {
            "runs": runs.to_message(),
            "clocks": {name: clock.to_message() for name, clock in clocks.items()},
        }

    def _clocks(self, stored: dict[str, Any] | None) -> dict[str, InputClock]:
        if stored is None:
            return {plan.name: InputClock.fresh() for plan in self.operator.inputs}
        return {name: InputClock.from_message(m) for name, m in stored["clocks"].items()}

    def _advance(
        self, clocks: dict[str, InputClock], messages: list[dict[str, Any]]
    ) -> dict[int, int]:
        """Move the input clocks on by what the batch says; give the lanes' baselines."""
        baselines: dict[int, int] = {}
        for plan in self.operator.inputs:
            told = [message for message in messages if message["input"] == plan.name]
            if plan.rule is None:
                for message in told:
                    clocks[plan.name] = clocks[plan.name].advanced_to(message["watermark"])
            elif told:
                seen = SourceTime.merge(message["source"] for message in told)
                baselines |= clocks[plan.name].baselines(seen, plan.rule)
                clocks[plan.name] = clocks[plan.name].after(seen, plan.rule)
        return baselines

    def _in_time(
        self, frames: list[pl.DataFrame], baselines: dict[int, int], floor_us: int
    ) -> pl.DataFrame | None:
        """Put the frames together without what came too late, which is counted."""
        kernel = self.operator.kernel
        kept: list[pl.DataFrame] = []
        for partials in frames:
            late = kernel.late_rows(partials, baselines, floor_us)
            in_time = partials.filter(pl.Series(~late)) if late.any() else partials
            held = rows_in(in_time)
            self.books.count(kernel.name, held=held, late=rows_in(partials) - held)
            if LANE in in_time.columns:
                in_time.drop_in_place(LANE)
            if in_time.height:
                kept.append(in_time)
        return pl.concat(kept) if kept else None

    def _emit(self, emitted: pl.DataFrame | None) -> Iterator[FrameRow]:
        if emitted is not None:
            for route in routes(self.operator.edges, self.bucket_labels, self.books):
                route.take(emitted)
                yield from route.frames(self.bucket)

    def _tell_time(self, watermark_us: int) -> Iterator[FrameRow]:
        for port in self.operator.time_ports:
            message = {"to": port, "input": self.operator.kernel.name, "watermark": watermark_us}
            yield FrameRow(PORT_TIME, self.bucket, encode_message(message))


def _watermark(clocks: Mapping[str, InputClock]) -> int:
    return min((clock.watermark_us for clock in clocks.values()), default=UNSEEN)
