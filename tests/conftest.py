"""What all tests share: how Hypothesis runs, lanes, and a PostgreSQL server for those that want one."""

import itertools

import hypothesis
import lane
import pytest
from drawn import some

from millstream.errors import EnvironmentProblem
from millstream.testing.postgres import PostgresServer

# How long an example takes says something of the machine, and nothing of what is tested.
hypothesis.settings.register_profile("millstream", deadline=None, max_examples=some(100))
hypothesis.settings.load_profile("millstream")

_numbers = itertools.count()


def pytest_addoption(parser):
    parser.addoption("--lane", metavar="NAME", help=f"one of: {', '.join(lane.names())}")


def pytest_configure(config):
    if name := config.getoption("--lane"):
        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        lane.load(name)(patch)


def pytest_runtest_setup(item):
    taken = item.config.getoption("--lane")
    for mark in item.iter_markers("not_in_lane"):
        if mark.args[0] == taken:
            pytest.skip(f"not in the lane {taken}: {mark.args[1]}")


@pytest.fixture(scope="session")
def postgres_server():
    """A server, started once; where there is none, the tests that want it are skipped."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")
    try:
        server = PostgresServer()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    with server:
        yield server


@pytest.fixture
def database(postgres_server):
    """The URL of an empty database."""
    return postgres_server.url(f"test{next(_numbers)}")


@pytest.fixture
def url(request):
    """A database where there is a server; what needs none is tried in any case."""
    try:
        return request.getfixturevalue("database")
    except pytest.skip.Exception:
        return None
