"""control.db: whatever the disk makes of it, the error is one of ours, and says what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, CorruptionError, DiskFullError, RetriableError
from millstream.log.control import CONTROL_NAME, ControlDb
from millstream.log.groups import committed_offsets, group_names
from millstream.log.reader import LogReader
from millstream.log.topics import Catalog
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition


def make(folder: Path) -> None:
    with LogWriter(folder, background=False) as writer:
        for number in range(8):
            writer.create_topic(f"topic-{number}", settings={"retention.ms": "1000"})
            place = TopicPartition(f"topic-{number}", 0)
            writer.commit_offsets("group", {place: (number, "noted by hand")})
        writer.transactions.register("producer", in_process=False)


def changed(folder: Path, before: bytes, after: bytes) -> None:
    path = folder / CONTROL_NAME
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"topic-3", b"topic\xff3"),  # a text that is none
        (b"topic-3", b"to/../3"),  # a name that would be a path
        (b'"retention.ms"', b'"retention.m\xff"'),
        (b'"retention.ms"', b'"retention.my"'),
        (b'{"retention.ms"', b'["retention.ms"'),
        (b"CREATE TABLE topics", b"CREATE TABLE topic\xff"),
        (b"SQLite format 3", b"SQLite format 4"),
    ],
)
def test_a_changed_byte_is_told_as_damage(tmp_path: Path, before: bytes, after: bytes) -> None:
    make(tmp_path)
    changed(tmp_path, before, after)
    for use in (
        lambda: LogReader(tmp_path).topics(),
        lambda: LogWriter(tmp_path, background=False),
    ):
        with pytest.raises(CorruptionError, match=r"control\.db is damaged.*from a backup"):
            use()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "log"
    make(folder)
    return folder


@given(place=st.floats(0, 1, exclude_max=True), content=st.binary(min_size=1, max_size=40))
@settings(max_examples=some(150))
def test_no_damage_gives_an_error_that_is_not_ours(
    model: Path, place: float, content: bytes
) -> None:
    path = model / CONTROL_NAME
    before = path.read_bytes()
    at = int(place * (len(before) - len(content)))
    try:
        path.write_bytes(before[:at] + content + before[at + len(content) :])
        control = ControlDb.open(model, write=False)
        try:
            Catalog(control).topics()
            for group in group_names(control):
                committed_offsets(control, group)
        finally:
            control.close()
    except (CorruptionError, ConfigError):
        pass
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, DiskFullError),
        (sqlite3.SQLITE_IOERR_SHMSIZE, DiskFullError),
        (sqlite3.SQLITE_BUSY, RetriableError),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, RetriableError),
        (sqlite3.SQLITE_READONLY, ConfigError),
        (sqlite3.SQLITE_IOERR_READ, CorruptionError),
        (sqlite3.SQLITE_CORRUPT, CorruptionError),
        (sqlite3.SQLITE_ERROR, CorruptionError),
    ],
)
def test_each_error_of_sqlite_says_what_the_caller_can_do(
    tmp_path: Path, code: int, kind: type[Exception]
) -> None:
    def fail() -> None:
        error = sqlite3.OperationalError("as SQLite says it")
        error.sqlite_errorcode = code
        raise error

    connection = sqlite3.connect(":memory:", isolation_level=None)
    control = ControlDb(connection, write=True, before_commit=fail)
    with pytest.raises(kind, match="as SQLite says it") as caught, control.commit():
        pass
    assert isinstance(caught.value, RetriableError) == issubclass(kind, RetriableError)
    control.close()
