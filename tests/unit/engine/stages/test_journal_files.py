"""Journals as files: written once, whole after a crash at any step, and removed with their batch."""

import os
from contextlib import suppress

import pytest
from s3_server import Fault

from millstream.engine.stages.journal_files import JournalFiles, remove_entries
from millstream.engine.stages.journal_place import JournalPlace
from millstream.log.files import DiskFiles
from millstream.object_store.address import parse_state_url
from millstream.object_store.client import ObjectClient
from millstream.object_store.place import StatePlace


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


@pytest.fixture(params=["folder", "file", "s3"])
def place(request, tmp_path):
    """Where the journals are, and the names of what is there."""
    folder = tmp_path / "app"
    if request.param == "folder":
        return JournalPlace(folder), lambda: _files(folder)
    if request.param == "file":
        url = parse_state_url(f"file://{tmp_path}/state")
        return JournalPlace(folder, StatePlace(url, "one")), lambda: _files(tmp_path / "state/one")
    url = request.getfixturevalue("s3_url")
    client = ObjectClient(f"{url}/one/journal")
    return JournalPlace(folder, StatePlace(parse_state_url(url), "one")), lambda: sorted(
        client.names()
    )


def _files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_journals_are_the_same_in_a_folder_and_at_a_url(place, tmp_path):
    journals, names = place
    one, other = (journals.journal(3, "key", 0) for _ in range(2))
    assert one.read("n") is None
    assert one.write("n", b"first") == b"first"
    assert other.write("n", b"second") == b"first"
    assert other.read("n") == b"first"
    assert journals.journal(4, "key", 0).read("n") is None
    assert journals.journal(4, "key", 1).write("n", b"") == b""
    assert names() == ["3-0-key-n", "4-1-key-n"]
    journals.remove(keep=4)
    assert names() == ["4-1-key-n"]
    journals.remove(keep=5)
    assert names() == []


def test_an_entry_whose_answer_was_lost_is_the_one_that_was_put(s3, s3_url):
    journals = JournalPlace(None, StatePlace(parse_state_url(s3_url), "one"))
    lost = iter([True])
    s3.decide = lambda method, _path: (
        Fault("lost answer") if method == "PUT" and next(lost, False) else None
    )
    assert journals.journal(3, "key", 0).write("n", b"first") == b"first"
    assert journals.journal(3, "key", 0).write("n", b"second") == b"first"
