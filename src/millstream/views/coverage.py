"""Since when each output is fed, and where it has gaps.

An output gets what comes out of the pipeline while it is declared. One that is declared later, is left
out of a run, or is declared differently, therefore lacks rows or has rows of two programs. The state store
keeps of each output the spans in which it was fed, and moves them on once a run has begun in
all targets; who reads a view is told.

What comes out after a moment is whole, even where it was counted from earlier events: a state goes on
whether or not an output shows it. So a span says from where in the log on what came out is there. What
came out before that moment and has not changed since is missing.
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
    """What is read was not fed all the time, or by more than one declaration: the text says when."""


@dataclass(frozen=True)
class BatchBoundary:
    """A place between two batches: before ``batch_id``, at a position of the log and a time (RFC 3339)."""

    batch_id: int
    position: Mapping[str, Any]
    at: str


@dataclass(frozen=True)
class CoverageSpan:
    """A time in which an output was fed, by one declaration: half-open, ``[since, until)``.

    ``since`` is None from the beginning of the log on; ``until`` is None while it goes on.
    """

    since: BatchBoundary | None = None
    until: BatchBoundary | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CoverageSpan:
        """Read back what ``asdict`` gave."""
        ends = [
            None if values[n] is None else BatchBoundary(**values[n]) for n in ("since", "until")
        ]
        return cls(*ends)


OutputSink = tuple[str, str]  # an output's name, and where it ends


@dataclass(frozen=True)
class OutputCoverage:
    """An output as the state store knows it: what its rows mean, and when it was fed."""

    definition: str
    spans: tuple[CoverageSpan, ...] = (CoverageSpan(),)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OutputCoverage:
        """Read back what ``asdict`` gave."""
        spans = tuple(CoverageSpan.from_json(span) for span in values["spans"])
        return cls(values["definition"], spans)

    def paused(self, now: BatchBoundary) -> OutputCoverage:
        """Give it as of a run without it.

        A last span in which no batch was committed stays where it follows the one before at once: that is
        of another declaration, and must not go on when this one comes back. Behind a gap it goes, as the
        output reflects nothing of it.
        """
        *before, last = self.spans
        if last.until is not None:
            return self
        spans = (*before, replace(last, until=now))
        if not (before and _is_adjacent(before[-1], last)):
            spans = _without_empty(spans)
        return replace(self, spans=spans)

    def resumed(self, now: BatchBoundary) -> OutputCoverage:
        """Give it as of a run with it: where nothing was missed, its last span goes on."""
        *before, last = self.spans
        if last.until is None:
            return self
        if last.until.batch_id == now.batch_id:
            return replace(self, spans=(*before, replace(last, until=None)))
        return replace(self, spans=_without_empty((*self.spans, CoverageSpan(now))))


def _is_adjacent(before: CoverageSpan, after: CoverageSpan) -> bool:
    assert before.until is not None, "only the last span goes on"
    return after.since is not None and after.since.batch_id == before.until.batch_id


def _without_empty(spans: Sequence[CoverageSpan]) -> tuple[CoverageSpan, ...]:
    """Leave out spans in which no batch was committed, but for the only one."""
    kept = [
        span
        for span in spans
        if span.until is None
        or span.until.batch_id != (0 if span.since is None else span.since.batch_id)
    ]
    return tuple(kept or spans[-1:])


def initial_coverage(plan: JobPlan) -> dict[OutputSink, OutputCoverage]:
    """Give the outputs of a plan as if they had been there from the beginning."""
    meanings = plan.program.outputs
    return {
        (sink.name, sink_label(sink)): OutputCoverage(canonical_text(meanings.get(sink.name)))
        for sink in plan.sinks
    }


def sink_label(sink: SinkPlan) -> str:
    """Say where an output ends, without credentials."""
    end = sink.spec
    if isinstance(end, ViewSinkSpec):
        return (
            STATE_STORE_VIEW
            if end.store is None
            else database_view_label(postgres_address(end.store).shown)
        )
    if isinstance(end, TopicSinkSpec):
        return f"topic {end.topic}"
    return f"dataset {end.path}" if isinstance(end, DatasetSinkSpec) else FUNCTION


def database_view_label(store: str) -> str:
    """Say where a view ends that a database keeps, given what is shown of its address."""
    return f"view in {store}"


def next_coverage(
    known: Mapping[OutputSink, OutputCoverage],
    declared: Mapping[OutputSink, OutputCoverage],
    now: BatchBoundary,
    same: Callable[[str, str], bool],
) -> dict[OutputSink, OutputCoverage]:
    """Give all outputs as of a run that begins ``now`` with the declared ones.

    ``same`` says whether what was meant and what is now is the same.
    """
    if now.batch_id == 0:  # nothing was committed, so nothing is missing anywhere
        return dict(declared)
    after = {where: one.paused(now) for where, one in known.items() if where not in declared}
    for where, one in declared.items():
        before = known.get(where)
        if before is None:
            after[where] = replace(one, spans=(CoverageSpan(now),))
        elif same(before.definition, one.definition):
            after[where] = replace(before.resumed(now), definition=one.definition)
        else:
            spans = (*before.paused(now).spans, CoverageSpan(now))
            after[where] = replace(one, spans=_without_empty(spans))
    return after


def spans_to_json(spans: Sequence[CoverageSpan]) -> list[dict[str, Any]]:
    """Give spans in JSON kinds."""
    return [asdict(span) for span in spans]


def is_complete(spans: Sequence[CoverageSpan]) -> bool:
    """Whether an output has been fed by one declaration from the beginning on, without a gap."""
    return list(spans) == [CoverageSpan()]


def last_covered(spans: Sequence[CoverageSpan]) -> tuple[int | None, dict[str, Any]] | None:
    """Give the last batch and the position that an output reflects which is no longer fed."""
    if not spans or spans[-1].until is None:
        return None
    until = spans[-1].until
    return until.batch_id - 1 if until.batch_id else None, dict(until.position)


def warn_if_partial(what: str, spans: Sequence[CoverageSpan]) -> None:
    """Tell who opens an output that it is not whole."""
    note = partial_note(spans)
    if note is not None:
        warnings.warn(f"{what} {note}.", PartialOutputWarning, stacklevel=3)


def partial_note(spans: Sequence[CoverageSpan]) -> str | None:
    """Say in words what an output lacks; None when nothing."""
    if not spans or is_complete(spans):
        return None
    told = []
    if spans[0].since is not None:
        told.append(
            f"is fed since {_format_boundary(spans[0].since)}; what came out before is missing"
        )
    for before, after in pairwise(spans):
        assert before.until is not None
        assert after.since is not None
        if _is_adjacent(before, after):
            told.append(f"was declared differently before {_format_boundary(after.since)}")
        else:
            told.append(
                f"was not fed from {_format_boundary(before.until)} to {_format_boundary(after.since)}; what came out or "
                "was taken back then is missing"
            )
    if spans[-1].until is not None:
        told.append(
            f"is no longer fed since {_format_boundary(spans[-1].until)}, when the app left it out"
        )
    return "; it ".join(told)


def _format_boundary(moment: BatchBoundary) -> str:
    read = [
        f"{topic}/{partition} {offset}"
        for topic, offsets in moment.position.items()
        for partition, offset in offsets.items()
    ]
    return f"{moment.at} (batch {moment.batch_id}; read up to {', '.join(read) or 'nothing'})"
