"""``millstream run``: the production form of running the pipeline that a file declares."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.errors import ConfigError
from millstream.pipeline.live import LiveTable

if TYPE_CHECKING:
    from millstream.pipeline.app import App
    from millstream.views.progress import Progress


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--app", "name", help="Which app, where the file declares several: its name.")
@click.option(
    "--until",
    type=click.Choice(["stopped", "caught-up"]),
    default="stopped",
    show_default=True,
    help="Run until Ctrl-C, or until all that the log holds now is taken in.",
)
@click.option("--timeout", help='Stop after this long, such as "10 minutes".')
@click.option("--count", type=click.IntRange(min=1), help="Stop after reading so many records.")
@click.option(
    "--master", metavar="URL", help="Run on this Spark cluster, such as spark://host:7077."
)
@click.option(
    "--cores",
    type=click.IntRange(min=1),
    help="Cores to use; by default as many as there are here.",
)
@click.option(
    "--same-expressions",
    is_flag=True,
    help="After an upgrade of polars or Python: what reads as before is the same.",
)
@click.option("--json", "as_json", is_flag=True, help="Print progress and report as JSON lines.")
def run(
    file: Path,
    name: str | None,
    until: str,
    timeout: str | None,
    count: int | None,
    *,
    master: str | None,
    cores: int | None,
    same_expressions: bool,
    as_json: bool,
) -> None:
    """Run the pipeline that FILE declares, going on where it was.

    Ctrl-C lets the batch at work finish and stops; a second one does not wait. In a terminal, one
    table shows what the run does; elsewhere there is a line at most once a second.

    \b
    Examples:
      millstream run app.py
      millstream run app.py --until caught-up
      millstream run app.py --timeout "1 hour" --json
    """
    app = find_app(file, name)
    with LiveTable(sys.stdout) as live:
        report = app.run(
            until="caught-up" if until == "caught-up" else "stopped",
            timeout=timeout,
            count=count,
            master=master,
            cores=cores,
            same_expressions=same_expressions,
            on_progress=_show_json if as_json else live.show,
        )
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))


def _show_json(progress: Progress) -> None:
    click.echo(json.dumps(progress.to_dict()))


def find_app(file: Path, name: str | None) -> App:
    """Load a file and give the app that it declares at its top level.

    Raises:
        ConfigError: there is none, there are several and no name was given, or none has the name.
    """
    from millstream.pipeline.app import App

    values = runpy.run_path(str(file), run_name="millstream_app").values()
    apps = {app.name: app for app in values if isinstance(app, App)}
    if not apps:
        raise ConfigError(
            f"{file} declares no app. Write app = ms.App(…) at its top level, not inside a function."
        )
    if name is None and len(apps) == 1:
        return next(iter(apps.values()))
    if name not in apps:
        said = "no --app" if name is None else f"--app {name}"
        raise ConfigError(f"{file} declares the apps {', '.join(sorted(apps))}; {said} was given.")
    return apps[name]
