"""Since when each output is fed, and where it has gaps.

An output gets what comes out of the pipeline while it is declared. One that is declared later, is left
out of a run, or is declared differently, therefore lacks rows or has rows of two programs. The home
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

from millstream.kernels.meaning import exact
from millstream.kernels.plan import DatasetEnd, JobPlan, SinkPlan, TopicEnd, ViewEnd
from millstream.views.address import postgres_address

HOME_VIEW = "view"
FUNCTION = "function"


class PartialOutputWarning(UserWarning):
    """What is read was not fed all the time, or by more than one declaration: the text says when."""


@dataclass(frozen=True)
class Moment:
    """A place between two batches: before ``batch_id``, at a position of the log and a time (RFC 3339)."""

    batch_id: int
    position: Mapping[str, Any]
    at: str


@dataclass(frozen=True)
class Span:
    """A time in which an output was fed, by one declaration: half-open, ``[since, until)``.

    ``since`` is None from the beginning of the log on; ``until`` is None while it goes on.
    """

    since: Moment | None = None
    until: Moment | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Span:
        """Read back what ``asdict`` gave."""
        ends = [None if values[n] is None else Moment(**values[n]) for n in ("since", "until")]
        return cls(*ends)


Where = tuple[str, str]  # an output's name, and where it ends


@dataclass(frozen=True)
class Feeding:
    """An output as the home knows it: what its rows mean, and when it was fed."""

    meaning: str
    spans: tuple[Span, ...] = (Span(),)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Feeding:
        """Read back what ``asdict`` gave."""
        spans = tuple(Span.from_json(span) for span in values["spans"])
        return cls(values["meaning"], spans)

    def ended(self, now: Moment) -> Feeding:
        """Give it as of a run without it.

        A last span in which no batch was committed stays where it follows the one before at once: that is
        of another declaration, and must not go on when this one comes back. Behind a gap it goes, as the
        output reflects nothing of it.
        """
        *before, last = self.spans
        if last.until is not None:
            return self
        spans = (*before, replace(last, until=now))
        if not (before and _follows_at_once(before[-1], last)):
            spans = _not_empty(spans)
        return replace(self, spans=spans)

    def begun(self, now: Moment) -> Feeding:
        """Give it as of a run with it: where nothing was missed, its last span goes on."""
        *before, last = self.spans
        if last.until is None:
            return self
        if last.until.batch_id == now.batch_id:
            return replace(self, spans=(*before, replace(last, until=None)))
        return replace(self, spans=_not_empty((*self.spans, Span(now))))


def _follows_at_once(before: Span, after: Span) -> bool:
    assert before.until is not None, "only the last span goes on"
    return after.since is not None and after.since.batch_id == before.until.batch_id


def _not_empty(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Leave out spans in which no batch was committed, but for the only one."""
    kept = [
        span
        for span in spans
        if span.until is None
        or span.until.batch_id != (0 if span.since is None else span.since.batch_id)
    ]
    return tuple(kept or spans[-1:])


def feedings(plan: JobPlan) -> dict[Where, Feeding]:
    """Give the outputs of a plan as if they had been there from the beginning."""
    meanings = plan.program.outputs
    return {
        (sink.name, place_of(sink)): Feeding(exact(meanings.get(sink.name))) for sink in plan.sinks
    }


def place_of(sink: SinkPlan) -> str:
    """Say where an output ends, without credentials."""
    end = sink.end
    if isinstance(end, ViewEnd):
        return HOME_VIEW if end.store is None else view_in(postgres_address(end.store).shown)
    if isinstance(end, TopicEnd):
        return f"topic {end.topic}"
    return f"dataset {end.path}" if isinstance(end, DatasetEnd) else FUNCTION


def view_in(store: str) -> str:
    """Say where a view ends that a database keeps, given what is shown of its address."""
    return f"view in {store}"


def moved_on(
    known: Mapping[Where, Feeding],
    declared: Mapping[Where, Feeding],
    now: Moment,
    same: Callable[[str, str], bool],
) -> dict[Where, Feeding]:
    """Give all outputs as of a run that begins ``now`` with the declared ones.

    ``same`` says whether what was meant and what is now is the same.
    """
    if now.batch_id == 0:  # nothing was committed, so nothing is missing anywhere
        return dict(declared)
    after = {where: one.ended(now) for where, one in known.items() if where not in declared}
    for where, one in declared.items():
        before = known.get(where)
        if before is None:
            after[where] = replace(one, spans=(Span(now),))
        elif same(before.meaning, one.meaning):
            after[where] = replace(before.begun(now), meaning=one.meaning)
        else:
            spans = (*before.ended(now).spans, Span(now))
            after[where] = replace(one, spans=_not_empty(spans))
    return after


def to_plain(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Give spans in JSON kinds."""
    return [asdict(span) for span in spans]


def is_whole(spans: Sequence[Span]) -> bool:
    """Whether an output has been fed by one declaration from the beginning on, without a gap."""
    return list(spans) == [Span()]


def end_of(spans: Sequence[Span]) -> tuple[int | None, dict[str, Any]] | None:
    """Give the last batch and the position that an output reflects which is no longer fed."""
    if not spans or spans[-1].until is None:
        return None
    until = spans[-1].until
    return until.batch_id - 1 if until.batch_id else None, dict(until.position)


def warn_of(what: str, spans: Sequence[Span]) -> None:
    """Tell who opens an output that it is not whole."""
    note = note_on(spans)
    if note is not None:
        warnings.warn(f"{what} {note}.", PartialOutputWarning, stacklevel=3)


def note_on(spans: Sequence[Span]) -> str | None:
    """Say in words what an output lacks; None when nothing."""
    if not spans or is_whole(spans):
        return None
    told = []
    if spans[0].since is not None:
        told.append(f"is fed since {_said(spans[0].since)}; what came out before is missing")
    for before, after in pairwise(spans):
        assert before.until is not None
        assert after.since is not None
        if _follows_at_once(before, after):
            told.append(f"was declared differently before {_said(after.since)}")
        else:
            told.append(
                f"was not fed from {_said(before.until)} to {_said(after.since)}; what came out or "
                "was taken back then is missing"
            )
    if spans[-1].until is not None:
        told.append(f"is no longer fed since {_said(spans[-1].until)}, when the app left it out")
    return "; it ".join(told)


def _said(moment: Moment) -> str:
    read = [
        f"{topic}/{partition} {offset}"
        for topic, offsets in moment.position.items()
        for partition, offset in offsets.items()
    ]
    return f"{moment.at} (batch {moment.batch_id}; read up to {', '.join(read) or 'nothing'})"
