"""What looks ordinary in MariaDB, and would leave rows out, or keep rows that are not there."""

import pytest

from millstream.errors import ConfigError


def now():
    return True


def ids(replica, table):
    return sorted(row["id"] for row in replica.rows(table))


def reader_of(database):
    name = f"reader_{database.name}"
    database.run(
        f"CREATE USER {name}@'%' IDENTIFIED BY 'p'",
        f"GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO {name}@'%'",
        f"GRANT SELECT ON {database.name}.* TO {name}@'%'",
    )
    return database.url(name, "p")


def test_what_is_rolled_back_is_not_captured_though_it_is_logged(database, replica):
    """It is, where a transaction has also changed a table of an engine without transactions."""
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE TABLE aria (id INT) ENGINE = Aria")
    replica.follow(database.source("t"), now)
    database.run(
        "BEGIN",
        "INSERT INTO t VALUES (1)",
        "SAVEPOINT `a b`",
        "INSERT INTO t VALUES (2)",
        "SAVEPOINT inner_one",
        "INSERT INTO aria VALUES (1)",
        "ROLLBACK TO `a b`",
        "INSERT INTO t VALUES (3)",
        "COMMIT",
    )
    database.run(
        "BEGIN", "INSERT INTO t VALUES (4)", "CREATE TEMPORARY TABLE tmp (a INT)", "ROLLBACK"
    )
    database.run("INSERT INTO t VALUES (5)")
    replica.follow(database.source("t"), now)
    assert ids(replica, "t") == [1, 3, 5]


def test_a_large_transaction_that_is_rolled_back_after_it_was_given_is_refused(
    database, replica, monkeypatch
):
    from millstream.capture.mysql import transactions

    monkeypatch.setattr(transactions, "HELD_BYTES", 10)
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE TABLE aria (id INT) ENGINE = Aria")
    replica.follow(database.source("t"), now)
    database.run(
        "BEGIN",
        "INSERT INTO t VALUES (1)",
        "SAVEPOINT s",
        "INSERT INTO t VALUES (2)",
        "INSERT INTO aria VALUES (1)",
        "ROLLBACK TO s",
        "COMMIT",
    )
    with pytest.raises(ConfigError, match="rolled back"):
        replica.follow(database.source("t"), now)


def test_a_table_that_was_left_out_for_a_while_is_read_again(database, replica):
    database.run(
        "CREATE TABLE a (id INT PRIMARY KEY)",
        "CREATE TABLE b (id INT PRIMARY KEY)",
        "INSERT INTO b VALUES (1)",
    )
    replica.follow(database.source(), now)
    replica.follow(database.source("a"), now)
    assert ids(replica, "b") == []
    replica.follow(database.source(), now)
    assert ids(replica, "b") == [1]
    database.run("INSERT INTO b VALUES (2)")
    replica.follow(database.source("a"), now)
    database.run("DELETE FROM b WHERE id = 1")
    replica.follow(database.source(), now)
    assert ids(replica, "b") == [2]
    positions = [position for _, position, _ in replica.units]
    assert len(positions) == len(set(positions))


def test_cascades_are_refused_to_a_user_who_may_only_read(database):
    url = reader_of(database)
    database.run(
        "CREATE TABLE p (id INT PRIMARY KEY)",
        "CREATE TABLE c (id INT PRIMARY KEY, p INT COMMENT 'FOREIGN KEY', "
        "CONSTRAINT `a``b` FOREIGN KEY (p) REFERENCES p (id) ON DELETE CASCADE ON UPDATE SET NULL, UNIQUE (p))",
    )
    with pytest.raises(ConfigError, match="a``b ON DELETE CASCADE ON UPDATE SET NULL"):
        database.source(url=url).check()
    database.source("p", url=url).check()


def test_a_replica_that_does_not_log_what_it_replicates_is_refused_to_a_user_who_may_only_read(
    own_database,
):
    url = reader_of(own_database)
    own_database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    own_database.source(url=url).check()
    own_database.run("SET GLOBAL gtid_slave_pos = '5-5-5'")
    with pytest.raises(ConfigError, match="log_slave_updates is OFF"):
        own_database.source(url=url).check()


def test_sequences_are_passed_over(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)", "CREATE SEQUENCE numbers")
    replica.follow(database.source(), now)
    database.run("SELECT NEXTVAL(numbers)", "INSERT INTO t VALUES (NEXTVAL(numbers))")
    replica.follow(database.source(), now)
    assert ids(replica, "t") == [2]


def test_partitions_that_become_tables_and_come_back_are_followed(database, replica):
    parts = "(PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN (20))"
    database.run(
        f"CREATE TABLE t (id INT PRIMARY KEY) PARTITION BY RANGE (id) {parts}",
        "INSERT INTO t VALUES (1), (11)",
    )
    replica.follow(database.source(), now)
    database.run("ALTER TABLE t CONVERT PARTITION p1 TO TABLE u")
    replica.follow(database.source(), now)
    assert (ids(replica, "t"), ids(replica, "u")) == ([1], [11])
    database.run("ALTER TABLE t CONVERT TABLE u TO PARTITION p1 VALUES LESS THAN (20)")
    replica.follow(database.source(), now)
    assert (ids(replica, "t"), ids(replica, "u")) == ([1, 11], [])


def test_keys_of_forty_digits_are_read_on_behind(database, replica):
    values = ", ".join(f"({number * 10**39})" for number in (1, 2, 3))
    database.run("CREATE TABLE t (id DECIMAL(40,0) PRIMARY KEY)", f"INSERT INTO t VALUES {values}")
    replica.follow(database.source(chunk_rows=1), now, limit=20)
    assert len(replica.rows("t")) == 3


def test_computed_columns_read_the_same_in_a_snapshot_and_in_the_log(database, replica):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, v INT AS (id + 1) VIRTUAL, p INT AS (id + 2) PERSISTENT)",
        "INSERT INTO t (id) VALUES (1)",
    )
    replica.follow(database.source(), now)
    database.run("INSERT INTO t (id) VALUES (2)", "UPDATE t SET id = 5 WHERE id = 1")
    replica.follow(database.source(), now)
    assert sorted(tuple(row.values()) for row in replica.rows("t")) == [(2, 3, 4), (5, 6, 7)]


def test_a_password_may_have_any_letters(database):
    name = f"letters_{database.name}"
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    for password in ("é", "€ and Ω"):
        database.run(
            f"CREATE OR REPLACE USER {name}@'%' IDENTIFIED BY '{password}'",
            f"GRANT ALL PRIVILEGES ON *.* TO {name}@'%'",
        )
        database.source(url=database.url(name, password)).check()
