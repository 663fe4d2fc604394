"""``millstream sql``: statements over views and topics, at a prompt or one by one; and a server that PostgreSQL's clients ask."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millstream.access.tls import certificate_of
from millstream.access.tokens import tokens_of
from millstream.cli.position_option import read_position
from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import Choice
from millstream.cli.token_option import door_options
from millstream.durations import to_us
from millstream.errors import ConfigError, MillstreamError

if TYPE_CHECKING:
    from millstream.sql_queries.app_tables import SqlScope
    from millstream.sql_queries.query import SqlResult
    from millstream.sql_queries.session import SqlLimits, SqlSession

_PIPE_WIDTH = 10_000  # a pipe has no screen to fit
_PROMPT_ROWS_MAX = 200
_HELP = r"Statements end with a semicolon. \d lists tables, \q ends."


@click.command()
@click.argument("target", metavar="FILE[:APP]|FOLDER|kafka://…")
@click.argument("query", required=False)
@click.option("--app", help="Which app, where the file or the folder has several.")
@click.option(
    "--format",
    "form",
    type=Choice(["table", "csv", "json", "parquet"]),
    default="table",
    show_default=True,
    help="How rows are printed; json is an object in a line. Parquet needs --output.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows to this file."
)
@click.option(
    "--at-least",
    metavar="JSON",
    help='A position that the rows must reflect, such as \'{"clicks": {"0": 17}}\'. It is waited for.',
)
@click.option(
    "--timeout", default="1 minute", show_default=True, help="How long a statement may take."
)
@click.option(
    "--memory-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(min=64),
    help="How much memory the engine may take for a statement, beside the rows of the tables.",
)
@click.option(
    "--since", metavar="DURATION", help="Of topics only the records of so long ago or less."
)
@click.option(
    "--topic-records-max",
    default=5_000_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="The largest topic that a statement may read.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Speak PostgreSQL's protocol at this address, until Ctrl-C.",
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path),
    help="With --listen: the file with the password that clients must have. By default what "
    "MILLSTREAM_SQL_PASSWORD has.",
)
@door_options("With --listen: the name of a token is the user, and the token the password.")
def sql(
    target: str,
    query: str | None,
    *,
    app: str | None,
    form: str,
    output: Path | None,
    at_least: str | None,
    timeout: str,
    memory_mb: int,
    since: str | None,
    topic_records_max: int,
    listen: str | None,
    password_file: Path | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Ask the views and topics of an app in SQL, at one position of the log.

    QUERY is one statement; without it there is a prompt, or standard input is read. Views are `views.NAME`, topics `topics.NAME`.
    Given FILE, topics that the app declares have their fields as columns; given a folder, each has its values as text. The SQL is
    DuckDB's. It only reads.

    \b
    Examples:
      millstream sql app.py "SELECT ad, sum(n) FROM per_minute GROUP BY ad"
      millstream sql ./data "SELECT * FROM topics.clicks LIMIT 5" --format json
      millstream sql app.py "FROM per_minute" --format parquet --output minutes.parquet
      millstream sql app.py
      millstream sql app.py --listen 127.0.0.1:5433
      psql "host=127.0.0.1 port=5433 dbname=clicks"
    """
    from millstream.sql_queries.session import SqlLimits

    scope = _scope(target, app, since, topic_records_max)
    limits = SqlLimits(seconds=to_us(timeout, what="--timeout") / 1e6, memory_mb=memory_mb)
    if listen is not None:
        if query is not None:
            raise ConfigError(
                "--listen serves statements of clients, and one is given. Leave out one of them."
            )
        _serve(scope, limits, listen, (password_file, token_file), (tls_cert, tls_key))
        return
    if form == "parquet" and output is None:
        raise ConfigError("--format parquet is for a file. Give --output FILE.")
    wanted = read_position(at_least)
    with _session(scope, limits) as session:
        if query is None and sys.stdin.isatty():
            _prompt(session, wanted)
            return
        result = _run(session, sys.stdin.read() if query is None else query, wanted)
        _write(result, form, output)


def _scope(target: str, app: str | None, since: str | None, records_max: int) -> SqlScope:
    from millstream.client.address import is_kafka
    from millstream.sql_queries.query import scope_of

    options: dict[str, Any] = {"since": since, "records_max": records_max}
    if is_kafka(target) or Path(target).is_dir():
        return scope_of(app, target, **options)
    if not Path(target).exists() and "." not in target and ":" not in target:
        raise ConfigError(
            f"There is no folder {target!r}. Give the folder of a log, or the file of an app."
        )
    from millstream.cli.run import find_app, split_file

    path, name = split_file(target, app)
    return scope_of(find_app(path, name), None, **options)


@contextmanager
def _session(scope: SqlScope, limits: SqlLimits) -> Iterator[SqlSession]:
    from millstream.sql_queries.app_tables import AppTables
    from millstream.sql_queries.session import SqlSession

    with closing(AppTables(scope)) as tables, closing(SqlSession(tables, limits)) as session:
        yield session


def _serve(
    scope: SqlScope,
    limits: SqlLimits,
    listen: str,
    secrets: tuple[Path | None, Path | None],
    tls: tuple[Path | None, Path | None],
) -> None:
    from millstream.sql_queries.server.server import read_password, serve_sql

    password_file, token_file = secrets
    if password_file is not None and token_file is not None:
        raise ConfigError(
            "A password and tokens are given. Give one of --password-file and --token-file."
        )

    with (
        wait_for_stop_signal() as wait,
        serve_sql(
            scope,
            listen,
            limits=limits,
            password=None if token_file is not None else read_password(password_file),
            tokens=tokens_of(None, token_file),
            certificate=certificate_of(*tls),
        ) as serving,
    ):
        click.echo(f"Serving {scope.log} to PostgreSQL's clients at {serving.url} (Ctrl-C ends it)")
        wait()


def _run(session: SqlSession, query: str, at_least: Mapping[str, Any] | None) -> SqlResult:
    from millstream.sql_queries.query import to_result

    return to_result(session.run(query.strip().rstrip(";"), at_least))


def _write(result: SqlResult, form: str, output: Path | None) -> None:
    """Print the rows, or write them to a file; say on standard error what they reflect."""
    from millstream.sql_queries.row_text import csv_text, json_lines

    if form == "parquet":
        assert output is not None, "it was checked"
        result.rows.write_parquet(output)
    elif form == "table" and output is None:
        _print_table(result)
    else:
        text = (csv_text if form == "csv" else json_lines)(result.rows, result.types)
        if output is None:
            click.echo(text, nl=False)
        else:
            output.write_text(text)
    _say_position(result)


def _print_table(result: SqlResult, rows_max: int | None = None) -> None:
    from millstream.cli.view import format_value

    rows = result.rows if rows_max is None else result.rows.head(rows_max)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in rows.iter_columns():
        table.add_column(
            Text(column.name), justify="right" if column.dtype.is_numeric() else "left"
        )
    for row in rows.iter_rows():
        table.add_row(*(Text(format_value(value)) for value in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    if rows.width:
        console.print(table)
    if rows.height < result.rows.height:
        click.echo(f"The first {rows.height:,} of {result.rows.height:,} rows.")


def _say_position(result: SqlResult) -> None:
    position = json.dumps(result.position, ensure_ascii=False)
    batch = "no batch" if result.batch_id is None else f"batch {result.batch_id}"
    click.echo(f"as of {batch}, position {position}", err=True)
    for note in result.notes:
        click.echo(note, err=True)


def _prompt(session: SqlSession, at_least: Mapping[str, Any] | None) -> None:
    """Ask for statements until the end of input; an error ends a statement, Ctrl-C the one that is being written."""
    import readline  # noqa: F401 - gives input() its history and its keys

    click.echo(_HELP)
    lines: list[str] = []
    while True:
        try:
            line = input("sql> " if not lines else "...> ")
        except KeyboardInterrupt:
            click.echo()
            lines = []
            continue
        except EOFError:
            click.echo()
            return
        if not lines and line.strip() in ("\\q", "exit", "quit"):
            return
        if not lines and line.strip() == "\\d":
            line = "FROM (SHOW ALL TABLES) SELECT schema, name, column_names WHERE schema IN ('views', 'topics');"
        if not lines and not line.strip():
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            _answer(session, "\n".join(lines), at_least)
            lines = []


def _answer(session: SqlSession, query: str, at_least: Mapping[str, Any] | None) -> None:
    try:
        result = _run(session, query, at_least)
    except MillstreamError as error:
        click.echo(str(error), err=True)
    except KeyboardInterrupt:
        session.interrupt()
        click.echo("cancelled", err=True)
    else:
        _print_table(result, _PROMPT_ROWS_MAX)
        _say_position(result)
