"""``millstream why``: what holds a window open, and why events were late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millstream.cli.app_folder import app_store
from millstream.cli.tables import app_store_option, json_option, log_option, print_json
from millstream.views.store_location import open_state_store

step_option = click.option("--step", help="Only this step.")


@click.group()
def why() -> None:
    """Say what holds a window open, and why events were late."""


@why.command("open")
@click.argument("app")
@step_option
@log_option
@app_store_option
@json_option
def why_open(app: str, step: str | None, folder: Path, store: str | None, *, as_json: bool) -> None:
    """Say which partition holds the watermark of each step of APP, since when, and what releases it.

    It describes the state after the last batch, whether the app runs or not.

    \b
    Examples:
      millstream why open ads
      millstream why open ads --step "tumbling(1 minute) by ad"
    """
    from millstream.ops.why import why_open as ask

    with open_state_store(app_store(folder, app, store), readonly=True) as opened:
        _answer(ask(opened, app, step), "no step of the app waits for time", as_json=as_json)


@why.command("late")
@click.argument("app")
@step_option
@log_option
@app_store_option
@json_option
def why_late(app: str, step: str | None, folder: Path, store: str | None, *, as_json: bool) -> None:
    """Say how many events were late for each step of APP, and by how much.

    \b
    Examples:
      millstream why late ads
      millstream why late ads --json
    """
    from millstream.ops.why import why_late as ask

    with open_state_store(app_store(folder, app, store), readonly=True) as opened:
        _answer(ask(opened, app, step), "no event came too late", as_json=as_json)


def _answer(found: list[Any], nothing: str, *, as_json: bool) -> None:
    if as_json:
        print_json([each.to_dict() for each in found])
        return
    for each in found:
        first, *rest = each.sentences
        click.echo(first)
        for sentence in rest:
            click.echo(f"  {sentence}")
    if not found:
        click.echo(nothing)
