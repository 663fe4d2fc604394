"""A session that makes the archive of its classes gives the answer first."""

import threading
from types import SimpleNamespace

import pytest

from millstream.spark import internals
from millstream.spark.session import _Asked, _Running

WAIT_S = 30


class Scratch:
    def __init__(self, new):
        self.kept, self.deleted = [], threading.Event()
        self.archive = SimpleNamespace(new=new, keep=lambda *, whole: self.kept.append(whole))

    def delete(self):
        self.deleted.set()


@pytest.fixture
def ending(monkeypatch):
    """Return a function that ends a session, and what lets its JVM be gone."""
    gone = threading.Event()
    monkeypatch.setattr(internals, "let_go", lambda _gateway: None)
    monkeypatch.setattr(internals, "end_process", lambda _process: gone.wait(WAIT_S))
    gateway = SimpleNamespace(proc=SimpleNamespace(returncode=0, poll=lambda: 0))

    def end(scratch):
        return _Running(None, gateway, _Asked(None, None, {}), scratch).end()

    yield end, gone
    gone.set()


def test_while_the_archive_is_written_the_answer_is_not_waited_for(ending):
    end, gone = ending
    scratch = Scratch("new")
    assert end(scratch) is True
    assert (scratch.kept, scratch.deleted.is_set()) == ([], False)
    gone.set()
    assert scratch.deleted.wait(WAIT_S)
    assert scratch.kept == [True]


def test_with_an_archive_the_jvm_is_gone_when_the_session_has_ended(ending):
    end, gone = ending
    gone.set()
    scratch = Scratch(None)
    assert end(scratch) is False
    assert scratch.deleted.is_set()
