"""``millstream consume``: print the records of a topic."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import click

from millstream.cli.topic import log_option
from millstream.client import EventLog, connect
from millstream.errors import ConfigError
from millstream.record import Record, to_timestamp_ms

Start = Literal["earliest", "latest"] | datetime | Mapping[int, int]


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "begin",
    default="earliest",
    show_default=True,
    metavar="earliest|latest|OFFSET|TIME",
    help="Where to begin; a TIME is ISO 8601, in UTC if it names no zone.",
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--follow", is_flag=True, help="Wait for more at the end; stop with Ctrl-C.")
@click.option("--partition", type=click.IntRange(min=0), help="Read this partition only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per record, with position.")
@log_option
def consume(
    topic: str,
    begin: str,
    count: int | None,
    partition: int | None,
    folder: Path,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the values of the records of TOPIC, one per line.

    Records of one partition come in order. A tombstone prints as an empty line; with --json its
    value is null.

    \b
    Examples:
      millstream consume clicks
      millstream consume clicks --from 2026-11-21T10:00 --count 5 --json
      millstream consume clicks --partition 0 --from 100 --follow
    """
    with connect(folder) as log:
        start = _start(log, topic, begin, partition)
        with log.consumer(topic, start=start, follow=follow) as consumer:
            for record in islice(consumer, count):
                line = _as_json(record).encode() if as_json else record.value or b""
                sys.stdout.buffer.write(line + b"\n")
                if follow:
                    sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()


def _start(log: EventLog, topic: str, begin: str, partition: int | None) -> Start:
    bounds = log.offsets(topic)
    if partition is not None and partition >= len(bounds):
        raise ConfigError(
            f"topic {topic!r} has no partition {partition}; choose one of 0 to {len(bounds) - 1}"
        )
    numbers = range(len(bounds)) if partition is None else [partition]
    if begin == "earliest":
        return {number: bounds[number][0] for number in numbers}
    if begin == "latest":
        return {number: bounds[number][1] for number in numbers}
    if begin.isascii() and begin.isdigit():
        return dict.fromkeys(numbers, int(begin))
    try:
        moment = datetime.fromisoformat(begin)
    except ValueError:
        raise ConfigError(
            f"--from is {begin!r}; give earliest, latest, an offset such as 17, or a time such as "
            "2026-11-21T10:00"
        ) from None
    moment_ms = to_timestamp_ms(moment)
    return {number: log.offset_for_time(topic, number, moment_ms) for number in numbers}


def _as_json(record: Record) -> str:
    """Return a record as one line of JSON; bytes that are not text go under a name with _base64."""
    line: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp.isoformat(timespec="milliseconds"),
    }
    try:
        line["key"] = None if record.key is None else record.key.decode()
    except UnicodeDecodeError:
        line["key_base64"] = base64.b64encode(record.key or b"").decode()
    try:
        line["value"] = record.json()
    except ValueError:
        try:
            line["value"] = (record.value or b"").decode()
        except UnicodeDecodeError:
            line["value_base64"] = base64.b64encode(record.value or b"").decode()
    return json.dumps(line, ensure_ascii=False)
