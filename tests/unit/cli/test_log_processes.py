"""The commands of the log as processes: killed, piped, beside each other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import millstream as ms

MILLSTREAM = [sys.executable, "-m", "millstream"]


@contextmanager
def started(*arguments: str, **options) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [*MILLSTREAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run(
        [*MILLSTREAM, *arguments], input=stdin, capture_output=True, timeout=60, check=False
    )


def committed(log: ms.EventLog, group: str) -> dict[int, int]:
    return {name.partition: at.offset for name, at in log.committed_offsets(group).items()}


@pytest.fixture
def log(folder) -> Iterator[ms.EventLog]:
    """Return a log that this process owns, with a topic of one partition."""
    with ms.connect(folder) as opened:
        opened.create_topic("t")
        yield opened


def send(log: ms.EventLog, values: range) -> None:
    with log.producer() as producer:
        for value in values:
            producer.send("t", value)


def test_two_processes_of_a_group_print_everything_once_between_them(log):
    send(log, range(100))
    first = finished("consume", "t", "--group", "g", "--count", "30")
    rest = finished("consume", "t", "--group", "g")
    assert (first.returncode, rest.returncode, rest.stderr) == (0, 0, b"")
    assert [int(line) for line in first.stdout.split()] == list(range(30))
    assert [int(line) for line in rest.stdout.split()] == list(range(30, 100))


def test_a_group_follows_what_another_process_produces(log, folder):
    with started("consume", "t", "--group", "g", "--follow") as consumer:
        send(log, range(3))
        assert [consumer.stdout.readline() for _ in range(3)] == [b"0\n", b"1\n", b"2\n"]
        send(log, range(3, 5))
        assert [consumer.stdout.readline() for _ in range(2)] == [b"3\n", b"4\n"]
        consumer.send_signal(signal.SIGINT)
        assert consumer.wait(30) == 130
        assert consumer.stderr.read().strip() == b""  # a new line after the terminal's ^C
    # The last line was read here before the command could note that it was printed, or after.
    assert committed(log, "g") in ({0: 4}, {0: 5})


def test_what_was_printed_is_committed_while_nothing_more_comes(log):
    send(log, range(3))
    with started("consume", "t", "--group", "g", "--follow") as consumer:
        for _ in range(3):
            consumer.stdout.readline()
        deadline = time.monotonic() + 30
        while committed(log, "g") != {0: 3}:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("printed", [1, 5000])
def test_a_killed_group_prints_again_what_was_not_committed_and_loses_nothing(log, printed):
    send(log, range(10_000))
    with started("consume", "t", "--group", "g", "--follow") as consumer:
        seen = [int(consumer.stdout.readline()) for _ in range(printed)]
        consumer.kill()
        seen += [int(line) for line in consumer.stdout.read().split(b"\n")[:-1]]
    went_on = committed(log, "g").get(0, 0)
    assert seen == list(range(len(seen)))
    assert went_on <= len(seen)
    rest = [int(line) for line in finished("consume", "t", "--group", "g").stdout.split()]
    assert rest == list(range(went_on, 10_000))


def test_a_reader_that_leaves_early_ends_it_quietly_with_what_was_printed_committed(log):
    send(log, range(30_000))
    with started("consume", "t", "--group", "g") as consumer:
        lines = [consumer.stdout.readline() for _ in range(3)]
        consumer.stdout.close()
        assert consumer.wait(30) == 0
        assert consumer.stderr.read() == b""
    assert lines == [b"0\n", b"1\n", b"2\n"]
    # What the pipe took counts as printed: head has read it, though it shows three lines.
    went_on = committed(log, "g")[0]
    assert 3 <= went_on < 30_000
    assert int(finished("consume", "t", "--group", "g", "--count", "1").stdout) == went_on


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_head_ends_it_quietly(log, options):
    send(log, range(30_000))
    command = " ".join([*MILLSTREAM, "consume", "t", *options])
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 2"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (piped.returncode, piped.stderr, piped.stdout.count(b"\n")) == (0, b"", 2)


def test_beside_an_owner_reading_works_and_writing_goes_through_it(done, folder):
    done("topic", "create", "t")
    done("produce", "t", stdin=b"1\n2\n")
    with started("produce", "t", stdin=subprocess.PIPE) as owner:
        owner.stdin.write(b"3\n")
        owner.stdin.flush()
        with ms.connect(folder) as log, log.consumer("t") as consumer:
            for _ in range(3):  # the third comes when the owner has opened the folder
                next(consumer)
        assert done("consume", "t", "--group", "g", "--count", "2") == "1\n2\n"
        done("group", "reset", "g", "--topic", "t", "--to", "1", "--yes")
        assert done("consume", "t", "--group", "g") == "2\n3\n"
        for reading in (["topic", "list"], ["topic", "describe", "t"], ["lag"], ["group", "list"]):
            done(*reading)
        done("produce", "t", stdin=b"4\n")
        done("topic", "create", "u")
        done("topic", "alter", "u", "--partitions", "2")
        done("topic", "delete", "u", "--yes")
        assert owner.poll() is None
    assert done("consume", "t") == "1\n2\n3\n4\n"
