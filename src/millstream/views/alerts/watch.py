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

from millstream.errors import (
    ConfigError,
    DiskFullError,
    FencedError,
    MillstreamError,
    RetriableError,
)
from millstream.log.files import DISK, replace_file
from millstream.metrics.exposition import ReadFigures
from millstream.metrics.readings import Readings
from millstream.views.alerts.rule import AlertRule, check_alert_names
from millstream.views.alerts.sender import TargetSender
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
        sender: Sends to the targets, and bounds how long that takes.
    """

    def __init__(
        self,
        scope: str,
        rules: Sequence[AlertRule],
        sources: Mapping[str, ReadFigures],
        store: AlertStore,
        *,
        wall_clock: Callable[[], float] = time.time,
        sender: TargetSender | None = None,
    ) -> None:
        check_alert_names(rules)
        self._scope = scope
        self._rules = tuple(rules)
        self._sources = dict(sources)
        self._store = store
        self._wall_clock = wall_clock
        self._sender = sender or TargetSender()
        self.unread: list[str] = []
        known = store.load()
        for name in known.keys() - {rule.name for rule in rules}:
            if known[name].get("notices"):
                _log.warning("the alert %s has no rule any more: it was not told to all", name)
        self._states = {
            rule.name: RuleState.from_json(known[rule.name]) if rule.name in known else RuleState()
            for rule in rules
        }
        self._stored: Mapping[str, RuleState] | None = dict(self._states)  # None: not known
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

        ``unread`` has afterwards the sources whose figures could not be read.

        Raises:
            FencedError: another run tells the alerts now.
            MillstreamError: the states cannot be stored, by another reason than the disk; then nothing new was told.
        """
        readings = Readings()
        self.unread = [
            name for name, read in self._sources.items() if not _read(name, read, readings)
        ]
        now_s = self._wall_clock()
        for rule in self._rules:
            evaluation = Evaluation(rule, self._scope, now_s)
            self._states[rule.name] = evaluation.next_state(
                self._states[rule.name], rule.series(readings), complete=not self.unread
            )
        if self._states != self._stored:
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
        if now_s < retry_at_s <= now_s + _WAIT_MAX_S:  # beyond that, the clock was set back
            return False
        try:
            message = AlertMessage(
                notice.id, notice.kind, notice.alert, self._scope, notice.text, notice.at_s
            )
            self._sender.send(target, message)
        except Exception as error:  # noqa: BLE001 - whatever fails, the other targets are told
            # The text of another error may have a secret of the target's.
            why = error if isinstance(error, RetriableError) else f"{target.name}: {type(error)}"
            _log.warning("an alert is told again in %.0f s: %s", wait_s, why)
            self._retry_at_s[target.name] = now_s + wait_s, min(2 * wait_s, _WAIT_MAX_S)
            return False
        self._retry_at_s.pop(target.name, None)
        return True

    def _save(self) -> None:
        self._stored = None
        try:
            self._store.save({name: state.to_json() for name, state in self._states.items()})
        except (OSError, DiskFullError) as error:
            # The alert may be about this disk: rather told twice, after a crash, than never.
            _log.warning(
                "the states of alerts cannot be stored, and are told all the same: %s", error
            )
        else:
            self._stored = dict(self._states)

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
            except MillstreamError as error:
                _log.warning("alerts could not be looked at: %s", error)
            except Exception:  # noqa: BLE001 - a defect in one look must not end all later ones in silence
                _log.exception("alerts could not be looked at")
            if ended:
                return
            ended = stopped.wait(every_s)


def _read(name: str, read: ReadFigures, readings: Readings) -> bool:
    """Read a source; False if it failed."""
    try:
        read(readings)
    except (MillstreamError, OSError) as error:
        _log.warning("figures of %s cannot be read: %s", name, error)
        return False
    except Exception:  # noqa: BLE001 - a defect in one source must not hide the others
        _log.exception("figures of %s cannot be read", name)
        return False
    return True
