"""Transactions of the log, from events that are made here."""

import struct

import pytest

from millstream.capture.mysql import transactions
from millstream.capture.mysql.decoder import BinlogDecoder, RowsEvent
from millstream.capture.mysql.snapshot import BinlogPosition
from millstream.capture.mysql.transactions import TransactionReader
from millstream.errors import CorruptionError


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
