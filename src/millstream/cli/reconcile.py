"""``millstream reconcile``: whether a copy is what its source is, and what to do if not."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import click

from millstream.capture.apply.reconcile import TableComparison
from millstream.capture.apply.reconcile import reconcile as reconcile_of
from millstream.cli.audit_option import audited
from millstream.cli.captured_options import log_option, tables_option
from millstream.client.address import log_folder

_SHOWN_KEYS = 5
EXIT_DIFFERENT = 1


@click.command()
@click.argument("name", metavar="NAME")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@tables_option("As they were given to `millstream apply`.")
@log_option
@click.option("--repair", is_flag=True, help="Give the copy the rows that the source has.")
def reconcile(
    name: str, source: str, target: str, *, tables: tuple[str, ...], log: str, repair: bool
) -> int:
    """Compare the copy at TARGET with the database SOURCE, at one position, and repair it.

    NAME is that of the capture, which must run. `millstream apply` of the same target ends when this begins; start it
    again afterwards. The exit code is 0 if the copy was the same, or was repaired, and 1 otherwise.

    \b
    Examples:
      millstream reconcile shop postgresql://reader@db.example/shop postgresql://writer@dw.example/copy
      millstream reconcile shop sqlite:///shop.db sqlite:///copy.db --repair
    """
    comparing = reconcile_of(name, source, target, tables=tables, log=log)
    folder = log_folder(log)
    details = {"tables": list(tables)}
    with ExitStack() as recording:
        recorded: dict[str, Any] = {}
        if repair and folder is not None:
            recorded = recording.enter_context(audited(folder, name, "reconcile --repair", details))
        found = comparing.run(repair=repair, on_table=lambda one: click.echo(line_of(one)))
        recorded["rows"] = found.faults
    word = "repaired" if repair else "different"
    said = f"{found.faults:,} rows {word}" if found.faults else "no difference"
    click.echo(f"{said}, at {found.position}")
    return EXIT_DIFFERENT if found.faults and not repair else 0


def line_of(table: TableComparison) -> str:
    """Say in a line how a table differs."""
    if table.left_out:
        return f"{table.table}: not compared, the capture does not read it any more"
    parts = [f"{table.table}: {table.rows:,} rows"]
    for what, keys in (
        ("missing", table.missing),
        ("different", table.differing),
        ("surplus", table.surplus),
    ):
        if keys:
            shown = ", ".join(json.dumps(key, ensure_ascii=False) for key in keys[:_SHOWN_KEYS])
            more = ", …" if len(keys) > _SHOWN_KEYS else ""
            parts.append(f"{len(keys):,} {what} ({shown}{more})")
    if table.not_compared:
        parts.append(f"not compared: {', '.join(table.not_compared)}")
    return ", ".join(parts)
