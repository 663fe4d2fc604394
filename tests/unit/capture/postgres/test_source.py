"""A real PostgreSQL server is captured: rows, changes, alterations, and what is refused."""

import pytest

from millstream.errors import ConfigError, ConflictError, RetriableError


def plain(changes):
    return [(one.op, one.before, one.after) for one in changes]


def test_rows_are_read_and_then_their_changes(shop, replica):
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, name text)",
        "INSERT INTO t SELECT n, 'n' || n FROM generate_series(1, 7) n",
    )
    replica.follow(shop.source())
    assert [one.op for one in replica.changes()] == ["r"] * 7
    before = len(replica.changes())
    shop.run(
        "INSERT INTO t VALUES (8, NULL)",
        "UPDATE t SET name = 'x' WHERE id = 1",
        "UPDATE t SET id = 100 WHERE id = 2",
        "DELETE FROM t WHERE id = 3",
    )
    replica.follow(shop.source())
    assert plain(replica.changes()[before:]) == [
        ("c", None, {"id": 8, "name": None}),
        ("u", None, {"id": 1, "name": "x"}),
        ("u", {"id": 2}, {"id": 100, "name": "n2"}),
        ("d", {"id": 3}, None),
    ]
    assert replica.tables["t"] == shop.rows("t", ["id"])


# Fault 19: two phases.
def test_19_a_rolled_back_transaction_is_not_there_and_a_prepared_one_is_when_it_commits(
    shop, replica
):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    with shop.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO t VALUES (1)")
        session.execute("SAVEPOINT s")
        session.execute("INSERT INTO t VALUES (2)")
        session.execute("ROLLBACK TO s")
        session.execute("COMMIT")
        session.execute("BEGIN")
        session.execute("INSERT INTO t VALUES (3)")
        session.execute("ROLLBACK")
        session.execute("BEGIN")
        session.execute("INSERT INTO t VALUES (4)")
        session.execute("PREPARE TRANSACTION 'two'")
        replica.follow(shop.source())
        assert set(replica.tables["t"]) == {(1,)}
        session.execute("COMMIT PREPARED 'two'")
    replica.follow(shop.source())
    assert set(replica.tables["t"]) == {(1,), (4,)}


# Fault 3: rows of one statement share places in the WAL.
def test_3_rows_of_one_copy_are_all_there_when_the_capture_stops_at_any_of_its_units(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    with shop.connect() as session, session.cursor().copy("COPY t FROM STDIN") as copy:
        for number in range(300):
            copy.write_row((number,))
    replica.follow(shop.source(), limit=0)
    replica.follow(shop.source())
    assert len(replica.changes()) == len(replica.tables["t"]) == 300
    assert len({position for kind, position, _ in replica.units if kind == "transaction"}) == 1


# Fault 4: transactions come in the order of their commits, whatever the order of their changes.
def test_4_interleaved_transactions_come_in_the_order_of_their_commits(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    with shop.connect() as one, shop.connect() as two:
        one.execute("BEGIN")
        one.execute("INSERT INTO t VALUES (1)")
        two.execute("BEGIN")
        two.execute("INSERT INTO t VALUES (2)")
        one.execute("INSERT INTO t VALUES (3)")
        two.execute("COMMIT")
        one.execute("COMMIT")
    replica.follow(shop.source())
    found = [
        [c.after["id"] for c in contents if hasattr(c, "op")] for _, _, contents in replica.units
    ]
    assert [one for one in found if one] == [[2], [1, 3]]


# Fault 6: a slot cannot be made while a transaction that writes is open.
def test_6_a_snapshot_behind_an_open_transaction_names_it_and_leaves_no_slot(
    shop, replica, monkeypatch
):
    from millstream.capture.postgres import stream

    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    monkeypatch.setattr(stream.create_slot, "__kwdefaults__", {"wait_s": 0.3})
    with shop.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO t VALUES (1)")
        pid = session.info.backend_pid
        with pytest.raises(RetriableError, match=f"{pid} .open for"):
            replica.follow(shop.source())
        assert not shop.run(
            f"SELECT 1 FROM pg_replication_slots WHERE database = '{shop.name}' AND NOT active"
        )
        session.execute("COMMIT")
    replica.follow(shop.source())
    assert replica.tables["t"] == {(1,): {"id": 1}}


# Fault 7: a crash at every step of the hand-over from snapshot to stream.
@pytest.mark.parametrize("step", range(9))
def test_7_a_crash_at_any_step_of_the_snapshot_loses_nothing(shop, replica, step):
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT n, 0 FROM generate_series(1, 10) n",
    )
    replica.follow(shop.source(), limit=step)
    shop.run(
        "UPDATE t SET n = 1 WHERE id = 9",
        "UPDATE t SET id = 11 WHERE id = 2",
        "UPDATE t SET id = -1 WHERE id = 10",
        "DELETE FROM t WHERE id = 5",
    )
    replica.follow(shop.source())
    assert replica.tables["t"] == shop.rows("t", ["id"])
    assert len(shop.run(f"SELECT 1 FROM pg_replication_slots WHERE database = '{shop.name}'")) == 1


# Faults 8 and 9: the slot is gone, made anew, or moved.
def test_8_a_slot_that_is_gone_or_made_anew_is_refused(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    slot = shop.slot()
    shop.run(f"SELECT count(*) FROM pg_drop_replication_slot('{slot}')", "INSERT INTO t VALUES (1)")
    with pytest.raises(ConflictError, match="is gone"):
        replica.follow(shop.source())
    shop.run(f"SELECT count(*) FROM pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with pytest.raises(ConflictError, match="made anew"):
        replica.follow(shop.source())


def test_9_a_slot_that_another_one_moved_is_refused(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    shop.run("INSERT INTO t VALUES (1)")
    shop.wait_until_released()
    shop.run(
        f"SELECT count(*) FROM pg_replication_slot_advance('{shop.slot()}', pg_current_wal_lsn())"
    )
    with pytest.raises(ConflictError, match="was moved"):
        replica.follow(shop.source())


# Fault 10: the captured database is idle, its neighbour is not.
def test_10_the_slot_moves_on_while_another_database_is_busy(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    at = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = '%s'"
    (before,) = shop.run(at % shop.slot())[0]
    neighbour = type(shop)(shop.server)
    neighbour.run("CREATE TABLE x AS SELECT generate_series(1, 20000)")
    replica.follow(
        shop.source(), done=lambda: shop.run(at % shop.slot())[0][0] > before + 1_000_000
    )


# Fault 13: tables are altered while they are captured, or while they are not.
def test_13_alterations_are_followed_at_their_place(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1), (2, 2)")
    replica.follow(shop.source())
    for statements in (
        ("ALTER TABLE t ADD COLUMN b int DEFAULT 7", "INSERT INTO t VALUES (3, 3, 3)"),
        ("ALTER TABLE t DROP COLUMN a", "INSERT INTO t VALUES (4, 4)"),
        ("ALTER TABLE t RENAME b TO c", "UPDATE t SET c = 9 WHERE id = 1"),
        ("ALTER TABLE t ALTER c TYPE text USING 'x' || c", "DELETE FROM t WHERE id = 2"),
    ):
        shop.run(*statements)
        replica.follow(shop.source())
        assert replica.tables["t"] == shop.rows("t", ["id"])
    names = [[column["name"] for column in one.columns] for one in replica.definitions()]
    assert names[-1] == ["id", "c"]


def test_13_a_table_made_anew_under_its_name_or_renamed_is_read_anew(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    replica.follow(shop.source())
    shop.run("DROP TABLE t", "CREATE TABLE t (name text PRIMARY KEY)", "INSERT INTO t VALUES ('a')")
    replica.follow(shop.source())
    assert replica.tables["t"] == {("a",): {"name": "a"}}
    shop.run("ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES ('b')")
    replica.follow(shop.source())
    assert replica.tables["t"] == {}
    assert set(replica.tables["u"]) == {("a",), ("b",)}


# Fault 14: the replica identity changes.
def test_14_identities_may_change_and_keys_stay_right(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY, u int NOT NULL UNIQUE, n int)")
    shop.run("INSERT INTO t VALUES (1, 10, 0), (2, 20, 0)")
    replica.follow(shop.source())
    shop.run("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET n = 1 WHERE id = 1")
    shop.run("DELETE FROM t WHERE id = 2")
    replica.follow(shop.source())
    assert replica.changes()[-1].before == {"id": 2, "u": 20, "n": 0}
    assert replica.tables["t"] == shop.rows("t", ["id"])
    shop.run("ALTER TABLE t REPLICA IDENTITY USING INDEX t_u_key", "UPDATE t SET u = 11, n = 2")
    replica.follow(shop.source())
    assert replica.changes()[-1].key == ("u",)
    assert replica.tables["t"] == shop.rows("t", ["u"])


# Fault 15: large values that an update does not change are not sent.
def test_15_unchanged_large_values_are_left_out_and_never_null(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY, n int, big text)")
    shop.run("ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    shop.run("INSERT INTO t VALUES (1, 0, repeat('x', 9000))")
    replica.follow(shop.source())
    shop.run("UPDATE t SET n = 1", "UPDATE t SET id = 2")
    replica.follow(shop.source())
    assert [one.after for one in replica.changes()[-2:]] == [{"id": 1, "n": 1}, {"id": 2, "n": 1}]
    assert replica.tables["t"] == shop.rows("t", ["id"])


# Fault 16: the publication is gone; a table is added late; a table has partitions.
def test_16_tables_that_are_added_late_and_partitioned_ones_are_captured(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    shop.run(
        "CREATE TABLE p (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
        "INSERT INTO p VALUES (1, 1), (11, 1)",
    )
    replica.follow(shop.source())
    shop.run("UPDATE p SET n = 2", "UPDATE p SET id = 12 WHERE id = 1", "TRUNCATE t")
    replica.follow(shop.source())
    assert replica.tables["p"] == shop.rows("p", ["id"])
    assert "p1" not in replica.tables
    assert replica.changes("t")[-1].op == "t"


def test_16_a_publication_that_is_gone_is_an_error_that_says_so(shop, replica):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    replica.follow(shop.source())
    shop.run(f"DROP PUBLICATION millstream_{shop.name}", "INSERT INTO t VALUES (1)")
    with pytest.raises(ConflictError, match="publication"):
        replica.follow(shop.source())


# Fault 20: values that others lose.
def test_20_values_keep_what_they_are_in_rows_and_in_changes(shop, replica):
    shop.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE DOMAIN whole AS int CHECK (VALUE > 0)"
    )
    shop.run(
        """CREATE TABLE "T ü" ("a ""b" numeric PRIMARY KEY, f float8, d date, ts timestamp, tz timestamptz,
           ti time, b bytea, j json, jb jsonb, ar text[], ai int[], nested int[][], m mood, w whole, ws whole[],
           iv interval, u uuid, bo bool, c char(5), r int4range, n numeric[])"""
    )
    insert = """INSERT INTO "T ü" VALUES (%s, 'NaN', 'infinity', '0044-03-15 12:00:00 BC', '2026-01-02 03:04:05.6+02',
        '24:00', '\\x00ff', '{"a":1, "a":2}', '{"a": 1e400}', '{"a,b",NULL,"NULL","q\\"\\\\"}', '[2:3]={1,NULL}',
        '{{1,2},{3,4}}', 'ok', 3, '{3,4}', '1 year 2 days', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', true, 'ab',
        '[1,5)', '{1.10,Infinity}')"""
    shop.run(insert % "'NaN'")
    replica.follow(shop.source())
    shop.run(insert % "12.30", "ALTER TYPE mood ADD VALUE 'new'")
    shop.run("""UPDATE "T ü" SET m = 'new' WHERE "a ""b" = 12.30""")
    replica.follow(shop.source())
    read, created, updated = (one.after for one in replica.changes())
    assert read.pop('a "b') == "NaN"
    assert created.pop('a "b') == "12.30"
    assert read == created
    assert (updated["m"], read["m"]) == ("new", "ok")
    assert len(read["jb"].split(":")[1]) > 400
    del read["jb"]
    assert read == {
        "f": "NaN", "d": "infinity", "ts": "0044-03-15 12:00:00 BC", "tz": "2026-01-02T01:04:05.6Z", "ti": "24:00:00",
        "b": "AP8=", "j": '{"a":1, "a":2}', "ar": ["a,b", None, "NULL", 'q"\\'], "ai": [1, None],
        "nested": [[1, 2], [3, 4]], "m": "ok", "w": 3, "ws": [3, 4], "iv": "P1Y2D",
        "u": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "bo": True, "c": "ab   ", "r": "[1,5)", "n": ["1.10", "Infinity"],
    }  # fmt: skip


def test_tables_without_a_key_are_read_whole(shop, replica):
    shop.run("CREATE TABLE t (a int, b text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    shop.run("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 10) n")
    replica.follow(shop.source())
    shop.run("DELETE FROM t WHERE a = 1", "UPDATE t SET b = NULL WHERE a = 2")
    replica.follow(shop.source())
    assert sorted((r["a"], r["b"]) for r in replica.tables["t"].values()) == sorted(
        shop.run("SELECT a, b FROM t")
    )
    assert {one.key for one in replica.changes()} == {()}


def test_what_would_lose_changes_is_refused_with_the_statement_that_mends_it(shop):
    shop.run("CREATE TABLE nokey (a int)", "CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)")
    with pytest.raises(ConfigError) as caught:
        shop.source().check()
    text = str(caught.value)
    assert 'ALTER TABLE "public"."nokey" REPLICA IDENTITY FULL' in text
    assert 'ALTER TABLE "public"."quick" SET LOGGED' in text
    assert shop.server.password not in text
    with pytest.raises(ConfigError, match="no table of"):
        shop.source("nothing*").check()


def test_a_role_that_may_not_is_told_each_grant(shop):
    shop.run("CREATE TABLE t (id int PRIMARY KEY)")
    shop.run(f"CREATE ROLE reader_{shop.name} LOGIN PASSWORD 'hush hush'")
    address = shop.url.replace(shop.server.user + ":", f"reader_{shop.name}:", 1)
    address = address.replace(address.split("@")[0].rpartition(":")[2], "hush%20hush", 1)
    with pytest.raises(ConfigError, match=f"ALTER ROLE reader_{shop.name} REPLICATION"):
        shop.source(url=address).check()
    shop.run(f"ALTER ROLE reader_{shop.name} REPLICATION")
    with pytest.raises(ConfigError) as caught:
        shop.source(url=address).check()
    assert 'GRANT SELECT ON "public"."t"' in str(caught.value)
    assert "CREATE PUBLICATION" in str(caught.value)
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="Correct the user, the password") as failed:
        shop.source(url=address.replace("hush", "wrong")).check()
    assert "wrong" not in str(failed.value)
