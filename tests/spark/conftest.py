"""One Spark session for the tests of a process: whichever asks first starts it, files in turn use it."""

import itertools
import sys
from pathlib import Path

import pytest

from millstream.engine.stages import executor
from millstream.spark.runtime.session import start_session, stop_session

sys.path.insert(
    0, str(Path(__file__).parent)
)  # for programs of tests that are modules of their own


class SharedSession:
    """Spark, from when it is first wanted; a JVM that starts costs more than most tests."""

    def __init__(self, folder):
        self._folder = folder
        self._session = None

    def get(self):
        if self._session is None:
            self._session = start_session("tests", folder=self._folder)
        return self._session

    def end(self):
        if self._session is not None:
            stop_session(self._session)
            self._session = None


@pytest.fixture(scope="session")
def shared_session(tmp_path_factory):
    shared = SharedSession(tmp_path_factory.mktemp("spark"))
    yield shared
    shared.end()


@pytest.fixture(scope="module")
def spark(shared_session):
    return shared_session.get()


@pytest.fixture(scope="module")
def no_spark(shared_session):
    """For tests that start sessions of their own."""
    shared_session.end()


@pytest.fixture
def in_workers(monkeypatch):
    """Have stages run as tasks of Spark's, however little they have to do."""
    monkeypatch.setattr(executor, "DRIVER_BYTES_MAX", -1)


@pytest.fixture
def in_turns(monkeypatch):
    """Have stages run here and in workers in turns, so that state goes from one to the other."""
    turns = itertools.cycle([True, False, False])
    monkeypatch.setattr(executor.StageExecutor, "_is_small", lambda _stages, _work: next(turns))
