"""``millstream token``: who may send requests to the HTTP and SQL servers, and what they may do."""

from __future__ import annotations

from pathlib import Path

import click

from millstream.access.tokens import ROLES, Role, TokenFile
from millstream.cli.tables import (
    Choice,
    TableColumn,
    confirm,
    json_option,
    print_result,
    print_rows,
    yes_option,
)

_file_option = click.option(
    "--token-file",
    "path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file of tokens, as for `millstream ui --token-file`.",
)


@click.group()
def token() -> None:
    """Add, list and remove the tokens of servers.

    They are in a file, as hashes. A server that has the file reads it again when it changes.

    \b
    Examples:
      millstream token add grafana --token-file tokens.txt
      millstream token add alice --role operate --token-file tokens.txt
      millstream token list --token-file tokens.txt
    """


@token.command()
@click.argument("name")
@_file_option
@click.option(
    "--role",
    type=Choice(list(ROLES)),
    default="read",
    show_default=True,
    help="What it allows: reading, or everything.",
)
@json_option
def add(name: str, path: Path, role: Role, *, as_json: bool) -> None:
    """Make a token for NAME, and print it: it is shown once, and kept nowhere.

    The file is created if there is none, for its owner alone.

    \b
    Examples:
      millstream token add grafana --token-file tokens.txt
      millstream token add alice --role operate --token-file tokens.txt > alice-token
    """
    made = TokenFile(path).add(name, role)
    values = {"token": made, "name": name, "role": role, "token_file": str(path)}
    if not as_json:
        click.echo(f"{name} may {role}, by the token in {path}. It is shown once:", err=True)
    print_result(made, values, as_json=as_json)


@token.command("list")
@_file_option
@json_option
def list_tokens(path: Path, *, as_json: bool) -> None:
    """List the names and the roles of the tokens.

    \b
    Example:
      millstream token list --token-file tokens.txt
    """
    rows = [
        {"name": one.principal.name, "role": one.principal.role} for one in TokenFile(path).read()
    ]
    columns = [TableColumn("name", left=True), TableColumn("role", left=True)]
    print_rows(rows, columns, as_json=as_json)


@token.command()
@click.argument("name")
@_file_option
@yes_option
@json_option
def remove(name: str, path: Path, *, yes: bool, as_json: bool) -> None:
    """Remove the token NAME. Its next request is refused; a stream that is open goes on until it ends.

    \b
    Example:
      millstream token remove grafana --token-file tokens.txt --yes
    """
    if not yes:
        confirm(f"remove token {name} from {path}?")
    TokenFile(path).remove(name)
    print_result(
        f"removed token {name} from {path}",
        {"name": name, "token_file": str(path)},
        as_json=as_json,
    )
