"""Parquet: the rows of a file become JSON objects of their columns, as ``send_many(rows=…)`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.client.json_fields import timestamp_ms_of
from millstream.client.tables import rows_to_json
from millstream.connectors.batch_rows import BatchRows
from millstream.connectors.folder.file_content import FileContent, UnreadableFileError
from millstream.connectors.folder.row_format import RowPosition
from millstream.errors import ConfigError

_ROWS = 5_000  # read at once


class ParquetRows:
    """The format of ``.parquet``."""

    def read(
        self, content: FileContent, start: RowPosition, rows: BatchRows
    ) -> Iterator[RowPosition]:
        """Read rows; see :class:`~millstream.connectors.folder.row_format.RowFormat`."""
        row = start.get("row", 0)
        with closing(content.open_raw()) as raw:
            try:
                for table in _tables(raw, row, min(_ROWS, rows.records_max)):
                    _add(rows, table, f"{content.path}, row", row)
                    row += len(table)
                    if rows.is_full:
                        yield {"row": row}
            except (pa.ArrowException, OSError) as error:
                if getattr(error, "errno", None) is not None:  # the disk's
                    raise
                raise UnreadableFileError(
                    f"it is no Parquet file, or a damaged one, from row {row + 1} on: {error}"
                ) from error


def _tables(raw: object, row: int, size_max: int) -> Iterator[pa.Table]:
    """Yield the rows from ``row`` on; groups before it are not read."""
    file = pq.ParquetFile(raw)
    group, before = 0, 0
    while (
        group < file.num_row_groups
        and before + (size := file.metadata.row_group(group).num_rows) <= row
    ):
        group, before = group + 1, before + size
    skipped = row - before
    groups = list(range(group, file.num_row_groups))
    for batch in file.iter_batches(size_max, row_groups=groups):
        table = pa.Table.from_batches([batch])
        if skipped:
            passed = min(skipped, len(table))
            skipped -= passed
            table = table.slice(passed)
        if len(table):
            yield table


def _add(rows: BatchRows, table: pa.Table, where: str, before: int) -> None:
    """Add rows; if they cannot be records together, halves of them may."""
    key, time = rows.fields.key, rows.fields.time
    for name in filter(None, (key, time)):
        if name not in table.column_names:
            raise UnreadableFileError(
                f"it has the columns {', '.join(table.column_names)}, and not {name!r}"
            )
    try:
        values, keys = rows_to_json(table, key)
        if keys is not None:
            _refuse_nulls(keys, "key")
        times = [] if time is None else _times(table[time])
    except ConfigError as error:
        if len(table) > 1:
            middle = len(table) // 2
            _add(rows, table.slice(0, middle), where, before)
            _add(rows, table.slice(middle), where, before + middle)
            return
        rows.add_dead(_shown(table), f"{where} {before + 1}", str(error))
        return
    named = [None] * len(table) if keys is None else keys.to_pylist()
    rows.add_many(values.to_pylist(), named, times)


def _times(column: pa.ChunkedArray) -> list[int]:
    _refuse_nulls(column, "time")
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    if not pa.types.is_integer(column.type):
        raise ConfigError(f"the time is a column of {column.type}: give timestamps or milliseconds")
    found: list[int] = column.to_pylist()
    for extreme in (min(found), max(found)):
        if timestamp_ms_of(extreme) is None:
            raise ConfigError(
                f"the time is {extreme}: give milliseconds since 1970, in the years 1 to 9999"
            )
    return found


def _shown(row: pa.Table) -> bytes:
    """Return what a row has, also if Python has not such values, as for times after the year 9999."""
    try:
        text = repr(row.to_pylist()[0])
    except (ValueError, OverflowError):
        text = str(row.to_string(preview_cols=row.num_columns))
    return text.encode(errors="replace")


def _refuse_nulls(column: pa.Array | pa.ChunkedArray, what: str) -> None:
    if column.null_count:
        raise ConfigError(f"the {what} is null")
