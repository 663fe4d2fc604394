"""The decoder, on the bytes that MariaDB 10.11.19 sent of a binary log with CRC-32."""

import base64
import json
from pathlib import Path

import pytest

from millstream.capture.mysql.decoder import (
    FL_DDL,
    BinlogDecoder,
    Commit,
    FormatDescription,
    GlobalTransactionId,
    Rotation,
    RowsEvent,
    Skipped,
    Statement,
    decompress,
)
from millstream.capture.mysql.row_images import RowChange
from millstream.capture.mysql.table_map import TableMap
from millstream.errors import ConfigError, CorruptionError

GOLDEN = json.loads((Path(__file__).parent / "mariadb_10_11.json").read_text())
EVENTS = [base64.b64decode(event) for event in GOLDEN["events"]]
CHARSETS = {int(number): name for number, name in GOLDEN["charsets"].items()}

INSERTED = {
    "id": 1,
    "ti": -1,
    "tu": 255,
    "y": 2026,
    "su": 65535,
    "m": -8388608,
    "mu": 16777215,
    "b": -9223372036854775808,
    "bu": 18446744073709551615,
    "f": 1.1,
    "dd": 2.5,
    "de": "-12345.67800",
    "dn": "0.0123456789",
    "bit1": "1",
    "bit10": "1010101010",
    "bit64": "1" * 64,
    "da": "2026-02-28",
    "t0": -3020399000000,
    "t2": -250000,
    "t3": 3723004000,
    "t6": -36000000001,
    "dt": "0000-00-00T00:00:00",
    "dt6": "2026-01-02T03:04:05.000006",
    "ts": "1970-01-01T00:00:01Z",
    "ts3": "2026-01-02T03:04:05.678Z",
    "c": "ab",
    "cl": "é€",
    "c255": "x",
    "v": "üñ",
    "vs": "ÿ€",
    "tx": "text",
    "lt": "lt",
    "bi": "YQAAAA==",
    "vb": "Yg==",
    "bl": "AP8=",
    "e": "ü",
    "st": "x,z",
    "j": '{"a": 1}',
    "bo": 1,
    "eb": "q",
}


def decoder(*tables):
    wanted = tables or ("every",)
    return BinlogDecoder(CHARSETS, lambda _, table: table in wanted, checksum=True)


def every(_database, _table):
    return True


def decoded(events=EVENTS, *tables):
    one = decoder(*tables)
    return [one.decode(event) for event in events]


def changes():
    found = [content for _, content in decoded() if isinstance(content, RowsEvent)]
    return [list(rows.changes()) for rows in found]


def test_a_log_begins_with_its_file_and_its_format():
    contents = [content for _, content in decoded()]
    assert contents[0] == Rotation("binlog.000002", 4)
    assert contents[1] == FormatDescription("10.11.19-MariaDB-0+deb12u1-log")


def test_every_type_of_column_is_decoded_from_a_full_image():
    assert changes()[0] == [RowChange("c", None, INSERTED)]


def test_columns_that_a_minimal_image_leaves_out_are_absent_and_nulls_are_not():
    key = {"id": 1, "v": "üñ"}
    assert changes()[1] == [RowChange("u", key, {"ti": None, "da": "2026-00-31"})]
    assert changes()[2] == [RowChange("d", key, None)]


def test_compressed_rows_are_decoded_as_others_are():
    created, updated, deleted = (rows[0] for rows in changes()[3:])
    nulls = dict.fromkeys(INSERTED) | {"id": 1, "v": "k"}
    assert created == RowChange("c", None, nulls)
    assert updated == RowChange("u", nulls, nulls | {"tx": "long" * 100})
    assert deleted == RowChange("d", nulls | {"tx": "long" * 100}, None)
    assert {event[4] for event in EVENTS} >= {166, 167, 168}


def test_a_table_has_its_names_and_its_key_in_the_keys_order():
    tables = [content for _, content in decoded() if isinstance(content, TableMap)]
    assert {(table.database, table.table) for table in tables} == {("shop", "every")}
    assert [column.name for column in tables[0].columns] == list(INSERTED)
    assert tables[0].key == ("v", "id")
    assert [column.name for column in tables[0].columns if not column.nullable] == ["id", "v"]
    assert tables[0].fingerprint == tables[-1].fingerprint


def test_a_transaction_begins_with_its_global_id_and_ends_with_a_commit():
    contents = [content for _, content in decoded()]
    first_rows = next(place for place, one in enumerate(contents) if isinstance(one, RowsEvent))
    began = contents[first_rows - 2]
    assert isinstance(began, GlobalTransactionId)
    assert (began.domain, began.server_id) == (0, 7)
    assert str(began) == f"0-7-{began.sequence}"
    assert contents[first_rows + 1] == Commit()


def test_ddl_is_flagged_and_has_its_text_and_dml_that_is_logged_as_text_has_no_flag():
    contents = [content for _, content in decoded()]
    statements = {
        content.text.split()[0]: contents[place - 1].flags & FL_DDL
        for place, content in enumerate(contents)
        if isinstance(content, Statement)
    }
    assert statements == {"create": FL_DDL, "insert": 0}


def test_a_table_that_is_not_wanted_is_skipped_whatever_its_columns_are():
    assert not [content for _, content in decoded(EVENTS, "none") if isinstance(content, RowsEvent)]


def test_a_wanted_table_with_a_geometry_is_refused():
    with pytest.raises(ConfigError, match=r"shop\.other\.p is a geometry"):
        decoded(EVENTS, "other")


def test_each_flipped_byte_of_an_event_is_found_by_its_checksum():
    one = decoder()
    for event in EVENTS[:2]:
        one.decode(event)
    rows = next(event for event in EVENTS if event[4] == 23)
    for place in range(len(rows)):
        damaged = bytearray(rows)
        damaged[place] ^= 1
        if place == 4:  # another type has the same checksum's place, and the checksum covers it
            damaged[4] = 25
        with pytest.raises((CorruptionError, ConfigError)):
            one.decode(bytes(damaged))


def test_an_event_that_ends_early_is_refused_wherever_it_ends():
    events = [event for event in EVENTS if event[4] in (15, 19, 23)][:3]
    sizes = set(range(19, len(events[2]) - 4)) - {33}  # which is one of no rows
    for size in sizes:
        one = BinlogDecoder(CHARSETS, every, checksum=False)
        one.decode(events[1][:-4])
        with pytest.raises(CorruptionError):
            _, content = one.decode(events[2][:size])
            list(content.changes())


def test_an_event_that_is_not_known_stops_the_decoding():
    one = BinlogDecoder({}, every, checksum=False)
    for number in (26, 33, 39, 40, 200):
        header = bytes(4) + bytes([number]) + bytes(14)
        with pytest.raises((ConfigError, CorruptionError), match=r"binary log"):
            one.decode(header)


def test_rows_of_a_table_that_was_not_described_are_refused():
    one = BinlogDecoder({}, every, checksum=False)
    with pytest.raises(CorruptionError, match="table number 3"):
        one.decode(bytes(4) + b"\x17" + bytes(14) + b"\3\0\0\0\0\0\0\0\1\1\0")


def test_a_heartbeat_is_told_from_other_events_that_change_nothing():
    one = BinlogDecoder({}, every, checksum=False)
    contents = [one.decode(bytes(4) + bytes([kind]) + bytes(14))[1] for kind in (27, 161)]
    assert contents == [Skipped(heartbeat=True), Skipped()]


def test_compressed_bytes_of_another_algorithm_or_length_are_refused():
    for damaged in (b"\x91\x03abc", b"\x81\x03abc", b"\x81\x04x\x9cKLJ\x06\x00\x02M\x01'"):
        with pytest.raises(CorruptionError):
            decompress(damaged)
