"""Tables that several sessions change at random are captured by one that stops at any unit."""

import random

import pytest
from mariadb_database import KINDS_OF_A_LONG_TEST
from random_mariadb_workload import SCHEMA, Writers

from millstream.errors import RetriableError


def rows_of(database, table):
    """Return the rows of a table, by its columns: read by plain SQL, not as capture reads it."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return sorted((dict(zip(names, row, strict=True)) for row in cursor.fetchall()), key=str)


def sequence(position):
    return int(position.replace(":", "-").rpartition("-")[2])


def follow(database, replica, until, **options):
    """Capture as a run does, which tries again: on a busy machine a table may be locked for longer than a source waits."""
    for attempt in range(5):
        try:
            return replica.follow(database.source(chunk_rows=5), until, **options)
        except RetriableError:
            if attempt == 4:
                raise
    return None


@pytest.mark.parametrize("database", KINDS_OF_A_LONG_TEST, indirect=True)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))]
)
def test_a_capture_that_stops_anywhere_ends_with_what_the_tables_hold(database, replica, seed):
    rng = random.Random(seed)
    database.run(*SCHEMA)
    with Writers(database.connect, seed, kind=database.kind) as writers:
        for _ in range(30):
            follow(database, replica, lambda: False, limit=rng.randrange(1, 40))
    assert not writers.errors
    follow(database, replica, lambda: True)
    for table in ("a", "b"):
        assert sorted(replica.rows(table), key=str) == rows_of(database, table)
    transactions = [sequence(at) for kind, at, _ in replica.units if kind == "transaction"]
    assert len(transactions) > 50
    assert transactions == sorted(set(transactions))
