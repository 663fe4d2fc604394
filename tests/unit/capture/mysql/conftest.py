"""A MariaDB server for the tests of this folder."""

import pytest
from capture_replica import Replica
from mariadb_database import Database, start


@pytest.fixture(scope="session")
def shared_server():
    with start() as server:
        yield server


@pytest.fixture
def own_server():
    """A server that a test may kill."""
    with start() as server:
        yield server


@pytest.fixture
def database(shared_server):
    return Database(shared_server)


@pytest.fixture
def own_database(own_server):
    return Database(own_server)


@pytest.fixture
def replica():
    return Replica()
