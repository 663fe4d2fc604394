"""``millstream produce``: append the lines of standard input to a topic."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, get_args

import click

from millstream.cli.tables import Choice, address_option, json_option, pluralize, print_result
from millstream.client import connect
from millstream.client.json_fields import key_in, timestamp_ms_in
from millstream.errors import ConfigError
from millstream.log.compression import CompressionName
from millstream.log.group_commit import DURABILITIES, Durability
from millstream.record import RecordMetadata

_WAITING_MAX = 10_000  # futures kept before the oldest is looked at
_TELL_EVERY_S = 1.0


@click.command()
@click.argument("topic")
@click.option("--key", help="The key of every record.")
@click.option(
    "--key-field", metavar="FIELD", help="Take the key from this field of each JSON line."
)
@click.option(
    "--keys",
    is_flag=True,
    help="Lines are a key, a TAB, and a value that is not looked at, as `consume --keys` prints "
    "them. Without a value it is a tombstone, without a key there is none.",
)
@click.option("--raw", is_flag=True, help="Lines are not JSON: append them as they are.")
@click.option(
    "--timestamp-field",
    metavar="FIELD",
    help="Take the time from this field of each JSON line: ISO 8601 (in UTC if it names no zone), "
    "or milliseconds since 1970.  [default: now]",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header of every record; may be repeated.",
)
@click.option("--partition", type=click.IntRange(min=0), help="Append to this partition only.")
@click.option(
    "--compression",
    type=Choice(get_args(CompressionName)),
    default="none",
    show_default=True,
    help="Of whole batches.",
)
@click.option(
    "--durability",
    type=Choice(DURABILITIES),
    default="synced",
    show_default=True,
    help="synced: what was appended survives the loss of power. written: it survives the end of "
    "this process. periodic: the same, with fewer syncs.",
)
@address_option
@json_option
def produce(
    topic: str,
    *,
    key: str | None,
    key_field: str | None,
    timestamp_field: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    compression: CompressionName,
    durability: Durability,
    address: Path | str,
    keys: bool,
    raw: bool,
    as_json: bool,
) -> None:
    """Append each line of standard input to TOPIC as one record.

    A line is a JSON value, unless --raw or --keys is given. Empty lines are passed over. When the
    command ends with 0, every line was appended, and is as safe as --durability says.

    \b
    Examples:
      echo '{"user": "u1", "ad": 7}' | millstream produce clicks --key-field user
      millstream produce clicks --timestamp-field at --compression zstd < clicks.jsonl
      millstream produce logs --raw --header host=web-1 < access.log
      millstream consume customers --keys | millstream produce copies --keys
    """
    _check(key, key_field, timestamp_field, keys=keys, raw=raw)
    form = _LineFormat(key, key_field, timestamp_field, keys=keys, raw=raw)
    named = _headers(headers)
    sent = 0
    waiting: deque[Future[RecordMetadata]] = deque()
    progress = _ProgressLine(sys.stderr, shown=sys.stderr.isatty() and not sys.stdin.isatty())
    with connect(address) as log, progress:
        log.offsets(topic)  # an unknown topic must not make this process the owner of a new folder
        with log.producer(compression=compression, durability=durability) as producer:
            for number, line in _lines(sys.stdin.buffer):
                record = form.record(number, line)
                future = producer.send(
                    topic,
                    record.value,
                    key=record.key,
                    timestamp_ms=record.timestamp_ms,
                    partition=partition,
                    headers=named,
                )
                waiting.append(future)
                sent += 1
                progress.update(sent)
                if len(waiting) > _WAITING_MAX:
                    waiting.popleft().result()
            producer.flush()
            for future in waiting:
                future.result()
    values = {"topic": topic, "records": sent}
    print_result(f"{pluralize(sent, 'record')} appended to {topic}", values, as_json=as_json)


class _ProgressLine:
    """Shows every second how many records were sent, on one line that vanishes at the end."""

    def __init__(
        self, stream: TextIO, *, shown: bool, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock_s = clock_s
        self._begun_s = clock_s()
        self._due_s = self._begun_s + _TELL_EVERY_S if shown else float("inf")
        self._width = 0

    def update(self, sent: int) -> None:
        """Say so, if it is time."""
        now_s = self._clock_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _TELL_EVERY_S
        rate = sent / (now_s - self._begun_s)
        self._put(f"{sent:,} records, {rate:,.0f} a second")

    def _put(self, text: str) -> None:
        self._stream.write(f"\r{text:<{self._width}}")
        self._stream.flush()
        self._width = len(text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._put("")
            self._stream.write("\r")


def _check(
    key: str | None, key_field: str | None, timestamp_field: str | None, *, keys: bool, raw: bool
) -> None:
    """Refuse options that exclude each other."""
    given = [
        name
        for name, said in (
            ("--key", key is not None),
            ("--key-field", key_field is not None),
            ("--keys", keys),
        )
        if said
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given; give one of them")
    for name, field in (("--key-field", key_field), ("--timestamp-field", timestamp_field)):
        if field is not None and (raw or keys):
            raise ConfigError(
                f"{name} needs JSON lines; leave out {'--raw' if raw else '--keys'}, or {name}"
            )


def _headers(texts: Sequence[str]) -> list[tuple[str, str]]:
    headers = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--header is {text!r}; give NAME=VALUE, such as host=web-1")
        headers.append((name, value))
    return headers


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield number, stripped


# -- lines as records -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """The record of a line."""

    value: bytes | None
    key: bytes | str | int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _LineFormat:
    """How a line is read as a record."""

    key: str | None
    key_field: str | None
    timestamp_field: str | None
    keys: bool
    raw: bool

    def record(self, number: int, line: bytes) -> _Line:
        """Return the record of a line.

        Raises:
            ConfigError: it is not of this form; the message names the line.
        """
        if self.keys:
            before, separator, after = line.partition(b"\t")
            if not separator:
                raise _bad_line(number, line, "has no TAB after a key", "correct it")
            return _Line(after or None, before or None)
        if self.raw:
            return _Line(line, self.key)
        try:
            decoded = json.loads(line)
        except ValueError as error:
            raise _bad_line(
                number, line, f"is not JSON ({error})", "correct it, or append lines with --raw"
            ) from None
        key = self.key if self.key_field is None else self._key(number, line, decoded)
        return _Line(line, key, self._timestamp_ms(number, line, decoded))

    def _key(self, number: int, line: bytes, decoded: Any) -> str | int:
        assert self.key_field is not None, "asked for only where there is one"
        found = key_in(decoded, self.key_field)
        if found is not None:
            return found
        raise _bad_line(
            number,
            line,
            f"has no text or whole number in the field {self.key_field!r}",
            "correct it, or name another --key-field",
        )

    def _timestamp_ms(self, number: int, line: bytes, decoded: Any) -> int | None:
        if self.timestamp_field is None:
            return None
        found = timestamp_ms_in(decoded, self.timestamp_field)
        if found is None:
            raise _bad_line(
                number,
                line,
                f"has no time in the field {self.timestamp_field!r}, as ISO 8601 or as "
                "milliseconds since 1970",
                "correct it, or name another --timestamp-field",
            )
        return found


def _bad_line(number: int, line: bytes, fault: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"line {number} {fault}: {line[:80]!r}; {remedy} (the lines before it were appended)"
    )
