"""``millstream rescale``: divide an app's state into more or fewer buckets, and the work on it among more or fewer tasks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from millstream.cli.app_folder import app_store
from millstream.cli.audit_option import audited
from millstream.cli.tables import app_store_option, json_option, log_option, print_result


@click.command()
@click.argument("app")
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="How many tasks are to work on a large batch at once: about as many as there are cores.",
)
@click.option(
    "--buckets",
    type=click.IntRange(min=1, max=4096),
    help="Into how many ranges of keys the state is to be divided: at least as many as partitions.",
)
@log_option
@app_store_option
@json_option
def rescale(
    app: str,
    partitions: int | None,
    buckets: int | None,
    folder: Path,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Divide the state of APP into more or fewer buckets or partitions.

    The app must be stopped. Nothing is moved, lost or computed again; the next run resumes where it stopped. What the app
    declares as its buckets stays as it was when its state was created.

    \b
    Examples:
      millstream stop ads
      millstream rescale ads --buckets 64 --partitions 16
    """
    if partitions is None and buckets is None:
        raise click.UsageError("Give --buckets, --partitions or both.")
    from millstream.engine.rescale import rescale as work

    location = app_store(folder, app, store)
    with audited(folder, app, "rescale", {"buckets": buckets, "partitions": partitions}):
        done = work(app, folder / "apps" / app, partitions, location, buckets=buckets)
    print_result(
        f"the state of {app} is divided into {done.buckets} buckets (before: {done.buckets_before}), which "
        f"{done.partitions} partitions share (before: {done.partitions_before}), from the next run on",
        asdict(done),
        as_json=as_json,
    )
