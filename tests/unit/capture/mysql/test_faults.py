"""What goes wrong with a server, and what a capture of it does then."""

import time

import pytest
from mariadb_database import SERVERS, Database, both, start
from random_mariadb_workload import SCHEMA, Writers

from millstream.capture.mysql import transactions
from millstream.capture.mysql.address import mariadb_address
from millstream.capture.mysql.preflight import table_faults
from millstream.capture.mysql.session import MariaDbSession
from millstream.errors import ConfigError, ConflictError, RetriableError


def now():
    return True


both_own = pytest.mark.parametrize("own_database", list(SERVERS), indirect=True)


def filled(database):
    database.run(
        "CREATE TABLE t (id INT PRIMARY KEY, s VARCHAR(100))", "INSERT INTO t VALUES (1, 'a')"
    )
    return database


@both_own
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.thorough)])
def test_fault_2_a_server_that_is_killed_goes_on_where_it_was(own_database, replica, kills):
    own_database.run(*SCHEMA)
    server = own_database.server
    for seed in range(kills):
        with Writers(
            own_database.connect, seed, ddl=seed % 2 == 0, kind=own_database.kind
        ) as writers:
            replica.follow(own_database.source(), lambda: False, limit=40)
            server.kill()
            with pytest.raises(RetriableError):
                for _ in range(1000):
                    replica.follow(own_database.source(), lambda: False)
        assert writers.errors  # their connections broke, too
        server.start()
    replica.follow(own_database.source(), now)
    for table in ("a", "b"):
        rows = own_database.run(f"SELECT * FROM {table}")
        assert sorted(tuple(row.values()) for row in replica.rows(table)) == sorted(rows)
    numbers = [
        int(at.replace(":", "-").rpartition("-")[2])
        for kind, at, _ in replica.units
        if kind == "transaction"
    ]
    assert numbers == sorted(set(numbers))


@both_own
def test_fault_17_a_log_that_was_purged_is_refused(own_database, replica):
    filled(own_database)
    replica.follow(own_database.source(), now)
    own_database.run("FLUSH BINARY LOGS", "INSERT INTO t VALUES (2, 'b')", "FLUSH BINARY LOGS")
    (last,) = own_database.run("SHOW BINARY LOGS")[-1:]
    while (
        len(own_database.run("SHOW BINARY LOGS")) > 1
    ):  # until the server has seen that its reader is gone
        own_database.run(f"PURGE BINARY LOGS TO '{last[0]}'")
    with pytest.raises(ConflictError, match="purged"):
        replica.follow(own_database.source(), now)


@both_own
def test_fault_17_a_log_that_lost_what_was_captured_is_refused(own_database, replica):
    filled(own_database)
    own_database.run("INSERT INTO t VALUES (2, REPEAT('b', 100))")
    replica.follow(own_database.source(), now)
    own_database.server.kill()
    file = own_database.server.folder / "data" / replica.progress["file"]
    file.write_bytes(file.read_bytes()[:-150])
    own_database.server.start()
    with pytest.raises(ConflictError, match="does not have the place"):
        replica.follow(own_database.source(), now)


@both_own
def test_a_log_that_was_made_anew_is_refused_though_it_is_as_long(own_database, replica):
    filled(own_database)
    replica.follow(own_database.source(), now)
    time.sleep(1.1)  # files are told apart by the second in which they were made
    own_database.run("RESET MASTER", *[f"INSERT INTO t VALUES ({n}, 'x')" for n in range(10, 40)])
    with pytest.raises(ConflictError, match="made anew"):
        replica.follow(own_database.source(), now)


@both
def test_a_large_transaction_is_given_while_it_is_read(database, replica, monkeypatch):
    filled(database)
    replica.follow(database.source(), now)
    monkeypatch.setattr(transactions, "HELD_BYTES", 1000)
    rows = ", ".join(f"({n}, REPEAT('x', 100))" for n in range(100, 5001))
    database.run(f"INSERT INTO t VALUES {rows}")
    held = []
    monkeypatch.setattr(
        transactions.TransactionReader,
        "_read_on",
        lambda self, group, gtid, old=transactions.TransactionReader._read_on: (
            held.append(sum(len(getattr(one, "body", b"")) for one in group.held)),
            old(self, group, gtid),
        )[1],
    )
    replica.follow(database.source(), now)
    assert len(replica.rows("t")) == 4902
    assert len(replica.changes("t")) == 1 + 4901
    assert len(held) > 20
    assert max(held) < 30_000
    assert (
        len(
            [
                1
                for kind, _, contents in replica.units
                if kind == "transaction" and len(contents) > 4000
            ]
        )
        == 1
    )


def test_a_server_that_does_not_respond_is_tried_again(database):
    url = database.url().replace(str(database.server.port), "1")
    with pytest.raises(RetriableError, match=r"127\.0\.0\.1:1/"):
        database.source(url=url).check()


@both
def test_no_error_has_the_password(database):
    for url in (
        database.url(password="se:cret/1"),
        database.url(user="nobody", password="se:cret/1"),
    ):
        with pytest.raises(ConfigError) as error:
            database.source(url=url).check()
        assert "se:cret/1" not in str(error.value)
        assert "se%3Acret" not in str(error.value)
    for text in (
        "mariadb://u:se:cret/1@h/d",
        "mariadb://u:secret@h",
        "mariadb://u:secret@h:x/d",
        "x",
    ):
        with pytest.raises(ConfigError) as error:
            mariadb_address(text)
        assert "cret" not in str(error.value)
    assert "cret" not in repr(mariadb_address("mariadb://u:secret@h/d"))


MONITOR = {"mariadb": "BINLOG MONITOR", "mysql": "REPLICATION CLIENT"}
SETTINGS = {
    "binlog_format": "MIXED",
    "binlog_row_image": "MINIMAL",
    "binlog_row_metadata": "NO_LOG",
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mariadb", SETTINGS),
        ("mysql", SETTINGS | {"binlog_row_metadata": "MINIMAL", "binlog_row_value_options": "PARTIAL_JSON"}),
    ],
)  # fmt: skip
def test_fault_18_settings_that_lose_changes_are_refused_with_the_statement_that_mends_them(
    kind, settings
):
    wanted = {
        "format": "ROW",
        "row_image": "FULL",
        "row_metadata": "FULL",
        **({"row_value_options": ""} if kind == "mysql" else {}),
    }
    with start(kind, **settings) as server:
        database = filled(Database(server))
        with pytest.raises(ConfigError) as error:
            database.source().check()
        for name, value in wanted.items():
            assert f"SET GLOBAL binlog_{name} = '{value}'" in str(error.value)
            server.run(f"SET GLOBAL binlog_{name} = '{value}'")
        database.source().check()


def test_a_server_without_a_binary_log_is_refused():
    with start(skip_log_bin="1") as server, pytest.raises(ConfigError, match="binary log is off"):
        Database(server).source().check()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("(a INT)", "ADD COLUMN id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY"),
        ("(a INT PRIMARY KEY) ENGINE = MyISAM", "ENGINE = InnoDB"),
        ("(a INT PRIMARY KEY, p POINT)", "is point"),
        ("(a INT PRIMARY KEY, b TEXT COMPRESSED)", "is compressed"),
        ("(a INT PRIMARY KEY, b TEXT CHARACTER SET big5)", "CONVERT TO CHARACTER SET utf8mb4"),
        ("(a DOUBLE PRIMARY KEY)", "not exact"),
        ("(a INT PRIMARY KEY) WITH SYSTEM VERSIONING", "system-versioned"),
        ("(a INT PRIMARY KEY, p INT, FOREIGN KEY f (p) REFERENCES parent (a) ON DELETE CASCADE)", "ON DELETE CASCADE"),
        ("(a INT PRIMARY KEY, p INT, FOREIGN KEY f (p) REFERENCES parent (a) ON UPDATE SET NULL)", "ON UPDATE SET NULL"),
    ],
)  # fmt: skip
def test_fault_19_tables_that_cannot_be_captured_are_refused_with_the_statement_that_mends_them(
    database, table, words
):
    database.run("CREATE TABLE parent (a INT PRIMARY KEY)", f"CREATE TABLE t {table}")
    with pytest.raises(ConfigError, match="cannot be captured as it is") as error:
        database.source().check()
    assert words in str(error.value)


def test_a_user_needs_these_privileges_and_no_more(database, replica):
    filled(database)
    name, password = f"reader_{database.name}", "p"
    database.run(
        f"CREATE USER {name}@'%' IDENTIFIED BY '{password}'",
        f"GRANT SELECT ON {database.name}.* TO {name}@'%'",
    )
    url = database.url(name, password)
    with pytest.raises(ConfigError) as error:
        database.source(url=url).check()
    grants = [line.split("Mend it: ")[1] for line in str(error.value).splitlines()[1:]]
    assert grants == [
        f"GRANT REPLICATION SLAVE ON *.* TO '{name}'@'%'",
        f"GRANT BINLOG MONITOR ON *.* TO '{name}'@'%'",
    ]
    database.run(*grants)
    replica.follow(database.source(url=url), now)
    assert replica.rows("t") == [{"id": 1, "s": "a"}]


@both
def test_a_table_that_the_user_may_not_read_stops_the_capture_with_its_first_change(
    database, replica
):
    filled(database)
    database.run("CREATE TABLE secret (id INT PRIMARY KEY, s TEXT)")
    name = f"reader_{database.name}"
    database.run(
        f"CREATE USER {name}@'%' IDENTIFIED BY 'p'",
        f"GRANT REPLICATION SLAVE, {MONITOR[database.kind]} ON *.* TO {name}@'%'",
        f"GRANT SELECT ON {database.name}.t TO {name}@'%'",
        f"GRANT LOCK TABLES ON {database.name}.* TO {name}@'%'",
    )
    url = database.url(name, "p")
    replica.follow(database.source(url=url), now)
    database.run("INSERT INTO secret VALUES (1, 'hidden')")
    with pytest.raises(ConfigError, match="may not read") as error:
        replica.follow(database.source(url=url), now)
    assert "hidden" not in str(error.value)
    replica.follow(database.source("t", url=url), now)
    database.run(f"GRANT SELECT (id) ON {database.name}.secret TO {name}@'%'")
    with pytest.raises(ConfigError, match="single columns"):
        database.source("t", url=url).check()


CHARSETS = [
    "latin1",
    "latin2",
    "latin5",
    "cp1250",
    "cp1251",
    "cp1256",
    "cp1257",
    "cp850",
    "cp852",
    "koi8r",
    "ascii",
]


@both
@pytest.mark.parametrize("charset", CHARSETS)
def test_each_byte_of_a_character_set_is_the_character_that_the_server_takes_it_for(
    database, charset
):
    from millstream.capture.mysql.charsets import text_decoder

    decode = text_decoder(charset, "d.t.c")
    with MariaDbSession(mariadb_address(database.url())) as session:
        for byte in range(128 if charset == "ascii" else 256):
            statement = f"SELECT HEX(CONVERT(_{charset} X'{byte:02x}' USING utf8mb4))"
            served = bytes.fromhex(session.value(statement)).decode()
            if served == "?" and byte != ord("?"):
                continue  # which the server has no character for
            assert decode(bytes([byte])) == served, hex(byte)


@both
def test_a_table_that_is_dropped_while_it_is_looked_at_has_no_faults(database, monkeypatch):
    """Its end is in the log: the preflight must not stop a capture for it."""
    filled(database)
    ask = MariaDbSession.rows

    def drop_first(session, statement, *parameters):
        if statement.startswith("SHOW CREATE TABLE"):
            database.run("DROP TABLE IF EXISTS t")
        return ask(session, statement, *parameters)

    monkeypatch.setattr(MariaDbSession, "rows", drop_first)
    with MariaDbSession(mariadb_address(database.url())) as session:
        assert table_faults(session, database.name, "t") == []
