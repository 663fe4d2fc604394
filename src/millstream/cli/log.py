"""``millstream log``: check the folder of a log, repair it, and describe it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.cli.progress_bar import progress_bar
from millstream.cli.tables import folder_argument

if TYPE_CHECKING:
    from millstream.log.findings import Finding
    from millstream.log.repair.repair import RepairedRange
    from millstream.log.statistics import PartitionStatistics

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")


@click.group()
def log() -> None:
    """Verify, repair and measure the folder of a log.

    DIR is the folder; if it is not given, $MILLSTREAM_LOG or ./data.

    \b
    Examples:
      millstream log verify ./data
      millstream log repair ./data
      millstream log stat ./data
    """


@log.command()
@folder_argument
@json_option
@click.pass_context
def verify(context: click.Context, folder: Path, *, as_json: bool) -> None:
    """Read everything in the log DIR and report what is wrong with it.

    Changes nothing, and may run while another process writes. Exits with 0 if every committed
    record can be read, with 1 if not.

    \b
    Example:
      millstream log verify ./data
    """
    found = _check(folder)
    if as_json:
        click.echo(json.dumps([_plain(one) for one in found], indent=2))
    else:
        for finding in found:
            click.echo(_line(finding))
        click.echo(f"{folder}: {_summary(found)}")
    if any(finding.lost for finding in found):
        context.exit(1)


@log.command()
@folder_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def repair(folder: Path, *, yes: bool, as_json: bool) -> None:
    """Give up what cannot be read in the log DIR, so that everything else can.

    Offsets that cannot be read stay empty; damaged files are kept in DIR/quarantine. A file that a
    backup has is better restored than given up. No other process may write to the log meanwhile.

    \b
    Example:
      millstream log repair ./data
    """
    from millstream.log.repair.repair import repair as repair_folder

    found = [finding for finding in _check(folder) if finding.kind != "quarantine"]
    if found and not yes:
        for finding in found:
            click.echo(_line(finding), err=as_json)
        click.confirm(_question(found), abort=True, err=as_json)
    repaired: list[RepairedRange] = []
    if found:
        with progress_bar("repairing") as progress:
            repaired = repair_folder(folder, progress=progress)
    if as_json:
        click.echo(json.dumps([_plain(one) for one in repaired], indent=2))
        return
    for one in repaired:
        click.echo(_repaired_line(one))
    if not repaired:
        click.echo(f"{folder}: {'repaired; ' if found else ''}nothing was given up")


@log.command()
@folder_argument
@json_option
def stat(folder: Path, *, as_json: bool) -> None:
    """Show what each partition of the log DIR holds.

    Offsets from `start` up to, but without, `end` are committed. `damaged` are offsets that are
    known to be unreadable; `millstream log verify` looks for more. Times are in UTC.

    \b
    Example:
      millstream log stat ./data --json
    """
    from millstream.log.statistics import measure

    facts = measure(folder)
    if as_json:
        click.echo(json.dumps([_plain(one) for one in facts], indent=2))
    elif facts:
        _print_table(facts)
    else:
        click.echo(f"no topics in {folder}; make one with: millstream topic create NAME")


def _check(folder: Path) -> list[Finding]:
    from millstream.log.repair.inspection import inspect

    with progress_bar("reading") as progress:
        return list(inspect(folder, progress=progress))


def _line(finding: Finding) -> str:
    severity = "lost    " if finding.lost else "harmless"
    return f"{severity}  {finding.kind}: {finding.where}: {finding.text}; {finding.advice}"


def _summary(found: Sequence[Finding]) -> str:
    lost = sum(finding.lost for finding in found)
    if lost:
        places = "place" if lost == 1 else "places"
        return f"records are lost or cannot be read in {lost} {places}"
    return "every committed record can be read" if found else "whole"


def _question(found: Sequence[Finding]) -> str:
    count = sum(
        one.end - one.start for one in found if one.start is not None and one.end is not None
    )
    if not count:
        return "repair this? No offset is given up"
    offsets = "offset" if count == 1 else "offsets"
    return f"repair this, and give up {count} {offsets} for good? The damaged files are kept in quarantine/"


def _repaired_line(one: RepairedRange) -> str:
    name = f"{one.topic}/{one.partition}"
    kept = f"the file as it was: {one.quarantined}" if one.quarantined else f"see {one.note}"
    if one.start == one.end:
        return f"{name}: stray bytes were taken out; {kept}"
    return f"{name}: offsets [{one.start}, {one.end}) were given up; {kept}"


def _plain(one: Finding | RepairedRange | PartitionStatistics) -> dict[str, object]:
    values = dataclasses.asdict(one)
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _print_table(facts: Sequence[PartitionStatistics]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns: dict[str, Callable[[PartitionStatistics], str]] = {
        "segments": lambda one: str(one.segments),
        "bytes": lambda one: f"{one.size_bytes:,}",
        "start": lambda one: str(one.start),
        "end": lambda one: str(one.end),
        "oldest": lambda one: _time(one.oldest_ms),
        "newest": lambda one: _time(one.newest_ms),
    }
    if any(one.open_transactions for one in facts):
        columns["open transactions"] = lambda one: str(one.open_transactions)
    if any(one.damaged for one in facts):
        columns["damaged"] = lambda one: " ".join(f"[{start}, {end})" for start, end in one.damaged)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("partition")
    for name in columns:
        table.add_column(name, justify="right")
    for one in facts:
        cells = (cell(one) for cell in columns.values())
        table.add_row(f"{one.topic}/{one.partition}", *cells)
    Console(markup=False).print(table)


def _time(timestamp_ms: int | None) -> str:
    if timestamp_ms is None:
        return ""
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ms} ms"  # a producer may write any number
    return moment.strftime("%Y-%m-%d %H:%M")
