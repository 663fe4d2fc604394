"""``millstream dead``: records that could not be processed; see them, append them again."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from millstream.cli.audit_option import audited
from millstream.cli.tables import (
    TableColumn,
    app_store_option,
    confirm,
    json_option,
    log_option,
    pluralize,
    print_json,
    print_result,
    print_rows,
    yes_option,
)
from millstream.errors import ConfigError
from millstream.kernels.errors.dead_letters import text_or_base64
from millstream.ops.dead_letter_replay import (
    DeadLetterFilter,
    dead_letters,
    parse_record_id,
    replay,
)
from millstream.views.dead_letter_relay import dead_letter_topic, relay
from millstream.views.reader import find_state_store

_topic_option = click.option("--topic", help="Only records of this topic.")
_reason_option = click.option("--reason", metavar="TEXT", help="Only reasons that have this text.")


@click.group()
def dead() -> None:
    """Look at records that could not be processed, and append them again.

    Such a record is kept whole, with the reason, in the view `dead_letters` of its app, and is
    forwarded to the topic APP.dead.

    \b
    Examples:
      millstream dead list ads
      millstream dead show ads ad-events/0/17
      millstream dead replay ads --reason "field 'cost'"
    """


@dead.command("list")
@click.argument("app")
@_topic_option
@_reason_option
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=0), help="Rows.")
@log_option
@app_store_option
@json_option
def list_dead(
    app: str,
    *,
    topic: str | None,
    reason: str | None,
    limit: int,
    folder: Path,
    store: str | None,
    as_json: bool,
) -> None:
    """List the dead letters of APP, by topic, partition and offset.

    \b
    Examples:
      millstream dead list ads --topic ad-events --limit 10
      millstream dead list ads --reason "is missing" --json
    """
    found = dead_letters(folder, app, DeadLetterFilter(topic, reason), store=store)
    if found.is_empty() and not as_json:
        click.echo(f"No dead letters in {app}.")
        return
    rows = [_row(row) for row in found.head(limit).iter_rows(named=True)]
    columns = (
        TableColumn("record", left=True),
        TableColumn("time", left=True),
        TableColumn("step", left=True),
        TableColumn("reason", left=True),
        TableColumn("replayed", left=True),
    )
    print_rows(rows, columns, as_json=as_json)
    if found.height > limit and not as_json:
        click.echo(f"{limit} of {pluralize(found.height, 'row')}; --limit shows more.")


@dead.command("show")
@click.argument("app")
@click.argument("record")
@log_option
@app_store_option
@json_option
def show_dead(app: str, record: str, *, folder: Path, store: str | None, as_json: bool) -> None:
    """Show the dead letter of a RECORD of APP: the reason, the step, and its key, headers and value.

    \b
    Example:
      millstream dead show ads ad-events/0/17
    """
    found = dead_letters(
        folder, app, DeadLetterFilter(record_ids=[parse_record_id(record)]), store=store
    )
    if found.is_empty():
        raise ConfigError(f"{app} has no dead letter {record}; `millstream dead list` shows them")
    rows = [_row(row) | _contents(row) for row in found.iter_rows(named=True)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        for name, value in row.items():
            click.echo(f"{name + ':':<10}{_shown(value)}")


@dead.command("replay")
@click.argument("app")
@_topic_option
@_reason_option
@click.option(
    "--record",
    "records",
    multiple=True,
    metavar="TOPIC/PARTITION/OFFSET",
    help="Only this record; may be repeated.",
)
@click.option("--again", is_flag=True, help="Also records that were replayed before.")
@click.option("--late-ok", is_flag=True, help="Also if some may be late.")
@yes_option
@log_option
@app_store_option
@json_option
def replay_dead(
    app: str,
    *,
    topic: str | None,
    reason: str | None,
    records: tuple[str, ...],
    again: bool,
    late_ok: bool,
    yes: bool,
    folder: Path,
    store: str | None,
    as_json: bool,
) -> None:
    """Replay dead letters of APP: append them to their topics again, once the cause is fixed.

    They are new records, with the old bytes, headers, timestamps and partitions. Each is appended
    once, however often this is repeated, unless --again is given.

    A dead letter from after a shuffle has its row but no record: it is omitted, and counted.

    The app's event time has advanced since: a record whose window is closed is counted as late, and left
    out of it. If some may be late, as of what the app has committed, nothing is appended without
    --late-ok. Records whose event time cannot be read from their bytes count as possibly late.

    \b
    Examples:
      millstream dead replay ads
      millstream dead replay ads --topic ad-events --reason "field 'cost'" --yes
      millstream dead replay ads --record ad-events/0/17 --again
    """
    selection = DeadLetterFilter(topic, reason, [parse_record_id(record) for record in records])
    if not yes:
        found = dead_letters(folder, app, selection, store=store)
        confirm(f"Append {pluralize(found.height, 'dead letter')} of {app} again, as far as due?")
    details = {"topic": topic, "reason": reason, "records": list(records), "again": again}
    with audited(folder, app, "dead replay", {**details, "late_ok": late_ok}) as recorded:
        done = replay(folder, app, selection, again=again, late_ok=late_ok, store=store)
        recorded["appended"] = done.records
    sentence = f"{pluralize(done.records, 'record')} appended again"
    if done.finished:
        sentence += f", and {done.finished} of a replay that was interrupted"
    if done.may_be_late:
        sentence += f"; {done.may_be_late} of them may come too late for the app"
    if done.already_replayed:
        sentence += (
            f"; {done.already_replayed} were replayed before (--again appends them once more)"
        )
    if done.rows_without_record:
        sentence += (
            f"; {pluralize(done.rows_without_record, 'dead letter')} from after a shuffle left out, as no record of "
            "them is kept (millstream reset reads everything again)"
        )
    values = dataclasses.asdict(done)
    print_result(sentence, values, as_json=as_json)


@dead.command("relay")
@click.argument("app")
@log_option
@app_store_option
@json_option
def relay_dead(app: str, *, folder: Path, store: str | None, as_json: bool) -> None:
    """Forward dead letters of APP to the topic APP.dead, each exactly once.

    A run does so at its end, unless another process owns the folder then.

    \b
    Example:
      millstream dead relay ads
    """
    # It names the existing apps, if it is none of them.
    location = find_state_store(folder, app, store)
    count = relay(folder, app, store=location)
    values = {"topic": dead_letter_topic(app), "records": count}
    print_result(
        f"{pluralize(count, 'record')} forwarded to {dead_letter_topic(app)}",
        values,
        as_json=as_json,
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "record": f"{row['topic']}/{row['partition']}/{row['offset']}",
        "time": _format_time(row["time"], "milliseconds"),
        "step": row["step"],
        "reason": row["reason"],
        "replayed": _format_time(row["replayed_at"], "seconds"),
    }


def _format_time(at: datetime | None, timespec: str) -> str | None:
    """Format a time; None where there is none, as of a row without a record."""
    return None if at is None else at.isoformat(timespec=timespec).replace("+00:00", "Z")


def _contents(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": text_or_base64(row["key"]),
        "headers": None if row["headers"] is None else json.loads(row["headers"]),
        "value": text_or_base64(row["value"]),
    }


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
