"""``ms.to_duckdb``: a sink to a table in a file of DuckDB, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from millstream.connectors.sinks.table_changes import ExtraFields
from millstream.connectors.sinks.table_choice import TableChoice
from millstream.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from millstream.connectors.sinks.duckdb_sink import DuckDbSink


def to_duckdb(
    path: Path | str,
    *,
    table: str,
    key: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    extra: ExtraFields = "refuse",
) -> DuckDbSink:
    """Return a sink to a table in a file of DuckDB. Both are there already. A repeated batch changes nothing.

    The file is open while a batch is written, and closed between batches, so that others can read it.

    Args:
        path: The file; or ``duckdb:///relative/path``, ``duckdb:////absolute/path``.
        table: Its columns have the names of the rows' fields.
        key: The columns of the table's primary key: a row replaces the one that has its key, and a tombstone deletes it. Without, each
            row is added, and a tombstone is a dead letter.
        columns: Those that the sink writes; by default all. It leaves others as they are.
        extra: What becomes of a row with a field that is no such column: "refuse" makes it a dead letter, "skip" leaves the field out.

    Raises:
        ConfigError: an option is not possible.
        EnvironmentProblem: DuckDB is not installed.
    """
    place = _path(path) if isinstance(path, str) else path
    choice = TableChoice.of(str(place), table, key, columns, extra)
    try:
        from millstream.connectors.sinks.duckdb_sink import DuckDbSink  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to write to DuckDB needs duckdb, which is not installed ({error}): pip install "millstream[sql]".'
        ) from error
    return DuckDbSink(place, choice)


def _path(text: str) -> Path:
    if not text.startswith("duckdb:"):
        return Path(text)
    parts = urlsplit(text)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path or "\0" in path or parts.query or parts.fragment:
        raise ConfigError(
            f"{text!r} is no file of DuckDB. Give duckdb:///relative/path or duckdb:////absolute/path, with ? # % written as "
            "%3F %23 %25."
        )
    return Path(path)
