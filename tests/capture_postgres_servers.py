"""PostgreSQL servers that can be captured, for tests, and databases of them."""

import itertools
import time

import pytest

from millstream.errors import EnvironmentProblem
from millstream.testing.postgres import PostgresServer, programs, wheel_programs

_numbers = itertools.count(1)
LOGICAL = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_prepared_transactions": "10",
}


def start(*, of_wheel=False, **settings):
    """Return a server, the system's or else the wheel's; where there is none, the test is skipped."""
    pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")
    if of_wheel and (programs() is None or wheel_programs() is None):
        pytest.skip("there are not two releases of PostgreSQL here")
    folder = wheel_programs() if of_wheel else programs() or wheel_programs()
    try:
        return PostgresServer(folder, **{**LOGICAL, **settings})
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


class Shop:
    """An empty database of a server, and a source of its tables."""

    def __init__(self, server):
        self.server = server
        self.name = f"shop{next(_numbers)}"
        self.url = server.url(self.name)

    def connect(self, **options):
        import psycopg

        return psycopg.connect(self.url, autocommit=True, **options)

    def run(self, *statements):
        with self.connect() as session:
            for statement in statements:
                found = session.execute(statement)
        return found.fetchall() if found.description else None

    def source(self, *tables, chunk_rows=3, heartbeat_s=0.05, url=None):
        from millstream.capture.postgres.source import PostgresSource
        from millstream.views.address import postgres_address

        return PostgresSource(
            postgres_address(url or self.url),
            tables or ("*",),
            name=self.name,
            chunk_rows=chunk_rows,
            heartbeat_s=heartbeat_s,
        )

    def slot(self):
        return self.run(
            f"SELECT slot_name FROM pg_replication_slots WHERE database = '{self.name}'"
        )[0][0]

    def wait_until_released(self, timeout_s=60):
        """Wait until the server knows that nobody reads the slot any more."""
        end_s = time.monotonic() + timeout_s
        sql = f"SELECT 1 FROM pg_replication_slots WHERE database = '{self.name}' AND active"
        while self.run(sql):
            assert time.monotonic() < end_s, "the slot is still read"
            time.sleep(0.02)

    def rows(self, table, key):
        """Return a table's rows as JSON has them, by key: read by plain SQL, not as capture reads it."""
        found = self.run(f"SELECT to_jsonb(t) FROM {table} t")
        return {tuple(row[name] for name in key): row for (row,) in found}
