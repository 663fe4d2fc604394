"""A session that makes the archive of its classes gives the answer first."""

import threading
from types import SimpleNamespace

import pytest

from millstream.spark.runtime import internals
from millstream.spark.runtime.session import _RunningSession, _SessionRequest

WAIT_S = 30


class Scratch:
    def __init__(self, new):
        self.released, self.deleted, self.discarded = [], [], []
        self.installed = threading.Event()
        installer = SimpleNamespace(wait=self.installed.set)
        self.archive = SimpleNamespace(
            new=new,
            start_installer=lambda pid: self.released.append(pid) or installer,
            discard=lambda: self.discarded.append(True),
        )

    def release(self):
        self.released.append("files")

    def delete(self):
        self.deleted.append(True)


@pytest.fixture
def ending(monkeypatch):
    """Return a function that ends a session, and what lets its JVM be gone."""
    gone = threading.Event()
    monkeypatch.setattr(internals, "request_jvm_exit", lambda _gateway: None)
    monkeypatch.setattr(internals, "end_process", lambda _process: gone.wait(WAIT_S))
    polls = iter([0])  # Spark is not stopped: the JVM is seen as ended, and then as running
    jvm = SimpleNamespace(pid=7, poll=lambda: next(polls, None), wait=lambda: gone.wait(WAIT_S))

    def end(scratch):
        gateway = SimpleNamespace(proc=jvm)
        return _RunningSession(None, gateway, _SessionRequest(None, None, {}), scratch).end()

    yield end, gone
    gone.set()


def test_while_the_archive_is_written_the_answer_is_not_waited_for(ending):
    end, gone = ending
    scratch = Scratch("new")
    assert end(scratch) is True
    assert (scratch.released, scratch.deleted) == ([7, "files"], [])
    assert not scratch.installed.is_set()
    gone.set()
    assert scratch.installed.wait(WAIT_S)


def test_with_an_archive_the_jvm_is_gone_when_the_session_has_ended(ending):
    end, gone = ending
    gone.set()
    scratch = Scratch(None)
    assert end(scratch) is False
    assert (scratch.deleted, scratch.discarded) == ([True], [True])
