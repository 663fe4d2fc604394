"""What a role needs for a state store in PostgreSQL, and the statement that grants what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ConfigError
from millstream.views.address import StateStoreAddress
from millstream.views.state_store.view_table import quote_identifier

if TYPE_CHECKING:
    from millstream.views.postgres.connection import Session


def create_schema(session: Session, address: StateStoreAddress) -> None:
    """Create the schema if it is missing.

    Raises:
        ConfigError: it is, and the role may not create it.
    """
    schema = quote_identifier(address.schema)
    if _one(session, "SELECT to_regnamespace(%s) IS NOT NULL", schema):
        return
    if not _one(session, "SELECT has_database_privilege(current_database(), 'CREATE')"):
        raise _missing(
            session, address, "create the schema", "CREATE SCHEMA {schema} AUTHORIZATION {role}"
        )
    session.execute(f"CREATE SCHEMA {schema}".encode())


def check_privileges(session: Session, address: StateStoreAddress, *, writes: bool) -> None:
    """Make sure that the role may do all that a store does.

    Raises:
        ConfigError: it may not; the message has the statement that grants it.
    """
    schema = quote_identifier(address.schema)
    if writes and _one(session, "SELECT pg_is_in_recovery()"):
        raise ConfigError(
            f"{address} is on a standby, which takes no writes. Give the primary, or all servers: "
            "postgresql://host-a,host-b/database?target_session_attrs=read-write."
        )
    for right in ("USAGE", "CREATE") if writes else ("USAGE",):
        if not _one(session, "SELECT has_schema_privilege(%s, %s)", address.schema, right):
            statement = (
                f"GRANT {'USAGE, CREATE' if writes else 'USAGE'} ON SCHEMA {{schema}} TO {{role}}"
            )
            raise _missing(session, address, f"use the schema ({right})", statement)
    if writes and not _one(
        session, "SELECT has_database_privilege(current_database(), 'TEMPORARY')"
    ):
        statement = "GRANT TEMPORARY ON DATABASE {database} TO {role}"
        raise _missing(session, address, "create temporary tables", statement)
    rights = ("SELECT", "INSERT", "UPDATE", "DELETE") if writes else ("SELECT",)
    for right in rights:
        denied = session.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) "
            "AND relkind IN ('r', 'p') AND NOT has_table_privilege(oid, %s) ORDER BY relname LIMIT 1",
            (schema, right),
        ).fetchone()
        if denied is not None:
            statement = f"GRANT {', '.join(rights)} ON ALL TABLES IN SCHEMA {{schema}} TO {{role}}"
            raise _missing(session, address, f"{right} in the table {denied[0]!r}", statement)


def _one(session: Session, statement: str, *parameters: str) -> bool:
    row = session.execute(statement.encode(), parameters or None).fetchone()
    return row is not None and bool(row[0])


def _missing(
    session: Session, address: StateStoreAddress, what: str, statement: str
) -> ConfigError:
    row = session.execute("SELECT current_user::text, current_database()::text").fetchone()
    assert row is not None
    role, database = map(quote_identifier, row)
    text = statement.format(schema=quote_identifier(address.schema), role=role, database=database)
    return ConfigError(
        f"The role {row[0]!r} may not {what} of {address}. Have its owner or an administrator run, in that "
        f"database: {text};"
    )
