"""What has to be so before a server can be captured without loss, each with the statement that makes it so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millstream.capture.mysql.charsets import is_supported
from millstream.capture.mysql.session import MariaDbSession
from millstream.capture.mysql.table_schema import SUPPORTED_TYPES, TableSchema, read_schema
from millstream.errors import ConfigError

_VARIABLES = {
    "binlog_format": ("ROW", "changes are logged as statements, whose rows cannot be known"),
    "binlog_row_image": ("FULL", "rows are logged without the columns that did not change"),
    "binlog_row_metadata": ("FULL", "rows are logged without the names of their columns"),
}
_OLDEST = (10, 5)


@dataclass(frozen=True, slots=True)
class PreflightFault:
    """Something that would lose changes, or make them wrong, and the statement that mends it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. Mend it: {self.remedy}"


def refuse_faults(faults: list[PreflightFault], server: str) -> None:
    """Raise one error that names all faults, if there are any.

    Raises:
        ConfigError: there are.
    """
    if faults:
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise ConfigError(f"{server} cannot be captured as it is:\n{listed}")


def server_faults(session: MariaDbSession) -> list[PreflightFault]:
    """Return what is wrong with the server's settings or the user's privileges."""
    version = str(session.value("SELECT VERSION()"))
    if "mariadb" not in version.lower():
        return [
            PreflightFault(
                f"the server is no MariaDB ({version}): MySQL gives no position with a snapshot",
                "capture a MariaDB server of release 10.5 or later",
            )
        ]
    numbers = tuple(int(part) for part in version.partition("-")[0].split(".")[:2])
    if numbers < _OLDEST:
        return [PreflightFault(f"the server is MariaDB {version}", "upgrade it to 10.5 or later")]
    return [*_log_faults(session), *_replica_faults(session), *_privilege_faults(session)]


def _log_faults(session: MariaDbSession) -> Iterator[PreflightFault]:
    if session.value("SELECT @@global.log_bin") != "1":
        yield PreflightFault(
            "the binary log is off",
            "put log_bin and a server_id into the section [mariadb] of its configuration, and restart it",
        )
        return
    for name, (wanted, why) in _VARIABLES.items():
        found = session.value(f"SELECT @@global.{name}")
        if found != wanted:
            yield PreflightFault(
                f"{name} is {found}: {why}",
                f"SET GLOBAL {name} = '{wanted}'; and the same in its configuration. Sessions that are "
                "open keep what they have: end them",
            )


def _replica_faults(session: MariaDbSession) -> Iterator[PreflightFault]:
    if session.value("SELECT @@global.log_slave_updates") == "1":
        return
    # The threads of replication are seen with PROCESS only, which a reader does not have.
    running = session.rows("SHOW GLOBAL STATUS LIKE 'Slaves_running'")
    if running[0][1] != "0" or session.value("SELECT @@global.gtid_slave_pos"):
        yield PreflightFault(
            "the server is a replica and does not log what it replicates (log_slave_updates is OFF)",
            "put log_slave_updates=ON into its configuration and restart it, or capture the primary",
        )


def _privilege_faults(session: MariaDbSession) -> Iterator[PreflightFault]:
    grants = " ".join(str(row[0]).upper() for row in session.rows("SHOW GRANTS"))
    for privilege, why in (
        ("REPLICATION SLAVE", "read the binary log"),
        ("BINLOG MONITOR", "ask where the binary log is"),
    ):
        if "ALL PRIVILEGES ON *.*" not in grants and privilege not in grants:
            user = session.value("SELECT CURRENT_USER()")
            yield PreflightFault(
                f"{user} may not {why}", f"GRANT {privilege} ON *.* TO {_quoted_user(str(user))}"
            )

    if "SELECT (" in grants:
        yield PreflightFault(
            "the user may read single columns of a table only, and the binary log has all of them",
            "GRANT SELECT on whole tables",
        )


def _quoted_user(user: str) -> str:
    name, _, host = user.rpartition("@")
    return f"'{name}'@'{host}'"


def table_names(
    session: MariaDbSession, wanted: Callable[[str, str], bool]
) -> list[tuple[str, str]]:
    """Return the captured tables that there are, sorted; the user sees those that it may read."""
    rows = session.rows(
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES "
        "WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') ORDER BY 1, 2"
    )
    return [(row[0], row[1]) for row in rows if wanted(row[0], row[1])]


def table_faults(session: MariaDbSession, database: str, table: str) -> list[PreflightFault]:
    """Return what is wrong with a table; nothing if it is gone."""
    schema = read_schema(session, database, table)
    if not schema.columns:
        return []
    return [
        *_kind_faults(session, schema),
        *_column_faults(schema),
        *_cascade_faults(session, schema),
    ]


def _kind_faults(session: MariaDbSession, schema: TableSchema) -> Iterator[PreflightFault]:
    rows = session.rows(
        "SELECT ENGINE, TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (schema.database, schema.table),
    )
    for engine, kind in rows:
        if engine != "InnoDB":
            yield PreflightFault(
                f"{schema.name} is of the engine {engine}, which has no consistent snapshots",
                f"ALTER TABLE {schema.quoted} ENGINE = InnoDB",
            )
        if kind == "SYSTEM VERSIONED":
            yield PreflightFault(
                f"{schema.name} is system-versioned: its history would read as rows",
                f"ALTER TABLE {schema.quoted} DROP SYSTEM VERSIONING, or leave the table out",
            )
    if not schema.key:
        yield PreflightFault(
            f"{schema.name} has no primary key: its rows cannot be told apart",
            f"ALTER TABLE {schema.quoted} ADD COLUMN id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY",
        )


def _column_faults(schema: TableSchema) -> Iterator[PreflightFault]:
    for column in schema.columns:
        name = f"{schema.name}.{column.name}"
        if column.data_type not in SUPPORTED_TYPES:
            yield PreflightFault(
                f"{name} is {column.data_type}, which capture does not read", "leave the table out"
            )
        elif column.compressed:
            yield PreflightFault(
                f"{name} is compressed",
                f"ALTER TABLE {schema.quoted} MODIFY {column.quoted} … without COMPRESSED",
            )
        elif column.charset is not None and not is_supported(column.charset):
            yield PreflightFault(
                f"{name} is in the character set {column.charset}, which capture does not decode",
                f"ALTER TABLE {schema.quoted} CONVERT TO CHARACTER SET utf8mb4",
            )
        if column.name in schema.key and column.data_type in ("float", "double"):
            yield PreflightFault(
                f"the key of {schema.name} has {column.name}, which is {column.data_type}: not exact",
                f"ALTER TABLE {schema.quoted} MODIFY {column.quoted} DECIMAL(…)",
            )


_FOREIGN_KEY = re.compile(
    r"^ +CONSTRAINT `((?:[^`]|``)*)` FOREIGN KEY .*\) *(ON .*?),?$", re.MULTILINE
)
_CASCADES = re.compile(r"ON (?:DELETE|UPDATE) (?:CASCADE|SET NULL|SET DEFAULT)")


def _cascade_faults(session: MariaDbSession, schema: TableSchema) -> Iterator[PreflightFault]:
    # information_schema shows constraints to those only who may do more than SELECT.
    rows = session.rows(f"SHOW CREATE TABLE {schema.quoted}")
    for name, ending in _FOREIGN_KEY.findall(rows[0][1]):
        rules = _CASCADES.findall(ending)
        if rules:
            yield PreflightFault(
                f"{schema.name} has the foreign key {name} {' '.join(rules)}, whose changes MariaDB does not log",
                f"ALTER TABLE {schema.quoted} DROP FOREIGN KEY `{name}`, and add it again without it",
            )
