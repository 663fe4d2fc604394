"""Transactions of the log, from events that are made here."""

import struct

import pytest

from millstream.capture.mysql import transactions
from millstream.capture.mysql.decoder import BinlogDecoder, RowsEvent, Statement
from millstream.capture.mysql.snapshot import BinlogPosition
from millstream.capture.mysql.transactions import TransactionReader
from millstream.errors import ConfigError, CorruptionError


class Log:
    """Events of a binary log, one after the other, without checksums."""

    def __init__(self):
        self.events = []
        self.position = 4
        self.sequence = 0

    def add(self, kind, body, *, moves=True):
        size = 19 + len(body)
        self.position += size if moves else 0
        header = struct.pack("<IBIIIH", 1000, kind, 1, size, self.position if moves else 0, 0)
        self.events.append(header + body)
        return self

    def begin(self, file="log.000001"):
        self.add(4, struct.pack("<Q", 4) + file.encode(), moves=False)
        return self.add(15, struct.pack("<H50sIB", 4, b"10.11-MariaDB", 0, 19) + b"\0" + bytes(4))

    def gtid(self, flags=12):
        self.sequence += 1
        return self.add(162, struct.pack("<QIB", self.sequence, 0, flags))

    def mysql_gtid(self):
        self.sequence += 1
        return self.add(33, b"\1" + bytes(range(16)) + struct.pack("<Q", self.sequence))

    def anonymous(self):
        return self.add(34, b"\1" + bytes(24))

    def statement(self, text):
        return self.add(2, struct.pack("<IIBHH", 0, 0, 1, 0, 0) + b"d\0" + text.encode())

    def xa_prepare(self, *, one_phase):
        return self.add(38, bytes([one_phase]))

    def table(self):
        body = b"\7\0\0\0\0\0\1\0" + b"\1d\0" + b"\1t\0" + b"\1\3" + b"\0" + b"\0"
        return self.add(19, body + b"\1\1\0" + b"\4\3\2id" + b"\10\1\0")

    def rows(self, *numbers):
        images = b"".join(b"\0" + struct.pack("<i", number) for number in numbers)
        return self.add(23, b"\7\0\0\0\0\0\1\0" + b"\1\1" + images)

    def commit(self):
        return self.add(16, bytes(8))

    def reader(self):
        events = iter(self.events)
        decoder = BinlogDecoder({}, lambda *_: True, checksum=False)
        reader = TransactionReader(
            decoder, lambda: next(events), BinlogPosition.of("log.000001", 4)
        )
        reader.open()
        return reader


def rows_of(transaction):
    return [
        change.after["id"]
        for event in transaction.events
        if isinstance(event, RowsEvent)
        for change in event.changes()
    ]


def read(log, until):
    found = []
    for transaction in (reader := log.reader()).read(until):
        found.append((str(transaction.gtid), rows_of(transaction)))
    return found, reader


def test_a_transaction_has_its_rows_and_ends_at_its_commit():
    log = Log().begin().gtid().table().rows(1, 2).rows(3).commit().gtid().table().rows(4).commit()
    found, reader = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [("0-1-1", [1, 2, 3]), ("0-1-2", [4])]
    assert reader.position == BinlogPosition.of("log.000001", log.position)


@pytest.mark.parametrize("size", [1, 10, 1 << 20])
def test_it_is_the_same_however_much_of_it_is_held(monkeypatch, size):
    monkeypatch.setattr(transactions, "HELD_BYTES", size)
    log = Log().begin().gtid().table().rows(1).rows(2).table().rows(3).commit().gtid().commit()
    found, _ = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [("0-1-1", [1, 2, 3]), ("0-1-2", [])]


def test_a_transaction_that_the_server_did_not_finish_is_not_given():
    log = Log().begin().gtid().table().rows(1)
    log.position = 4
    log.begin("log.000002").gtid().table().rows(2).commit()
    found, _ = read(log, BinlogPosition.of("log.000002", log.position))
    assert found == [("0-1-2", [2])]


def test_one_that_is_too_large_to_be_held_is_an_error(monkeypatch):
    monkeypatch.setattr(transactions, "HELD_BYTES", 10)
    log = Log().begin().gtid().table().rows(1).rows(2)
    log.begin("log.000002")
    with pytest.raises(CorruptionError, match="ends in the middle of the large transaction 0-1-1"):
        read(log, BinlogPosition.of("log.000002", 10))


def test_rows_outside_of_a_transaction_are_an_error():
    log = Log().begin().table()
    with pytest.raises(CorruptionError, match="in the middle of a transaction"):
        read(log, BinlogPosition.of("log.000001", log.position))


UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


def statements(log):
    end = BinlogPosition.of("log.000001", log.position)
    return [
        [one.text for one in transaction.events if isinstance(one, Statement)]
        for transaction in log.reader().read(end)
    ]


def test_a_transaction_of_mysql_ends_where_its_first_statement_says():
    log = Log().begin().mysql_gtid().statement("BEGIN").table().rows(1, 2).commit()
    log.mysql_gtid().statement("ALTER TABLE t ADD x INT")
    log.mysql_gtid().statement("BEGIN").table().rows(3).statement("COMMIT")
    found, _ = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [(f"{UUID}:1", [1, 2]), (f"{UUID}:2", []), (f"{UUID}:3", [3])]
    assert statements(log) == [[], ["ALTER TABLE t ADD x INT"], []]


@pytest.mark.parametrize("begins", [True, False])
def test_a_table_that_newer_servers_make_with_its_rows_is_one_transaction(begins):
    """WL#13355, of MySQL 8.0.21: there was no such server to try it with."""
    text = "CREATE TABLE `t` (\n  `id` int NOT NULL\n) START TRANSACTION"
    log = Log().begin().mysql_gtid()
    log = (log.statement("BEGIN") if begins else log).statement(text).table().rows(1).commit()
    found, _ = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [(f"{UUID}:1", [1])]
    assert statements(log) == [[text]]


def test_a_statement_within_a_transaction_of_mysql_is_refused():
    log = Log().begin().mysql_gtid().statement("BEGIN").statement("INSERT INTO t VALUES (1)")
    with pytest.raises(ConfigError, match="logged as a statement"):
        read(log.commit(), BinlogPosition.of("log.000001", log.position))


def test_transactions_without_a_number_are_named_by_their_place():
    log = Log().begin().anonymous()
    first = log.position
    log.statement("BEGIN").table().rows(1).commit().anonymous()
    second = log.position
    log.statement("BEGIN").table().rows(2).commit()
    found, _ = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [(f"log.000001:{first}", [1]), (f"log.000001:{second}", [2])]


def test_a_transaction_of_xa_is_given_when_it_is_committed_in_one_phase_only():
    log = Log().begin().mysql_gtid().statement("XA START X'79',X'',1").table().rows(1)
    log.statement("XA END X'79',X'',1").xa_prepare(one_phase=True)
    found, _ = read(log, BinlogPosition.of("log.000001", log.position))
    assert found == [(f"{UUID}:1", [1])]
    log.mysql_gtid().statement("XA START X'78',X'',1").table().rows(2)
    log.xa_prepare(one_phase=False).mysql_gtid().statement("XA COMMIT X'78',X'',1")
    with pytest.raises(ConfigError, match="is of XA"):
        read(log, BinlogPosition.of("log.000001", log.position))
