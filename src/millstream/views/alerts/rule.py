"""Rules: which value of which metric is too much, for how long, and who is told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from millstream.choices import did_you_mean
from millstream.durations import Duration, to_us
from millstream.errors import ConfigError
from millstream.metrics.definitions import METRICS, PREFIX, SERVED_BY, MetricDefinition
from millstream.metrics.readings import Readings
from millstream.views.alerts.targets import AlertTarget

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Series(NamedTuple):
    """One series of a metric: its labels, as ``app=shop, view=orders``, and its value."""

    labels: str
    value: float


@dataclass(frozen=True)
class AlertRule:
    """A rule: made by :func:`alert`. Times are in seconds."""

    name: str
    metric: MetricDefinition
    above: float | None
    below: float | None
    where: Mapping[str, str]
    over_s: float | None
    held_s: float
    repeat_s: float | None
    tell: tuple[AlertTarget, ...] = field(repr=False)

    def series(self, readings: Readings) -> list[Series]:
        """Return the series that the rule is about."""
        found = []
        for labels, value in readings.values(self.metric.name):
            if all(labels[name] == wanted for name, wanted in self.where.items()):
                found.append(Series(", ".join(f"{n}={v}" for n, v in labels.items()), value))
        return found

    def is_breached(self, value: float) -> bool:
        """Return whether a value, or a change of it, is too much."""
        if self.above is not None:
            return value > self.above
        assert self.below is not None
        return value < self.below

    def describe(self, breached: Iterable[Series]) -> str:
        """Say which series are beyond the limit, the worst five."""
        worst = sorted(breached, key=lambda one: one.value, reverse=self.above is not None)
        limit = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        within = "" if self.over_s is None else f" within {self.over_s:g} s"
        shown = "; ".join(
            f"{one.labels}: {one.value:g}" if one.labels else f"{one.value:g}" for one in worst[:5]
        )
        more = f"; and {len(worst) - 5} more" if len(worst) > 5 else ""
        return f"{self.metric.name}{within} is {limit}: {shown}{more}"


def alert(
    name: str,
    metric: str,
    *,
    tell: AlertTarget | Sequence[AlertTarget],
    above: float | None = None,
    below: float | None = None,
    where: Mapping[str, str] | None = None,
    over: Duration | None = None,
    held: Duration = "0 seconds",
    repeat: Duration | None = "4 hours",
) -> AlertRule:
    """Return a rule for :meth:`millstream.App.alerts`: somebody is told when a figure is too large or too small.

    One alert is told for the rule, with the series that are beyond the limit, and one when none is any more.

    Args:
        name: The identity of the alert: lower-case letters, digits, ``-``, ``_``.
        metric: A metric of docs/metrics.md that the app has, with ``millstream_`` or without.
        tell: :func:`tell_webhook`, :func:`tell_email`, :func:`tell_command`, or several.
        above, below: The limit: one of the two.
        where: Values of labels; by default all series of the metric count.
        over: Compare how much the value has changed within this time, instead of the value. A counter needs it.
        held: For how long the limit must be exceeded before anybody is told.
        repeat: Tell it again after so long, while it lasts; None: never.

    Raises:
        ConfigError: a name, metric, label or limit is not possible.

    Example::

        chat = ms.tell_webhook("https://chat.example/hook")
        app.alerts(
            ms.alert("behind", "source_lag_seconds", above=300, held="2 minutes", tell=chat),
            ms.alert("dead", "step_exit_rows_total", where={"exit": "dead"}, over="10 minutes", above=0, tell=chat),
        )
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"The name of an alert is {name!r}. Give up to 64 lower-case letters, digits, '-' and '_'."
        )
    definition = _definition(name, metric)
    if (above is None) == (below is None):
        raise ConfigError(f"The alert {name!r} needs a limit: above= or below=, one of the two.")
    _check_number(name, below if above is None else above)
    for label in where or {}:
        if label not in definition.labels:
            known = ", ".join(definition.labels) or "none"
            raise ConfigError(
                f"The alert {name!r} asks for the label {label!r}, and {definition.name} has: {known}."
                f"{did_you_mean(label, definition.labels)}"
            )
    if definition.kind == "counter" and over is None:
        raise ConfigError(
            f"The alert {name!r} is on {definition.name}, which only grows. Say within which time it may grow so "
            'much: over="10 minutes".'
        )
    over_s = None if over is None else to_us(over, what="an alert's over") / 1e6
    if over_s == 0:
        raise ConfigError(
            f"The alert {name!r} has over={over!r}. Give the time of the change, such as '10 minutes'."
        )
    return AlertRule(
        name,
        definition,
        above,
        below,
        {label: str(value) for label, value in (where or {}).items()},
        over_s,
        to_us(held, what="an alert's held") / 1e6,
        None if repeat is None else to_us(repeat, what="an alert's repeat") / 1e6,
        _targets(name, tell),
    )


def _check_number(name: str, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not isfinite(limit):
        raise ConfigError(f"The limit of the alert {name!r} is {limit!r}. Give a finite number.")


def _targets(name: str, tell: AlertTarget | Sequence[AlertTarget]) -> tuple[AlertTarget, ...]:
    """Return whom an alert is told, each once."""
    given = [tell] if isinstance(tell, AlertTarget) else list(tell)
    if not given:
        raise ConfigError(f"The alert {name!r} is told to nobody. Give tell=.")
    found: dict[str, AlertTarget] = {}
    for target in given:
        if not isinstance(target, AlertTarget):
            raise ConfigError(
                f"The alert {name!r} is told to {target!r}. Give such as ms.tell_webhook(URL)."
            )
        if found.setdefault(target.name, target) != target:
            raise ConfigError(
                f"The alert {name!r} is told in two ways to one place, {target.name}, and could not tell them apart. "
                "Give one of them."
            )
    return tuple(found.values())


def _definition(name: str, metric: str) -> MetricDefinition:
    found = METRICS.get(PREFIX + metric.removeprefix(PREFIX))
    usable = [one.name.removeprefix(PREFIX) for one in METRICS.values() if one.kind != "histogram"]
    if found is None or found.kind == "histogram":
        raise ConfigError(
            f"The alert {name!r} is on {metric!r}, which is no metric with one value: see docs/metrics.md."
            f"{did_you_mean(metric.removeprefix(PREFIX), usable)}"
        )
    return found


def check_app_rules(rules: Sequence[AlertRule]) -> None:
    """Make sure that rules are ones that a run of an app can tell.

    Raises:
        ConfigError: one is on a metric that an app does not have, or two have one name.
    """
    check_alert_names(rules)
    for rule in rules:
        if rule.metric.source != "app":
            raise ConfigError(
                f"The alert {rule.name!r} is on {rule.metric.name}, which is none of an app's. Put it into the rules of "
                "`millstream alert`."
            )


def check_rule_sources(rules: Iterable[AlertRule]) -> None:
    """Make sure that rules are ones that `millstream alert` can tell.

    Raises:
        ConfigError: one is on a metric that neither apps nor the log have: it would never fire.
    """
    for rule in rules:
        if rule.metric.source not in ("app", "log"):
            raise ConfigError(
                f"The alert {rule.name!r} is on {rule.metric.name}, which only the process has that counts it "
                f"({SERVED_BY[rule.metric.source]}): Prometheus can watch it, and `millstream alert` cannot."
            )


def check_alert_names(rules: Sequence[AlertRule]) -> None:
    """Make sure that no two rules have one name.

    Raises:
        ConfigError: two have.
    """
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two alerts are named {name!r}. Give each a name of its own.")
