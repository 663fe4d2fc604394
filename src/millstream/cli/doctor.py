"""``millstream doctor``: what this machine has of all that is needed, and what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from millstream.client.default_log import LOG_VARIABLE


@click.command()
@click.option(
    "--log",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=LOG_VARIABLE,
    show_envvar=True,
    help="Folder of the log; its disk is looked at. By default the current folder.",
)
@click.option(
    "--store",
    metavar="URL",
    help="A PostgreSQL database that is, or will be, the state store of apps: App(store=…).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of lines.")
@click.pass_context
def doctor(
    context: click.Context, folder: Path | None, store: str | None, *, as_json: bool
) -> None:
    """Check that this machine has what Millstream needs.

    Exits with 1 when something is wrong.
    """
    from millstream.ops.doctor import diagnose

    findings = diagnose(folder, store)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            state = "ok     " if finding.ok else "problem"
            what_to_do = f" -> {finding.advice}" if finding.advice else ""
            click.echo(f"{state}  {finding.name:{width}}  {finding.seen}{what_to_do}")
    if not all(finding.ok for finding in findings):
        context.exit(1)
