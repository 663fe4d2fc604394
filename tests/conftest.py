"""A PostgreSQL server for every test that wants one: started once, skipped where there is none."""

import itertools

import pytest

from millstream.errors import EnvironmentProblem
from millstream.testing.postgres import PostgresServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server():
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
