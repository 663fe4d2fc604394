"""``millstream consume``: print the records of a topic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import click

from millstream.cli.tables import address_option
from millstream.cli.topic_positions import (
    TopicPosition,
    check_partitions,
    offsets_at,
    parse_position,
)
from millstream.client import connect
from millstream.client.consumer import Consumer
from millstream.client.json_record import record_as_json
from millstream.client.open import open_reader
from millstream.client.reader import Reader
from millstream.client.start_position import StartPosition
from millstream.errors import ConfigError
from millstream.log.groups import check_offsets
from millstream.log.reader import Isolation
from millstream.record import Record


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "begin",
    default="earliest",
    show_default=True,
    metavar="earliest|latest|OFFSET|TIME",
    help="Where to start; with --group: if the group has committed nothing.",
)
@click.option(
    "--until",
    metavar="OFFSET|TIME|end",
    help="Where to stop, without the record there.  [default: end, unless --follow]",
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--follow", is_flag=True, help="Wait for more at the end; stop with Ctrl-C.")
@click.option(
    "--group",
    metavar="NAME",
    help="Continue where this group is, and commit printed records for it.",
)
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Read this partition only; may be repeated.",
)
@click.option("--keys", is_flag=True, help="Print the key, a TAB, and the value.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per record, with position.")
@click.option(
    "--uncommitted",
    is_flag=True,
    help="Also records of transactions that are open or were aborted.",
)
@address_option
def consume(
    topic: str,
    *,
    begin: str,
    until: str | None,
    count: int | None,
    group: str | None,
    partitions: tuple[int, ...],
    address: Path | str,
    follow: bool,
    keys: bool,
    as_json: bool,
    uncommitted: bool,
) -> None:
    """Print the values of the records of TOPIC, one per line.

    Records of one partition are printed in order. A tombstone prints as an empty line; with --json its
    value is null. A TIME is ISO 8601, in UTC if it names no zone, and means the first record at it
    or later.

    With --group, each record is committed after it was printed, every second and at the end. If it is
    killed in between, the next call prints uncommitted records again, and skips none. Two commands of one
    group at the same time do not share the records: each prints all of them.

    \b
    Examples:
      millstream consume clicks
      millstream consume clicks --from 2026-11-21T10:00 --until 2026-11-21T11:00 --json
      millstream consume clicks --partition 0 --from 100 --count 5 --keys
      millstream consume clicks --group billing --follow
    """
    start = parse_position("--from", begin, ("earliest", "latest"))
    stop = parse_position("--until", until or "end", ("end",))
    _check(start, stop, follow=follow and until is not None, json_and_keys=as_json and keys)
    if group is not None:
        check_offsets(group, {})
    isolation: Isolation = "read_uncommitted" if uncommitted else "read_committed"
    reader = open_reader(address, isolation)
    numbers = check_partitions(reader, topic, partitions)
    printer = _Printer(
        record_as_json if as_json else _with_key if keys else _value,
        count=count,
        # In a group a record counts as read when the next one is requested; by then it is printed.
        at_once=follow or group is not None,
    )
    with _until_nobody_reads(), connect(address) as log:
        for part, end in _parts(reader, topic, numbers, stop):
            consumer = log.consumer(
                topic,
                group=group,
                start=_start(reader, topic, part, start),
                follow=follow,
                partitions=part,
                isolation=isolation,
            )
            with suppress(_PastEndError), consumer:
                printer.print(consumer, end)
            if printer.finished:
                break


class _PastEndError(Exception):
    """A record beyond the requested end was returned; it is not printed, so it does not count as read."""


class _Printer:
    """Prints records to standard output, up to a number of them."""

    def __init__(
        self, line: Callable[[Record], bytes], *, count: int | None, at_once: bool
    ) -> None:
        self._line = line
        self._left = -1 if count is None else count
        self._at_once = at_once

    @property
    def finished(self) -> bool:
        """Whether the requested number was printed."""
        return self._left == 0

    def print(self, consumer: Consumer, end: int | None) -> None:
        """Print the records of a consumer, below an offset.

        Raises:
            _PastEndError: a record at or after that offset came.
            BrokenPipeError: the reader of the output has closed it.
        """
        out = sys.stdout.buffer
        for record in consumer:
            if end is not None and record.offset >= end:
                raise _PastEndError
            out.write(self._line(record) + b"\n")
            if self._at_once:
                out.flush()
            self._left -= 1
            if self.finished:
                return


@contextmanager
def _until_nobody_reads() -> Iterator[None]:
    """End quietly when the reader of the output closes it, as ``head`` does."""
    try:
        yield
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, or Python complains about it at its end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _check(start: TopicPosition, stop: TopicPosition, *, follow: bool, json_and_keys: bool) -> None:
    if follow:
        raise ConfigError(
            "--until says where to stop and --follow to continue forever; leave out one of them"
        )
    if json_and_keys:
        raise ConfigError("--json prints the keys already; leave out --keys")
    if isinstance(start, int) and isinstance(stop, int) and stop < start:
        raise ConfigError(f"--until {stop} lies before --from {start}; give a later one")


def _start(
    reader: Reader, topic: str, partitions: list[int], start: TopicPosition
) -> StartPosition:
    if isinstance(start, datetime):
        return start
    if isinstance(start, int):
        return offsets_at(reader, topic, partitions, start, option="--from")
    return "earliest" if start == "earliest" else "latest"


def _parts(
    reader: Reader, topic: str, partitions: list[int], stop: TopicPosition
) -> Iterator[tuple[list[int], int | None]]:
    """Yield the partitions that are read together, with their end; those that stop early are read alone."""
    if isinstance(stop, str):
        yield partitions, None
        return
    for number in partitions:
        if isinstance(stop, int):
            yield [number], stop  # or where it ends, if that comes first
        else:
            yield [number], offsets_at(reader, topic, [number], stop, option="--until")[number]


# -- records as lines -------------------------------------------------------------------------


def _value(record: Record) -> bytes:
    return record.value or b""


def _with_key(record: Record) -> bytes:
    return (record.key or b"") + b"\t" + (record.value or b"")
