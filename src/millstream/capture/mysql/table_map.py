"""TABLE_MAP events: which columns the row events that follow have, and what reads their values.

All comes from the event itself, whose optional part the server writes with ``binlog_row_metadata=FULL``: names,
signs, character sets, labels and the primary key as they were when the row was logged. So no schema
history is kept, and no DDL needs to be understood to decode a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from millstream.capture.mysql import columns, values
from millstream.capture.mysql.binary_json import document_text
from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.charsets import (
    ASCII_CHARSETS,
    BINARY_COLLATION,
    UTF8_CHARSETS,
    TextDecoder,
    text_decoder,
)
from millstream.capture.mysql.columns import ColumnFormat
from millstream.errors import ConfigError

# The protocol's codes of column types.
TINY, SHORT, LONG, FLOAT, DOUBLE = 1, 2, 3, 4, 5
LONGLONG, INT24, DATE, YEAR = 8, 9, 10, 13
VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2 = 15, 16, 17, 18, 19
JSON, NEWDECIMAL, ENUM, SET, BLOB = 245, 246, 247, 248, 252
VAR_STRING, STRING, GEOMETRY = 253, 254, 255

_INTEGERS = {TINY: 1, SHORT: 2, INT24: 3, LONG: 4, LONGLONG: 8}
_WITH_SIGN = frozenset((*_INTEGERS, NEWDECIMAL, FLOAT, DOUBLE, YEAR))
_PLAIN = {
    FLOAT: ColumnFormat(values.read_float, columns.floats, 4),
    DOUBLE: ColumnFormat(values.read_double, columns.doubles, 8),
    DATE: ColumnFormat(values.read_date, columns.dates, 3),
    YEAR: ColumnFormat(values.read_year, columns.years, 1),
}
_TEXTS = frozenset((VARCHAR, VAR_STRING, STRING, BLOB))
_METADATA_SIZES = {
    FLOAT: 1,
    DOUBLE: 1,
    BLOB: 1,
    TIMESTAMP2: 1,
    DATETIME2: 1,
    TIME2: 1,
    GEOMETRY: 1,
    JSON: 1,
    VARCHAR: 2,
    VAR_STRING: 2,
    STRING: 2,
    BIT: 2,
    NEWDECIMAL: 2,
    ENUM: 2,
    SET: 2,
    **dict.fromkeys((TINY, SHORT, INT24, LONG, LONGLONG, DATE, YEAR), 0),
}
_REFUSED = {
    7: (
        "a TIMESTAMP of the format before MySQL 5.6",
        "ALTER TABLE … FORCE, with mysql56_temporal_format=ON",
    ),
    11: (
        "a TIME of the format before MySQL 5.6",
        "ALTER TABLE … FORCE, with mysql56_temporal_format=ON",
    ),
    12: (
        "a DATETIME of the format before MySQL 5.6",
        "ALTER TABLE … FORCE, with mysql56_temporal_format=ON",
    ),
    0: ("a DECIMAL of the format before MySQL 5.0", "ALTER TABLE … FORCE"),
    140: ("a compressed column", "ALTER TABLE … MODIFY … without COMPRESSED"),
    141: ("a compressed column", "ALTER TABLE … MODIFY … without COMPRESSED"),
    242: ("a vector", "leave the table out of the capture"),
    GEOMETRY: ("a geometry", "leave the table out of the capture"),
}
_SEQUENCE = (  # the columns of a SEQUENCE, which the log has as a table without a key; its numbers are no rows
    "next_not_cached_value",
    "minimum_value",
    "maximum_value",
    "start_value",
    "increment",
    "cache_size",
    "cycle_option",
    "cycle_count",
)
_SIGNS, _CHARSET_DEFAULT, _CHARSETS, _NAMES, _SET_LABELS, _ENUM_LABELS = 1, 2, 3, 4, 5, 6
_HEAD_BYTES = 8  # the table's number, and two of flags
_KEY, _KEY_PREFIXES, _LABEL_CHARSET_DEFAULT, _LABEL_CHARSETS = 8, 9, 10, 11


@dataclass(frozen=True, slots=True)
class BinlogColumn:
    """A column as the binary log has it. ``logged_type``: what its declared type is, as far as the log says it."""

    name: str
    type: int
    nullable: bool
    format: ColumnFormat
    logged_type: str


@dataclass(frozen=True, slots=True)
class TableMap:
    """A table as row events have it that follow its TABLE_MAP."""

    database: str
    table: str
    columns: tuple[BinlogColumn, ...]
    key: tuple[str, ...]
    """The columns of the primary key, in its order; empty if the table has none."""
    fingerprint: bytes
    """The event's bytes without the number: equal while the columns are."""


def read_table_map(
    body: bytes,
    charsets: Mapping[int, str],
    wanted: Callable[[str, str], bool],
    *,
    of_mysql: bool = False,
) -> TableMap | None:
    """Return the table of a TABLE_MAP event; None if it is not wanted, or a sequence.

    Args:
        charsets: The character set of each of the server's collations, by its number.
        wanted: Says of a database and a table whether it is.
        of_mysql: MySQL wrote the event, which does not count a YEAR among the columns with a sign, as MariaDB does.

    Raises:
        ConfigError: a column has no name in the event, or a type or character set that is not supported.
        CorruptionError: the event ends too early.
    """
    reader = BinlogBuffer(body, _HEAD_BYTES)
    database, table = _name(reader), _name(reader)
    if not wanted(database, table):
        return None
    types = list(reader.take(reader.packed()))
    metadata = list(_metadata(types, reader.packed_bytes(), f"{database}.{table}"))
    nullable = _bits(reader.take((len(types) + 7) // 8), len(types), lowest_first=True)
    optional = dict(_optional(reader))
    with_sign = _WITH_SIGN - {YEAR} if of_mysql else _WITH_SIGN
    layout = _Layout(
        f"{database}.{table}", types, metadata, optional, charsets, kinds_with_sign=with_sign
    )
    described = tuple(layout.column(*pair) for pair in enumerate(nullable))
    key = tuple(described[place].name for place in _key_columns(optional))
    if not key and tuple(column.name for column in described) == _SEQUENCE:
        return None
    return TableMap(database, table, described, key, body[6:])


def _name(reader: BinlogBuffer) -> str:
    name = reader.take(reader.little(1)).decode()
    reader.take(1)
    return name


def _metadata(types: list[int], data: bytes, table: str) -> Iterator[bytes]:
    """Yield the bytes about each column that its type has."""
    reader = BinlogBuffer(data)
    for place, column_type in enumerate(types):
        if column_type in _REFUSED and column_type != GEOMETRY:
            what, remedy = _REFUSED[column_type]
            raise ConfigError(
                f"column {place + 1} of {table} is {what}, which capture does not read. Change it: {remedy}."
            )
        size = _METADATA_SIZES.get(column_type)
        if size is None:
            raise ConfigError(
                f"column {place + 1} of {table} has the type {column_type} of the binary log, which capture "
                "does not know. Leave the table out of the capture."
            )
        yield reader.take(size)


def _optional(reader: BinlogBuffer) -> Iterator[tuple[int, bytes]]:
    while not reader.at_end:
        yield reader.little(1), reader.packed_bytes()


def _numbers(data: bytes) -> list[int]:
    reader = BinlogBuffer(data)
    found = []
    while not reader.at_end:
        found.append(reader.packed())
    return found


def _texts(data: bytes) -> list[bytes]:
    reader = BinlogBuffer(data)
    found = []
    while not reader.at_end:
        found.append(reader.packed_bytes())
    return found


def _bits(data: bytes, count: int, *, lowest_first: bool) -> list[bool]:
    return [
        bool(data[place // 8] >> (place % 8 if lowest_first else 7 - place % 8) & 1)
        for place in range(count)
    ]


def _key_columns(optional: Mapping[int, bytes]) -> list[int]:
    if _KEY_PREFIXES in optional:  # pairs of a column and the length of its prefix
        return _numbers(optional[_KEY_PREFIXES])[::2]
    return _numbers(optional.get(_KEY, b""))


class _Layout:
    """Puts together what the event says of each column in several lists."""

    def __init__(
        self,
        table: str,
        types: list[int],
        metadata: list[bytes],
        optional: Mapping[int, bytes],
        charsets: Mapping[int, str],
        *,
        kinds_with_sign: frozenset[int],
    ) -> None:
        self._table = table
        self._types = [_real_type(*pair) for pair in zip(types, metadata, strict=True)]
        self._metadata = metadata
        self._charsets = charsets
        self._names = [name.decode() for name in _texts(optional.get(_NAMES, b""))]
        self._check_names()
        with_sign = [place for place, kind in enumerate(self._types) if kind in kinds_with_sign]
        signs = _bits(optional.get(_SIGNS, b"\0" * len(types)), len(with_sign), lowest_first=False)
        self._unsigned = dict(zip(with_sign, signs, strict=True))
        texts = [place for place, kind in enumerate(self._types) if kind in _TEXTS]
        labelled = [place for place, kind in enumerate(self._types) if kind in (ENUM, SET)]
        self._collations = _collations(texts, optional, _CHARSET_DEFAULT, _CHARSETS)
        self._collations |= _collations(labelled, optional, _LABEL_CHARSET_DEFAULT, _LABEL_CHARSETS)
        self._labels = self._labels_of(SET, optional.get(_SET_LABELS, b""))
        self._labels |= self._labels_of(ENUM, optional.get(_ENUM_LABELS, b""))

    def _check_names(self) -> None:
        if len(self._names) != len(self._types):
            raise ConfigError(
                f"the binary log names {len(self._names)} of the {len(self._types)} columns of {self._table}: "
                "binlog_row_metadata was not FULL when the row was logged. SET GLOBAL "
                "binlog_row_metadata = 'FULL' and put it into the server's configuration; rows that are "
                "logged without it need a new snapshot."
            )

    def _labels_of(self, kind: int, data: bytes) -> dict[int, tuple[str, ...]]:
        reader = BinlogBuffer(data)
        found = {}
        for place in [place for place, other in enumerate(self._types) if other == kind]:
            decode = self._decoder(place)
            count = reader.packed()
            found[place] = tuple(decode(reader.packed_bytes()) for _ in range(count))
        return found

    def _charset(self, place: int) -> str:
        collation = self._collations.get(place, BINARY_COLLATION)
        if collation == BINARY_COLLATION:  # labels may be binary
            return "utf8mb4"
        return self._charsets.get(collation) or f"of collation {collation}"

    def _decoder(self, place: int) -> TextDecoder:
        return text_decoder(self._charset(place), f"{self._table}.{self._names[place]}")

    def column(self, place: int, nullable: bool) -> BinlogColumn:  # noqa: FBT001 - private
        kind = self._types[place]
        if kind in _REFUSED:
            what, remedy = _REFUSED[kind]
            raise ConfigError(
                f"column {self._table}.{self._names[place]} is {what}, which capture does not read: {remedy}."
            )
        text = self._collations.get(place, BINARY_COLLATION) != BINARY_COLLATION
        logged = logged_type(
            kind, self._metadata[place], text=text, unsigned=self._unsigned.get(place, False)
        )
        return BinlogColumn(self._names[place], kind, nullable, self._format(place, kind), logged)

    def _format(self, place: int, kind: int) -> ColumnFormat:
        if kind in _TEXTS:
            return self._text_format(place, kind, self._metadata[place])
        if kind in _INTEGERS:
            size, unsigned = _INTEGERS[kind], self._unsigned[place]
            read = values.read_integer(size, unsigned=unsigned)
            return ColumnFormat(read, columns.integers(size, unsigned=unsigned), size)
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind in (ENUM, SET):
            return self._label_format(place, kind, self._metadata[place][1])
        return _made_format(kind, self._metadata[place])

    def _label_format(self, place: int, kind: int, size: int) -> ColumnFormat:
        labels = self._labels[place]
        if kind == ENUM:
            return ColumnFormat(values.read_enum(size, labels), columns.enums(size, labels), size)
        read = values.read_set(size, labels)
        return ColumnFormat(read, columns.one_by_one(read), size)

    def _text_format(self, place: int, kind: int, about: bytes) -> ColumnFormat:
        width = _string_width(about) if kind == STRING else int.from_bytes(about, "little")
        length_size = about[0] if kind == BLOB else 1 if width < 256 else 2
        if self._collations.get(place, BINARY_COLLATION) != BINARY_COLLATION:
            charset, decode = self._charset(place), self._decoder(place)
            encode = columns.texts(
                decode, utf8=charset in UTF8_CHARSETS, of_ascii=charset in ASCII_CHARSETS
            )
            read = values.read_text(length_size, decode)
            return ColumnFormat(read, encode, length_size=length_size)
        fixed = width if kind == STRING else 0
        read = values.read_binary(length_size, fixed)
        return ColumnFormat(
            read, columns.binaries(fixed), length_size=length_size, fixed_width=fixed
        )


def _made_format(kind: int, about: bytes) -> ColumnFormat:
    """Return the format of a type that the metadata makes one of many."""
    if kind == NEWDECIMAL:
        read = values.read_decimal(about[0], about[1])
        encode = columns.decimal_encoder(about[0], about[1], read)
        return ColumnFormat(read, encode, values.decimal_size(about[0], about[1]))
    if kind == JSON:
        read = values.read_text(about[0], document_text)
        encode = columns.made_of_bytes(document_text)
        return ColumnFormat(read, encode, length_size=about[0])
    if kind == BIT:
        count = about[1] * 8 + about[0]
        return ColumnFormat(values.read_bit(count), columns.bits(count), (count + 7) // 8)
    places = about[0]
    read, encode, size = {
        TIMESTAMP2: (values.read_timestamp(places), columns.timestamps(places), 4),
        DATETIME2: (values.read_datetime(places), columns.datetimes(places), 5),
        TIME2: (values.read_time(places), columns.durations(places), 3),
    }[kind]
    return ColumnFormat(read, encode, size + (places + 1) // 2)


_LOGGED_NAMES = {
    TINY: "tinyint",
    SHORT: "smallint",
    INT24: "mediumint",
    LONG: "int",
    LONGLONG: "bigint",
    FLOAT: "float",
    DOUBLE: "double",
    DATE: "date",
    YEAR: "year",
    TIMESTAMP2: "timestamp",
    DATETIME2: "datetime",
    TIME2: "time",
    ENUM: "enum",
    SET: "set",
    JSON: "json",
}
_LOGGED_AS = {
    **dict.fromkeys(("char", "varchar", "tinytext", "mediumtext", "longtext", "json"), "text"),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "mediumblob", "longblob"), "blob"),
    **dict.fromkeys(("uuid", "inet4", "inet6"), "blob"),
}
_DECLARED = re.compile(r"([a-z0-9]+)(\([^)]*\))?(.*)", re.DOTALL)


def logged_type(kind: int, about: bytes, *, text: bool, unsigned: bool) -> str:
    """Return the declared type of a column as far as the log says it: ``text`` and ``blob`` stand for all of theirs."""
    sign = " unsigned" if unsigned and kind != YEAR else ""
    if kind == NEWDECIMAL:
        return f"decimal({about[0]},{about[1]}){sign}"
    if kind == BIT:
        return f"bit({about[1] * 8 + about[0]})"
    return _LOGGED_NAMES.get(kind, "text" if text else "blob") + sign


def is_logged_as(declared: str, logged: str) -> bool:
    """Say whether a column of a declared type is logged as one that the log says is ``logged``."""
    found = _DECLARED.match(declared.lower())
    if found is None:
        return False
    if logged == "json":
        return found[1] == "json"
    name = _LOGGED_AS.get(found[1], found[1])
    digits = found[2] if name in ("decimal", "bit") else ""
    labelled = name in ("enum", "set")  # a label may be any text
    sign = " unsigned" if "unsigned" in found[3] and not labelled else ""
    return f"{name}{digits}{sign}" == logged


def _real_type(column_type: int, about: bytes) -> int:
    """Return what a column is: enums and sets are logged as strings, with their type in the metadata."""
    if column_type != STRING:
        return column_type
    kind = about[0] | 0x30
    return kind if kind in (ENUM, SET) else STRING


def _string_width(about: bytes) -> int:
    """Return a CHAR's width in bytes, of which two bits are in the type, inverted."""
    return about[1] | ((about[0] & 0x30) ^ 0x30) << 4


def _collations(
    places: list[int], optional: Mapping[int, bytes], default: int, each: int
) -> dict[int, int]:
    """Return the collation of each column: one list of all, or a default with exceptions by their place."""
    if each in optional:
        return dict(zip(places, _numbers(optional[each]), strict=True))
    if default not in optional:
        return {}
    first, *others = _numbers(optional[default])
    exceptions = dict(zip(others[::2], others[1::2], strict=True))
    return {place: exceptions.get(number, first) for number, place in enumerate(places)}
