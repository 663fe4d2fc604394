"""What has to be so before a server can be captured without loss, each with the statement that makes it so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from millstream.capture.mysql.charsets import is_supported
from millstream.capture.mysql.session import (
    NO_SUCH_TABLE,
    MariaDbSession,
    TableAlteredError,
)
from millstream.capture.mysql.table_schema import (
    SUPPORTED_TYPES,
    TableSchema,
    quote_name,
    read_schema,
)
from millstream.errors import ConfigError

_VARIABLES = {
    "binlog_format": ("ROW", "changes are logged as statements, whose rows cannot be known"),
    "binlog_row_image": ("FULL", "rows are logged without the columns that did not change"),
    "binlog_row_metadata": ("FULL", "rows are logged without the names of their columns"),
}
# Of MySQL alone, and not of each release.
_MYSQL_VARIABLES = {
    "binlog_row_value_options": ("", "rows are logged with parts of JSON documents"),
    "binlog_transaction_compression": ("OFF", "transactions are compressed, which is not read"),
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of server: its name, the oldest release that is captured, its section of a configuration."""

    title: str
    oldest: tuple[int, ...]
    section: str


_WITHOUT_HIDDEN_COLUMNS = (8, 0, 18)  # by its source: Replicated_columns_view
_KINDS = {
    "mariadb": _Kind("MariaDB", (10, 5), "mariadb"),
    "mysql": _Kind("MySQL", (8, 0, 15), "mysqld"),
}


@dataclass(frozen=True, slots=True)
class PreflightFault:
    """Something that would lose changes, or make them wrong, and the statement that mends it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. Mend it: {self.remedy}"


def refuse_faults(
    faults: list[PreflightFault], server: str, what: Literal["captured", "compared"] = "captured"
) -> None:
    """Raise one error that names all faults for which a server cannot be captured, or compared, if there are any.

    Raises:
        ConfigError: there are.
    """
    if faults:
        once = dict.fromkeys(map(str, faults))
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(once, 1))
        raise ConfigError(f"{server} cannot be {what} as it is:\n{listed}")


def scheme_faults(session: MariaDbSession) -> list[PreflightFault]:
    """Return that a server is not what its URL says."""
    scheme = "mysql" if session.is_mysql else "mariadb"
    if session.address.scheme == scheme:
        return []
    server = f"{_KINDS[scheme].title} {session.version}"
    what = f"the server is {server}, and the URL begins with {session.address.scheme}://"
    return [PreflightFault(what, f"give {scheme}://…")]


def server_faults(session: MariaDbSession) -> list[PreflightFault]:
    """Return what is wrong with the server's settings or the user's privileges."""
    faults = scheme_faults(session)
    if faults:
        return faults
    kind = _KINDS[session.address.scheme]
    if session.release < kind.oldest:
        oldest = ".".join(map(str, kind.oldest))
        what = f"the server is {kind.title} {session.version}"
        return [PreflightFault(what, f"upgrade it to {oldest} or later")]
    faults = [*_log_faults(session, kind.section), *_replica_faults(session)]
    faults += _name_faults(session, kind.section)
    return [*faults, *privilege_faults(session)]


def _name_faults(session: MariaDbSession, section: str) -> Iterator[PreflightFault]:
    if session.value("SELECT @@global.lower_case_table_names") == "2":
        yield PreflightFault(
            "lower_case_table_names is 2: the log does not have names as the tables have them",
            f"put lower_case_table_names=1 into the section [{section}] of a new server's configuration, or run it on Linux",
        )


def _log_faults(session: MariaDbSession, section: str) -> Iterator[PreflightFault]:
    if session.value("SELECT @@global.log_bin") != "1":
        yield PreflightFault(
            "the binary log is off",
            f"put log_bin and a server_id into the section [{section}] of its configuration, and restart it",
        )
        return
    there = {
        str(name): str(value)
        for name, value in session.rows("SHOW GLOBAL VARIABLES LIKE 'binlog%'")
    }
    asked = _VARIABLES | (_MYSQL_VARIABLES if session.is_mysql else {})
    for name, (wanted, why) in asked.items():
        found = there.get(name, wanted if name in _MYSQL_VARIABLES else "not there")
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
    if session.is_mysql:
        replicates = "the server may be a replica"  # which it is, it tells to others
    else:
        running = session.rows("SHOW GLOBAL STATUS LIKE 'Slaves_running'")
        if running[0][1] == "0" and not session.value("SELECT @@global.gtid_slave_pos"):
            return
        replicates = "the server is a replica"
    yield PreflightFault(
        f"{replicates} and does not log what it replicates (log_slave_updates is OFF)",
        "put log_slave_updates=ON into its configuration and restart it, or capture the primary",
    )


def _grants(session: MariaDbSession) -> list[str]:
    """Return what the user, and the roles that it has taken, may do."""
    role = "NONE" if not session.is_mysql else str(session.value("SELECT CURRENT_ROLE()"))
    using = "" if role == "NONE" else f" FOR CURRENT_USER() USING {role}"
    return [str(row[0]) for row in session.rows(f"SHOW GRANTS{using}")]


def privilege_faults(session: MariaDbSession) -> Iterator[PreflightFault]:
    """Yield what the user may not do that a capture, and a comparison with it, needs."""
    grants = " ".join(_grants(session)).upper()
    status = "REPLICATION CLIENT" if session.is_mysql else "BINLOG MONITOR"
    for privilege, why in (
        ("REPLICATION SLAVE", "read the binary log"),
        (status, "ask where the binary log is"),
    ):
        if "ALL PRIVILEGES ON *.*" not in grants and privilege not in grants:
            user = _user(session)
            yield PreflightFault(f"{user} may not {why}", f"GRANT {privilege} ON *.* TO {user}")

    if "SELECT (" in grants:
        yield PreflightFault(
            "the user may read single columns of a table only, and the binary log has all of them",
            "GRANT SELECT on whole tables",
        )


def _user(session: MariaDbSession) -> str:
    name, _, host = str(session.value("SELECT CURRENT_USER()")).rpartition("@")
    return f"'{name}'@'{host}'"


_DATABASE_GRANT = re.compile(r"GRANT (.*?) ON (?:\*|`((?:[^`]|``)*)`)\.\* TO ", re.DOTALL)


def lock_faults(session: MariaDbSession, database: str) -> Iterator[PreflightFault]:
    """Yield that a snapshot of MySQL cannot be tied to the log: privileges on a database are for names with % and _."""
    for grant in _grants(session):
        found = _DATABASE_GRANT.match(grant)
        if found is None or not {"LOCK TABLES", "ALL PRIVILEGES"} & {*found[1].split(", ")}:
            continue
        if found[2] is None or re.fullmatch(_as_expression(found[2]), database, re.IGNORECASE):
            return
    user = _user(session)
    what = f"{user} may not lock tables of {database}, for the moment in which a snapshot is taken"
    yield PreflightFault(what, f"GRANT LOCK TABLES ON {quote_name(database)}.* TO {user}")


def _as_expression(pattern: str) -> str:
    """Return a regular expression of a database's name in a grant."""
    wild = {"%": ".*", "_": "."}
    parts = re.findall(r"\\.|.", pattern.replace("``", "`"), re.DOTALL)
    return "".join(wild.get(part) or re.escape(part[-1]) for part in parts)


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
    while True:
        schema = read_schema(session, database, table)
        if not schema.columns:
            return []
        try:
            return [
                *(lock_faults(session, database) if session.is_mysql else ()),
                *(_index_faults(session, schema) if session.is_mysql else ()),
                *_kind_faults(session, schema),
                *_column_faults(schema),
                *_cascade_faults(session, schema),
            ]
        except TableAlteredError as error:
            # Dropped or renamed between two of the questions: the next look finds it gone, or as it is now.
            if error.code != NO_SUCH_TABLE:
                raise


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


def _index_faults(session: MariaDbSession, schema: TableSchema) -> Iterator[PreflightFault]:
    if session.release >= _WITHOUT_HIDDEN_COLUMNS:
        return
    found = session.value(
        "SELECT INDEX_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s "
        "AND EXPRESSION IS NOT NULL",
        (schema.database, schema.table),
    )
    if found is not None:
        yield PreflightFault(
            f"{schema.name} has the index {found} on an expression, for which MySQL {session.version} describes a hidden "
            "column in the log",
            f"ALTER TABLE {schema.quoted} DROP INDEX {quote_name(str(found))}, and index a generated column",
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
                f"{schema.name} has the foreign key {name} {' '.join(rules)}, whose changes the server does not log",
                f"ALTER TABLE {schema.quoted} DROP FOREIGN KEY `{name}`, and add it again without it",
            )
