"""``app.table(…, capture=…)``: which topics a captured table is read from, and how its records are written.

Whole transactions are applied, in the order of the database. So the topics must have all records: what compaction
removes would be missed for ever, as the END of a transaction counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.capture.envelope import CaptureTopics
from millstream.capture.run import Capture, capture
from millstream.client.address import absolute_address, shown
from millstream.errors import ConfigError
from millstream.pipeline.captured_definition import declared_by_database
from millstream.pipeline.debezium import Debezium
from millstream.pipeline.expressions import names_given


@dataclass(frozen=True)
class CapturedTopic:
    """The topic of a captured table, with as many partitions where it does not exist yet."""

    topic: str
    options: Debezium
    partitions: int | None = None
    capture: str = ""
    """The name of the capture; empty where it is another connector's."""


def captured_topic(given: object, table: str, log: Path | str) -> CapturedTopic:
    """Return where the changes of a table are.

    Args:
        given: What :func:`millstream.capture` returns, the URL of the database, or the capture's name.
        table: ``table`` or ``schema.table``, as the capture's ``tables`` names it.
        log: The app's.

    Raises:
        ConfigError: it is none of these, or its topics do not have what a table needs.
    """
    if isinstance(given, str) and "://" in given:
        given = capture(given, to=log)
    if isinstance(given, str):
        return _by_name(given, table)
    if not isinstance(given, Capture):
        raise ConfigError(
            f"The capture of table {table!r} is {given!r}. Give what ms.capture(…) returns, the URL of the database, "
            'or the name of the capture, such as "shop".'
        )
    if absolute_address(given.log) != absolute_address(log):
        raise ConfigError(
            f"The capture of table {table!r} writes into {shown(given.log)!r}, and the app reads {shown(log)!r}. Give "
            "both the same log: ms.capture(…, to=…), ms.App(…, log=…)."
        )
    if "compact" in given.cleanup:
        raise ConfigError(
            f"The capture of table {table!r} has cleanup={given.cleanup!r}. A table changes by whole transactions, of "
            'which compaction removes records: capture with cleanup="delete", under another name.'
        )
    whole = Debezium(given.topics.transaction, ".".join(given.split(table)), decimals="string")
    return CapturedTopic(given.topic(table), whole, given.partitions, given.name)


def declared_columns(
    log: Path | str,
    name: str,
    found: CapturedTopic,
    key: str | Sequence[str] | None,
    schema: Any,
) -> tuple[tuple[str, ...], Any]:
    """Return the key and the schema of a table with an envelope or a capture: those given, or the database's.

    Raises:
        ConfigError: there is no key, or it is not that of the database.
    """
    given = None if key is None else names_given(key, "table's key")
    collection = found.options.collection
    if found.capture and collection is not None:
        return declared_by_database(log, found.capture, collection, given, schema)
    if given is None:
        raise ConfigError(
            f'The table {name!r} has an envelope, and no key. Say which columns identify a row: key="id". Only a table '
            "of a capture has one by itself."
        )
    return given, schema


def _by_name(name: str, table: str) -> CapturedTopic:
    if not name or "." not in table:
        raise ConfigError(
            f"The table {table!r} of the capture {name!r} has no schema. Say which: {'public.' + table!r} of PostgreSQL, "
            f"{'main.' + table!r} of SQLite, {'database.' + table!r} of MariaDB; or give what ms.capture(…) returns."
        )
    known = CaptureTopics(name)
    whole = Debezium(known.transaction, table, decimals="string")
    return CapturedTopic(known.of_table(*table.split(".", 1)), whole, capture=name)
