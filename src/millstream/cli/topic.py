"""``millstream topic``: make, list, describe, alter, archive and delete the topics of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from millstream.cli.byte_sizes import describe_bytes, parse_bytes
from millstream.cli.tables import (
    TableColumn,
    TableRow,
    address_option,
    confirm,
    json_option,
    pluralize,
    print_json,
    print_result,
    print_rows,
    print_table,
    yes_option,
)
from millstream.client import connect
from millstream.client.address import shown
from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.client.topic_settings import topic_settings
from millstream.durations import format_us
from millstream.errors import ConfigError
from millstream.log.config import FOREVER, TopicConfig
from millstream.log.reader import LogReader
from millstream.log.topics import check_topic_name

Command = TypeVar("Command", bound=Callable[..., Any])


def _setting_options(command: Command) -> Command:
    for option in (
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="NAME=VALUE",
            help="Any setting, under Kafka's name and in Kafka's unit; may be repeated. "
            "`topic describe --all` shows their names.",
        ),
        click.option(
            "--cleanup",
            metavar="delete|compact|compact,delete",
            help="delete: old segments are removed. compact: the last record of each key is kept.",
        ),
        click.option(
            "--retention-bytes",
            metavar="SIZE",
            help='How much of each partition is kept at least, in bytes or as "10GiB".',
        ),
        click.option(
            "--retention",
            metavar="DURATION",
            help='How long records are kept, by their timestamps, such as "7 days".',
        ),
    ):
        command = option(command)
    return command


@click.group()
def topic() -> None:
    """Create, list, describe, alter, archive and delete topics.

    \b
    Examples:
      millstream topic create clicks --partitions 4 --retention "7 days"
      millstream topic list
      millstream topic describe clicks --json
      millstream topic alter clicks --retention "14 days"
    """


@topic.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many ordered parts the topic has. More can be added later; keys then move.",
)
@_setting_options
@address_option
@json_option
def create(
    name: str,
    *,
    partitions: int,
    retention: str | None,
    retention_bytes: str | None,
    cleanup: str | None,
    assignments: tuple[str, ...],
    address: Path | str,
    as_json: bool,
) -> None:
    """Create the topic NAME, and the log folder if there is none.

    All records are kept forever, unless an option says otherwise. Whole segments are removed, so a
    little more is kept than the limit.

    \b
    Examples:
      millstream topic create clicks --partitions 4
      millstream topic create clicks --retention "7 days" --retention-bytes 10GiB
      millstream topic create customers --cleanup compact --set segment.bytes=1048576
    """
    settings = _settings_given(retention, retention_bytes, cleanup, assignments)
    check_topic_name(name)  # a wrong call must not leave a new folder behind
    with connect(address) as log:
        info = log.create_topic(name, partitions=partitions, settings=settings)
    print_result(
        f"created topic {name} with {pluralize(partitions, 'partition')} in {shown(address)}",
        {"topic": name, "topic_id": info.topic_id, "partitions": partitions, "settings": settings},
        as_json=as_json,
    )


@topic.command("list")
@address_option
@json_option
def list_topics(address: Path | str, *, as_json: bool) -> None:
    """List the topics, with how much each holds and how long it is kept.

    The number of records counts offsets: where compaction removed records, or transactions left
    their marks, there are fewer. Bytes are those of the segments on disk.

    \b
    Example:
      millstream topic list --log ./data
    """
    reader = open_reader(address)
    rows = [_topic_row(reader, name, info.partitions) for name, info in reader.topics().items()]
    if as_json or rows:
        print_rows(rows, _LIST_COLUMNS, as_json=as_json)
    else:
        click.echo(f"no topics in {shown(address)}; make one with: millstream topic create NAME")


@topic.command()
@click.argument("name")
@click.option(
    "--all", "every", is_flag=True, help="Show the settings that have their defaults too."
)
@address_option
@json_option
def describe(name: str, address: Path | str, *, every: bool, as_json: bool) -> None:
    """Show the settings of the topic NAME, and what each partition holds.

    Offsets from `start` up to, but without, `end` can be read. Of these, some have no record where
    compaction removed it, or a transaction left its mark. Bytes are those of the segments on disk.

    \b
    Examples:
      millstream topic describe clicks
      millstream topic describe clicks --all
    """
    reader = open_reader(address)
    settings = reader.settings(name)
    defaults = TopicConfig().settings()
    given = {key: text for key, text in settings.items() if every or text != defaults.get(key)}
    info = reader.topics()[name]
    partitions = [_partition_row(reader, name, number) for number in range(info.partitions)]
    if as_json:
        print_json(
            {
                "topic": name,
                "topic_id": info.topic_id,
                "settings": given,
                "partitions": partitions,
            }
        )
        return
    click.echo(f"topic {name}, id {info.topic_id}")
    if given:
        rows = [
            {"name": key, "value": text, "default": defaults.get(key)}
            for key, text in given.items()
        ]
        print_table(rows, _SETTING_COLUMNS)
    else:
        click.echo("all settings have their defaults; --all shows them")
    click.echo()
    print_table(partitions, _PARTITION_COLUMNS)


@topic.command()
@click.argument("name")
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="How many there are to be. They can be added, not taken away; the records stay where they "
    "are, and a key may go to another partition from now on.",
)
@_setting_options
@click.option(
    "--unset",
    "unset",
    multiple=True,
    metavar="NAME",
    help="Reset a setting to its default; may be repeated.",
)
@address_option
@json_option
def alter(
    name: str,
    *,
    partitions: int | None,
    retention: str | None,
    retention_bytes: str | None,
    cleanup: str | None,
    assignments: tuple[str, ...],
    unset: tuple[str, ...],
    address: Path | str,
    as_json: bool,
) -> None:
    """Change settings of the topic NAME, or add partitions. Settings that are not named do not change.

    \b
    Examples:
      millstream topic alter clicks --retention "14 days"
      millstream topic alter clicks --set retention.ms=86400000 --unset retention.bytes
      millstream topic alter clicks --partitions 8
    """
    given = _settings_given(retention, retention_bytes, cleanup, assignments)
    changes = {**given, **_settings_unset(unset, given)}
    if not changes and partitions is None:
        raise ConfigError(
            f"nothing was said to change of topic {name!r}; give --set, --unset, --retention, "
            "--retention-bytes, --cleanup or --partitions"
        )
    reader = open_reader(address)
    before = _state(reader, name)  # an unknown topic must not make this process the owner
    with connect(address) as log:
        log.alter_topic(name, partitions=partitions, settings=changes)
        after = _state(reader, name)
    rows = [
        {"setting": key, "before": before[key], "after": value}
        for key, value in after.items()
        if value != before[key]
    ]
    if rows or as_json:
        print_rows(rows, _CHANGE_COLUMNS, as_json=as_json)
    else:
        click.echo(f"topic {name} was like that already")


@topic.command()
@click.argument("name")
@yes_option
@address_option
@json_option
def delete(name: str, address: Path | str, *, yes: bool, as_json: bool) -> None:
    """Delete the topic NAME and all its records, for good.

    The offsets that groups have committed in it are deleted too.

    \b
    Example:
      millstream topic delete clicks --yes
    """
    with connect(address) as log:
        records = sum(end - start for start, end in log.offsets(name))
        if not yes:
            confirm(f"delete topic {name} and its {pluralize(records, 'record')} for good?")
        log.delete_topic(name)
    print_result(
        f"deleted topic {name} and its {pluralize(records, 'record')}",
        {"topic": name, "records_at_most": records},
        as_json=as_json,
    )


@topic.command()
@click.argument("name")
@click.option(
    "--app",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The Python file with the app that declares the topic: its schema gives the columns.",
)
@click.option("--name", "app_name", help="Which app, where the file declares several: its name.")
@click.option(
    "--close-active",
    is_flag=True,
    help="Close the segments that are still growing first, to archive all.",
)
@json_option
def archive(
    name: str, *, file: Path, app_name: str | None, close_active: bool, as_json: bool
) -> None:
    """Write a Parquet file with the records as columns beside each closed segment of the topic NAME.

    Batch tools read these files as they are; jobs read them instead of decoding the records again.
    They are copies, and may be deleted at any time. An archive is not written again
    unless the schema has changed. The log is the one that the app names.

    `undecodable` counts records that do not fit the schema: only their segment has what they hold.

    \b
    Examples:
      millstream topic archive bids --app app.py
      millstream topic archive bids --app app.py --close-active --json
    """
    from millstream.cli.progress_bar import progress_bar
    from millstream.cli.run import find_app

    app = find_app(file, app_name)
    if name not in app.topics:
        known = ", ".join(app.topics) or "none"
        raise ConfigError(
            f"the app {app.name!r} in {file} declares no topic {name!r} (topics: {known}); correct "
            "the name, or declare it there with its schema"
        )
    with progress_bar("archiving") as progress:
        found = app.topics[name].archive(close_active=close_active, on_progress=progress)
    print_rows([asdict(one) for one in found], _ARCHIVE_COLUMNS, as_json=as_json)
    for text in [] if as_json else [text for one in found for text in one.left_out]:
        click.echo(f"left out: {text}", err=True)


# -- settings as they are given ---------------------------------------------------------------


def _settings_given(
    retention: str | None,
    retention_bytes: str | None,
    cleanup: str | None,
    assignments: Sequence[str],
) -> dict[str, str]:
    """Return what the options set, under Kafka's names.

    Raises:
        ConfigError: a setting is not known, not possible, or given twice.
    """
    others: dict[str, str] = {} if cleanup is None else {"cleanup.policy": cleanup}
    for text in assignments:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not key:
            raise ConfigError(f"--set is {text!r}; give NAME=VALUE, such as retention.ms=86400000")
        if key in others:
            raise ConfigError(
                f"{key} was given twice, as {others[key]!r} and as {value!r}; give it once"
            )
        others[key] = value
    size = None
    if retention_bytes is not None:
        size = parse_bytes(retention_bytes, what="--retention-bytes")
    settings = topic_settings(retention, size, "delete", others)
    TopicConfig.parse(settings)
    return settings


def _settings_unset(names: Sequence[str], given: Mapping[str, str]) -> dict[str, None]:
    known = TopicConfig().settings()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--unset is {name!r}; a topic has the settings {', '.join(sorted(known))}"
            )
        if name in given:
            raise ConfigError(f"{name} was set and unset at once; do one of them")
    return dict.fromkeys(names)


def _state(reader: Reader, name: str) -> dict[str, str]:
    """Return all that can be altered of a topic."""
    settings = reader.settings(name)
    return {"partitions": str(reader.topics()[name].partitions), **settings}


# -- topics as they are shown -----------------------------------------------------------------


def _topic_row(reader: Reader, name: str, partitions: int) -> dict[str, object]:
    known = TopicConfig().settings().keys()
    settings = reader.settings(name).items()
    config = TopicConfig.parse({key: text for key, text in settings if key in known})
    rows = [_partition_row(reader, name, number) for number in range(partitions)]
    return {
        "topic": name,
        "partitions": partitions,
        "records_at_most": sum(row["records_at_most"] for row in rows),
        "bytes": _sum_of_known(row["bytes"] for row in rows),
        "cleanup": ",".join(sorted(config.cleanup_policy)),
        "retention_ms": _limit(config.retention_ms),
        "retention_bytes": _limit(config.retention_bytes),
    }


def _sum_of_known(values: Iterable[int | None]) -> int | None:
    found = list(values)
    return None if None in found else sum(value or 0 for value in found)


def _partition_row(reader: Reader, name: str, number: int) -> dict[str, Any]:
    start, end = reader.bounds(name, number)
    files = reader.contents(name, number) if isinstance(reader, LogReader) else None
    return {
        "partition": number,
        "start": start,
        "end": end,
        "records_at_most": end - start,
        "bytes": None if files is None else files.size_bytes,
    }


def _bytes(row: TableRow) -> str | None:
    """Return the size of the segments; brokers do not report it."""
    return None if row["bytes"] is None else describe_bytes(row["bytes"])


def _limit(value: int) -> int | None:
    return None if value == FOREVER else value


def _retention(row: TableRow) -> str:
    """Say how long a topic keeps its records."""
    limits = []
    if "delete" in row["cleanup"]:
        if row["retention_ms"] is not None:
            limits.append(format_us(row["retention_ms"] * 1000))
        if row["retention_bytes"] is not None:
            limits.append(describe_bytes(row["retention_bytes"]))
    return ", ".join(limits) or "forever"


def _human_value(name: str, text: str) -> str:
    """Say the value of a setting in units that people use; nothing if it is plain already."""
    if not name.endswith((".ms", ".bytes")):
        return ""
    if text == str(FOREVER):
        return "no limit"
    number = int(text)
    return format_us(number * 1000) if name.endswith(".ms") else describe_bytes(number)


def _with_human_value(name: str, text: str | None) -> str | None:
    if text is None:
        return None
    meaning = _human_value(name, text)
    return f"{text} ({meaning})" if meaning else text


_LIST_COLUMNS = [
    TableColumn("topic", left=True),
    TableColumn("partitions"),
    TableColumn("records\nat most", "records_at_most"),
    TableColumn("bytes", _bytes),
    TableColumn("cleanup", left=True),
    TableColumn("retention", _retention, left=True),
]
_PARTITION_COLUMNS = [
    TableColumn("partition"),
    TableColumn("start"),
    TableColumn("end"),
    TableColumn("records at most", "records_at_most"),
    TableColumn("bytes", _bytes),
]
_ARCHIVE_COLUMNS = [
    TableColumn("partition"),
    TableColumn("segments\narchived", "segments"),
    TableColumn("of these\nnow", "made"),
    TableColumn("records", "rows"),
    TableColumn("undecodable"),
    TableColumn("bytes\nbefore", lambda row: describe_bytes(row["segment_bytes"])),
    TableColumn("bytes\nafter", lambda row: describe_bytes(row["archive_bytes"])),
]
_SETTING_COLUMNS = [
    TableColumn("setting", "name", left=True),
    TableColumn("value"),
    TableColumn("that is", lambda row: _human_value(row["name"], row["value"]), left=True),
    TableColumn("default", lambda row: _with_human_value(row["name"], row["default"]), left=True),
]
_CHANGE_COLUMNS = [
    TableColumn("setting", left=True),
    TableColumn("before", lambda row: _with_human_value(row["setting"], row["before"]), left=True),
    TableColumn("after", lambda row: _with_human_value(row["setting"], row["after"]), left=True),
]
