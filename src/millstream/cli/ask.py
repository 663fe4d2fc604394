"""``millstream ask``: questions to an app, answered from its state; and a server that answers them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.access.tokens import read_token
from millstream.cli.position_option import read_position
from millstream.cli.signals import wait_for_stop_signal
from millstream.cli.tables import TableColumn, app_log_option, json_option, print_table
from millstream.cli.token_option import door_options
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.pipeline.app import App


@click.command()
@click.argument("target", metavar="FILE[:APP]|URL")
@click.argument("name", required=False)
@click.argument("key", nargs=-1, metavar="[COLUMN=VALUE]...")
@click.option(
    "--deadline", default="5 seconds", show_default=True, help="How long the answer may take."
)
@click.option(
    "--at-least",
    metavar="JSON",
    help='A position that the answer must reflect, such as \'{"clicks": {"0": 17}}\'.',
)
@app_log_option
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Answer questions over HTTP at this address, until Ctrl-C, instead of asking one.",
)
@door_options("Questions over HTTP carry a token (Authorization: Bearer …).")
@click.option(
    "--insecure",
    is_flag=True,
    help="With --listen: allow an address that other machines reach, without a token.",
)
@json_option
def ask(
    target: str,
    name: str | None,
    key: tuple[str, ...],
    *,
    deadline: str,
    at_least: str | None,
    address: Path | str | None,
    listen: str | None,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Ask the app in FILE, or whose questions are served at URL, about its state.

    NAME is a step, a view, or a question of the app's; without it, what can be asked is listed. The answer is as of the last batch that is committed; the app may run
    meanwhile, or not at all. Windows that are open answer with their value so far. Values of a key are texts, as for
    `millstream view`; arguments of a question are JSON, or else texts.

    \b
    Examples:
      millstream ask app.py
      millstream ask app.py per_minute ad=7 --deadline 2s
      millstream ask app.py --listen 127.0.0.1:8402
      millstream ask http://127.0.0.1:8402 reach url=example.com/a --json
    """
    if target.startswith(("http://", "https://")):
        if listen is not None:
            raise ConfigError(
                f"--listen serves an app in a file, and {target} is a URL. Give FILE."
            )
        token = None if token_file is None else read_token(token_file)
        _ask_url(target, name, key, (deadline, at_least, token), as_json=as_json)
        return
    from millstream.cli.plan import edited_app

    app = edited_app(target, None, address)
    if listen is not None:
        _serve(app, listen, token_file, (tls_cert, tls_key), insecure=insecure)
    elif name is None:
        _print_listing(app.what_can_be_asked(), as_json=as_json)
    else:
        given = _given(key, is_question=name in app.questions)
        wanted = read_position(at_least)
        _print_answer(app.ask(name, given, deadline=deadline, at_least=wanted).to_json(), as_json)


def _ask_url(
    url: str,
    name: str | None,
    key: Sequence[str],
    given: tuple[str, str | None, str | None],
    *,
    as_json: bool,
) -> None:
    from millstream.views.questions.client import ask as ask_over_http
    from millstream.views.questions.client import list_questions

    deadline, at_least, token = given
    listing = list_questions(url, token)
    if name is None:
        _print_listing(listing, as_json=as_json)
        return
    is_question = any(one["name"] == name and one["kind"] == "question" for one in listing)
    answer = ask_over_http(
        url,
        name,
        _given(key, is_question=is_question),
        deadline=deadline,
        at_least=read_position(at_least),
        token=token,
    )
    _print_answer(answer.to_json(), as_json)


def _serve(
    app: App,
    listen: str,
    token_file: Path | None,
    tls: tuple[Path | None, Path | None],
    *,
    insecure: bool,
) -> None:
    with (
        wait_for_stop_signal() as wait,
        app.serve_questions(
            listen,
            token_file=token_file,
            tls_cert=tls[0],
            tls_key=tls[1],
            insecure=insecure,
        ) as serving,
    ):
        click.echo(f"Answering questions to {app.name} at {serving.url} (Ctrl-C ends it)")
        wait()


def _given(key: Sequence[str], *, is_question: bool) -> dict[str, Any] | None:
    given: dict[str, Any] = {}
    for text in key:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r} is not COLUMN=VALUE. Give each column of the key so.")
        given[name] = _argument(value) if is_question else value
    return given or None


def _argument(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print_listing(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    columns = [
        TableColumn("kind", left=True),
        TableColumn("name", left=True),
        TableColumn(
            "key or arguments",
            lambda row: ", ".join(row.get("key", row.get("arguments", ()))),
            left=True,
        ),
    ]
    print_table(found, columns)


def _print_answer(text: str, as_json: bool) -> None:  # noqa: FBT001 - one of two forms of one thing
    if as_json:
        click.echo(text)
        return
    answer = json.loads(text)
    rows = answer["answer"]
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        print_table(rows, [TableColumn(name) for name in rows[0]])
    else:
        click.echo("no rows" if rows == [] else json.dumps(rows, ensure_ascii=False))
    runs = {True: "the app runs", False: "the app does not run"}.get(answer["running"])
    position = json.dumps(answer["position"], ensure_ascii=False)
    after = "" if runs is None else f"; {runs}"
    click.echo(f"as of batch {answer['batch_id']}, position {position}{after}", err=True)
