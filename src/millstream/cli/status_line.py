"""What ``capture``, ``apply`` and ``source`` have in common: a run that a signal ends, and a line that says how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import click

from millstream.capture.last_status import RunStatus
from millstream.cli.metrics_option import serving_metrics
from millstream.cli.signals import wait_for_stop_signal
from millstream.metrics.exposition import Exposition

SHOW_S = 1.0
S = TypeVar("S", bound=RunStatus)


@contextmanager
def stopped_by_signal(
    stop: Callable[[], None], metrics: str | None, exposition: Exposition
) -> Iterator[None]:
    """Call ``stop`` at the first signal within the block, and serve figures, if an address is given."""
    with serving_metrics(metrics, lambda: exposition), wait_for_stop_signal() as wait:

        def stop_at_signal() -> None:
            wait()
            stop()

        threading.Thread(target=stop_at_signal, daemon=True).start()
        yield


class StatusLine(Generic[S]):
    """Shows a status: on a terminal one line that changes, else a line where the state changes."""

    def __init__(
        self, line_of: Callable[[S], str], monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._line_of, self._monotonic_s = line_of, monotonic_s
        self._terminal = sys.stderr.isatty()
        self._shown_s = -SHOW_S
        self._state = self._alarm = ""

    def __call__(self, status: S) -> None:
        now = self._monotonic_s()
        if status.state == self._state and now - self._shown_s < SHOW_S:
            return
        line = self._line_of(status)
        if self._terminal:
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        elif status.state != self._state:
            click.echo(line, err=True)
        self._shown_s, self._state = now, status.state

    def alarm(self, text: str) -> None:
        """Show an alarm on a line of its own, when it is another one; empty if there is none."""
        if text and text != self._alarm:
            click.echo(f"{self._newline}ALARM: {text}", err=True)
        self._alarm = text

    def end(self, line: str) -> None:
        """Show the last line, where what the command says goes."""
        click.echo(f"{self._newline}{line}")

    @property
    def _newline(self) -> str:
        return "\n" if self._terminal else ""
