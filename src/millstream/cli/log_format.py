"""``--log-format``: what is logged on standard error, as text or as JSON lines."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType

import click

from millstream.cli.program_error import ProgramError, shown_error
from millstream.cli.tables import Choice
from millstream.errors import MillstreamError

log_format_option = click.option(
    "--log-format",
    type=Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log on standard error as text, or as JSON lines with app, job, run and batch.",
)
_log = logging.getLogger("millstream")


def set_log_format(log_format: str) -> None:
    """Log as it is asked for; as text, what Python logs without being told.

    As JSON is all that is on standard error from now on: also what other libraries log, Python's warnings, and the error
    that ends the program, or a thread. Who collects the lines would fail at one that is none.
    """
    if log_format == "text":
        return
    from millstream.views.runs.log_fields import JsonFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    _log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_defect
    threading.excepthook = _log_end_of_thread


def print_error(error: MillstreamError, *, debug: bool = False) -> None:
    """Print the error that ends a command, in the form that was asked for; with ``debug`` also where it was raised."""
    if sys.excepthook is _log_defect:
        whole = debug or isinstance(error, ProgramError)
        _log.error("%s", shown_error(error), exc_info=error if whole else None)
        return
    if debug:
        traceback.print_exception(error)
    click.echo(f"millstream: {shown_error(error)}", err=True)


def _log_defect(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    kind, error = ended.exc_type, ended.exc_value
    if kind is not SystemExit and error is not None:  # that is how a thread may end
        name = ended.thread.name if ended.thread else "unknown"
        trace = (kind, error, ended.exc_traceback)
        _log.error("the thread %r ended: %s: %s", name, kind.__name__, error, exc_info=trace)
