"""Altered tables are followed where no row can be lost, and else refused with the statements that do it."""

import sqlite3
from dataclasses import replace

import pytest
from applied_model import write

import millstream as ms
from millstream.capture.apply.run import ApplySession
from millstream.capture.units import CaptureUnit, TableChange, TableDefinition
from millstream.client import connect
from millstream.errors import ConfigError, ConflictError, FencedError, UnknownTopicError

numbers = iter(range(1, 10_000))


def unit(*contents):
    number = next(numbers)
    details = {"db": "shop"}
    return CaptureUnit("transaction", f"p{number}", 1000, iter(contents), {"at": number}, details)


def defined(*columns, key=("id",), table="t"):
    described = tuple({"name": name, "type": kind} for name, kind in columns)
    return TableDefinition("public", table, described, key)


def change(op="c", table="t", key=("id",), **row):
    return TableChange("public", table, op, key, None, row)


def rows(path, query="SELECT * FROM t ORDER BY 1"):
    session = sqlite3.connect(path)
    try:
        return session.execute(query).fetchall()
    finally:
        session.close()


@pytest.fixture
def log(tmp_path):
    with connect(tmp_path / "log") as opened:
        yield opened


@pytest.fixture
def copy(tmp_path):
    """What applies, from where the last one stopped."""
    path = tmp_path / "copy.db"

    def run(**options):
        applying = ms.apply("shop", f"sqlite:///{path}", log=tmp_path / "log", **options)
        return applying.run(until="caught-up")

    run.path = path
    return run


ID, NAME = ("id", "int8"), ("name", "text")


def test_an_added_column_is_added(log, copy):
    write(log, [unit(defined(ID), change(id=1))])
    copy()
    write(log, [unit(defined(ID, NAME), change("r", id=1, name="a"), change(id=2, name=None))])
    copy()
    assert rows(copy.path) == [(1, "a"), (2, None)]


def test_rows_from_before_and_after_an_alteration_in_one_transaction_are_both_applied(log, copy):
    write(
        log,
        [
            unit(defined(ID), change(id=1)),
            unit(change(id=2), defined(ID, NAME), change(id=3, name="c")),
        ],
    )
    copy()
    assert rows(copy.path) == [(1, None), (2, None), (3, "c")]


def test_a_dropped_column_stays_with_its_values(log, copy):
    write(log, [unit(defined(ID, NAME), change(id=1, name="a"))])
    copy()
    write(log, [unit(defined(ID), change("u", id=1), change(id=2))])
    copy()
    assert rows(copy.path) == [(1, "a"), (2, None)]


def test_another_type_is_refused_with_the_statements_and_goes_on_after_them(log, copy):
    write(log, [unit(defined(ID, NAME), change(id=1, name="a"))])
    copy()
    write(
        log,
        [unit(change(id=2, name="b")), unit(defined(ID, ("name", "int4")), change(id=3, name=5))],
    )
    with pytest.raises(
        ConfigError, match="differs from its definition in the source in name"
    ) as refused:
        copy()
    session = sqlite3.connect(copy.path)
    session.executescript(str(refused.value).partition("and apply again: ")[2])
    session.close()
    copy()
    assert rows(copy.path) == [(1, "a"), (2, "b"), (3, 5)]


def test_another_type_of_an_empty_table_is_followed(log, copy):
    write(log, [unit(defined(ID, NAME), change(id=1, name="a"))])
    copy()
    write(log, [unit(change("t"), defined(ID, ("name", "int4"))), unit(change("r", id=1, name=5))])
    copy()
    assert rows(copy.path) == [(1, 5)]


def test_another_key_is_followed(log, copy):
    write(log, [unit(defined(ID, NAME), change(id=1, name="a"))])
    copy()
    again = unit(change("t"), defined(ID, NAME, key=("name",)))
    write(
        log,
        [
            again,
            unit(change("r", key=("name",), id=1, name="a"), change(key=("name",), id=1, name="b")),
        ],
    )
    copy()
    assert rows(copy.path) == [(1, "a"), (1, "b")]


def test_a_definition_that_was_written_alone_holds_from_its_first_row_on(log, copy):
    write(
        log,
        [
            unit(defined(ID)),
            unit(change(id=1)),
            unit(defined(ID, NAME)),
            unit(change(id=2, name="b")),
        ],
    )
    copy()
    assert rows(copy.path) == [(1, None), (2, "b")]


def test_a_table_that_was_made_anew_has_its_own_definition_wherever_the_copy_stopped(log, copy):
    """The columns have the same names, so only the place of the definition says by which one a row was written."""
    again = replace(defined(ID, NAME, key=("name",)), placed=True)
    write(log, [unit(defined(ID, NAME), change(id=1, name="a")), unit(change("t"))])
    copy()
    write(log, [unit(again), unit(defined(ID, table="u"), change(table="u", id=5))])
    copy()
    key = ("name",)
    write(log, [unit(change(key=key, id=1, name="b")), unit(change(key=key, id=1, name="c"))])
    copy()
    assert rows(copy.path) == [(1, "b"), (1, "c")]


def test_tables_that_are_not_wanted_are_left_out(log, copy):
    write(log, [unit(defined(ID), defined(ID, table="u"), change(id=1), change(table="u", id=2))])
    status = copy(tables="public.t")
    assert (status.changes, rows(copy.path)) == (1, [(1,)])
    assert rows(copy.path, "SELECT name FROM sqlite_master WHERE name = 'u'") == []
    with pytest.raises(
        ConfigError, match=r"has the tables public\.t, and now \* are to be applied"
    ):
        copy()


def test_a_table_without_a_key_is_refused(log, copy):
    write(log, [unit(defined(ID, key=()), change(key=(), id=1))])
    with pytest.raises(ConfigError, match=r"public\.t has no key"):
        copy()


def test_rows_that_were_there_before_are_not_touched(log, copy):
    session = sqlite3.connect(copy.path)
    session.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    session.execute("INSERT INTO t VALUES (99)")
    session.commit()
    session.close()
    write(log, [unit(defined(ID), change(id=1))])
    with pytest.raises(ConfigError, match="rows that `millstream apply` has not written"):
        copy()
    assert rows(copy.path) == [(99,)]


def test_a_value_that_compaction_took_is_missed_loudly(log, copy):
    write(log, [unit(defined(ID, NAME), change("u", id=1))])
    with pytest.raises(
        ConflictError, match=r'row \{"id":1\} of public\.t has no value for name.*IDENTITY FULL'
    ):
        copy()


def test_the_way_to_whole_rows_is_that_of_the_source(log, copy):
    write(log, [unit(defined(ID, NAME), change("u", id=1))], connector="mariadb")
    with pytest.raises(ConflictError, match="leave binlog_row_image as FULL"):
        copy()


def test_missing_records_are_missed_loudly(log, copy, tmp_path):
    write(log, [unit(defined(ID), change(id=1), change(id=2))])
    copy()
    with log.producer() as producer:  # an END without its records
        end = b'{"status":"END","id":"transaction:p0","ts_ms":1,"data_collections":[{"data_collection":"public.t","event_count":1}]}'
        producer.send("shop.transaction", end)
    with pytest.raises(
        ms.CorruptionError, match=r"has 1 changes of public\.t, and 'shop\.public\.t' has 0"
    ):
        copy()


def test_a_capture_that_is_not_there_is_named(log, copy):
    log.create_topic("other")
    with pytest.raises(UnknownTopicError, match="there is no capture 'shop'"):
        copy()


def test_a_topic_that_was_made_anew_is_refused(log, copy):
    write(log, [unit(defined(ID), change(id=1))])
    copy()
    log.delete_topic("shop.public.t")
    log.create_topic("shop.public.t")
    with pytest.raises(ConflictError):
        copy()


def test_the_later_of_two_appliers_stops_the_earlier(log, copy, tmp_path):
    write(log, [unit(defined(ID), change(id=1))])
    first, second = (
        ms.apply("shop", f"sqlite:///{copy.path}", log=tmp_path / "log") for _ in range(2)
    )
    with ApplySession(first) as older:
        older.step()
        second.run(until="caught-up")
        write(log, [unit(change(id=2))])
        with pytest.raises(FencedError, match="run one at a time"):
            older.step()
    with pytest.raises(FencedError):  # nor after it has opened the target again
        first.run(until="caught-up")
    second.run(until="caught-up")
    assert rows(copy.path) == [(1,), (2,)]


def test_a_database_that_is_captured_is_no_target(log, copy):
    session = sqlite3.connect(copy.path)
    session.execute("CREATE TABLE _millstream_capture (id)")
    session.commit()
    session.close()
    write(log, [unit(defined(ID), change(id=1))])
    with pytest.raises(ConfigError, match="is a database that is captured"):
        copy()
