"""``ms.to_mariadb``: a sink to a table of MariaDB or MySQL, whose driver is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from millstream.capture.mysql.address import mariadb_address
from millstream.connectors.sinks.sink_password import sink_password
from millstream.connectors.sinks.table_changes import ExtraFields
from millstream.connectors.sinks.table_choice import TableChoice
from millstream.errors import EnvironmentProblem

if TYPE_CHECKING:
    from millstream.connectors.sinks.mariadb_sink import MariaDbSink


def to_mariadb(
    url: str,
    *,
    table: str,
    key: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    extra: ExtraFields = "refuse",
) -> MariaDbSink:
    """Return a sink to a table of MariaDB or MySQL that is there. A repeated batch changes nothing.

    Args:
        url: ``mariadb://user@host:3306/database``, ``mysql://…``. Leave a password to the variable MILLSTREAM_SINK_PASSWORD.
        table: Its columns have the names of the rows' fields.
        key: The columns of the table's primary key: a row replaces the one that has its key, and a tombstone deletes it. Without, each
            row is added, and a tombstone is a dead letter.
        columns: Those that the sink writes; by default all. It leaves others as they are.
        extra: What becomes of a row with a field that is no such column: "refuse" makes it a dead letter, "skip" leaves the field out.

    Raises:
        ConfigError: the URL is not one of MariaDB or MySQL, or an option is not possible.
        EnvironmentProblem: the driver is not installed.
    """
    address = mariadb_address(url)
    choice = TableChoice.of(address.shown, table, key, columns, extra)
    try:
        from millstream.connectors.sinks.mariadb_sink import MariaDbSink  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f'to write to MariaDB or MySQL needs PyMySQL, which is not installed ({error}): pip install "millstream[mysql]".'
        ) from error
    address = replace(address, password=sink_password(url) or "")
    return MariaDbSink(address, choice)
