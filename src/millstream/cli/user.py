"""``millstream user``: who may connect to a broker."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from millstream.broker.security.users import UsersFile
from millstream.cli.tables import confirm, json_option, print_json, print_result, yes_option

_users_option = click.option(
    "--users",
    "path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file of users, as for `millstream broker --users`.",
)


@click.group()
def user() -> None:
    """Add, list and remove the users of a broker.

    They are in a file, with hashes of their passwords. A broker that has the file reads it again
    when it changes.

    \b
    Examples:
      millstream user add alice --users users.txt
      millstream user list --users users.txt
      millstream user remove alice --users users.txt
    """


@user.command()
@click.argument("name")
@_users_option
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the password from standard input.")
@click.option("--replace", is_flag=True, help="Change the password of an existing user.")
@json_option
def add(name: str, path: Path, *, from_stdin: bool, replace: bool, as_json: bool) -> None:
    """Add the user NAME, and the file of users if there is none.

    Prompts for the password without showing it. With --stdin it is the first line of
    standard input. It is stored as a salted hash (scrypt).

    \b
    Examples:
      millstream user add alice --users users.txt
      millstream user add alice --users users.txt --replace
      millstream user add billing --users users.txt --stdin < password.txt
    """
    if from_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = click.prompt("password", hide_input=True, confirmation_prompt=True, err=True)
    UsersFile(path).put(name, password, replace=replace)
    print_result(
        f"added user {name} to {path}", {"user": name, "users": str(path)}, as_json=as_json
    )


@user.command("list")
@_users_option
@json_option
def list_users(path: Path, *, as_json: bool) -> None:
    """List the names of the users.

    \b
    Example:
      millstream user list --users users.txt
    """
    names = sorted(UsersFile(path).read())
    if as_json:
        print_json([{"user": name} for name in names])
    else:
        for name in names:
            click.echo(name)


@user.command()
@click.argument("name")
@_users_option
@yes_option
@json_option
def remove(name: str, path: Path, *, yes: bool, as_json: bool) -> None:
    """Remove the user NAME. Open connections stay open until they end.

    \b
    Example:
      millstream user remove alice --users users.txt --yes
    """
    if not yes:
        confirm(f"remove user {name} from {path}?")
    UsersFile(path).remove(name)
    print_result(
        f"removed user {name} from {path}", {"user": name, "users": str(path)}, as_json=as_json
    )
