"""``millstream stop``: ask a running app to finish the current batch and end."""

from __future__ import annotations

import time
from pathlib import Path

import click

from millstream.cli.app_folder import app_folder
from millstream.cli.audit_option import audited
from millstream.cli.tables import log_option
from millstream.durations import to_us
from millstream.errors import JobFailedError
from millstream.views.runs.control_files import active_runs, stop_request_file

_POLL_S = 0.05


@click.command()
@click.argument("app")
@log_option
@click.option(
    "--timeout",
    default="1 minute",
    show_default=True,
    help="How long to wait for the current batch.",
)
def stop(app: str, folder: Path, timeout: str) -> None:
    """Stop the running APP, as Ctrl-C in its terminal would: after the current batch.

    Its next start resumes where it stopped.

    \b
    Examples:
      millstream stop ads
      millstream stop ads --log /srv/data --timeout "10 minutes"
    """
    of_app = app_folder(folder, app)
    with audited(folder, app, "stop") as found:
        stopped = stop_app(app, of_app, timeout)
        found["stopped"] = stopped
    click.echo(f"{app} has stopped" if stopped else f"{app} is not running")


def stop_app(app: str, of_app: Path, timeout: str) -> bool:
    """Ask the runs of the app in a folder to stop, and wait until they have; False if there are none.

    Raises:
        JobFailedError: it still works on a batch after ``timeout``.
    """
    if not active_runs(of_app):
        return False
    end = time.monotonic() + to_us(timeout, what="--timeout") / 1e6
    while active_runs(of_app):
        if time.monotonic() > end:
            pids = ", ".join(str(running.pid) for running in active_runs(of_app))
            raise JobFailedError(
                f"{app} has not stopped within {timeout}; process {pids} still works on a batch. "
                "It stops after that batch: wait longer with --timeout, or end the process."
            )
        stop_request_file(of_app).touch()  # again and again: a run that is starting clears it once
        time.sleep(_POLL_S)
    stop_request_file(of_app).unlink(missing_ok=True)
    return True
