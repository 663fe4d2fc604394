"""Units of a source in the log: each once and whole, whatever is interrupted."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

import millstream as ms
from millstream import testing
from millstream.capture.envelope import CaptureTopics
from millstream.capture.group_reader import GroupReader
from millstream.capture.lag import SourceLag
from millstream.capture.run import Capture
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.capture.writer import CaptureWriter
from millstream.client import connect
from millstream.errors import (
    ConfigError,
    ConflictError,
    ProducerFencedError,
    RetriableError,
)

COLUMNS = ({"name": "id"}, {"name": "name"})


def insert(number: int, name: str = "a") -> TableChange:
    return TableChange("shop", "users", "c", ("id",), None, {"id": number, "name": name})


def unit(number: int, *contents: object, kind: str = "transaction") -> CaptureUnit:
    return CaptureUnit(kind, f"p{number}", 1000 + number, iter(contents), {"at": number})


def writer_of(log: ms.EventLog, name: str = "shop", connector: str = "test") -> CaptureWriter:
    return CaptureWriter(log, CaptureTopics(name), connector, lambda: 5000)


def values(log: ms.EventLog, topic: str) -> list[dict | None]:
    found = log.read(topic, 0).column("value").to_pylist()
    return [None if value is None else json.loads(value) for value in found]


@pytest.fixture
def log(tmp_path) -> Iterator[ms.EventLog]:
    with connect(tmp_path) as opened:
        yield opened


def test_a_unit_is_a_transaction_of_records_and_progress(log) -> None:
    with writer_of(log) as writer:
        writer.write([unit(1, TableDefinition("shop", "users", COLUMNS, ("id",)), insert(7))])
    (record,) = values(log, "shop.shop.users")
    assert record["after"] == {"id": 7, "name": "a"}
    assert (record["op"], record["before"]) == ("c", None)
    assert record["transaction"] == {
        "id": "transaction:p1",
        "total_order": 1,
        "data_collection_order": 1,
    }
    begin, end = values(log, "shop.transaction")
    assert (begin["status"], begin["id"]) == ("BEGIN", "transaction:p1")
    assert end["event_count"] == 1
    assert end["data_collections"] == [{"data_collection": "shop.users", "event_count": 1}]
    (definition,) = values(log, "shop")
    assert definition["tableChanges"][0]["type"] == "CREATE"
    with writer_of(log) as writer:
        assert writer.progress.source == {"at": 1}
        assert writer.progress.columns == {"shop.users": ["id", "name"]}


def test_progress_without_a_change_is_kept_too(tmp_path) -> None:
    source = Walk(random.Random(0), 0)
    assert Capture(source, tmp_path, "shop", "test").run(until="caught-up").state == "idle"
    with connect(tmp_path) as log, writer_of(log) as writer:
        assert writer.progress.source == {"at": 0}
        assert values(log, "__debezium-heartbeat.shop")


def test_a_change_of_the_key_is_a_deletion_and_a_creation(log) -> None:
    moved = TableChange("shop", "users", "u", ("id",), {"id": 1, "name": "a"}, {"id": 2})
    with writer_of(log) as writer:
        definition = TableDefinition("shop", "users", COLUMNS, ("id",))
        writer.write([unit(1, definition, insert(1)), unit(2, moved)])
    _, deleted, tombstone, created = values(log, "shop.shop.users")
    assert (deleted["op"], deleted["before"]["id"], tombstone) == ("d", 1, None)
    assert (created["op"], created["after"]) == ("c", {"id": 2})
    assert (created["unavailable"], created["carry_from"]) == (["name"], {"id": 1})
    assert [one["transaction"]["total_order"] for one in (deleted, created)] == [1, 2]


def test_what_fails_in_the_middle_of_a_group_leaves_nothing(log) -> None:
    def broken() -> Iterator[CaptureUnit]:
        yield unit(1, insert(1))
        yield CaptureUnit("transaction", "p2", 0, cut_short())

    def cut_short() -> Iterator[TableChange]:
        yield insert(2)
        raise RetriableError("the server is gone")

    with writer_of(log) as writer:
        with pytest.raises(RetriableError):
            writer.write(broken())
        assert writer.progress is None
        writer.write([unit(1, insert(1)), unit(2, insert(2))])
    assert [one["after"]["id"] for one in values(log, "shop.shop.users")] == [1, 2]
    assert len(values(log, "shop.transaction")) == 4


def test_a_later_capture_of_the_name_stops_the_earlier(log) -> None:
    with writer_of(log) as first:
        first.write([unit(1, insert(1))])
        with writer_of(log) as second:
            assert second.progress.source == {"at": 1}
            with pytest.raises(ProducerFencedError):
                first.write([unit(2, insert(2))])
            second.write([unit(2, insert(2))])
    assert [one["after"]["id"] for one in values(log, "shop.shop.users")] == [1, 2]


def test_progress_is_found_behind_many_transactions_that_were_aborted(log) -> None:
    with writer_of(log) as writer:
        writer.write([unit(1, insert(1))])
        for _ in range(30):
            with pytest.raises(RetriableError):
                writer.write(iter_raising())
    with writer_of(log) as writer:
        assert writer.progress.source == {"at": 1}


def iter_raising() -> Iterator[CaptureUnit]:
    yield unit(9, insert(9))
    raise RetriableError("gone")


def test_the_progress_of_another_kind_of_source_is_refused(log) -> None:
    with writer_of(log) as writer:
        writer.write([unit(1, insert(1))])
    with pytest.raises(ConflictError, match="kind 'test', and this one is 'other'"):
        writer_of(log, connector="other").__enter__()


def test_two_tables_of_one_topic_are_refused() -> None:
    topics = CaptureTopics("shop")
    assert topics.of_table("db", "a b") == "shop.db.a_b"
    with pytest.raises(ConfigError, match=r"the table db\.a_b would have the topic 'shop.db.a_b'"):
        topics.of_table("db", "a_b")


def test_two_tables_of_one_topic_are_refused_after_a_restart_too(log) -> None:
    one, other = (
        TableChange("db", name, "c", ("id",), None, {"id": 1, "name": "a"})
        for name in ("a b", "a_b")
    )
    with writer_of(log) as writer:
        writer.write([unit(1, one)])
    with writer_of(log) as writer, pytest.raises(ConfigError, match="would have the topic"):
        writer.write([unit(2, other)])


def test_a_capture_whose_progress_is_lost_does_not_begin_anew_on_top_of_its_records(log) -> None:
    with writer_of(log) as writer:
        writer.write([unit(1, insert(1))])
    log.delete_topic("shop.progress")
    with pytest.raises(ConflictError, match="progress is gone"):
        writer_of(log).__enter__()


def test_a_topic_that_was_deleted_or_made_anew_is_refused(log) -> None:
    with writer_of(log) as writer:
        writer.write([unit(1, TableDefinition("shop", "users", COLUMNS, ("id",)), insert(1))])
    log.delete_topic("shop.shop.users")
    with pytest.raises(ConflictError, match=r"'shop\.shop\.users' is not the topic"):
        writer_of(log).__enter__()
    log.create_topic("shop.shop.users")
    with pytest.raises(ConflictError, match=r"'shop\.shop\.users' is not the topic"):
        writer_of(log).__enter__()


@pytest.mark.parametrize(("old", "new"), [(0.0, -0.0), (1, 1.0), (1, True)])
def test_keys_that_are_equal_and_written_otherwise_are_two(log, old, new) -> None:
    moved = TableChange("shop", "t", "u", ("id",), {"id": old}, {"id": new})
    with writer_of(log) as writer:
        writer.write([unit(1, moved)])
    deleted, tombstone, created = values(log, "shop.shop.t")
    assert (deleted["op"], tombstone, created["op"]) == ("d", None, "c")


def test_a_truncate_goes_into_a_compacted_topic(log) -> None:
    truncate = TableChange("shop", "users", "t", ())
    with CaptureWriter(
        log, CaptureTopics("shop"), "test", lambda: 5000, cleanup="compact"
    ) as writer:
        writer.write([unit(1, insert(1)), unit(2, truncate), unit(3, insert(2))])
    assert [one["op"] for one in values(log, "shop.shop.users")] == ["c", "t", "c"]


@pytest.mark.parametrize("later", [False, True])
def test_a_topic_that_others_have_compacted_takes_truncates(tmp_path, later) -> None:
    def run(*statements: str) -> None:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()
        ms.capture(f"sqlite:///{tmp_path / 'shop.db'}", to=tmp_path / "log", name="shop").run(
            until="caught-up"
        )

    with connect(tmp_path / "log") as log:
        if later:
            run("CREATE TABLE t (id INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)")
            log.alter_topic("shop.main.t", settings={"cleanup.policy": "compact"})
        else:
            log.create_topic("shop.main.t", cleanup="compact")
            run("CREATE TABLE t (id INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        run("DROP TABLE t")
        assert [one["op"] for one in values(log, "shop.main.t")] == ["r", "t"]


def test_rows_without_keys_do_not_go_into_a_compacted_topic(log) -> None:
    row = TableChange("shop", "users", "c", (), None, {"name": "a"})
    log.create_topic("shop.shop.users", cleanup="compact")
    topics = CaptureTopics("shop")
    with (
        CaptureWriter(log, topics, "test", lambda: 5000, cleanup_of=lambda _: "compact") as writer,
        pytest.raises(ConfigError, match=r"shop\.users have no key.*--cleanup delete"),
    ):
        writer.write([unit(1, row)])


def test_a_truncate_goes_into_each_partition_that_an_older_run_has_made(log) -> None:
    name = CaptureTopics("shop")
    with CaptureWriter(log, name, "test", lambda: 5000, partitions=3) as writer:
        writer.write([unit(1, *map(insert, range(20)))])
    with writer_of(log) as writer:
        writer.write([unit(2, TableChange("shop", "users", "t", ()))])
    for partition in range(3):
        last = log.read("shop.shop.users", partition).column("value").to_pylist()[-1]
        assert json.loads(last)["op"] == "t"


class Walk:
    """A source with a history of transactions; it may be interrupted at any content."""

    def __init__(self, dice: random.Random, count: int) -> None:
        self.dice, self.fail = dice, False
        self.rows: dict[int, str] = {}
        rows: dict[int, str] = {}
        self.history = []
        for _ in range(count):
            changes = []
            for _ in range(dice.choice([1, 1, 2, 40])):
                key, value = dice.randrange(9), str(dice.randrange(99))
                if key in rows and dice.random() < 0.3:
                    old = {"id": key, "name": rows.pop(key)}
                    changes.append(TableChange("shop", "users", "d", ("id",), old, None))
                elif key in rows and dice.random() < 0.3 and 9 + key not in rows:
                    old, new = {"id": key, "name": rows.pop(key)}, {"id": 9 + key, "name": value}
                    rows[9 + key] = value
                    changes.append(TableChange("shop", "users", "u", ("id",), old, new))
                else:
                    before = {"id": key, "name": rows[key]} if key in rows else None
                    rows[key] = value
                    after = {"id": key, "name": value}
                    op = "c" if before is None else "u"
                    changes.append(TableChange("shop", "users", op, ("id",), before, after))
            self.history.append(changes)
        self.rows = rows

    def check(self) -> list[tuple[str, str]]:
        return [("shop", "users")]

    def acknowledge(self, progress: dict) -> None:
        """Do nothing: the history is kept."""

    def measure(self, progress: dict) -> SourceLag:
        return SourceLag(bytes_behind=len(self.history) - progress["at"])

    def units(self, progress: dict | None) -> Iterator[CaptureUnit]:
        start = 0 if progress is None else progress["at"]
        for number in range(start, len(self.history)):
            yield CaptureUnit(
                "transaction", f"p{number}", 1000, self.contents(number), {"at": number + 1}
            )
        yield CaptureUnit("progress", "", 0, iter(()), {"at": len(self.history)})

    def contents(self, number: int) -> Iterator[TableChange]:
        for change in self.history[number]:
            if self.dice.random() < 0.004:
                raise RetriableError("the server is gone")
            yield change


@pytest.mark.parametrize("seed", range(6))
def test_a_source_that_is_cut_off_again_and_again_gives_every_transaction_once(
    tmp_path, seed: int, monkeypatch
) -> None:
    monkeypatch.setattr("millstream.capture.retry_wait._FIRST_S", 0.001)
    dice = random.Random(seed)
    source = Walk(dice, 120)
    status = Capture(source, tmp_path, "shop", "test").run(until="caught-up")
    assert status.state == "idle"
    with connect(tmp_path) as log:
        ends = [one for one in values(log, "shop.transaction") if one["status"] == "END"]
        assert [one["id"] for one in ends] == [f"transaction:p{n}" for n in range(120)]
        rows: dict[int, str] = {}
        for record in values(log, "shop.shop.users"):
            if record is None:
                continue
            if record["op"] == "d":
                del rows[record["before"]["id"]]
            else:
                rows[record["after"]["id"]] = record["after"]["name"]
        assert rows == source.rows
        records = {
            topic: [
                testing.Row(value, key=key)
                for key, value in zip(
                    *(log.read(topic, 0).column(c).to_pylist() for c in ("key", "value")),
                    strict=True,
                )
            ]
            for topic in ("shop.shop.users", "shop.transaction")
        }
    app = ms.App("mirror", log="unused")
    whole = ms.debezium(transactions="shop.transaction")
    app.table(
        "shop.shop.users", {"id": int, "name": str}, key="id", envelope=whole, partitions=1
    ).view("users")
    found = testing.run(app, records, batches=5, partitions=1, seed=seed)["users"]
    assert dict(found["id", "name"].rows()) == source.rows


def test_a_unit_larger_than_the_queue_goes_through_in_pieces(log) -> None:
    class Large(Walk):
        def units(self, progress):
            changes = (insert(number) for number in range(50_000))
            yield CaptureUnit("transaction", "big", 1000, changes, {"at": 1})

    source = Large(random.Random(0), 0)
    with writer_of(log) as writer, GroupReader(source, None) as reader:
        assert reader.wait(10)
        writer.write(reader.group())
        assert writer.progress.source == {"at": 1}
    assert values(log, "shop.transaction")[-1]["event_count"] == 50_000


def test_an_address_that_is_not_known_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        ms.capture("oracle://me:secret@host/db")
    assert "secret" not in str(refused.value)
    assert "mariadb://user@host:3306/database" in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret%zz@host/db",
        "postgresql://me:secret%00@host/db",
        "postgresql://me:secret@host:port/db",
        "postgresql://me:secret@host/db?nonsense=1",
        "mariadb://me:sec[ret@host/db",
        "mariadb://me:secret@host/db?ssl=secret",
        "sqlite://me:secret@host/db",
        "sqlite:///a%00b",
    ],
)
def test_an_address_that_cannot_be_read_is_one_error_without_its_password(url) -> None:
    pytest.importorskip("psycopg")
    pytest.importorskip("pymysql")
    with pytest.raises(ConfigError) as refused:
        ms.capture(url, name="shop")
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
