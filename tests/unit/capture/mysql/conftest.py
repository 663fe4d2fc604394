"""Servers of MariaDB and MySQL for the tests of this folder: MariaDB's, unless a test is marked with ``both``."""

import pytest
from capture_replica import Replica
from mariadb_database import Database, start


@pytest.fixture(scope="session")
def servers():
    """Servers by their kind, each started when it is first asked for."""
    started = {}
    yield started
    for server in started.values():
        server.close()


@pytest.fixture
def database(servers, request):
    kind = getattr(request, "param", "mariadb")
    if kind not in servers:
        servers[kind] = start(kind)
    return Database(servers[kind])


@pytest.fixture
def own_database(request):
    """A database of a server that the test may kill."""
    with start(getattr(request, "param", "mariadb")) as server:
        yield Database(server)


@pytest.fixture
def replica():
    return Replica()
