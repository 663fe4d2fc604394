"""``millstream run``: the production form of running the pipeline that a file declares."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.choices import did_you_mean
from millstream.cli.kept_version import kept_sentence
from millstream.cli.log_format import log_format_option, set_log_format
from millstream.cli.metrics_option import metrics_option
from millstream.cli.program_error import program_mistakes
from millstream.cli.spark_settings import spark_settings
from millstream.cli.tables import Choice, app_log_option, app_name_option
from millstream.cli.token_option import door_options
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.pipeline.app import App
    from millstream.pipeline.engine_choice import EngineName
    from millstream.views.runs.progress import Progress


@click.command()
@click.argument("file", metavar="FILE[:APP]")
@app_name_option
@app_log_option
@click.option(
    "--until",
    type=Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Run until Ctrl-C, or until all records that the log has now are processed.",
)
@click.option("--timeout", help='Stop after this long, such as "10 minutes".')
@click.option("--count", type=click.IntRange(min=1), help="Stop after reading so many records.")
@click.option(
    "--start",
    "starts",
    metavar="earliest|latest|TIME|TOPIC/PARTITION/OFFSET",
    multiple=True,
    help="Where streams begin if the app has no state yet, instead of where it declares: with the first record, the "
    "next one, the first of a time or later, by its timestamp; or an offset of each partition that is named.",
)
@click.option(
    "--engine",
    type=Choice(["spark", "local"]),
    help="Spark, or this process alone, for development. By default MILLSTREAM_ENGINE, or Spark.",
)
@click.option(
    "--master",
    metavar="URL",
    help="Run on this Spark cluster: spark://HOST:7077, yarn, k8s://https://HOST:6443.",
)
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    help="Cores to use; by default as many as there are here.",
)
@click.option(
    "--properties-file",
    type=click.Path(path_type=Path),
    help="Settings of Spark's, one in a line: NAME VALUE, as in spark-defaults.conf.",
)
@click.option(
    "--conf",
    "pairs",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of Spark's, which overrides that of the file; may be given more than once.",
)
@click.option(
    "--same-expressions",
    is_flag=True,
    help="After an upgrade of polars or Python: confirm that expressions with unchanged text are the same.",
)
@log_format_option
@metrics_option
@click.option(
    "--ask",
    "questions",
    metavar="HOST:PORT",
    help="Answer questions about the app's state over HTTP at this address while it runs: see `millstream ask`.",
)
@door_options("Questions over HTTP carry a token (Authorization: Bearer …).")
@click.option(
    "--ready-within",
    default="5 minutes",
    show_default=True,
    help="/readyz is 503 when records have waited and no batch was committed for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print progress and report as JSON lines.")
@click.pass_context
def run(
    context: click.Context,
    file: str,
    name: str | None,
    *,
    address: Path | str | None,
    until: str,
    timeout: str | None,
    count: int | None,
    starts: tuple[str, ...],
    engine: EngineName | None,
    master: str | None,
    cores: int | None,
    properties_file: Path | None,
    pairs: tuple[str, ...],
    same_expressions: bool,
    log_format: str,
    metrics: str | None,
    questions: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    ready_within: str,
    as_json: bool,
) -> None:
    """Run the pipeline that FILE declares, from where it stopped.

    APP is the app's name, or that of its variable, where the file declares several. The exit code is
    1 if at some step more rows were dead than the app's dead_max allows.

    Ctrl-C stops after the current batch; a second one does not wait. In a terminal, one
    table shows what the run does; elsewhere there is a line at most once a second.

    \b
    Examples:
      millstream run app.py
      millstream run app_folder.py:billing --until caught-up
      millstream run app.py --engine local
      millstream run app.py --start 2026-11-01
      millstream run app.py --timeout "1 hour" --json
      millstream run app.py --metrics 127.0.0.1:9464
      millstream run app.py --ask 127.0.0.1:8402
      millstream run app.py --master yarn --conf spark.executor.cores=2
    """
    set_log_format(log_format)
    path, name = split_file(file, name)
    settings = spark_settings(properties_file, pairs)
    if not as_json:
        click.echo(f"loading {path} …")
    app = find_app(path, name)
    if address is not None:
        app.use_log(address)
    _fill(app, same_expressions=same_expressions, quiet=as_json)
    answering = (
        app.serve_questions(questions, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key)
        if questions
        else nullcontext()
    )
    with answering:
        report = app.run(
            until="caught-up" if until == "caught-up" else "stopped",
            timeout=timeout,
            count=count,
            start=starts or None,
            engine=engine,
            master=master,
            cores=cores,
            settings=settings,
            same_expressions=same_expressions,
            metrics=metrics,
            ready_within=ready_within,
            on_progress=_show_json if as_json else None,
            show=None if as_json else sys.stdout,
        )
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if not report.ok:
        context.exit(1)


def _fill(app: App, *, same_expressions: bool, quiet: bool) -> None:
    """Fill what is new behind tables, and say so."""
    from millstream.ops.fill_new import fill_new

    done = fill_new(app, same_expressions=same_expressions)
    if done is None or quiet:
        return
    filled = [part for part in done.plan.change.parts if part.is_addition]
    named = ", ".join(f"{part.kind} {part.name!r}" for part in filled)
    tables = sorted(
        {
            table
            for part in filled
            for table in (*part.filled_from_steps, part.filled_from_table)
            if table
        }
    )
    click.echo(f"filled from the state of {', '.join(map(repr, tables))}: {named}")
    if done.kept_until is not None:
        click.echo(kept_sentence(done.kept_until))


def _show_json(progress: Progress) -> None:
    click.echo(json.dumps(progress.to_dict()))


def split_file(text: str, name: str | None) -> tuple[Path, str | None]:
    """Take FILE, or FILE:APP, apart.

    Raises:
        ConfigError: there is no such file, or two apps are named.
    """
    path, app = Path(text), None
    if not path.exists() and ":" in text:
        before, _, app = text.rpartition(":")
        path = Path(before)
    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}. Give a Python file, or FILE:APP.")
    if app is not None and name not in (None, app):
        raise ConfigError(f"{text} names the app {app!r}, and --app {name!r}. Give one of them.")
    return path, app or name


def find_app(file: Path, name: str | None) -> App:
    """Load a file and return the app that it declares at its top level.

    Raises:
        ConfigError: there is none, there are several and none was named, or the name is not clear.
        ProgramError: the file has a mistake.
    """
    from millstream.pipeline.app import App

    folder = str(file.absolute().parent)
    if folder not in sys.path:  # as Python has it for a program: what is beside it can be imported
        sys.path.insert(0, folder)
    with program_mistakes(file):
        values = runpy.run_path(str(file), run_name="millstream_app")
    apps = {variable: app for variable, app in values.items() if isinstance(app, App)}
    if not apps:
        raise ConfigError(
            f"{file} declares no app. Write app = ms.App(…) at its top level, not inside a function."
        )
    found = {id(app): app for variable, app in apps.items() if name in (None, variable, app.name)}
    if len(found) == 1:
        return next(iter(found.values()))
    said = f"it is not clear which one {name!r} is" if found else f"none is {name!r}"
    names = [*apps, *(app.name for app in apps.values())]
    choices = ", ".join(f"{file}:{variable} (the app {app.name})" for variable, app in apps.items())
    declared = "several apps" if len(apps) > 1 else "one app"
    raise ConfigError(
        f"{file} declares {declared}, and {said if name else 'none was named'}. Say which: {choices}."
        f"{did_you_mean(name, names) if name and not found else ''}"
    )
