"""``millstream rescale``: divide the work on an app's state among more or fewer tasks."""

from __future__ import annotations

from pathlib import Path

import click

from millstream.cli.app_folder import app_store
from millstream.cli.tables import app_store_option, json_option, log_option, print_result


@click.command()
@click.argument("app")
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    required=True,
    help="How many tasks are to work on a large batch at once: about as many as there are cores.",
)
@log_option
@app_store_option
@json_option
def rescale(app: str, partitions: int, folder: Path, store: str | None, *, as_json: bool) -> None:
    """Divide the work on the state of APP among more or fewer partitions.

    The app must be stopped. Nothing is moved, lost or computed again; the next run resumes where it stopped.

    \b
    Examples:
      millstream stop ads
      millstream rescale ads --partitions 4
    """
    from millstream.spark.rescale import rescale as work

    done = work(app, folder / "apps" / app, partitions, app_store(folder, app, store))
    before = done.partitions_before
    print_result(
        f"the state of {app} is shared by {partitions} partitions (before: {before})",
        {"app": app, "partitions": partitions, "partitions_before": before},
        as_json=as_json,
    )
