"""Outboxes of SQLite and PostgreSQL: each committed event once, in its topic, in order, whatever is done to its row."""

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from capture_postgres_servers import Shop, start

import millstream as ms
from millstream.capture.outbox import OutboxRouter
from millstream.capture.sqlite.source import SqliteSource
from millstream.capture.units import LoggedMessage, TableChange
from millstream.errors import ConfigError, UnknownTopicError

COLUMNS = "id {0} PRIMARY KEY, aggregatetype {0}, aggregateid {0}, type {0}, payload {1}"
SQLITE = (
    f"CREATE TABLE outbox ({COLUMNS.format('TEXT NOT NULL', 'TEXT').replace('NOT NULL,', ',')})"
)
POSTGRES = f"CREATE TABLE outbox ({COLUMNS.format('text', 'jsonb')}, at timestamptz DEFAULT now())"


def events(folder, topic):
    """Return (id, event type, key, value) of the records of a topic."""
    with ms.connect(folder) as log:
        try:
            ends = log.end_offsets(topic)
        except UnknownTopicError:
            return []
        found = []
        for partition in range(len(ends)):
            rows = log.read(topic, partition, columns=("key", "value", "headers")).to_pylist()
            for row in rows:
                headers = {one["key"]: one["value"].decode() for one in row["headers"] or ()}
                found.append((headers["id"], headers.get("eventType"), row["key"], row["value"]))
        return found


def dead(folder, name="shop"):
    with ms.connect(folder) as log:
        values = log.read(f"{name}.outbox.dead", 0, columns=("value",)).column("value").to_pylist()
    return [json.loads(value)["reason"] for value in values]


def topics(folder):
    with ms.connect(folder) as log:
        return set(log.topics())


class Lite:
    def __init__(self, folder):
        self.path, self.log = folder / "shop.db", folder / "log"

    def run(self, *statements):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    def caught_up(self):
        capture = ms.capture(f"sqlite:///{self.path}", tables="t", to=self.log, outbox="outbox")
        source = SqliteSource(
            self.path, ["t", "outbox"], chunk_rows=3, heartbeat_s=0.001, poll_s=0.001
        )
        replace(capture, source=source).run(until="caught-up")


def test_events_of_committed_transactions_are_once_in_their_topics_and_tables_have_none(tmp_path):
    shop, dice = Lite(tmp_path), random.Random(4)
    shop.run(SQLITE, "CREATE TABLE t (id INTEGER PRIMARY KEY)")
    sent = {"order": [], "customer": []}
    for number in range(60):
        kind, rolled_back = dice.choice(list(sent)), dice.random() < 0.3
        value = json.dumps({"n": number, "ü": "\"'"}).replace("'", "''")
        insert = (
            f"INSERT INTO outbox VALUES ('e{number}', '{kind}', 'k{number % 3}', 'Made', '{value}')"
        )
        delete = [f"DELETE FROM outbox WHERE id = 'e{number}'"] if dice.random() < 0.7 else []
        end = "ROLLBACK" if rolled_back else "COMMIT"
        shop.run("BEGIN", f"INSERT INTO t VALUES ({number})", insert, *delete, end)
        deleted_before_any_capture = number < 7 and delete
        if not rolled_back and not deleted_before_any_capture:
            sent[kind].append(
                (f"e{number}", "Made", f"k{number % 3}".encode(), value.replace("''", "'").encode())
            )
        if (number >= 6 and dice.random() < 0.3) or number == 6:
            shop.caught_up()
    shop.caught_up()
    for kind, expected in sent.items():
        assert events(shop.log, f"outbox.event.{kind}") == expected
    assert "shop.main.outbox" not in topics(shop.log)
    assert "shop.main.t" in topics(shop.log)


def test_no_event_is_lost_where_the_outbox_is_altered_or_made_anew_and_known_ones_keep_their_ids(
    tmp_path,
):
    shop = Lite(tmp_path)
    shop.run(SQLITE, "CREATE TABLE t (id INTEGER PRIMARY KEY)")
    shop.run("INSERT INTO outbox VALUES ('a', 'order', '1', 'Made', '{}')")
    shop.caught_up()
    shop.run("ALTER TABLE outbox ADD COLUMN more TEXT")
    shop.run("INSERT INTO outbox VALUES ('b', 'order', '1', 'Made', '{}', 'm')")
    shop.caught_up()
    found = events(shop.log, "outbox.event.order")
    assert set(found) == {(name, "Made", b"1", b"{}") for name in "ab"}
    shop.run("DROP TABLE outbox", SQLITE)
    shop.run("INSERT INTO outbox VALUES ('c', 'order', '1', 'Made', NULL)")
    shop.caught_up()
    assert events(shop.log, "outbox.event.order")[len(found) :] == [("c", "Made", b"1", None)]


def test_what_cannot_be_routed_is_kept_with_the_reason_and_nothing_stops(tmp_path):
    shop = Lite(tmp_path)
    shop.run(SQLITE, "CREATE TABLE t (id INTEGER PRIMARY KEY)")
    shop.caught_up()
    shop.run(
        "INSERT INTO outbox VALUES ('a', 'order', '1', 'Made', 'x')",
        "UPDATE outbox SET payload = 'y' WHERE id = 'a'",
        "INSERT INTO outbox VALUES ('b', NULL, '1', 'Made', 'x')",
        "INSERT INTO outbox VALUES ('c', 'bad topic', '1', 'Made', 'x')",
        "INSERT INTO outbox VALUES ('d', 'order', NULL, NULL, 'z')",
    )
    shop.caught_up()
    assert events(shop.log, "outbox.event.order") == [
        ("a", "Made", b"1", b"x"),
        ("d", None, None, b"z"),
    ]
    assert dead(shop.log) == [
        "the row of an event was updated",
        "no topic can be named after the aggregatetype None",
        "no topic can be named after the aggregatetype 'bad topic'",
    ]


def test_a_table_that_is_no_outbox_is_refused_before_any_row(tmp_path):
    shop = Lite(tmp_path)
    shop.run("CREATE TABLE outbox (id TEXT PRIMARY KEY NOT NULL, payload TEXT)")
    shop.run("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    with pytest.raises(ConfigError, match="no column aggregateid, aggregatetype, type"):
        shop.caught_up()
    for wrong in ("", "out*"):
        with pytest.raises(ConfigError, match="Give the name of one table"):
            ms.capture(f"sqlite:///{shop.path}", outbox=wrong)
    with pytest.raises(ConfigError, match="and has messages in it"):
        ms.capture(f"sqlite:///{shop.path}", outbox_messages=True)


def test_a_message_without_a_key_has_none():
    router = OutboxRouter(None)
    event = router.of_message(LoggedMessage("outbox:order", b"\xff"), "7/1")
    assert (event.topic, event.key, event.value) == ("outbox.event.order", None, b"\xff")
    event = router.of_message(LoggedMessage("outbox:order:a:b", b""), "7/1")
    assert (event.key, event.headers) == (b"a:b", (("id", b"7/1"),))
    assert not router.takes(TableChange("public", "outbox", "c", ()))


@pytest.fixture(scope="module")
def server():
    with start() as started:
        yield started


def test_outbox_and_messages_of_postgresql_are_in_the_order_of_their_transactions(server, tmp_path):
    shop, folder = Shop(server), tmp_path / "log"
    shop.run(POSTGRES, "CREATE TABLE t (id int PRIMARY KEY)")

    def caught_up():
        capture = ms.capture(
            shop.url, tables="t", to=folder, name="shop", outbox="outbox", outbox_messages=True
        )
        capture.source.heartbeat_s = 0.05
        capture.run(until="caught-up")

    def transact(*statements):
        with shop.connect() as session, session.transaction():
            for statement in statements:
                session.execute(statement)

    shop.run("INSERT INTO outbox VALUES ('0', 'order', 'k', 'Made', '{\"n\": 0}')")
    caught_up()
    emit = "SELECT pg_logical_emit_message({}, '{}', '{}')"
    insert = "INSERT INTO outbox VALUES ('{}', 'order', 'k', 'Made', '{{\"n\": {}}}')"
    transact(insert.format(1, 1), "DELETE FROM outbox", "INSERT INTO t VALUES (1)")
    transact(emit.format("true", "outbox:order:k", "two"))
    with shop.connect() as session:
        session.execute("BEGIN")
        session.execute(insert.format(9, 9))
        session.execute(emit.format("true", "outbox:order:k", "rolled back"))
        session.execute("ROLLBACK")
    caught_up()
    transact(emit.format("true", "other:order:k", "not ours"), insert.format(3, 3))
    transact(emit.format("true", "outbox:bad topic:k", "nowhere"))
    shop.run("ALTER TABLE outbox ADD COLUMN more text DEFAULT 'm'")
    transact(insert.format(4, 4))
    caught_up()
    caught_up()
    found = events(folder, "outbox.event.order")
    assert [(one[2], one[3]) for one in found] == [
        (b"k", b'{"n": 0}'),
        (b"k", b'{"n": 1}'),
        (b"k", b"two"),
        (b"k", b'{"n": 3}'),
        (b"k", b'{"n": 4}'),
        *((b"k", b'{"n": %d}' % number) for number in (3, 4)),  # the outbox was altered
    ]
    assert len({one[0] for one in found}) == 5
    assert dead(folder) == ["no topic can be named after the aggregatetype 'bad topic'"]
    assert "shop.public.outbox" not in topics(folder)
    with ms.connect(folder) as log:
        values = log.read("shop.public.t", 0, columns=("value",)).column("value").to_pylist()
        ends = [
            json.loads(value)
            for value in log.read("shop.transaction", 0, columns=("value",))
            .column("value")
            .to_pylist()
        ]
    assert len(values) == 1
    # The others are those in which a table was defined, of which no rows came.
    counted = [one["data_collections"] for one in ends if one["status"] == "END"]
    assert list(filter(None, counted)) == [[{"data_collection": "public.t", "event_count": 1}]]
