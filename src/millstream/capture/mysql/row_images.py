"""Row events: the images of a table's rows before and after a change.

A column that an image leaves out (``binlog_row_image`` is MINIMAL or NOBLOB in the writer's session) is absent
from the row, which is not the same as null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.table_map import BinlogColumn, TableMap
from millstream.errors import CorruptionError

RowImage: TypeAlias = dict[str, Any]


class RowChange(NamedTuple):
    """A change of one row: created has no ``before``, deleted no ``after``."""

    op: Literal["c", "u", "d"]
    before: RowImage | None
    after: RowImage | None


def read_row_changes(
    table: TableMap, reader: BinlogBuffer, op: Literal["c", "u", "d"]
) -> Iterator[RowChange]:
    """Yield the changes of a row event, whose reader stands at the number of columns.

    Raises:
        CorruptionError: the event does not have the columns of the table, or ends too early.
    """
    width = reader.packed()
    if width != len(table.columns):
        raise CorruptionError(
            f"a row event of {table.database}.{table.table} has {width} columns, and its TABLE_MAP "
            f"{len(table.columns)}. Start the capture again; if it stops here again, the log is damaged."
        )
    first = _present(table, reader)
    second = _present(table, reader) if op == "u" else first
    while not reader.at_end:
        image = _image(first, reader)
        if op == "u":
            yield RowChange(op, image, _image(second, reader))
        else:
            yield RowChange(op, *((None, image) if op == "c" else (image, None)))


def _present(table: TableMap, reader: BinlogBuffer) -> list[BinlogColumn]:
    bits = reader.little((len(table.columns) + 7) // 8)
    return [column for place, column in enumerate(table.columns) if bits >> place & 1]


def _image(present: list[BinlogColumn], reader: BinlogBuffer) -> RowImage:
    nulls = reader.little((len(present) + 7) // 8)
    return {
        column.name: None if nulls >> place & 1 else column.format.read(reader)
        for place, column in enumerate(present)
    }
