"""``millstream compare``: an edited app beside the one that has run, row by row, before it takes its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.deploy import ask_again_option, records_per_second_option, shown_batches
from millstream.cli.plan import edited_app, edited_app_options, from_option
from millstream.cli.tables import TableColumn, json_option, pluralize, print_table

if TYPE_CHECKING:
    from millstream.ops.compare import Comparison
    from millstream.ops.view_difference import ViewDifference

EXIT_DIFFERENT = 3
EXIT_NOT_COMPARED = 4


@click.command()
@edited_app_options
@click.option(
    "--fail-if",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    help="End with the exit code 3 if this holds for a view, such as 'changed > 1%' or 'removed > 0', and with 4 if it holds "
    "for none of those that could be compared, and not all could; may be given more than once.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How many rows that differ to show of each view.",
)
@records_per_second_option
@from_option
@click.option(
    "--gone-ok", is_flag=True, help="Compare although the log no longer holds all records."
)
@ask_again_option
@json_option
@click.pass_context
def compare(
    context: click.Context,
    file: str,
    name: str | None,
    *,
    address: Path | str | None,
    same_expressions: bool,
    conditions: tuple[str, ...],
    sample: int,
    records_per_second: int | None,
    starts: tuple[str, ...],
    gone_ok: bool,
    ask_again: bool,
    as_json: bool,
) -> None:
    """Compare the views that the edited app in FILE rebuilds with those that there are.

    Both are of one position of the log. Rows are paired by the key of the view: how many are equal, changed, added or
    removed; by how much each column differs; and some of them. The app is not changed, and may run meanwhile; `millstream
    deploy` goes on with what was computed.

    In a condition, changed, added, removed or different (all three) is a number of rows, or with % a share of all
    rows of both. The exit code is 3 if one holds; 4 if none does, and an output that the edit changes could not be
    compared; 1 and 2 are errors.

    \b
    Examples:
      millstream compare app.py
      millstream compare app.py --fail-if "different > 1%" && millstream deploy app.py --stop
    """
    from millstream.ops.compare import compare as work
    from millstream.ops.replay_start import ReplayStart
    from millstream.ops.view_difference import Threshold

    start = ReplayStart.parse(starts)
    thresholds = [Threshold.parse(text) for text in conditions]
    app = edited_app(file, name, address)
    with shown_batches(as_json=as_json, records_per_second=records_per_second) as on_batch:
        found = work(
            app,
            on_batch,
            same_expressions=same_expressions,
            gone_ok=gone_ok,
            ask_again=ask_again,
            start=start,
            sample_rows=sample,
        )
    failing = found.failing(thresholds)
    unknown = bool(thresholds and found.not_compared) and not failing
    if as_json:
        values = _finite({**found.to_dict(), "failing": failing})
        click.echo(json.dumps(values, indent=2, ensure_ascii=False, default=str))
    else:
        _print(found)
        for text in failing:
            click.secho(f"fails: {text}", fg="red")
        if unknown:
            names = ", ".join(found.not_compared)
            click.secho(f"not known: whether a condition holds for {names}", fg="yellow")
    context.exit(EXIT_DIFFERENT if failing else EXIT_NOT_COMPARED if unknown else 0)


def _finite(value: Any) -> Any:
    """Return plain values in which NaN and the infinities, which JSON lacks, are text."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(found: Comparison) -> None:
    for view in found.views:
        _print_view(view)
        if view.view in found.lacking:
            click.echo(f"  the rows that are there lack some: it {found.lacking[view.view]}")
    for name in found.new:
        click.echo(f"{name}: is new")
    for name, why in found.not_compared.items():
        click.echo(f"{name}: not compared: {why}")
    if not found.views and not found.new and not found.not_compared:
        click.echo(f"{found.app} rebuilds no view: there is nothing to compare.")


def _print_view(view: ViewDifference) -> None:
    counts = f"{view.equal:,} equal, {view.changed:,} changed, {view.added:,} added, {view.removed:,} removed"
    share = f" ({view.different / view.rows:.2%} different)" if view.rows else ""
    click.echo(f"{view.view}: {pluralize(view.rows, 'row')}: {counts}{share}")
    for what, names in (("new", view.new_columns), ("left out", view.old_columns)):
        if names:
            click.echo(f"  columns that are {what}, and not compared: {', '.join(names)}")
    for column in view.columns:
        if column.changed:
            size = "" if column.largest is None else _size(column.largest, column.mean)
            click.echo(
                f"  column {column.name!r} differs in {pluralize(column.changed, 'row')}{size}"
            )
    if view.sample:
        columns = [
            TableColumn("key", lambda row: _shown(row["key"]), left=True),
            TableColumn("before", lambda row: _shown(row["before"]), left=True),
            TableColumn("after", lambda row: _shown(row["after"]), left=True),
        ]
        print_table(view.sample, columns)


def _size(largest: float, mean: float | None) -> str:
    return f", by up to {largest:g}" + ("" if mean is None else f", {mean:g} on average")


def _shown(values: Mapping[str, Any] | None) -> str | None:
    return None if values is None else ", ".join(f"{name}={one}" for name, one in values.items())
