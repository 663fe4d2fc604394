"""``millstream why``: why windows are open, events late and jobs behind; what became of a record, and what made a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from millstream.cli.app_folder import app_store
from millstream.cli.plan import edited_app, named_option
from millstream.cli.tables import (
    app_log_option,
    app_store_option,
    json_option,
    log_option,
    print_json,
)
from millstream.errors import ConfigError
from millstream.views.state_store.sqlite_values import parse_value
from millstream.views.store_location import open_state_store


class _Answer(Protocol):
    """What is answered: in sentences for people, the first of which is the answer, and as plain values."""

    @property
    def sentences(self) -> tuple[str, ...]: ...

    def to_dict(self) -> dict[str, Any]: ...


step_option = click.option("--step", help="Only this step.")


@click.group()
def why() -> None:
    """Say why a window or match is open, an event late, a job behind, a row missing, a value so."""


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
        _print_answers(ask(opened, app, step), "no step of the app waits for time", as_json=as_json)


@why.command("late")
@click.argument("app")
@step_option
@log_option
@app_store_option
@json_option
def why_late(app: str, step: str | None, folder: Path, store: str | None, *, as_json: bool) -> None:
    """Say how many events were late for each step of APP, and by how much.

    Of a single record, `millstream why record` says it.

    \b
    Examples:
      millstream why late ads
      millstream why late ads --json
    """
    from millstream.ops.why import why_late as ask

    with open_state_store(app_store(folder, app, store), readonly=True) as opened:
        _print_answers(ask(opened, app, step), "no event came too late", as_json=as_json)


@why.command("behind")
@click.argument("app")
@log_option
@app_store_option
@json_option
def why_behind(app: str, folder: Path, store: str | None, *, as_json: bool) -> None:
    """Say how far APP is behind its topics, whether it catches up, and which phase and step take its time.

    It looks at the last 60 batches of the newest run, and at the ends of the log.

    \b
    Examples:
      millstream why behind ads
      millstream why behind ads --json
    """
    from millstream.ops.why_behind import why_behind as ask

    with open_state_store(app_store(folder, app, store), readonly=True) as opened:
        found = ask(opened, app, folder)
    _print_answer(found, as_json=as_json)


@why.command("record")
@click.argument("file", metavar="FILE[:APP]")
@click.argument("record", metavar="TOPIC/PARTITION/OFFSET")
@app_log_option
@json_option
def why_record(file: str, record: str, address: Path | str | None, *, as_json: bool) -> None:
    """Follow one record through the app in FILE: what each step did with it, and the rows it is in, or why it is in none.

    The log up to the record is read again and processed in memory, by the app as it is declared in FILE. It changes
    nothing, and the app may run meanwhile.

    \b
    Examples:
      millstream why record app.py ad-events/0/17
      millstream why record app.py ad-events/0/17 --json
    """
    from millstream.ops.dead_letter_replay import parse_record_id
    from millstream.ops.record_trace import trace_record

    found = trace_record(edited_app(file, None, address), parse_record_id(record))
    _print_answer(found, as_json=as_json)


@why.command("value")
@click.argument("file", metavar="FILE[:APP]")
@click.argument("view")
@click.argument("key", nargs=-1, required=True, metavar="COLUMN=VALUE...")
@app_log_option
@json_option
def why_value(
    file: str, view: str, key: tuple[str, ...], address: Path | str | None, *, as_json: bool
) -> None:
    """List the records behind a row of VIEW: those without which it would be another, and what it would be then.

    The row is named by its key. The log is read again and processed in memory, by the app as it is declared in FILE.
    It changes nothing, and the app may run meanwhile.

    \b
    Examples:
      millstream why value app.py ad_ctr window_start=2026-01-31T12:00:00Z ad_id=7
      millstream why value app.py ad_ctr window_start=2026-01-31T12:00:00Z ad_id=7 --json
    """
    from millstream.ops.value_records import records_behind

    app = edited_app(file, None, address)
    with open_state_store(app.state_store, readonly=True) as opened:
        kinds = opened.schema(view).kinds
    found = records_behind(app, view, dict(_key_value(text, kinds) for text in key))
    _print_answer(found, as_json=as_json)


@why.command("match")
@click.argument("file", metavar="FILE[:APP]")
@click.argument("key", nargs=-1, metavar="[COLUMN=VALUE...]")
@step_option
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="At most so many partial matches.",
)
@app_log_option
@named_option
@json_option
def why_match(
    file: str,
    key: tuple[str, ...],
    step: str | None,
    limit: int,
    address: Path | str | None,
    *,
    as_json: bool,
) -> None:
    """List the partial matches of the patterns of the app in FILE: their rows, what each waits for, when its time is over.

    COLUMN=VALUE leaves those of other keys out. It describes the state after the last batch, whether the app runs or not.

    \b
    Examples:
      millstream why match app.py
      millstream why match app.py user=anna --step "match(cart)"
    """
    from millstream.ops.partial_matches import partial_matches

    wanted = dict(_column_text(text) for text in key)
    _print_answer(
        partial_matches(edited_app(file, None, address), step, wanted, limit), as_json=as_json
    )


def _column_text(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"{text!r} is not COLUMN=VALUE. Name a column of the key: user=anna.")
    return name, value


def _key_value(text: str, kinds: dict[str, str]) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or name not in kinds:
        raise ConfigError(
            f"{text!r} is not COLUMN=VALUE with one of the columns {', '.join(kinds)}."
        )
    return name, parse_value(value, kinds[name])


def _print_answers(found: Sequence[_Answer], nothing: str, *, as_json: bool) -> None:
    if as_json:
        print_json([each.to_dict() for each in found])
        return
    for each in found:
        _print_sentences(each.sentences)
    if not found:
        click.echo(nothing)


def _print_answer(answer: _Answer, *, as_json: bool) -> None:
    if as_json:
        print_json(answer.to_dict())
    else:
        _print_sentences(answer.sentences)


def _print_sentences(sentences: tuple[str, ...]) -> None:
    first, *rest = sentences
    click.echo(first)
    for sentence in rest:
        click.echo(f"  {sentence}")
