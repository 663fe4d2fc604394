"""``millstream capture-incident``: packs the batch that failed into a folder that is a failing test."""

from __future__ import annotations

from pathlib import Path

import click

from millstream.cli.deploy import shown_batches
from millstream.cli.plan import edited_app
from millstream.cli.run import split_file
from millstream.cli.tables import (
    app_log_option,
    app_name_option,
    json_option,
    pluralize,
    print_json,
)


@click.command("capture-incident")
@click.argument("file", metavar="FILE[:APP]")
@app_name_option
@app_log_option
@click.option(
    "--batch",
    "batch_id",
    type=click.IntRange(min=0),
    help="Which batch; by default, and at most, the one that comes next.",
)
@click.option(
    "--to",
    "folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The folder to make; by default incident-APP-BATCH.",
)
@json_option
def capture_incident(
    file: str,
    name: str | None,
    *,
    address: Path | str | None,
    batch_id: int | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Pack a batch of the app in FILE, by default the one that failed, into a folder that is a test.

    The folder has the records of the batch, the state before it, the code, and the versions of all
    libraries: `pytest FOLDER` runs the batch again, without the log and without Spark, and fails as it failed. Once
    the code is mended, it passes.

    Of the batch that comes next that is possible while the app is stopped. The state before an earlier one
    (--batch) is computed again from the app's beginning, or from its last deployment, by the batches as they were; its test
    fails where the code fails on a row, and has the rows that the batch sets in views. The records and the state are
    those of the app, so the folder is as confidential as they are.

    \b
    Examples:
      millstream capture-incident app.py
      millstream capture-incident app.py --batch 17 --to tests/incident_17
    """
    from millstream.ops.incident import capture_incident as work
    from millstream.ops.incident_replay import replay_batch

    app = edited_app(file, name, address)
    path, _ = split_file(file, name)
    with shown_batches(as_json=as_json, records_per_second=None) as on_batch:
        done = work(app, path, folder, batch_id, on_batch)
    found: str | None = None
    try:
        replay_batch(done.folder, app)
    except Exception as error:  # noqa: BLE001 - it is what the batch is captured for
        found = f"{type(error).__name__}: {error}"
    if as_json:
        print_json(
            {
                "app": done.app,
                "batch_id": done.batch_id,
                "folder": str(done.folder),
                "records": done.records,
                "committed": done.committed,
                "failure": done.failure,
                "fails_with": found,
            }
        )
        return
    click.echo(
        f"Batch {done.batch_id} of {done.app}, with {pluralize(done.records, 'record')}, is in {done.folder}."
    )
    if found is None and done.committed:
        click.echo(
            "It was committed, and its code fails on no row. The test has the rows that it sets in views: assert what they "
            "should be."
        )
    elif found is None:
        click.echo(
            "It runs to its end here: the failure came from outside (a sink, a service, memory), or the code was mended."
        )
    else:
        click.echo(f"It fails here, too: {found}")
    click.echo(f"pytest {done.folder}")
