"""A session that makes the archive of its classes gives the answer first."""

from types import SimpleNamespace

import pytest

from millstream.spark.runtime import internals
from millstream.spark.runtime.session import _RunningSession, _SessionRequest


class Process:
    """A JVM, or what takes over its archive."""

    def __init__(self, returncode=None):
        self.pid, self.returncode = 4711, returncode

    def poll(self):
        return self.returncode

    def wait(self):
        return 0


class Scratch:
    """Writes down what is done with the folders and with the archive."""

    def __init__(self, new):
        self.done = []
        self.archive = SimpleNamespace(
            new=new,
            start_installer=lambda pid: self.done.append(f"install after {pid}") or Process(),
            discard=lambda: self.done.append("discard"),
        )

    def release(self):
        self.done.append("release")

    def delete(self):
        self.done.append("delete")


@pytest.fixture
def ended(monkeypatch):
    """Return a function that ends a session, and says what was done and whether Java goes on."""
    monkeypatch.setattr(internals, "request_jvm_exit", lambda _gateway: None)

    def end(new, *, returncode=None):
        scratch = Scratch(new)
        monkeypatch.setattr(internals, "end_process", lambda _jvm: scratch.done.append("wait"))
        gateway = SimpleNamespace(proc=Process(returncode))
        session = _RunningSession(None, gateway, _SessionRequest(None, None, {}), scratch)
        monkeypatch.setattr(type(session), "is_alive", lambda _session: False)
        return session.end(), scratch.done

    return end


def test_while_the_archive_is_written_nobody_waits(ended):
    assert ended("new") == (True, ["install after 4711", "release"])


def test_with_an_archive_the_jvm_is_gone_when_the_session_has_ended(ended):
    assert ended(None) == (False, ["wait", "delete", "discard"])


def test_a_jvm_that_died_leaves_no_archive(ended):
    assert ended("new", returncode=-9) == (False, ["wait", "delete", "discard"])
