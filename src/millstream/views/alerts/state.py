"""What is kept of an alert between two looks at its figures, and the notices that are still to be told.

=========  ==================================  =========  ================================================
firing     the limit is                        then       and a notice
=========  ==================================  =========  ================================================
no         kept                                no
no         exceeded, for less than ``held``    no
no         exceeded, for ``held`` or longer    yes        ``firing``
yes        exceeded                            yes        ``repeat``, if the last one was ``repeat`` ago
yes        exceeded, and a target is new       yes        ``repeat``, to that target
yes        kept                                no         ``resolved``
either     unknown, as figures are missing     the same
=========  ==================================  =========  ================================================

Where figures could not be read, a limit is kept only if each series that exceeded it is there again, and keeps it.

A notice has an id, which is the same whenever it is told: the number and the time of the alert's firing are in it. So
it is not taken for one of before a reset, where numbers begin again. What a crash leaves after each step:

1. The state and its new notices are stored together. Before: the next look finds the same.
2. A notice is told to a target. After a crash it is told to it again, with the same id, by which a receiver knows it.
3. The target is taken from the notice, and that is stored. Then it is not told to it any more.

So each notice reaches each target at least once, and only a crash between 2 and 3, or a response that was lost,
makes it twice. Where the disk does not take 1, notices are told all the same, as they may be about that disk; then a
crash makes them twice, under two ids.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

from millstream.views.alerts.rule import AlertRule, Series

NoticeKind = Literal["firing", "repeat", "resolved"]
SAMPLES_MAX = 60  # of a series, for changes within a time
NOTICES_MAX = (
    100  # untold, of one alert: then those to be told first are given up, and that is logged
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlertNotice:
    """Something to be told: ``pending`` names the targets that have not been told."""

    id: str
    kind: NoticeKind
    alert: str
    text: str
    at_s: float
    pending: tuple[str, ...]


@dataclass(frozen=True)
class RuleState:
    """The state of one alert. ``since_s`` is when its limit was found exceeded; ``number`` counts its firings.

    ``fired_s`` is when the last one began, ``breached`` which series exceed the limit, ``audience`` which targets the
    last notices were for, ``metric`` of which metric the samples are.
    """

    firing: bool = False
    since_s: float | None = None
    number: int = 0
    told_s: float = 0.0
    repeats: int = 0
    notices: tuple[AlertNotice, ...] = ()
    samples: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    fired_s: float = 0.0
    breached: tuple[str, ...] = ()
    audience: tuple[str, ...] = ()
    metric: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RuleState:
        notices = tuple(
            AlertNotice(**{**one, "pending": tuple(one["pending"])}) for one in values["notices"]
        )
        samples = {
            labels: tuple((at_s, value) for at_s, value in kept)
            for labels, kept in values["samples"].items()
        }
        names = {name: tuple(values.get(name, ())) for name in ("breached", "audience")}
        known = {one.name for one in fields(cls)}  # a later version may have more
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, **names, "notices": notices, "samples": samples})

    def at(self, rule: AlertRule, now_s: float) -> RuleState:
        """Return the state for a look: nothing of another metric, and no time after now, if the clock was set back."""
        samples: Mapping[str, Sequence[tuple[float, float]]] = {}
        if self.metric == rule.metric.name:
            samples = {
                labels: tuple((min(at_s, now_s), value) for at_s, value in kept)
                for labels, kept in self.samples.items()
            }
        return replace(
            self,
            metric=rule.metric.name,
            samples=samples,
            since_s=None if self.since_s is None else min(self.since_s, now_s),
            told_s=min(self.told_s, now_s),
        )

    def told(self, notice_id: str, target: str) -> RuleState:
        """Return the state once a notice has been told to a target."""
        left = []
        for one in self.notices:
            pending = tuple(t for t in one.pending if (one.id, t) != (notice_id, target))
            if pending:
                left.append(replace(one, pending=pending))
        return replace(self, notices=tuple(left))


@dataclass(frozen=True)
class Evaluation:
    """Evaluates one rule at one moment. ``scope`` is what is watched, in the ids of notices."""

    rule: AlertRule
    scope: str
    now_s: float

    def next_state(
        self, before: RuleState, series: Sequence[Series], *, complete: bool = True
    ) -> RuleState:
        """Return the state after a look at the figures: see the table above.

        Args:
            complete: Whether all figures could be read. If not, a series that is missing may be anything.
        """
        state = before.at(self.rule, self.now_s)
        seen = {one.labels for one in series}
        if self.rule.over_s is not None:
            samples = _with_samples(self.rule, state.samples, series, self.now_s)
            missing = {} if complete else {n: s for n, s in state.samples.items() if n not in seen}
            state = replace(state, samples={**samples, **missing})
            series = _changes(self.rule, samples)
        breached = [one for one in series if self.rule.is_breached(one.value)]
        unknown = () if complete else tuple(n for n in state.breached if n not in seen)
        state = replace(state, breached=(*sorted(one.labels for one in breached), *unknown))
        if not breached:
            return state if unknown else self._kept(replace(state, since_s=None))
        since_s = self.now_s if state.since_s is None else state.since_s
        state = replace(state, since_s=since_s)
        if state.firing:
            return self._repeated(state, breached)
        if self.now_s - since_s < self.rule.held_s:
            return state
        number = state.number + 1
        state = replace(state, firing=True, number=number, repeats=0, fired_s=self.now_s)
        return self._with_notice(state, "firing", self.rule.describe(breached), self._targets)

    def _kept(self, state: RuleState) -> RuleState:
        """Return the state where the limit is kept."""
        if not state.firing:
            return state
        text = f"{self.rule.metric.name} is back within its limit"
        return self._with_notice(replace(state, firing=False), "resolved", text, self._targets)

    def _repeated(self, state: RuleState, breached: Sequence[Series]) -> RuleState:
        """Return the state where an alert goes on firing."""
        repeat_s = self.rule.repeat_s
        if repeat_s is not None and self.now_s - state.told_s >= repeat_s:
            # who has not been told the last one is told that first, and holds no other one up
            behind = {name for notice in state.notices for name in notice.pending}
            to = tuple(name for name in self._targets if name not in behind)
        else:
            to = tuple(name for name in self._targets if name not in state.audience)
        if not to:
            return state
        told_s = self.now_s if {*to} & {*state.audience} else state.told_s
        state = replace(state, repeats=state.repeats + 1)
        state = self._with_notice(state, "repeat", self.rule.describe(breached), to)
        return replace(state, told_s=told_s)

    @property
    def _targets(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.rule.tell)

    def _with_notice(
        self, state: RuleState, kind: NoticeKind, text: str, to: tuple[str, ...]
    ) -> RuleState:
        number = f"{state.number}.{state.repeats}" if kind == "repeat" else f"{state.number}"
        fired_ms = round(state.fired_s * 1000)
        notice = AlertNotice(
            id=f"{self.scope}/{self.rule.name}/{fired_ms}/{number}/{kind}",
            kind=kind,
            alert=self.rule.name,
            text=text,
            at_s=self.now_s,
            pending=to,
        )
        for lost in state.notices[: max(0, len(state.notices) + 1 - NOTICES_MAX)]:
            _log.error("%s could not be told for too long, and is given up", lost.id)
        notices = (*state.notices, notice)[-NOTICES_MAX:]
        return replace(state, told_s=self.now_s, notices=notices, audience=self._targets)


def _changes(rule: AlertRule, samples: Mapping[str, Sequence[tuple[float, float]]]) -> list[Series]:
    counter = rule.metric.kind == "counter"
    return [Series(labels, change(kept, counter=counter)) for labels, kept in samples.items()]


def _with_samples(
    rule: AlertRule,
    before: Mapping[str, Sequence[tuple[float, float]]],
    series: Iterable[Series],
    now_s: float,
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Add the present values, and drop what is older than needed: the newest that is, is kept as the start."""
    assert rule.over_s is not None
    found = {}
    for one in series:
        kept = [*before.get(one.labels, ())]
        while len(kept) > 1 and kept[1][0] <= now_s - rule.over_s:
            del kept[0]
        # The newest sample is replaced until the one before it is old enough, so that they are few; but not where
        # a counter began again, as what it counted before that would be forgotten.
        if len(kept) > 1 and kept[-1][0] - kept[-2][0] < rule.over_s / SAMPLES_MAX:
            rises = kept[-2][1] <= kept[-1][1] <= one.value
            if rises or rule.metric.kind != "counter":
                del kept[-1]
        found[one.labels] = (*kept, (now_s, one.value))
    return found


def change(samples: Sequence[tuple[float, float]], *, counter: bool) -> float:
    """Return by how much a value has changed; of a counter, which may begin again at 0, by how much it has grown."""
    if not counter:
        return samples[-1][1] - samples[0][1]
    grown = 0.0
    for (_, before), (_, after) in pairwise(samples):
        grown += after - before if after >= before else after
    return grown
