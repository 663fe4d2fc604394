"""Sessions that change tables at random, and what their tables hold in the end."""

import random
import threading

SCHEMA = (
    "CREATE TABLE a (id INT PRIMARY KEY, n INT, s VARCHAR(20))",
    "CREATE TABLE b (x VARCHAR(9), y INT, n INT, PRIMARY KEY (x, y))",
)
_KEYS = 40


def change(rng):
    """Return a statement that changes rows of one of the tables."""
    key, other, number = rng.randrange(_KEYS), rng.randrange(_KEYS), rng.randrange(1000)
    return rng.choice(
        [
            f"INSERT INTO a (id, n, s) VALUES ({key}, {number}, 's{number}') ON DUPLICATE KEY UPDATE n = n + 1",
            f"REPLACE INTO b VALUES ('k{key}', {other % 3}, {number})",
            f"UPDATE a SET n = {number} WHERE id < {key}",
            f"UPDATE IGNORE a SET id = {other} WHERE id = {key}",
            f"UPDATE IGNORE b SET x = 'K{other}' WHERE x = 'k{key}'",
            f"DELETE FROM a WHERE id = {key}",
            f"DELETE FROM b WHERE n % 7 = {key % 7}",
            "INSERT IGNORE INTO a (id, n, s) VALUES "
            + ", ".join(f"({one}, {number}, NULL)" for one in range(key, key + 6)),
        ]
    )


def transact(connection, rng):
    """Run a transaction, which may be rolled back in part or whole."""
    import pymysql

    with connection.cursor() as cursor:
        try:
            cursor.execute("START TRANSACTION")
            for _ in range(rng.choice([1, 1, 2, 5])):
                cursor.execute(change(rng))
            if rng.random() < 0.2:
                cursor.execute("SAVEPOINT s")
                cursor.execute(change(rng))
                cursor.execute("ROLLBACK TO s")
            cursor.execute("ROLLBACK" if rng.random() < 0.15 else "COMMIT")
        except pymysql.err.MySQLError as error:
            if error.args[0] not in (1205, 1213, 1412, 1020, 1062):  # deadlocks and their like
                raise


_MARIADB_DDL = (
    "CREATE OR REPLACE TABLE c (id INT PRIMARY KEY, n INT) SELECT {number} AS id, 1 AS n",
)
_DDL = (
    "TRUNCATE TABLE b",
    "ALTER TABLE a ADD COLUMN extra{number} INT DEFAULT {number}",
    "ALTER TABLE b MODIFY n BIGINT",
    "FLUSH BINARY LOGS",
    "CREATE TABLE IF NOT EXISTS c (id INT PRIMARY KEY, n INT)",
    "DROP TABLE IF EXISTS c",
)


class Writers:
    """Sessions that write until they are stopped; use it in ``with``."""

    def __init__(self, connect, seed, *, sessions=3, ddl=True, kind="mariadb"):
        self._connect = connect
        self._ddl = _DDL + _MARIADB_DDL if kind == "mariadb" else _DDL
        self._stop = threading.Event()
        self.errors = []
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(seed + number), ddl and not number))
            for number in range(sessions)
        ]  # fmt: skip

    def _write(self, rng, ddl):
        try:
            with self._connect() as connection:
                while not self._stop.wait(0.005):
                    transact(connection, rng)
                    if ddl and rng.random() < 0.02:
                        with connection.cursor() as cursor:
                            cursor.execute(
                                rng.choice(self._ddl).format(number=rng.randrange(10**6))
                            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()
