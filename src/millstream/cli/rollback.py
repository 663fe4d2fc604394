"""``millstream rollback``: puts the version before the last deployment of an app back in its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.cli.audit_option import audited
from millstream.cli.deploy import OnBatch, complete, report, switch_options
from millstream.cli.plan import edited_app, edited_app_options
from millstream.cli.tables import json_option

if TYPE_CHECKING:
    from millstream.ops.deploy import DeployResult


@click.command()
@edited_app_options
@switch_options
@json_option
@click.pass_context
def rollback(
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
    as_json: bool,
) -> None:
    """Put the version before the last deployment back: FILE as it was then.

    Its state and views are kept since the deployment, for as long as --keep said there. They go on from where they
    were, so only what the app has read since is read, and the start of the log is not needed. One transaction
    puts them in place, as in a deployment. The version that is left is kept in its turn.

    No code is kept: check out FILE as it was. Another program than that version is refused. The exit code is 3 if the app
    runs, so that it has to be stopped first; 1 and 2 are errors.

    \b
    Examples:
      git checkout HEAD~1 app.py && millstream rollback app.py --stop && millstream run app.py
    """
    from millstream.ops.rollback import rollback as work

    app = edited_app(file, name, address)

    def attempt(on_batch: OnBatch) -> DeployResult:
        return work(app, on_batch, same_expressions=same_expressions, keep=keep)

    stopped = timeout if stop else None
    with audited(app.folder.parent.parent, app.name, "rollback", {"file": file}) as found:
        done = complete(app, attempt, stopped, as_json=as_json, per_second=records_per_second)
        found["switched"] = done.switched
    report(context, app, done, as_json=as_json)
