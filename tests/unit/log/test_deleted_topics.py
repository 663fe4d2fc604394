"""A deletion whose files the disk does not remove: it stands, and is finished later."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from millstream.errors import ConfigError, CorruptionError, DiskFullError
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.reader import LogReader
from millstream.log.topics import Catalog, catalog_of
from millstream.log.writer import LogWriter


class Refusing(DiskFiles):
    """A disk that does not remove the folders of some topics."""

    refused: tuple[str, ...] = ()

    def remove_folder(self, path: Path) -> None:
        if path.name.partition(".")[0] in self.refused:
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().remove_folder(path)


def folders(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.glob("t/*"))


def write(writer: LogWriter, *topics: str) -> None:
    for topic in topics:
        writer.create_topic(topic)
        writer.append(topic, 0, [encode_records([SimpleRecord(1, b"k", b"v")])])


def test_a_deletion_whose_files_remain_succeeds_and_every_pass_of_maintenance_retries_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Refusing()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        write(writer, "a", "b", "c")
        files.refused = ("a",)
        for topic in ("a", "b"):
            writer.delete_topic(topic)
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert "left to maintenance: [Errno 5]" in warning.message
        assert list(LogReader(tmp_path).topics()) == list(writer.topics()) == ["c"]
        assert folders(tmp_path) == ["a", "c"]
        for _ in range(2):
            (deferred,) = writer.run_maintenance().deferred
            assert deferred.startswith("deleted topics: [Errno 5] Input/output error: ")
        write(writer, "a")  # the name is free, the slot is not
        with catalog_of(tmp_path) as catalog:
            (deleted,) = catalog.deleted_topics().values()
            assert not set(deleted.slots) & set(catalog.topics()["a"].slots)
        files.refused = ()
        assert writer.run_maintenance().deferred == []
        assert folders(tmp_path) == ["a", "c"]
        with catalog_of(tmp_path) as catalog:
            assert catalog.deleted_topics() == {}
        assert LogReader(tmp_path).offsets("a") == [(0, 1)]


def test_one_topic_that_remains_does_not_keep_the_others(tmp_path: Path) -> None:
    files = Refusing()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        write(writer, "a", "b", "c")
        files.refused = ("a", "b", "c")
        for topic in files.refused:
            writer.delete_topic(topic)
        files.refused = ("a", "c")
        (deferred,) = writer.run_maintenance().deferred
        assert "/t/a." in deferred
        assert folders(tmp_path) == ["a", "c"]


def test_files_of_a_deleted_topic_do_not_prevent_the_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Refusing()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        write(writer, "a", "b")
        files.refused = ("a",)
        writer.delete_topic("a")
    caplog.clear()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        assert [one.message.partition(":")[0] for one in caplog.records] == [
            "a topic is deleted, and its files are left to maintenance"
        ]
        assert list(writer.topics()) == folders(tmp_path)[1:] == ["b"]
        assert len(writer.run_maintenance().deferred) == 1
    files.refused = ()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        assert folders(tmp_path) == ["b"]
        assert writer.run_maintenance().deferred == []


def test_the_folder_of_a_topic_that_nobody_deleted_still_prevents_the_opening(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path, background=False) as writer:
        write(writer, "a")
    with ControlDb.open(tmp_path, write=True).commit() as connection:
        connection.execute("DELETE FROM topics")
    with pytest.raises(CorruptionError, match="no such topic"):
        LogWriter(tmp_path, background=False)


def test_a_deletion_whose_row_remains_is_finished_by_maintenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskFullError("control.db could not be written")

    with LogWriter(tmp_path, background=False) as writer:
        write(writer, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "delete", full)
            writer.delete_topic("a")
            assert folders(tmp_path) == []
            assert len(writer.run_maintenance().deferred) == 1
        assert writer.run_maintenance().deferred == []
        with catalog_of(tmp_path) as catalog:
            assert catalog.deleted_topics() == {}


def test_a_partition_whose_file_cannot_be_closed_is_deleted_with_the_others(tmp_path: Path) -> None:
    class Unclosed(DiskFiles):
        fails = False

        def close(self, handle: int) -> None:
            super().close(handle)
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")

    files = Unclosed()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        writer.create_topic("a", partitions=3)
        partitions = writer.partitions()
        files.fails = True
        writer.delete_topic("a")
        files.fails = False
        assert all(one.closed for one in partitions)
        assert folders(tmp_path) == []
        with pytest.raises(ConfigError, match="no topic 'a'"):
            writer.delete_topic("a")
