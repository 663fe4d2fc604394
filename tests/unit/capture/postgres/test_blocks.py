"""Rows decoded by column say what they say one by one: by a model written from PostgreSQL's and Debezium's documents.

The model reads a message of pgoutput and a line of COPY byte by byte, makes a Python value of each text by the type's
own rule, and a record as a mapping; it shares no code with what it is compared with.
"""

import base64
import json
import math
import struct
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.envelope import CapturedRecords, CaptureTopics, UnitRecords
from millstream.capture.postgres import tracker as tracker_module
from millstream.capture.postgres.cells import copy_cells, message_cells
from millstream.capture.postgres.tracker import PgTableTracker, TableLayout
from millstream.capture.postgres.values import PgTypes
from millstream.capture.units import CaptureUnit, RowBlock

OID = 16384
NOW_MS = 1_767_225_600_123

# ── the model ───────────────────────────────────────────────────────────────────────────────


def number(text):
    return text if text in ("NaN", "Infinity", "-Infinity") else float(text)


def timestamp(text):
    if "infinity" in text or text.endswith("BC") or text[4] not in "-" + "0123456789":
        return text
    day, _, clock = text.partition(" ")
    return f"{day}T{clock[:-3]}Z" if clock.endswith("+00") else f"{day}T{clock}"


def float_text(value):
    """Return a number as float8out does: the fewest digits, with an exponent below 1e-4 and from 1e15 on."""
    if not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[repr(value)]
    short = Decimal(repr(value)).normalize()
    if value == 0 or -4 <= short.adjusted() < 15:
        return f"{short:f}"
    first, *rest = map(str, short.as_tuple().digits)
    point = "." if rest else ""
    return f"{'-' if value < 0 else ''}{first}{point}{''.join(rest)}e{short.adjusted():+03d}"


TYPES = {  # by the oids of pg_type
    16: ("bool", lambda text: {"t": True, "f": False}[text]),
    17: ("bytea", lambda text: base64.b64encode(bytes.fromhex(text[2:])).decode()),
    20: ("int8", int),
    25: ("text", str),
    701: ("float8", number),
    1114: ("timestamp", timestamp),
    1184: ("timestamptz", timestamp),
    1700: ("numeric", str),
    1009: ("_text", lambda text: json.loads("[" + text[1:-1] + "]")),
}
TEXTS = {
    16: st.sampled_from(["t", "f"]),
    17: st.binary(max_size=9).map(lambda data: "\\x" + data.hex()),
    20: st.integers(-(2**63), 2**63 - 1).map(str),
    25: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)
    | st.sampled_from(["", '"', "\\", "\\N", "a\tb\nc\r", "é\u2028😀", "\x01\x1f\x7f"]),
    701: (st.floats() | st.integers(-9, 9).map(float) | st.integers().map(lambda n: n / 8)).map(
        float_text
    )
    | st.sampled_from(["0", "-0", "1e+20", "1e-07", "999999999999999", "-0.0001", "1e+15"]),
    1114: st.datetimes().map(lambda at: at.strftime("%Y").zfill(4) + at.isoformat(" ")[4:])
    | st.sampled_from(["infinity", "-infinity", "0044-03-15 12:00:00 BC", "10000-01-01 00:00:00"]),
    1184: st.datetimes().map(lambda at: at.isoformat(" ") + "+00")
    | st.sampled_from(["infinity", "0044-03-15 12:00:00+00 BC", "294276-12-31 23:59:59.5+00"]),
    1700: st.decimals(places=3, allow_nan=False).map(str) | st.just("NaN"),
    1009: st.lists(st.sampled_from(["a", "b c", "ü"]), max_size=3).map(
        lambda found: "{" + ",".join(json.dumps(one, ensure_ascii=False) for one in found) + "}"
    ),
}


@st.composite
def tables(draw):
    """Return the oids of columns, of which the first is the key, and rows of texts; None is null."""
    oids = [
        draw(st.sampled_from([20, 25])),
        *draw(st.lists(st.sampled_from(list(TYPES)), max_size=5)),
    ]
    row = st.tuples(TEXTS[oids[0]], *(st.none() | TEXTS[oid] for oid in oids[1:]))
    return oids, draw(st.lists(row, min_size=1, max_size=7))


def value(oid, text):
    return None if text is None else TYPES[oid][1](text)


def names(oids):
    return [f'c{number} "ü\\' for number in range(len(oids))]


def message(kind, tuple_kind, texts):
    head = b"w" + bytes(24) + kind + struct.pack(">I", OID) + tuple_kind
    cells = [
        b"n" if text is None else b"t" + struct.pack(">I", len(text.encode())) + text.encode()
        for text in texts
    ]
    return head + struct.pack(">H", len(texts)) + b"".join(cells)


def copy_line(texts):
    escapes = {
        "\\": "\\\\",
        "\t": "\\t",
        "\n": "\\n",
        "\r": "\\r",
        "\b": "\\b",
        "\f": "\\f",
        "\v": "\\v",
    }
    cells = [
        "\\N" if text is None else "".join(escapes.get(letter, letter) for letter in text)
        for text in texts
    ]
    return "\t".join(cells).encode() + b"\n"


def record_of(op, row, key, seq):
    """Return a record's key and value, by the published envelope, and the tombstone of a deletion."""
    envelope = {
        "before": row if op == "d" else None,
        "after": None if op == "d" else row,
        "source": {
            "version": ..., "connector": "postgresql", "name": "shop", "ts_ms": 5, "ts_us": 5000, "ts_ns": 5_000_000,
            "snapshot": "false", "db": "base", "schema": "public", "table": "t", "position": "0/1", "seq": seq,
            "txId": 7,
        },
        "transaction": {"id": "transaction:0/1", "total_order": seq, "data_collection_order": seq},
        "op": op,
        "ts_ms": NOW_MS, "ts_us": NOW_MS * 1000, "ts_ns": NOW_MS * 1_000_000,
    }  # fmt: skip
    return [(key, envelope), *([(key, None)] if op == "d" else [])]


# ── what it is compared with ────────────────────────────────────────────────────────────────


def layout(oids):
    types = PgTypes(elements={1009: 25})
    readers = tuple((name, types.reader(oid)) for name, oid in zip(names(oids), oids, strict=True))
    key = (readers[0][0],)
    return TableLayout("public", "t", key, readers, frozenset(key))


def tracker(oids):
    made = PgTableTracker(
        {str(OID): {"schema": "public", "table": "t", "state": "done"}}, list, dict
    )
    made._layouts[OID] = layout(oids)
    return made


def records_of(contents):
    """Return the keys and values of the table's topic."""
    maker = UnitRecords(CaptureTopics("shop"), "postgresql", lambda: NOW_MS)
    details = {"db": "base", "txId": 7}
    unit = CaptureUnit("transaction", "0/1", 5, iter(contents), {}, details)
    found = []
    for record in maker.records(unit):
        if isinstance(record, CapturedRecords):
            found += zip(record.keys.to_pylist(), record.values.to_pylist(), strict=True)
        elif record.table:
            found.append((record.key, record.value))
    return found


def parsed(records):
    texts = [tuple(one and one.decode() for one in record) for record in records]
    found = [tuple(None if one is None else json.loads(one) for one in record) for record in texts]
    for _, one in found:
        if one is not None:
            one["source"]["version"] = ...
    return found


def same(found, expected):
    """Compare as text: NaN never equals itself, 1 equals 1.0 and True, and the order of members counts, too."""
    return [repr(one) for one in found] == [repr(one) for one in expected]


@given(tables(), st.sampled_from([(b"I", b"N", "c"), (b"U", b"N", "u"), (b"D", b"O", "d")]))
def test_a_block_of_messages_is_what_its_messages_say(table, kind):
    oids, rows = table
    messages = [message(kind[0], kind[1], row) for row in rows]
    block = layout(oids).block(message_cells(messages), len(rows), kind[2])
    expected = []
    for seq, row in enumerate(rows, 1):
        plain = dict(zip(names(oids), map(value, oids, row), strict=True))
        key = {names(oids)[0]: value(oids[0], row[0])}
        expected += record_of(kind[2], plain, key, seq)
    by_column = records_of([block])
    assert same(parsed(by_column), expected)
    one_by_one = records_of(list(tracker(oids).changes(messages)))  # too few for a block
    assert one_by_one == by_column


@given(tables())
def test_a_deletion_has_the_identity_alone(table):
    oids, rows = table
    messages = [message(b"D", b"K", [row[0]] + [None] * (len(row) - 1)) for row in rows]
    block = layout(oids).block(message_cells(messages), len(rows), "d", identity_only=True)
    keys = [{names(oids)[0]: value(oids[0], row[0])} for row in rows]
    expected = [one for seq, key in enumerate(keys, 1) for one in record_of("d", key, key, seq)]
    assert same(parsed(records_of([block])), expected)


@given(tables())
def test_lines_of_copy_are_the_rows_that_were_copied(table):
    oids, rows = table
    cells = copy_cells([copy_line(row) for row in rows], len(oids))
    assert [one.texts() for one in cells] == [list(column) for column in zip(*rows, strict=True)]
    block = layout(oids).block(cells, len(rows), "r")
    expected = [dict(zip(names(oids), map(value, oids, row), strict=True)) for row in rows]
    assert same([json.loads(row) for row in block.rows.to_pylist()], expected)


def test_a_table_without_columns_has_rows():
    assert copy_cells([b"\n", b"\n"], 0) == []
    empty = TableLayout("public", "t", (), (), frozenset())
    block = empty.block([], 2, "r")
    assert block.rows.to_pylist() == [b"{}", b"{}"]
    assert block.keys is None


@given(tables(), st.data())
def test_what_is_cut_short_is_left_to_the_decoder_of_single_messages(table, data):
    _, rows = table
    messages = [message(b"I", b"N", row) for row in rows]
    at = data.draw(st.integers(0, len(rows) - 1))
    messages[at] = messages[at][: data.draw(st.integers(33, len(messages[at]) - 1))]
    assert message_cells(messages) is None


def test_a_value_that_was_not_sent_is_left_to_the_decoder_of_single_messages():
    sent = [message(b"U", b"N", [str(number), "x"]) for number in range(60)]
    unsent = message(b"U", b"N", ["7", None])[:-1] + b"u"
    assert message_cells([*sent, unsent]) is None
    contents = list(tracker([20, 25]).changes([*sent, unsent]))
    assert [one.after for one in contents][-1] == {names([20, 25])[0]: 7}
    assert len(contents) == 61


@pytest.mark.parametrize("count", [1, 47, 48, 49, 5000])
def test_many_messages_are_a_block_and_few_are_not(count):
    messages = [message(b"I", b"N", [str(number), None]) for number in range(count)]
    contents = list(tracker([20, 25]).changes(messages))
    assert isinstance(contents[0], RowBlock) == (count >= tracker_module.BLOCK_ROWS_MIN)
    expected = [{'c0 "ü\\': number, 'c1 "ü\\': None} for number in range(count)]
    found = [one["after"] for _, one in parsed(records_of(contents))]
    assert found == expected
