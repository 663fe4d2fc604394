"""``millstream deploy``: puts an edited app in the place of what has run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.cli.audit_option import audited
from millstream.cli.kept_version import kept_sentence
from millstream.cli.plan import (
    Command,
    edited_app,
    edited_app_options,
    from_option,
    print_plan,
)
from millstream.cli.stop import stop_app
from millstream.cli.tables import json_option, pluralize, print_json
from millstream.durations import format_us

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.engine.local_run import LocalProgress
    from millstream.ops.deploy import DeployResult
    from millstream.pipeline.app import App

OnBatch = Callable[["LocalProgress"], None]
EXIT_NOT_SWITCHED = 3
KEEP = "7 days"  # that of ops/deploy.py, which is imported when it is called

records_per_second_option = click.option(
    "--records-per-second",
    type=click.IntRange(min=1),
    help="Read the log no faster than this, to leave the machine to what runs.",
)


ask_again_option = click.option(
    "--ask-again",
    is_flag=True,
    help="Compute steps anew that ask a service (enrich), although it may give other answers than it gave then.",
)


def switch_options(command: Command) -> Command:
    """Take what a switch to another version of an app is told: when it may stop the app, and what it keeps."""
    for option in (
        click.option(
            "--keep",
            default=KEEP,
            show_default=True,
            help="How long to keep the version that is there now, for millstream rollback.",
        ),
        records_per_second_option,
        click.option(
            "--timeout",
            default="1 minute",
            show_default=True,
            help="With --stop: how long to wait for it.",
        ),
        click.option(
            "--stop",
            is_flag=True,
            help="Stop the app, if it runs, once the new state is nearly there.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@edited_app_options
@switch_options
@from_option
@click.option(
    "--gone-ok",
    is_flag=True,
    help="Rebuild although the log no longer holds all records, or is compacted: what is rebuilt lacks them, and says so.",
)
@ask_again_option
@json_option
@click.pass_context
def deploy(
    context: click.Context,
    file: str,
    name: str | None,
    *,
    address: Path | str | None,
    same_expressions: bool,
    stop: bool,
    timeout: str,
    records_per_second: int | None,
    keep: str,
    starts: tuple[str, ...],
    gone_ok: bool,
    ask_again: bool,
    as_json: bool,
) -> None:
    """Put the app in FILE, as it is now, in the place of what has run.

    What `millstream plan` says is rebuilt is computed from the log, in this process and beside the app, which
    may run meanwhile. All else keeps its state. Once the app is stopped, one transaction puts the new state and
    the rebuilt views in place: readers see the old app or the new one. Then run it: `millstream run`.

    A deployment that is stopped or killed resumes when it is called again. The exit code is 3 if the app runs, so
    that it has to be stopped first; 1 and 2 are errors.

    \b
    Examples:
      millstream deploy app.py
      millstream deploy app.py --stop && millstream run app.py
      millstream deploy app.py --records-per-second 20000
      millstream deploy app.py --from 2026-11-01
    """
    from millstream.ops.deploy import deploy as work
    from millstream.ops.replay_start import ReplayStart

    start = ReplayStart.parse(starts)
    app = edited_app(file, name, address)

    def attempt(on_batch: OnBatch) -> DeployResult:
        return work(
            app,
            on_batch,
            same_expressions=same_expressions,
            gone_ok=gone_ok,
            ask_again=ask_again,
            start=start,
            keep=keep,
        )

    stopped = timeout if stop else None
    with audited(app.folder.parent.parent, app.name, "deploy", {"file": file}) as found:
        done = complete(app, attempt, stopped, as_json=as_json, per_second=records_per_second)
        found["switched"] = done.switched
    if starts and not done.plan.replays and not as_json:
        click.echo("Nothing reads the log again, so --from changes nothing.")
    report(context, app, done, as_json=as_json)


def complete(
    app: App,
    attempt: Callable[[OnBatch], DeployResult],
    timeout: str | None,
    *,
    as_json: bool,
    per_second: int | None,
) -> DeployResult:
    """Deploy, and return what that did.

    With a ``timeout`` stop the app if it runs, and deploy what it has read since.
    """
    with shown_batches(as_json=as_json, records_per_second=per_second) as on_batch:
        done = attempt(on_batch)
    if timeout is not None and not done.switched:
        stop_app(app.name, app.folder, timeout)
        with shown_batches(as_json=as_json, records_per_second=per_second) as on_batch:
            done = attempt(on_batch)
    return done


def report(context: click.Context, app: App, done: DeployResult, *, as_json: bool) -> None:
    """Print what a deployment did, and end the command."""
    _print_result(app, done, as_json=as_json)
    context.exit(0 if done.switched else EXIT_NOT_SWITCHED)


def _print_result(app: App, done: DeployResult, *, as_json: bool) -> None:
    if as_json:
        until = None if done.kept_until is None else done.kept_until.isoformat()
        values = {
            "app": app.name,
            "records": done.records,
            "switched": done.switched,
            "kept_until": until,
            "topics": {topic: list(offsets) for topic, offsets in done.topics.items()},
            "plan": done.plan.to_dict(),
        }
        print_json(values)
        return
    print_plan(done.plan, advice=False)
    read = f"read {pluralize(done.records, 'record')}"
    if done.switched:
        click.echo(f"{app.name} is deployed ({read}). Its next run goes on with it.")
        for topic, offsets in done.topics.items():
            shown = ", ".join(f"{topic}/{number}/{offset}" for number, offset in enumerate(offsets))
            click.echo(f"The topic {topic!r} has records of it from {shown} on.")
        if done.kept_until is not None:
            click.echo(kept_sentence(done.kept_until))
    else:
        click.echo(
            f"The new state of {app.name} is computed ({read}), and the app runs. Stop it (millstream stop "
            f"{app.name}) and do this again, which reads what it has read since; or use --stop."
        )


@contextmanager
def shown_batches(
    *,
    as_json: bool,
    records_per_second: int | None,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnBatch]:
    """Yield what is called after each batch: it waits if the log is read too fast, and shows how far it is.

    It shows how many records are read, of how many, how fast, and when all are read at this speed; on a terminal alone,
    which is standard error, if no ``console`` is given. ``clock`` has seconds.
    """
    began, read = clock(), 0

    def throttle(progress: LocalProgress) -> None:
        nonlocal read
        read += progress.read
        if records_per_second is not None:
            time.sleep(max(0.0, read / records_per_second - (clock() - began)))

    if as_json or not (sys.stderr.isatty() if console is None else console.is_terminal):
        yield throttle
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    speed = TextColumn(
        "{task.completed:,.0f} of {task.total:,.0f} records, {task.fields[rate]:,.0f}/s, "
        "{task.fields[remaining]}"
    )
    columns = (TextColumn("reading the log"), BarColumn(20), speed)
    console = Console(stderr=True) if console is None else console
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rate=0.0, remaining="", visible=False)

        def show(progress: LocalProgress) -> None:
            throttle(progress)
            rate, total = read / max(clock() - began, 1e-3), read + progress.left
            remaining = _remaining(progress.left, rate)
            bar.update(
                task,
                completed=read,
                total=total,
                rate=rate,
                remaining=remaining,
                visible=True,
                refresh=True,
            )

        yield show


def _remaining(left: int, rate: float) -> str:
    """Say when all records are read that are there now, at a rate of records a second."""
    if not left:
        return "caught up"
    if not rate:
        return "nothing read yet"
    return f"caught up in {format_us(max(1, round(left / rate)) * 1_000_000)}"
