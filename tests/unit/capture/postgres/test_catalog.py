"""Tables that look ordinary, and would lose rows, show others' rows, or break the application."""

import psycopg
import pytest
from capture_postgres_servers import Shop, start

from millstream.errors import ConfigError, ConflictError


def test_a_table_that_others_inherit_from_has_its_own_rows_only(shop, replica):
    shop.run(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
    )
    replica.follow(shop.source("parent"))
    assert set(replica.tables["parent"]) == {(1,)}
    shop.run("UPDATE child SET id = 3")  # it has no key, and is not published
    replica.follow(shop.source("parent"))
    assert set(replica.tables["parent"]) == {(1,)}


def test_a_key_that_is_checked_late_is_no_replica_identity(shop, replica):
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, name text)",
        "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
    )
    with pytest.raises(ConfigError, match="has no replica identity"):
        shop.source().check()
    shop.run("ALTER TABLE t REPLICA IDENTITY FULL")
    replica.follow(shop.source())
    shop.run("UPDATE t SET id = 3 - id")
    replica.follow(shop.source())
    rows = sorted((row["id"], row["name"]) for row in replica.tables["t"].values())
    assert rows == [(1, "b"), (2, "a")]


def test_rows_that_a_policy_hides_are_refused_and_not_left_out(shop, replica):
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1), (2)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON t USING (id = 1)",
        f"CREATE ROLE half_{shop.name} LOGIN PASSWORD 'half' REPLICATION",
        f"GRANT SELECT ON t TO half_{shop.name}",
        f"CREATE PUBLICATION millstream_{shop.name} FOR TABLE t WITH (publish_via_partition_root = true)",
    )
    address = shop.url.replace(shop.server.user + ":", f"half_{shop.name}:", 1)
    address = address.replace(address.split("@")[0].rpartition(":")[2], "half", 1)
    with pytest.raises(ConfigError, match=f"ALTER ROLE half_{shop.name} BYPASSRLS"):
        shop.source(url=address).check()
    shop.run(f"ALTER ROLE half_{shop.name} BYPASSRLS")
    replica.follow(shop.source(url=address))
    assert len(replica.tables["t"]) == 2


def test_partitions_that_have_no_identity_of_their_own_are_refused(shop):
    shop.run(
        "CREATE TABLE t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t DEFAULT",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    )
    with pytest.raises(ConfigError, match=r"ALTER TABLE public\.t1 REPLICA IDENTITY FULL"):
        shop.source("t").check()
    shop.run("ALTER TABLE t1 REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1)")
    shop.source("t").check()


def test_a_key_that_is_computed_is_refused(shop):
    shop.run("CREATE TABLE t (a int, id int GENERATED ALWAYS AS (a + 1) STORED PRIMARY KEY)")
    with pytest.raises(ConfigError, match="generated column"):
        shop.source().check()


def test_columns_of_vectors_and_tables_of_no_columns_are_read(shop, replica):
    shop.run(
        "CREATE TABLE v (id int PRIMARY KEY, n int2vector, o oidvector)",
        "INSERT INTO v VALUES (1, '1 2', '3 4')",
        "CREATE TABLE z ()",
        "ALTER TABLE z REPLICA IDENTITY FULL",
        "INSERT INTO z DEFAULT VALUES",
    )
    replica.follow(shop.source())
    assert replica.tables["v"] == {(1,): {"id": 1, "n": "1 2", "o": "3 4"}}
    assert [(one.op, one.after) for one in replica.changes("z")] == [("t", None), ("r", {})]


def test_a_table_that_left_the_publication_for_a_while_is_read_again(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    replica.follow(shop.source())
    publication = shop.run("SELECT pubname FROM pg_publication")[0][0]
    shop.run(
        f"ALTER PUBLICATION {publication} DROP TABLE t",
        "CREATE TABLE other (id int PRIMARY KEY)",
        f"ALTER PUBLICATION {publication} ADD TABLE other",
        "INSERT INTO t VALUES (2)",
        "DELETE FROM t WHERE id = 1",
    )
    replica.follow(shop.source())
    assert set(replica.tables["t"]) == {(2,)}


def test_a_publication_that_was_altered_and_altered_back_is_refused(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    replica.follow(shop.source())
    publication = shop.run("SELECT pubname FROM pg_publication")[0][0]
    shop.run(
        f"ALTER PUBLICATION {publication} SET (publish = 'insert')",
        "DELETE FROM t WHERE id = 1",
        f"ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')",
    )
    with pytest.raises(ConflictError, match="was altered"):
        replica.follow(shop.source())


@pytest.mark.parametrize("alteration", ["SET (publish = 'insert')", "SET TABLE t WHERE (id > 5)"])
def test_a_publication_that_left_changes_out_is_not_mended_but_refused(shop, replica, alteration):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    replica.follow(shop.source())
    publication = shop.run("SELECT pubname FROM pg_publication")[0][0]
    shop.run(f"ALTER PUBLICATION {publication} {alteration}", "DELETE FROM t WHERE id = 1")
    with pytest.raises(ConflictError, match="under a new name"):
        replica.follow(shop.source())


def test_the_application_may_change_what_is_captured(shop, replica):
    shop.run("CREATE TABLE parent (id int PRIMARY KEY)", "CREATE TABLE child () INHERITS (parent)")
    replica.follow(shop.source("parent"))
    try:
        shop.run("INSERT INTO child VALUES (1)", "DELETE FROM child")
    except psycopg.Error as error:
        pytest.fail(str(error))


def test_changes_of_a_table_that_is_gone_by_now_are_passed_over(shop, replica):
    shop.run("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    replica.follow(shop.source())
    shop.run("INSERT INTO a VALUES (1)")
    source = shop.source()
    units = source.units(replica.progress)
    replica.store(
        next(one for one in units if one.kind == "transaction")
    )  # the layout of a is known
    shop.run(
        "ALTER TABLE b ADD COLUMN n int", "INSERT INTO b VALUES (2)"
    )  # the catalogue is looked at
    shop.run("INSERT INTO a VALUES (3)", "DROP TABLE a")
    for unit in units:
        replica.store(unit)
        source.acknowledge(replica.progress)
        if unit.kind == "progress" and replica.tables.get("b"):
            break
    units.close()
    source.close()
    assert set(replica.tables["b"]) == {(2,)}
    assert not replica.tables["a"]


def test_a_table_that_is_renamed_while_it_is_read_is_read_anew(shop, replica):
    shop.run("CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a SELECT generate_series(1, 10)")
    replica.follow(shop.source(), limit=3)
    assert replica.tables["a"]
    shop.run("ALTER TABLE a RENAME TO b")
    replica.follow(shop.source())
    assert not replica.tables["a"]
    assert set(replica.tables["b"]) == {(number,) for number in range(1, 11)}


def test_partitions_that_are_rewritten_after_a_snapshot_began_are_not_read_as_empty(shop):
    from millstream.capture.postgres.catalog import find_tables
    from millstream.capture.postgres.snapshot import PgSnapshot

    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t DEFAULT",
        "INSERT INTO t VALUES (1, 1)",
    )
    source = shop.source()
    with shop.connect() as session:
        (table,) = find_tables(session, source.wanted)
    with PgSnapshot(source.address, f"s_{shop.name}") as snapshot:
        shop.run("ALTER TABLE t ALTER COLUMN n TYPE bigint")
        assert snapshot.lock(table) is None
    with PgSnapshot(source.address, f"s_{shop.name}") as snapshot:
        assert snapshot.lock(table) is not None


def test_a_capture_that_goes_on_needs_no_further_slot(replica):
    with start(max_replication_slots="2") as server:
        shop = Shop(server)
        shop.run("CREATE TABLE t (id int PRIMARY KEY)")
        shop.source().check()
        replica.follow(shop.source())
        shop.source().check()
        replica.follow(shop.source())
