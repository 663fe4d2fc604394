"""`millstream view`: look at the views of a log folder or a database, their rows and their changes.

Reads only, while the pipeline runs or after it has stopped; ``forget`` alone removes what an app
has left in a database. Tables for people; with ``--json`` one JSON object per line for programs.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millstream.choices import did_you_mean
from millstream.cli.app_folder import print_failure
from millstream.cli.tables import confirm, log_option, store_option, yes_option
from millstream.errors import ConfigError, UnknownViewError
from millstream.views.query import ViewReader
from millstream.views.reader import (
    apps_with_state,
    open_database,
    open_view,
    state_store_location,
)
from millstream.views.schema import ViewSchema
from millstream.views.state_store.sqlite_values import parse_value
from millstream.views.store_location import is_database, open_state_store

Command = TypeVar("Command", bound=Callable[..., Any])


def _folder_options(command: Command) -> Command:
    for option in (
        store_option,
        click.option("--json", "as_json", is_flag=True, help="One JSON object per line."),
        click.option("--app", help="Whose view, if several apps have one of that name."),
        log_option,
    ):
        command = option(command)
    return command


@click.group()
def view() -> None:
    """Look at maintained views: list them, show rows, follow changes."""


@view.command("list")
@_folder_options
def list_views(folder: Path, app: str | None, store: str | None, *, as_json: bool) -> None:
    """List the views of a log folder, or of a database.

    \b
    Examples:
      millstream view list --log ./data
      millstream view list --store postgresql://user@host/database
    """
    rows = _database_views(store, app) if is_database(store) else _folder_views(folder, app)
    if not rows and not as_json:
        where = "the database" if is_database(store) else folder
        click.echo(f"No views in {where} yet. They appear once a pipeline with .view(...) has run.")
        return
    _print(rows, ("app", "view", "rows", "key", "columns"), as_json=as_json)


def _database_views(url: str, app: str | None) -> list[dict[str, Any]]:
    rows = []
    for each in open_database(url, app):
        with each.store as store:
            rows += [
                _described(store, each.owners[schema.name], schema)
                for schema in store.views()
                if app in (None, each.owners[schema.name])
            ]
    return rows


def _folder_views(folder: Path, app: str | None) -> list[dict[str, Any]]:
    known = apps_with_state(folder)
    if app is not None and app not in known:
        raise UnknownViewError(
            f"The log folder {str(folder)!r} has no views of an app {app!r}; there are views of: "
            f"{', '.join(known) or 'none'}.{did_you_mean(app, known)}"
        )
    rows = []
    for each in [app] if app is not None else known:
        print_failure(each, folder / "apps" / each)
        with open_state_store(state_store_location(folder, each), readonly=True) as store:
            rows += [_described(store, each, schema) for schema in store.views()]
    return rows


def _described(store: ViewReader, app: str, schema: ViewSchema) -> dict[str, Any]:
    return {
        "app": app,
        "view": schema.name,
        "rows": store.count(schema.name),
        "key": ", ".join(schema.key),
        "columns": ", ".join(f"{n} {kind}" for n, kind in schema.columns),
    }


@view.command("show")
@click.argument("name")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=0), help="Rows.")
@click.option("--where", multiple=True, metavar="COL=VALUE", help="Only rows with this value.")
@_folder_options
def show(
    name: str,
    *,
    limit: int,
    where: tuple[str, ...],
    folder: Path,
    app: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Show rows of a view, in the order of its key.

    \b
    Examples:
      millstream view show ad_ctr --limit 10
      millstream view show ad_ctr --where ad=7
      millstream view show ad_ctr --where window_start=2019-11-24T05:00:00Z --json
    """
    with open_view(name, log=folder, app=app, store=store) as opened:
        schema = opened.schema
        conditions = dict(_condition(text, schema.kinds) for text in where)
        frame = opened.scan(where=conditions, limit=limit + 1)
        note = opened.partial_note
    rows = [_with_json(row, schema.kinds) for row in frame.head(limit).iter_rows(named=True)]
    _print(rows, schema.names, as_json=as_json)
    if frame.height > limit and not as_json:
        click.echo(f"The first {limit} rows; --limit shows more.")
    if note is not None:
        click.echo(f"This view is incomplete: it {note}.", err=True)


@view.command("changes")
@click.argument("name")
@click.option(
    "--since",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="The last change number you have seen (_seq).",
)
@_folder_options
def changes(
    name: str, since: int, folder: Path, app: str | None, store: str | None, *, as_json: bool
) -> None:
    """Show what changed in a view after a change number, oldest first.

    \b
    Example:
      millstream view changes ad_ctr --since 1200 --json
    """
    with open_view(name, log=folder, app=app, store=store) as opened:
        kinds = opened.schema.kinds
        frame = opened.changes(since=since)
        note = opened.partial_note
    rows = [_with_json(row, kinds) for row in frame.iter_rows(named=True)]
    _print(rows, tuple(frame.columns), as_json=as_json)
    if note is not None:
        click.echo(f"This view is incomplete: it {note}.", err=True)


@view.command("forget")
@click.argument("app")
@store_option
@yes_option
def forget(app: str, store: str | None, *, yes: bool) -> None:
    """Remove an app's views from a database, for good.

    For an app that no longer exists. To start an app over, use `millstream reset` for all of it:
    without its views it is refused.

    \b
    Example:
      millstream view forget ads --store postgresql://user@host/database
    """
    from millstream.views.address import postgres_address
    from millstream.views.sinks.postgres import forget_app

    if not is_database(store):
        raise ConfigError("forget needs a database; give its URL with --store.")
    shown = postgres_address(store).shown
    if not yes:
        confirm(f"Remove all views of the app {app!r} from {shown}?")
    gone = forget_app(store, app)
    click.echo(f"Removed from {shown}: {', '.join(gone) or 'no views, only its fence'}.")


def _condition(text: str, kinds: dict[str, str]) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or name not in kinds:
        raise ConfigError(
            f"--where {text!r} is not COL=VALUE with one of the columns {', '.join(kinds)}."
        )
    return name, parse_value(value, kinds[name])


def _with_json(row: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    return {
        name: json.loads(value) if kinds.get(name) == "json" and value is not None else value
        for name, value in row.items()
    }


def _print(rows: list[dict[str, Any]], names: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            click.echo(json.dumps({n: _jsonable(row[n]) for n in names}, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(format_value(row[name])) for name in names))
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        # In a pipe nothing is cut off to fit a screen.
        console = Console(width=max(80, *(_width(rows, name) for name in names)) * len(names))
    console.print(table)


def _width(rows: list[dict[str, Any]], name: str) -> int:
    return max([len(name), *(len(format_value(row[name])) for row in rows)]) + 2


def format_value(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, dt.datetime):
        return value.isoformat(sep=" ").replace("+00:00", "Z")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _jsonable(value: Any) -> Any:
    """Return a value as JSON has it; what JSON lacks becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
