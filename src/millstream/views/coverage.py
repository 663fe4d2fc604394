"""Coverage: the spans of the log that each output reflects, and the gaps between them.

An output is written while the app declares it. An output that is declared later, is left out of a run, or
is declared differently, lacks rows or has rows of two programs. The state store keeps the spans in which
each output was written, and updates them once a run has begun in all sinks. Readers of an incomplete
output get a warning.

Rows written after a span begins are complete, even if they count earlier events: operators keep their
state whether or not an output shows it. Rows that were due before the span and have not changed since
are missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from millstream.kernels.definition import canonical_text
from millstream.kernels.plan import DatasetSinkSpec, JobPlan, SinkPlan, TopicSinkSpec, ViewSinkSpec
from millstream.views.address import postgres_address

STATE_STORE_VIEW = "view"
FUNCTION = "function"


class PartialOutputWarning(UserWarning):
    """An output was not written all the time, or by more than one declaration: the text says when."""


@dataclass(frozen=True)
class BatchBoundary:
    """A point between two batches: before ``batch_id``, at a position of the log and a time (RFC 3339)."""

    batch_id: int
    position: Mapping[str, Any]
    at: str


@dataclass(frozen=True)
class CoverageSpan:
    """A span in which an output was written, by one declaration: half-open, ``[since, until)``.

    ``since`` is None for the beginning of the log; ``until`` is None while the span goes on. ``compacted`` are topics
    of which compaction may have removed records before the span was computed of them. ``first_offsets`` are, of an output
    that is a topic, where its records begin that are of this span, by partition: those below are of spans before.
    """

    since: BatchBoundary | None = None
    until: BatchBoundary | None = None
    compacted: tuple[str, ...] = ()
    first_offsets: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CoverageSpan:
        """Return the object of values made by ``asdict``."""
        since, until = (
            None if values[name] is None else BatchBoundary(**values[name])
            for name in ("since", "until")
        )
        tuples = (tuple(values.get(name, ())) for name in ("compacted", "first_offsets"))
        return cls(since, until, *tuples)


OutputSink = tuple[str, str]  # an output's name, and the label of its sink: see sink_label


@dataclass(frozen=True)
class OutputCoverage:
    """An output as the state store keeps it: what its rows mean, and its spans."""

    definition: str
    spans: tuple[CoverageSpan, ...] = (CoverageSpan(),)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OutputCoverage:
        """Return the object of values made by ``asdict``."""
        spans = tuple(CoverageSpan.from_json(span) for span in values["spans"])
        return cls(values["definition"], spans)

    def paused(self, now: BatchBoundary) -> OutputCoverage:
        """Return the coverage as of a run without the output.

        If no batch was committed in the last span, the span stays if it directly follows the one before:
        that one has another declaration, and must not go on when this one comes back. After a gap the
        span is removed, as the output reflects nothing of it.
        """
        *before, last = self.spans
        if last.until is not None:
            return self
        spans = (*before, replace(last, until=now))
        if not (before and _is_adjacent(before[-1], last)):
            spans = _without_empty(spans)
        return replace(self, spans=spans)

    def resumed(self, now: BatchBoundary) -> OutputCoverage:
        """Return the coverage as of a run with the output: if no batch was missed, its last span goes on."""
        *before, last = self.spans
        if last.until is None:
            return self
        if last.until.batch_id == now.batch_id:
            return replace(self, spans=(*before, replace(last, until=None)))
        return replace(self, spans=_without_empty((*self.spans, CoverageSpan(now))))

    def begun_at(self, now: BatchBoundary, offsets: Sequence[int]) -> OutputCoverage:
        """Return the coverage with the offsets of a topic at which its last span begins, if that is ``now``."""
        *before, last = self.spans
        begins = last.since is not None and last.since.batch_id == now.batch_id
        if not begins or last.until is not None or last.first_offsets:
            return self
        return replace(self, spans=(*before, replace(last, first_offsets=tuple(offsets))))


def _is_adjacent(before: CoverageSpan, after: CoverageSpan) -> bool:
    assert before.until is not None, "only the last span goes on"
    return after.since is not None and after.since.batch_id == before.until.batch_id


def _without_empty(spans: Sequence[CoverageSpan]) -> tuple[CoverageSpan, ...]:
    """Leave out spans in which no batch was committed, unless there is no other."""
    kept = [
        span
        for span in spans
        if span.until is None
        or span.until.batch_id != (0 if span.since is None else span.since.batch_id)
    ]
    return tuple(kept or spans[-1:])


def initial_coverage(plan: JobPlan) -> dict[OutputSink, OutputCoverage]:
    """Return the coverage of a plan's outputs that are written from the beginning."""
    definitions = plan.program.outputs
    return {
        (sink.name, sink_label(sink)): OutputCoverage(canonical_text(definitions.get(sink.name)))
        for sink in plan.sinks
    }


def sink_label(sink: SinkPlan) -> str:
    """Return a text for the sink of an output, without credentials."""
    spec = sink.spec
    if isinstance(spec, ViewSinkSpec):
        return (
            STATE_STORE_VIEW
            if spec.store is None
            else database_view_label(postgres_address(spec.store).shown)
        )
    if isinstance(spec, TopicSinkSpec):
        return topic_label(spec.topic)
    return f"dataset {spec.path}" if isinstance(spec, DatasetSinkSpec) else FUNCTION


def topic_label(topic: str) -> str:
    """Return the label of an output that is a topic."""
    return f"topic {topic}"


def database_view_label(store: str) -> str:
    """Return the label of a view in a database, whose address is shown as ``store``."""
    return f"view in {store}"


def next_coverage(
    known: Mapping[OutputSink, OutputCoverage],
    declared: Mapping[OutputSink, OutputCoverage],
    now: BatchBoundary,
    same: Callable[[str, str], bool],
) -> dict[OutputSink, OutputCoverage]:
    """Return the coverage of all outputs as of a run that begins ``now`` with the declared ones.

    ``same`` compares a stored definition with the declared one.
    """
    if now.batch_id == 0:  # nothing was committed, so nothing is missing anywhere
        return dict(declared)
    after = {output: one.paused(now) for output, one in known.items() if output not in declared}
    for output, one in declared.items():
        before = known.get(output)
        if before is None:
            after[output] = replace(one, spans=(CoverageSpan(now),))
        elif same(before.definition, one.definition):
            after[output] = replace(before.resumed(now), definition=one.definition)
        else:
            spans = (*before.paused(now).spans, CoverageSpan(now))
            after[output] = replace(one, spans=_without_empty(spans))
    return after


def spans_to_json(spans: Sequence[CoverageSpan]) -> list[dict[str, Any]]:
    """Return spans as JSON values."""
    return [asdict(span) for span in spans]


def is_complete(spans: Sequence[CoverageSpan]) -> bool:
    """Return whether an output has been written from the beginning, without a gap, by one declaration."""
    return list(spans) == [CoverageSpan()]


def last_covered(spans: Sequence[CoverageSpan]) -> tuple[int | None, dict[str, Any]] | None:
    """Return the last batch and the position that an output reflects; None while it is written."""
    if not spans or spans[-1].until is None:
        return None
    until = spans[-1].until
    return until.batch_id - 1 if until.batch_id else None, dict(until.position)


def warn_if_partial(what: str, spans: Sequence[CoverageSpan]) -> None:
    """Warn the caller that opens an output if it is incomplete."""
    note = partial_note(spans)
    if note is not None:
        warnings.warn(f"{what} {note}.", PartialOutputWarning, stacklevel=3)


def partial_note(spans: Sequence[CoverageSpan]) -> str | None:
    """Return a text that says what an output lacks; None if nothing."""
    if not spans or is_complete(spans):
        return None
    notes = []
    if spans[0].since is not None:
        notes.append(
            f"is written since {format_boundary(spans[0].since)}; what came out before is missing"
        )
    for before, after in pairwise(spans):
        assert before.until is not None
        assert after.since is not None
        if _is_adjacent(before, after):
            notes.append(
                f"was declared differently before {format_boundary(after.since)}{_first_offsets(after)}"
            )
        else:
            notes.append(
                f"was not written from {format_boundary(before.until)} to "
                f"{format_boundary(after.since)}; what came out or was taken back then is missing"
            )
    compacted = sorted({topic for span in spans for topic in span.compacted})
    if compacted:
        notes.append(
            f"was computed of what compaction had left in {', '.join(map(repr, compacted))}; what follows from other "
            "records is missing"
        )
    if spans[-1].until is not None:
        notes.append(
            f"is no longer written since {format_boundary(spans[-1].until)}, when the app left it out"
        )
    return "; it ".join(notes)


def _first_offsets(span: CoverageSpan) -> str:
    if not span.first_offsets:
        return ""
    shown = ", ".join(
        f"{partition}/{offset}" for partition, offset in enumerate(span.first_offsets)
    )
    return f", and has the records of that declaration from the offsets {shown} on"


def format_boundary(boundary: BatchBoundary) -> str:
    """Return a text that says where a boundary is: its time, batch, and position of the log."""
    read = [
        f"{topic}/{partition} {offset}"
        for topic, offsets in boundary.position.items()
        for partition, offset in offsets.items()
    ]
    return f"{boundary.at} (batch {boundary.batch_id}; read up to {', '.join(read) or 'nothing'})"
