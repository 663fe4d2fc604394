"""Looks at figures again and again, and tells the alerts of some rules. `state.py` has the crash table."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millstream.errors import ConfigError, FencedError, MillstreamError, RetriableError
from millstream.log.files import DISK, replace_file
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings
from millstream.views.alerts.rule import AlertRule, check_alert_names
from millstream.views.alerts.state import AlertNotice, Evaluation, RuleState
from millstream.views.alerts.targets import AlertMessage, AlertTarget
from millstream.views.sink import RunStart
from millstream.views.state_store.store import StateStore

EVERY_S = 15.0
_WAIT_S, _WAIT_MAX_S = 5.0, 300.0  # before a target that failed is tried again
DESCRIPTION = "alerts"
_log = logging.getLogger(__name__)


class AlertStore(Protocol):
    """Where the states of alerts are kept. What :meth:`save` was given is there after a crash."""

    def load(self) -> Mapping[str, Any]: ...

    def save(self, states: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class AppAlertStore:
    """States in the app's state store, for the run that has begun.

    :meth:`save` raises FencedError when a newer run has begun, which then tells the alerts.
    """

    store: StateStore
    start: RunStart

    def load(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.store.description(self.start.app, DESCRIPTION) or {}
        return found

    def save(self, states: Mapping[str, Any]) -> None:
        self.store.put_run_description(self.start, DESCRIPTION, dict(states))


@dataclass(frozen=True)
class AlertFile:
    """States in a JSON file, which is replaced as a whole."""

    path: Path

    def load(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(
                f"{self.path} has no states of alerts ({error}). Remove it: alerts that fire are told again."
            ) from None
        if not isinstance(found, dict):
            raise ConfigError(f"{self.path} has no states of alerts. Name another file.")
        return found

    def save(self, states: Mapping[str, Any]) -> None:
        replace_file(DISK, self.path, json.dumps(states, ensure_ascii=False).encode())


class AlertWatch:
    """Evaluates rules, and tells what has changed. One thread at a time.

    Args:
        scope: What is watched, in ids and subjects: the app's name.
        sources: Add the figures. Where one fails, the alerts of its metrics stay as they are.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        scope: str,
        rules: Sequence[AlertRule],
        sources: Mapping[str, ReadFigures],
        store: AlertStore,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        check_alert_names(rules)
        self._scope = scope
        self._rules = tuple(rules)
        self._sources = dict(sources)
        self._store = store
        self._wall_clock = wall_clock
        known = store.load()
        self._states = {
            rule.name: RuleState.from_json(known[rule.name]) if rule.name in known else RuleState()
            for rule in rules
        }
        self._retry_at_s: dict[str, tuple[float, float]] = {}  # target → when again, and the wait

    @property
    def firing(self) -> list[str]:
        """The alerts that fire."""
        return [name for name, state in self._states.items() if state.firing]

    @property
    def untold(self) -> list[AlertNotice]:
        """What is still to be told."""
        return [notice for state in self._states.values() for notice in state.notices]

    def look(self) -> None:
        """Look at the figures once, and tell what is to be told.

        Raises:
            FencedError: another run tells the alerts now.
            MillstreamError, OSError: the states cannot be stored; then nothing new was told.
        """
        readings, complete = Readings(), True
        for name, read in self._sources.items():
            try:
                read(readings)
            except (MillstreamError, OSError) as error:
                complete = False
                _log.warning("figures of %s cannot be read: %s", name, error)
        now_s = self._wall_clock()
        before = dict(self._states)
        for rule in self._rules:
            series = rule.series(readings)
            seen = series if series or complete else None
            evaluation = Evaluation(rule, self._scope, now_s)
            self._states[rule.name] = evaluation.next_state(self._states[rule.name], seen)
        if self._states != before:
            self._save()
        self._tell(now_s)

    def _tell(self, now_s: float) -> None:
        for rule in self._rules:
            targets = {target.name: target for target in rule.tell}
            for notice in self._states[rule.name].notices:
                for name in notice.pending:
                    if name not in targets:  # the rule has been edited since
                        _log.warning("%s is not told to %s any more", notice.id, name)
                    elif not self._told(targets[name], notice, now_s):
                        continue
                    self._states[rule.name] = self._states[rule.name].told(notice.id, name)
                    self._save()

    def _told(self, target: AlertTarget, notice: AlertNotice, now_s: float) -> bool:
        """Tell a target; False if it has failed, or is not to be tried yet."""
        retry_at_s, wait_s = self._retry_at_s.get(target.name, (0.0, _WAIT_S))
        if now_s < retry_at_s:
            return False
        try:
            target.send(
                AlertMessage(
                    notice.id, notice.kind, notice.alert, self._scope, notice.text, notice.at_s
                )
            )
        except RetriableError as error:
            _log.warning("an alert is told again in %.0f s: %s", wait_s, error)
            self._retry_at_s[target.name] = now_s + wait_s, min(2 * wait_s, _WAIT_MAX_S)
            return False
        self._retry_at_s.pop(target.name, None)
        return True

    def _save(self) -> None:
        self._store.save({name: state.to_json() for name, state in self._states.items()})

    def run(self, stopped: threading.Event, every_s: float = EVERY_S) -> None:
        """Look at once, every so often, and a last time when ``stopped`` is set; or until another run tells the alerts.

        The first look is what the changes of a short run are compared with.
        """
        ended = False
        while True:
            try:
                self.look()
            except FencedError:
                return
            except (MillstreamError, OSError) as error:
                _log.warning("alerts could not be looked at: %s", error)
            if ended:
                return
            ended = stopped.wait(every_s)
