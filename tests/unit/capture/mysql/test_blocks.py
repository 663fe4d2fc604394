"""Rows decoded by column are, byte for byte, the records that the decoder of single rows gives.

That decoder is compared with the published format elsewhere (test_values.py, test_decoder.py). Here tables and row
events are written by that format: random columns of every type, of which none, some or all values are null.
"""

import base64
import struct
from functools import partial

import captured_records
import pyarrow as pa
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.capture.mysql import cells as cells_module
from millstream.capture.mysql.cells import row_blocks, row_runs
from millstream.capture.mysql.decoder import RowsEvent, Statement
from millstream.capture.mysql.row_images import RowChange
from millstream.capture.mysql.snapshot import BinlogPosition, SnapshotChunk
from millstream.capture.mysql.table_map import is_logged_as, read_table_map
from millstream.capture.mysql.table_schema import SchemaColumn, TableSchema, fixed_binary_renderer
from millstream.capture.units import RowBlock, TableChange
from millstream.errors import ConfigError

CHARSETS = {45: "utf8mb4", 8: "latin1", 35: "ucs2", 51: "cp1251", 11: "ascii", 63: "binary"}
LABELS = ("a", "ü", 'x"y', "1,2")

# ── columns, as the protocol has them ───────────────────────────────────────────────────────


def packed(number):
    return bytes([number]) if number < 251 else b"\xfc" + struct.pack("<H", number)


def counted(data, size=0):
    return (len(data).to_bytes(size, "little") if size else packed(len(data))) + data


def number(low, high, size, order="little"):
    signed = low < 0
    return st.integers(low, high).map(lambda found: found.to_bytes(size, order, signed=signed))


def fraction(places):
    size = (places + 1) // 2
    largest = (100 ** (size or 1)) - 1
    return number(0, largest, size, "big") if size else st.just(b"")


def moment(places):
    @st.composite
    def drawn(draw):
        year, month, day = (
            draw(st.integers(0, 9999)),
            draw(st.integers(0, 12)),
            draw(st.integers(0, 31)),
        )
        clock = (
            draw(st.integers(0, 23)) << 12
            | draw(st.integers(0, 59)) << 6
            | draw(st.integers(0, 59))
        )
        whole = (year * 13 + month) << 22 | day << 17 | clock
        return (whole + 0x8000000000).to_bytes(5, "big") + draw(fraction(places))

    return drawn()


def decimal(precision, scale):
    sizes = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    whole = precision - scale
    lengths = [whole % 9] + [9] * (whole // 9) + [9] * (scale // 9) + [scale % 9]

    def encoded(drawn):
        groups, negative = drawn
        data = bytearray()
        for length, group in zip(lengths, groups, strict=True):
            data += (group % 10**length).to_bytes(sizes[length], "big")
        data = bytearray(byte ^ 0xFF for byte in data) if negative else data
        data[0] ^= 0x80
        return bytes(data)

    group = st.integers(0, 10**9 - 1) | st.just(0)
    return st.tuples(st.tuples(*[group] * len(lengths)), st.booleans()).map(encoded)


def text(codec, length_size, alphabet=None):
    letters = st.characters(codec=codec) if alphabet is None else alphabet
    some = st.text(letters, max_size=9) | st.sampled_from(["", '"', "\\", "a\n\x00\x1f\x7f"])
    return some.map(lambda found: counted(found.encode(codec), length_size))


def latin1():
    return st.binary(max_size=9).map(lambda data: counted(data, 1))


# Of each: the type's code, its metadata, its values; "s" has a sign, "u" none, a collation of texts, labels.
KINDS = {
    "tinyint": (1, b"", number(-128, 127, 1), "s"),
    "tinyint unsigned": (1, b"", number(0, 255, 1), "u"),
    "smallint": (2, b"", number(-(2**15), 2**15 - 1, 2), "s"),
    "mediumint": (9, b"", number(-(2**23), 2**23 - 1, 3), "s"),
    "mediumint unsigned": (9, b"", number(0, 2**24 - 1, 3), "u"),
    "int": (3, b"", number(-(2**31), 2**31 - 1, 4), "s"),
    "bigint": (8, b"", number(-(2**63), 2**63 - 1, 8), "s"),
    "bigint unsigned": (8, b"", number(0, 2**64 - 1, 8), "u"),
    "year": (13, b"", number(0, 255, 1), "u"),
    "float": (4, b"\4", st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda v: struct.pack("<f", v)), "s"),
    "double": (5, b"\10", st.floats(allow_nan=False, allow_infinity=False).map(lambda v: struct.pack("<d", v)), "s"),
    **{
        f"decimal({p},{s})": (246, bytes([p, s]), decimal(p, s), "s")
        for p, s in ((1, 0), (10, 2), (18, 0), (18, 18), (20, 5), (36, 18), (37, 18), (65, 30), (9, 9))
    },
    **{
        f"bit({n})": (16, bytes([n % 8, n // 8]), number(0, 2**n - 1, (n + 7) // 8, "big"), "")
        for n in (1, 8, 10, 64)
    },
    "date": (10, b"", st.tuples(st.integers(0, 9999), st.integers(0, 15), st.integers(0, 31)).map(
        lambda d: (d[0] << 9 | d[1] << 5 | d[2]).to_bytes(3, "little")), ""),
    **{
        f"datetime({n})": (18, bytes([n]), moment(n), "") for n in range(7)
    },
    **{
        f"timestamp({n})": (17, bytes([n]), st.tuples(number(0, 2**32 - 1, 4, "big") | st.just(bytes(4)), fraction(n)).map(b"".join), "")
        for n in range(7)
    },
    **{
        f"time({n})": (19, bytes([n]), st.integers(-838 * 3600, 838 * 3600).map(
            lambda s, size=(n + 1) // 2: ((1 if s >= 0 else -1) * (abs(s) // 3600 << 12 | abs(s) // 60 % 60 << 6 | abs(s) % 60)
                * 256**size + (1 << (8 * (3 + size) - 1))).to_bytes(3 + size, "big")), "")
        for n in range(7)
    },
    "varchar": (15, struct.pack("<H", 100), text("utf-8", 1), 45),
    "long varchar": (15, struct.pack("<H", 900), text("utf-8", 2), 45),
    "latin1": (15, struct.pack("<H", 100), latin1(), 8),
    "cp1251": (15, struct.pack("<H", 100), text("cp1251", 1), 51),
    "ascii": (15, struct.pack("<H", 100), text("ascii", 1), 11),
    "ucs2": (15, struct.pack("<H", 100), text("utf-16-be", 1, st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])), 35),
    "char": (254, bytes([254, 40]), text("utf-8", 1), 45),
    "text": (252, b"\2", text("utf-8", 2), 45),
    "longtext": (252, b"\4", text("utf-8", 4), 45),
    "blob": (252, b"\3", st.binary(max_size=9).map(lambda d: counted(d, 3)), 63),
    "binary": (254, bytes([254, 6]), st.binary(max_size=6).map(lambda d: counted(d, 1)), 63),
    "uuid": (254, bytes([254, 16]), st.binary(min_size=0, max_size=16).map(lambda d: counted(d, 1)), 63),
    "enum": (254, bytes([247, 1]), number(0, len(LABELS), 1), "enum"),
    "wide enum": (254, bytes([247, 2]), number(0, len(LABELS), 2), "enum"),
    "set": (254, bytes([248, 1]), number(0, 2 ** len(LABELS) - 1, 1), "set"),
}  # fmt: skip
NUMERIC = (1, 2, 9, 3, 8, 13, 4, 5, 246)


def described(kinds):
    """Return the body of a TABLE_MAP event; the first column is the primary key."""
    named = [KINDS[kind] for kind in kinds]
    with_sign = [about for about in named if about[0] in NUMERIC]
    signs = 0
    for place, about in enumerate(with_sign):
        signs |= (about[3] == "u") << (7 - place % 8 + 8 * (place // 8))
    collations = [about[3] for about in named if isinstance(about[3], int)]
    labels = packed(len(LABELS)) + b"".join(counted(label.encode()) for label in LABELS)
    count = {what: sum(about[3] == what for about in named) for what in ("enum", "set")}
    optional = {
        1: signs.to_bytes((len(with_sign) + 7) // 8, "little"),
        3: b"".join(map(packed, collations)),
        4: b"".join(counted(name.encode()) for name in names(kinds)),
        5: labels * count["set"],
        6: labels * count["enum"],
        8: packed(0),
        10: packed(45),
    }
    return (
        bytes(6) + bytes(2) + counted(b"shop") + b"\0" + counted(b"t") + b"\0"
        + packed(len(kinds)) + bytes(about[0] for about in named)
        + counted(b"".join(about[1] for about in named)) + b"\xff" * ((len(kinds) + 7) // 8)
        + b"".join(bytes([kind]) + counted(data) for kind, data in optional.items() if data)
    )  # fmt: skip


def names(kinds):
    return [f'c{place} "ü\\' for place in range(len(kinds))]


def table_of(kinds):
    return read_table_map(described(kinds), CHARSETS, lambda *_: True)


def image(row):
    nulls = sum((value is None) << place for place, value in enumerate(row))
    data = b"".join(value for value in row if value is not None)
    return nulls.to_bytes((len(row) + 7) // 8, "little") + data


def event_of(table, op, images, present=None):
    width = len(table.columns)
    full = (2**width - 1 if present is None else present).to_bytes((width + 7) // 8, "little")
    head = bytes(8) + packed(width) + full * (2 if op == "u" else 1)
    return RowsEvent(table, head + b"".join(images), op, 1, compressed=False)


@st.composite
def events(draw):
    """Return an operation, a table and its row events, with how many rows there are."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=6))
    kinds.insert(0, draw(st.sampled_from(["int", "varchar", "uuid", "decimal(10,2)", "double"])))
    table, op = table_of(kinds), draw(st.sampled_from("cud"))
    key = KINDS[kinds[0]][2]
    rest = st.tuples(*(st.none() | KINDS[kind][2] for kind in kinds[1:]))
    made, count = [], 0
    for _ in range(draw(st.integers(1, 3))):
        images = []
        for _ in range(draw(st.integers(1, 4))):
            keys = [draw(key)] * 2
            if op == "u" and draw(st.integers(0, 30)) == 0:
                keys[1] = draw(key)
            count += 1
            images += [image((at, *draw(rest))) for at in keys[: 2 if op == "u" else 1]]
        made.append(event_of(table, op, images))
    return table, made, count


# ── both ways to records ────────────────────────────────────────────────────────────────────

RENDERERS = {'c0 "ü\\': fixed_binary_renderer("uuid")}


def renderers_of(table):
    width = table.columns[0].format.fixed_width
    return RENDERERS if width == 16 else {}


def one_by_one(table, made):
    """Return changes as the decoder of single rows gives them."""
    render = renderers_of(table)
    for event in made:
        for op, before, after in event.changes():
            rows = [
                row and {n: render[n](v) if n in render else v for n, v in row.items()}
                for row in (before, after)
            ]
            yield TableChange("shop", "t", op, table.key, *rows)


records_of = partial(captured_records.records_of, database="mariadb", position="0-1-7", at=5000)


@pytest.fixture(autouse=True)
def blocks_of_few_rows(monkeypatch):
    monkeypatch.setattr(cells_module, "BLOCK_ROWS_MIN", 1)
    monkeypatch.setattr(cells_module, "_BLOCK_ROWS_MAX", 3)


@settings(max_examples=some(60))
@given(events())
def test_blocks_are_the_records_that_single_rows_give(drawn):
    table, made, count = drawn
    moved = [change for event in made for change in event.changes() if is_moved(table, change)]
    blocks = row_blocks(made, renderers_of(table))
    assert (blocks is None) == bool(moved)
    if blocks is not None:
        assert sum(len(block.rows) for block in blocks) == count
        assert records_of(blocks) == records_of(one_by_one(table, made))
        assert [repr(one) for block in blocks for one in block.changes()] == [
            repr(one) for one in one_by_one(table, made)
        ]


def is_moved(table, change: RowChange):
    return change.op == "u" and any(
        repr(change.before[name]) != repr(change.after[name]) for name in table.key
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=some(12))
@given(data=st.data())
def test_each_type_alone_is_decoded_by_column(kind, data):
    table = table_of(["int", kind])
    values = st.none() | KINDS[kind][2]
    rows = [
        (place.to_bytes(4, "little"), value)
        for place, value in enumerate(data.draw(st.lists(values, min_size=1, max_size=8)))
    ]
    made = [event_of(table, "c", [image(row) for row in rows])]
    blocks = row_blocks(made, {})
    assert blocks is not None
    assert records_of(blocks) == records_of(one_by_one(table, made))


def whole_table(count=4, op="c"):
    table = table_of(["int", "varchar"])
    rows = [image((n.to_bytes(4, "little"), counted(b"x" * n, 1))) for n in range(1, count + 1)]
    return table, rows


@given(st.data())
def test_what_is_cut_short_is_left_to_the_decoder_of_single_rows(data):
    table, rows = whole_table()
    whole = b"".join(rows)
    cut = data.draw(st.integers(1, len(whole) - 1))
    ends = [len(b"".join(rows[: n + 1])) for n in range(len(rows))]
    blocks = row_blocks([event_of(table, "c", [whole[:cut]])], {})
    assert (blocks is None) == (cut not in ends)


def test_an_image_without_some_columns_is_left_to_the_decoder_of_single_rows():
    table, _ = whole_table()
    event = event_of(table, "c", [b"\0" + bytes(4)], present=1)
    assert row_blocks([event], {}) is None
    assert [change.after for change in event.changes()] == [{'c0 "ü\\': 0}]


def test_bytes_that_are_no_text_are_the_same_error_either_way():
    table = table_of(["int", "varchar"])
    event = event_of(table, "c", [image((bytes(4), counted(b"\xff", 1)))])
    assert row_blocks([event], {}) is None
    with pytest.raises(ConfigError, match="holds bytes that are no text"):
        list(event.changes())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_has_not_is_left_to_the_decoder_of_single_rows(value):
    table = table_of(["int", "double"])
    event = event_of(table, "c", [image((bytes(4), struct.pack("<d", value)))])
    assert row_blocks([event], {}) is None


def test_addresses_are_text_and_null_is_null():
    table = table_of(["int", "uuid"])
    data = bytes(range(16))
    rows = [(bytes(4), counted(data, 1)), (b"\1\0\0\0", None)]
    event = event_of(table, "c", [image(row) for row in rows])
    name = table.columns[1].name
    (block,) = row_blocks([event], {name: fixed_binary_renderer("uuid")})
    shown = [change.after[name] for change in block.changes()]
    assert shown == ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]
    assert base64.b64decode(next(iter(event.changes())).after[name]) == data


# ── which rows go together ──────────────────────────────────────────────────────────────────


def test_statements_on_one_table_are_one_run_and_others_end_it(monkeypatch):
    table, rows = whole_table()
    other = table_of(["int"])
    inserted, deleted = event_of(table, "c", rows[:1]), event_of(table, "d", rows[:1])
    foreign = event_of(other, "c", [b"\0" + bytes(4)])
    statement = Statement("shop", "ALTER TABLE t COMMENT 'x'")
    given_events = [
        table,
        inserted,
        table,
        inserted,
        deleted,
        other,
        foreign,
        table,
        inserted,
        statement,
        inserted,
    ]
    assert list(row_runs(iter(given_events))) == [
        table, [inserted, inserted], [deleted], other, [foreign], table, [inserted], statement, [inserted],
    ]  # fmt: skip
    monkeypatch.setattr(cells_module, "_RUN_BYTES_MAX", 1)
    assert list(row_runs(iter([table, inserted, inserted]))) == [table, [inserted], [inserted]]


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_few_rows_are_not_a_block(monkeypatch, count):
    monkeypatch.undo()
    table, rows = whole_table(count)
    blocks = row_blocks([event_of(table, "c", rows)], {})
    assert (blocks is not None) == (count >= cells_module.BLOCK_ROWS_MIN)
    if blocks is not None:
        assert all(isinstance(block, RowBlock) for block in blocks)


# ── snapshots ───────────────────────────────────────────────────────────────────────────────


def chunk(rows, size):
    text = SchemaColumn("x", "longtext", "longtext", True, "utf8mb4", "utf8mb4_bin", 0, None)
    key = SchemaColumn("id", "int", "int(11)", False, None, None, 0, None)
    schema = TableSchema("shop", "t", (key, text), ("id",))
    selected = [(str(place), b"x" * size, str(place)) for place in range(rows)]
    return SnapshotChunk(schema, BinlogPosition.of("binlog.1", 4), selected, None)


def test_a_chunk_is_in_memory_as_json_a_part_at_a_time():
    found = list(chunk(4500, 1).contents())
    assert [len(block.rows) for block in found] == [2000, 2000, 500]
    assert [change for block in found for change in block.changes()] == [
        TableChange("shop", "t", "r", ("id",), None, row) for row in chunk(4500, 1).rows()
    ]
    large = chunk(20, 1 << 20)
    assert [change.after["id"] for change in large.contents()] == list(range(20))


def test_texts_that_are_no_one_array_are_read_one_by_one(monkeypatch):
    """An array of Arrow holds 2 GiB; a list with more becomes several."""

    def divided(values, kind=None):
        found = made(values, kind)
        return pa.chunked_array([found[:1], found[1:]]) if kind == pa.binary() else found

    made = pa.array
    monkeypatch.setattr(pa, "array", divided)
    assert [change.after["id"] for change in chunk(20, 1).contents()] == list(range(20))


@pytest.mark.parametrize("declared", ["enum('a)','unsigned')", "set('x) unsigned')"])
def test_a_label_says_nothing_of_a_sign(declared):
    assert is_logged_as(declared, declared.partition("(")[0])
