"""``millstream produce``: append the lines of standard input to a topic."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import click

from millstream.cli.topic import log_option
from millstream.client import connect
from millstream.errors import ConfigError

_WAITING_MAX = 10_000  # futures kept before the oldest is looked at


@click.command()
@click.argument("topic")
@click.option("--key", help="The key of every record.")
@click.option(
    "--key-field", metavar="FIELD", help="Take the key from this field of each JSON line."
)
@click.option("--raw", is_flag=True, help="Lines are not JSON: append them as they are.")
@click.option("--partition", type=click.IntRange(min=0), help="Append to this partition only.")
@log_option
def produce(
    topic: str,
    key: str | None,
    key_field: str | None,
    partition: int | None,
    folder: Path,
    *,
    raw: bool,
) -> None:
    """Append each line of standard input to TOPIC as one record.

    A line is a JSON value, unless --raw is given. Empty lines are passed over. When the command
    ends with 0, every line is on stable storage.

    \b
    Examples:
      echo '{"user": "u1", "ad": 7}' | millstream produce clicks --key-field user
      millstream produce logs --raw < access.log
    """
    if key is not None and key_field is not None:
        raise click.UsageError("--key and --key-field were both given; give one of them.")
    if raw and key_field is not None:
        raise click.UsageError("--key-field needs JSON lines; leave out --raw, or use --key.")
    sent = 0
    waiting: deque[Future[tuple[int, int]]] = deque()
    with connect(folder) as log:
        log.offsets(topic)  # an unknown topic must not make this process the owner of a new folder
        with log.producer() as producer:
            for number, line in _lines(sys.stdin.buffer):
                own_key = key if raw else _check_json(number, line, key, key_field)
                waiting.append(producer.send(topic, line, key=own_key, partition=partition))
                sent += 1
                if len(waiting) > _WAITING_MAX:
                    waiting.popleft().result()
            producer.flush()
            for future in waiting:
                future.result()
    click.echo(f"{sent} {'record' if sent == 1 else 'records'} appended to {topic}")


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield number, stripped


def _check_json(
    number: int, line: bytes, key: str | None, key_field: str | None
) -> str | int | None:
    """Return the key of a line after making sure that the line is JSON."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"line {number} is not JSON ({error}): {line[:80]!r}; mend it, or append lines as they "
            "are with --raw (the lines before it were appended)"
        ) from None
    if key_field is None:
        return key
    found = value.get(key_field) if isinstance(value, dict) else None
    if found is None or isinstance(found, bool) or not isinstance(found, str | int):
        raise ConfigError(
            f"line {number} has no text or whole number in the field {key_field!r}: "
            f"{line[:80]!r}; mend it, or name another --key-field (the lines before it were "
            "appended)"
        )
    return found
