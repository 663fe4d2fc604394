"""Shared by the commands of the log: the option for its folder, and printing tables.

A table is for people: in a terminal it fits the screen, in a pipe nothing is cut off. With ``--json``
the same rows are printed for programs, with plain numbers in the units that end their names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millstream.choices import did_you_mean
from millstream.client.address import log_folder, shown
from millstream.client.default_log import DEFAULT_FOLDER, LOG_VARIABLE
from millstream.errors import ConfigError

TableRow = Mapping[str, Any]

_PIPE_WIDTH = 10_000  # a pipe has no screen to fit


class _Folder(click.Path):
    """A folder, for what only a folder holds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if log_folder(value) is None:
            raise ConfigError(
                f"The log is {shown(value)}, and brokers keep no state and views of apps. Give the folder "
                "in which these are: --log ./data"
            )
        return super().convert(value, param, ctx)


class Address(click.Path):
    """A folder, or ``kafka://``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if log_folder(value) is None:
            return value
        return super().convert(value, param, ctx)


class Choice(click.Choice[str]):
    """One of a few words; the error for another one names the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = did_you_mean(str(value), map(str, self.choices))
            raise click.BadParameter(error.message + near, ctx, param) from None


def _log_option(dest: str, kind: click.Path, metavar: str, said: str) -> Callable[[Any], Any]:
    return click.option(
        "--log",
        dest,
        type=kind,
        metavar=metavar,
        default=Path(DEFAULT_FOLDER),
        envvar=LOG_VARIABLE,
        show_default=DEFAULT_FOLDER,
        show_envvar=True,
        help=said,
    )


def log_argument(dest: str, kind: click.Path, metavar: str) -> Callable[[Any], Any]:
    """Take a log as an argument that may be left out: then it is as for ``--log``."""
    return click.argument(
        dest, metavar=f"[{metavar}]", type=kind, default=Path(DEFAULT_FOLDER), envvar=LOG_VARIABLE
    )


folder_argument = log_argument("folder", _Folder(file_okay=False, path_type=Path), "DIR")
address_argument = log_argument(
    "address", Address(file_okay=False, path_type=Path), "DIR|kafka://HOST:PORT"
)


log_option = _log_option(
    "folder", _Folder(file_okay=False, path_type=Path), "DIRECTORY", "Folder of the log."
)
address_option = _log_option(
    "address",
    Address(file_okay=False, path_type=Path),
    "FOLDER|kafka://HOST:PORT",
    "The log: its folder, or brokers that have one.",
)
app_log_option = click.option(
    "--log",
    "address",
    metavar="FOLDER|kafka://HOST:PORT",
    type=Address(file_okay=False, path_type=Path),
    help="The log, instead of the one that the app names; where it names none, MILLSTREAM_LOG.",
)
app_name_option = click.option(
    "--app", "name", help="Which app, where the file declares several: as FILE:APP."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
store_option = click.option(
    "--store",
    envvar="MILLSTREAM_VIEWS",
    show_envvar=True,
    metavar="URL",
    help="The database that keeps the views, if it is not the log folder. A password is better left to "
    "PGPASSWORD or ~/.pgpass: a command line can be read by others.",
)
app_store_option = click.option(
    "--store",
    metavar="URL",
    help="The database that keeps the app's state: App(store=…). With it, nothing of the log folder is "
    "needed. A password is better left to PGPASSWORD or ~/.pgpass.",
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column: its title, and what it shows of a row (by default the value of that name)."""

    title: str
    cell: str | Callable[[TableRow], object] = ""
    left: bool = False

    def text(self, row: TableRow) -> Text:
        """Return this column's text for a row; a missing value is a dash."""
        value = self.cell(row) if callable(self.cell) else row[self.cell or self.title]
        if isinstance(value, Text):
            return value
        return Text("-" if value is None else str(value))


def print_rows(rows: Sequence[TableRow], columns: Sequence[TableColumn], *, as_json: bool) -> None:
    """Print rows: as one JSON array, or the columns of them as a table."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, columns)


def print_json(value: object) -> None:
    """Print a value as JSON over several lines."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[TableRow], columns: Sequence[TableColumn]) -> None:
    """Print columns of rows. Names are folded if the screen is too narrow; numbers never are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="left" if column.left else "right",
            overflow="fold",
            no_wrap=not column.left,
            vertical="top",
        )
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(table)


def print_result(sentence: str, values: Mapping[str, object], *, as_json: bool) -> None:
    """Print what was done: a sentence, or the values in it as JSON."""
    if as_json:
        print_json(values)
    else:
        click.echo(sentence)


def confirm(question: str) -> None:
    """Ask, and return if the reply is yes.

    Raises:
        click.Abort: it is no.
        ConfigError: there was none.
    """
    click.echo(f"{question} [y/N]: ", err=True, nl=False)
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
        raise ConfigError(f"nobody answered {question!r}; give --yes to do it without asking")
    if answer.strip().lower() not in {"y", "yes"}:
        raise click.Abort


def pluralize(number: int, noun: str) -> str:
    """Return ``1 record``, ``2 records``, ``3,000 records``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_time(timestamp_ms: int) -> str:
    """Return a time as people read it, in UTC, to the second."""
    when = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return when.strftime("%Y-%m-%d %H:%M:%SZ")
