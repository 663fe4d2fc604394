"""Journals as files: written once, whole after a crash at any step, and removed with their batch."""

import os
from contextlib import suppress

import pytest

from millstream.log.files import DiskFiles
from millstream.spark.stages.journal_files import JournalFiles, remove_entries


class DiedError(BaseException):
    """The process died."""


def test_the_first_entry_counts_for_everybody(tmp_path):
    one, other = (JournalFiles(tmp_path / "journal", 3, "key", 0) for _ in range(2))
    assert one.read("n") is None
    assert one.write("n", b"first") == b"first"
    assert other.write("n", b"second") == b"first"
    assert other.read("n") == b"first"
    assert JournalFiles(tmp_path / "journal", 4, "key", 0).read("n") is None
    assert JournalFiles(tmp_path / "journal", 3, "key", 1).read("n") is None


@pytest.mark.parametrize("at", range(1, 7))
def test_a_death_at_any_step_leaves_a_whole_entry_or_none(tmp_path, monkeypatch, at):
    folder, passed = tmp_path / "journal", 0

    def wrap(owner, name):
        real = getattr(owner, name)

        def dying(*args, **named):
            nonlocal passed
            passed += 1
            if passed == at:
                raise DiedError
            return real(*args, **named)

        patch.setattr(owner, name, dying)

    with monkeypatch.context() as patch:
        for owner, name in (
            (DiskFiles, "sync"),
            (DiskFiles, "pwrite"),
            (os, "link"),
            (DiskFiles, "sync_folder"),
        ):
            wrap(owner, name)
        with suppress(DiedError):
            JournalFiles(folder, 3, "key", 0).write("n", b"first")
    told = JournalFiles(folder, 3, "key", 0).write("n", b"second")
    assert told in (b"first", b"second")
    assert JournalFiles(folder, 3, "key", 0).read("n") == told
    remove_entries(folder, keep=3)
    assert [path.name for path in folder.iterdir()] == ["3-0-key-n"]
    remove_entries(folder, keep=4)
    assert not list(folder.iterdir())
