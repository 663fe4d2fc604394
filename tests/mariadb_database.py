"""A server of MariaDB or MySQL for a test, and databases of it."""

import itertools
import random

import pytest

from millstream.capture.mysql.address import mariadb_address
from millstream.capture.mysql.source import MariaDbSource
from millstream.errors import EnvironmentProblem
from millstream.testing.mariadb import MariaDbServer
from millstream.testing.mysql import MySqlServer

SERVERS = {"mariadb": MariaDbServer, "mysql": MySqlServer}
# Of a test that takes a database: it runs with one of each.
both = pytest.mark.parametrize("database", list(SERVERS), indirect=True)
# The same of a long test, whose run with MySQL `make test-all` alone makes.
KINDS_OF_A_LONG_TEST = ["mariadb", pytest.param("mysql", marks=pytest.mark.thorough)]
of_mysql = pytest.mark.parametrize("database", ["mysql"], indirect=True)
_numbers = itertools.count(1)


def start(kind="mariadb", **settings):
    """Return a server; where there is none, the test is skipped."""
    pytest.importorskip("pymysql", reason="the driver of MariaDB is not installed here")
    try:
        return SERVERS[kind](**settings)
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


class Database:
    """An empty database of a server, and a source of its tables."""

    def __init__(self, server):
        self.server = server
        self.kind = server.title.lower()
        self.name = f"shop{next(_numbers)}"
        self.run(f"CREATE DATABASE {self.name} CHARACTER SET utf8mb4", database=None)

    def run(self, *statements, database=""):
        return self.server.run(*statements, database=self.name if database == "" else database)

    def connect(self, **options):
        return self.server.connect(self.name, **options)

    def url(self, user=None, password=None):
        from urllib.parse import quote

        password = quote(password or self.server.password, safe="")
        who = f"{user or self.server.user}:{password}"
        return f"{self.kind}://{who}@127.0.0.1:{self.server.port}/{self.name}"

    def source(self, *tables, chunk_rows=3, url=None):
        return MariaDbSource(
            mariadb_address(url or self.url()),
            tables or ("*",),
            replica_id=random.randrange(1 << 31, 1 << 32),
            chunk_rows=chunk_rows,
            heartbeat_s=0.05,
        )
