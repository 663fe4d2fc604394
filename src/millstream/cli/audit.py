"""``millstream audit``: who has changed an app."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from millstream.access.audit_log import AuditEntry, AuditLog
from millstream.cli.tables import TableColumn, json_option, log_option, print_rows


@click.command()
@click.argument("app")
@log_option
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(min=0), help="The last so many."
)
@json_option
def audit(app: str, folder: Path, limit: int, *, as_json: bool) -> None:
    """Show who changed APP, when, how, and whether it succeeded.

    Deployments, rollbacks, resets, stops, rescaling, dead letters that were sent again, and repairs of the copies of a capture of
    this name: from command lines, by the user and the machine; from the page, by the name of the token and the address of the
    client. A reset keeps the list.

    \b
    Examples:
      millstream audit ads
      millstream audit ads --limit 5 --json
    """
    found = AuditLog(folder, app).read()
    if not found and not as_json:
        click.echo(f"Nothing is recorded of {app} in {folder}.")
        return
    columns = [
        TableColumn("at", left=True),
        TableColumn("who", left=True),
        TableColumn("what", left=True),
        TableColumn("outcome", left=True),
        TableColumn("details", left=True),
    ]
    shown = found[-limit:] if limit else []
    print_rows([_row(one, as_json=as_json) for one in shown], columns, as_json=as_json)


def _row(entry: AuditEntry, *, as_json: bool) -> dict[str, Any]:
    if as_json:
        who = {name: value for name, value in vars(entry.who).items() if value is not None}
        return {**vars(entry), "who": who}
    details = [f"{name}={_text(value)}" for name, value in entry.details.items()]
    return {
        "at": entry.at,
        "who": str(entry.who),
        "what": entry.what,
        "outcome": entry.outcome or "cannot be read",
        "details": ", ".join([*details, *filter(None, [entry.reason])]),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
