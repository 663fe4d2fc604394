"""What a server's catalogue says: its tables and types, and what has to be so before they can be captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg.sql import SQL, Identifier

from millstream.capture.postgres.stream import Session
from millstream.capture.postgres.values import PgTypes
from millstream.capture.signals import RereadRequest
from millstream.capture.table_patterns import TablePatterns
from millstream.errors import ConfigError, ConflictError

OF_THE_SERVER = frozenset(("pg_catalog", "information_schema", "pg_toast"))
_OLDEST = 130_000


@dataclass(frozen=True, slots=True)
class PgTable:
    """A table, with the columns of its key: of its primary key, else of the index that is its replica identity."""

    oid: int
    schema: str
    table: str
    identity: str
    key: tuple[str, ...]
    logged: bool
    readable: bool
    ours: bool
    primary_key: bool
    partitioned: bool
    hidden: bool
    """A policy of row-level security may leave out rows for this role."""
    computed_key: bool

    @property
    def quoted(self) -> str:
        return Identifier(self.schema, self.table).as_string(None)

    @property
    def alone(self) -> str:
        """The table without those that inherit from it, which are tables of their own; its partitions are none."""
        return self.quoted if self.partitioned else f"ONLY {self.quoted}"


# The index that is a table's identity: UPDATE and DELETE are refused where only a deferrable one could be.
_IDENTITY_INDEX = """
    LEFT JOIN LATERAL (
        SELECT i.indisprimary,
               (SELECT array_agg(a.attname::text ORDER BY k.place)
                FROM unnest(i.indkey) WITH ORDINALITY AS k(number, place)
                JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
                WHERE k.place <= i.indnkeyatts) AS key,
               EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> ''
                       AND a.attnum = ANY (i.indkey)) AS computed
        FROM pg_index i WHERE i.indrelid = c.oid AND i.indimmediate AND (i.indisprimary OR i.indisreplident)
        ORDER BY (c.relreplident = 'i' AND i.indisreplident) DESC, i.indisprimary DESC LIMIT 1) i ON true
"""


def find_tables(session: Session, wanted: TablePatterns) -> list[PgTable]:
    """Return the tables that are captured. A partitioned table is one; its partitions are none."""
    rows = session.execute(
        f"""
        SELECT c.oid::int8, n.nspname, c.relname, c.relreplident::text, coalesce(i.key, '{{}}'),
               c.relpersistence = 'p',
               has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'),
               pg_has_role(c.relowner, 'USAGE'), coalesce(i.indisprimary, false), c.relkind = 'p',
               row_security_active(c.oid), coalesce(i.computed, false)
        FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace
        {_IDENTITY_INDEX}
        WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
        ORDER BY n.nspname, c.relname
        """.encode()  # noqa: S608 - a constant of above
    ).fetchall()
    return [
        PgTable(oid, schema, table, identity, tuple(key), *flags)
        for oid, schema, table, identity, key, *flags in rows
        if wanted(schema, table)
    ]


def read_types(session: Session) -> PgTypes:
    """Return what domains and arrays are made of, and the names of types."""
    # int2vector and oidvector have elements, too, and are written otherwise: no type has them as its array.
    rows = session.execute(
        "SELECT oid::int8, typtype::text, typbasetype::int8, typname::text, "
        "coalesce((SELECT e.oid::int8 FROM pg_type e WHERE e.typarray = t.oid), 0) FROM pg_type t"
    ).fetchall()
    return PgTypes(
        {oid: base for oid, kind, base, *_ in rows if kind == "d"},
        {oid: element for oid, *_, element in rows if element},
        {oid: name for oid, _, _, name, _ in rows},
    )


@dataclass(frozen=True, slots=True)
class PgFault:
    """Something that would lose changes, make them wrong, or fail later, and the statement that mends it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. Mend it: {self.remedy}"


def refuse_faults(faults: list[PgFault], server: str) -> None:
    """Raise one error that names all faults, if there are any.

    Raises:
        ConfigError: there are.
    """
    if faults:
        listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise ConfigError(f"{server} cannot be captured as it is:\n{listed}")


def server_faults(session: Session, *, slot_needed: bool) -> Iterator[PgFault]:
    """Yield what is wrong with the server's settings or the role's privileges."""
    if session.info.server_version < _OLDEST:
        version = session.info.parameter_status("server_version")
        yield PgFault(f"the server is PostgreSQL {version}", "upgrade it to 13 or later")
        return
    if session.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
        yield PgFault(
            "the server is a standby, which has no changes of its own",
            "capture its primary; in a URL of several hosts, add ?target_session_attrs=read-write",
        )
    settings: dict[str, str] = dict(
        session.execute(
            "SELECT name, setting FROM pg_settings "
            "WHERE name IN ('wal_level', 'max_replication_slots', 'max_wal_senders', 'server_encoding')"
        ).fetchall()
    )
    if settings["wal_level"] != "logical":
        yield PgFault(
            f"wal_level is {settings['wal_level']}: rows cannot be read from the WAL",
            "ALTER SYSTEM SET wal_level = 'logical'; and restart the server",
        )
    if settings["server_encoding"] == "SQL_ASCII":
        yield PgFault(
            "the database's encoding is SQL_ASCII: its texts are bytes of no known meaning",
            "copy it into a database of encoding UTF8",
        )
    ours = session.execute(
        "SELECT rolreplication OR rolsuper, quote_ident(rolname) FROM pg_roles WHERE rolname = current_user"
    ).fetchone()
    if ours is not None and not ours[0]:
        yield PgFault("the role may not replicate", f"ALTER ROLE {ours[1]} REPLICATION;")
    yield from _room_faults(session, settings, slots=1 + slot_needed)


def _room_faults(session: Session, settings: dict[str, str], slots: int) -> Iterator[PgFault]:
    used = session.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication)"
    ).fetchone()
    assert used is not None
    for name, count, wanted in (
        ("max_replication_slots", used[0], slots),
        ("max_wal_senders", used[1], 2),
    ):
        if int(settings[name]) - count < wanted:
            yield PgFault(
                f"{name} is {settings[name]}, of which {count} are used, and {wanted} more are needed",
                f"ALTER SYSTEM SET {name} = {count + wanted + 2}; and restart the server",
            )


def table_faults(session: Session, tables: list[PgTable]) -> Iterator[PgFault]:
    """Yield what is wrong with tables."""
    role = session.execute("SELECT quote_ident(current_user)").fetchone()
    assert role is not None
    for one in tables:
        if not one.readable:
            yield PgFault(
                f"{one.quoted} may not be read",
                f"GRANT USAGE ON SCHEMA {Identifier(one.schema).as_string(None)} TO {role[0]}; "
                f"GRANT SELECT ON {one.quoted} TO {role[0]};",
            )
        if one.hidden:
            yield PgFault(
                f"{one.quoted} has row-level security, which hides rows from a snapshot by this role, and not from the "
                "WAL",
                f"ALTER ROLE {role[0]} BYPASSRLS;",
            )
        if one.computed_key:
            yield PgFault(
                f"{one.quoted} has a generated column in its key, which the server does not send",
                f"ALTER TABLE {one.quoted} REPLICA IDENTITY USING INDEX …, or leave it out",
            )
        if not one.logged:
            yield PgFault(
                f"{one.quoted} is unlogged: its changes are not in the WAL",
                f"ALTER TABLE {one.quoted} SET LOGGED; or leave it out",
            )
        elif one.identity == "n" or (one.identity == "d" and not one.primary_key):
            yield PgFault(
                f"{one.quoted} has no replica identity: once it is published, the application's UPDATE and DELETE fail",
                f"ALTER TABLE {one.quoted} ADD PRIMARY KEY (…), which may not be DEFERRABLE; or "
                f"ALTER TABLE {one.quoted} REPLICA IDENTITY FULL;",
            )
        if one.partitioned:
            yield from _partition_faults(session, one)


def _partition_faults(session: Session, table: PgTable) -> Iterator[PgFault]:
    """Yield what is wrong with partitions: each has an identity of its own, which is that of its rows in the WAL."""
    rows = session.execute(
        f"""
        SELECT format('%%I.%%I', n.nspname, c.relname), c.relkind = 'f', c.relpersistence = 'p'
        FROM pg_partition_tree(%s::oid) p JOIN pg_class c ON c.oid = p.relid JOIN pg_namespace n ON n.oid = c.relnamespace
        {_IDENTITY_INDEX}
        WHERE p.isleaf AND c.relkind <> 'p' AND (c.relkind = 'f' OR c.relpersistence <> 'p' OR c.relreplident <> %s
              OR (c.relreplident = 'i' AND i.key IS DISTINCT FROM %s::text[])) ORDER BY 1
        """.encode(),  # noqa: S608 - a constant of above
        (table.oid, table.identity, list(table.key)),
    ).fetchall()
    for name, foreign, logged in rows:
        what, remedy = "has another replica identity", f"ALTER TABLE {name} {_identity_of(table)};"
        if foreign or not logged:
            what = "is a foreign table" if foreign else "is unlogged"
            what, remedy = (
                f"{what}: its changes are not in the WAL",
                "detach it, or leave the table out",
            )
        yield PgFault(f"{name}, a partition of {table.quoted}, {what}", remedy)


def _identity_of(table: PgTable) -> str:
    kinds = {"f": "FULL", "i": "USING INDEX …", "n": "NOTHING"}
    return f"REPLICA IDENTITY {kinds.get(table.identity, 'DEFAULT')}"


def publication_faults(session: Session, name: str, tables: list[PgTable]) -> Iterator[PgFault]:
    """Yield what is wrong with the publication, or what stands in the way of making it."""
    quoted = Identifier(name).as_string(None)
    found = session.execute(
        "SELECT pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = %s", (name,)
    ).fetchone()
    missing = missing_tables(session, name, tables)
    ours = all(one.ours for one in missing)
    if found is None:
        may = session.execute("SELECT has_database_privilege(current_database(), 'CREATE')")
        if not (ours and may.fetchone() == (True,)):
            yield PgFault(
                f"there is no publication {quoted}, and the role may not make one of these tables",
                publication_statement(name, missing),
            )
        return
    if missing and not (ours and found[0]):
        yield PgFault(
            f"the publication {quoted} lacks tables, and the role may not add them",
            f"ALTER PUBLICATION {quoted} ADD TABLE {', '.join(one.alone for one in missing)};",
        )
    yield from omission_faults(session, name)


def omission_faults(session: Session, name: str) -> Iterator[PgFault]:
    """Yield what the publication leaves out of the tables that it has."""
    quoted = Identifier(name).as_string(None)
    found = session.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AND pubviaroot "
        "FROM pg_publication WHERE pubname = %s",
        (name,),
    ).fetchone()
    if found == (False,):
        yield PgFault(
            f"the publication {quoted} leaves out some changes, or names partitions instead of their tables",
            f"ALTER PUBLICATION {quoted} SET (publish = 'insert, update, delete, truncate', "
            "publish_via_partition_root = true);",
        )
    if session.info.server_version < 150_000:
        return  # there are no filters before 15
    rows = session.execute(
        "SELECT prrelid::regclass::text FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid "
        "WHERE pubname = %s AND (prqual IS NOT NULL OR prattrs IS NOT NULL)",
        (name,),
    )
    for (table,) in rows:
        yield PgFault(
            f"the publication {quoted} leaves out rows or columns of {table}",
            f"ALTER PUBLICATION {quoted} DROP TABLE {table}; ALTER PUBLICATION {quoted} ADD TABLE {table};",
        )


def refuse_alterations(session: Session, name: str, known: str | None) -> str:
    """Return which definition of the publication this is: any ALTER but of its tables makes another one.

    Args:
        known: Which one it was; None if that is not known.

    Raises:
        ConflictError: it was altered, and so left changes out or may have.
    """
    found = session.execute(
        "SELECT xmin::text FROM pg_publication WHERE pubname = %s", (name,)
    ).fetchone()
    now = "" if found is None else str(found[0])
    faults = list(omission_faults(session, name))
    if faults or (known is not None and now != known):
        what = (
            f"the publication {name} is gone"
            if found is None
            else f"the publication {name} was altered"
        )
        what = faults[0].what if faults else what
        raise ConflictError(
            f"{what}, so that the log may lack changes. Capture under a new name (--name), which begins with a new "
            "snapshot."
        )
    return now


def published_tables(session: Session, name: str) -> dict[int, int]:
    """Return the tables that a publication names, by oid, with a number: it is another one if it left them out since."""
    rows = session.execute(
        "SELECT prrelid::int8, r.oid::int8 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = prpubid "
        "WHERE pubname = %s",
        (name,),
    )
    return dict(rows.fetchall())


def missing_tables(session: Session, name: str, tables: list[PgTable]) -> list[PgTable]:
    """Return the tables that a publication lacks."""
    rows = session.execute(
        "SELECT relid::int8 FROM pg_publication p, LATERAL (SELECT prrelid AS relid FROM pg_publication_rel "
        "WHERE prpubid = p.oid UNION SELECT c.oid FROM pg_class c WHERE p.puballtables) r WHERE p.pubname = %s",
        (name,),
    )
    there = {oid for (oid,) in rows}
    return [one for one in tables if one.oid not in there]


def publication_statement(name: str, tables: list[PgTable]) -> str:
    """Return the statement that makes a publication of tables."""
    listed = ", ".join(one.alone for one in tables)
    return (
        f"CREATE PUBLICATION {Identifier(name).as_string(None)} FOR TABLE {listed} "
        "WITH (publish_via_partition_root = true);"
    )


def publish(session: Session, name: str, tables: list[PgTable]) -> None:
    """Make the publication, or add tables to it."""
    missing = missing_tables(session, name, tables)
    there = session.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (name,)).fetchone()
    if there is None:
        session.execute(publication_statement(name, missing).encode())
    elif missing:
        listed = ", ".join(one.alone for one in missing)
        quoted = Identifier(name).as_string(None)
        session.execute(f"ALTER PUBLICATION {quoted} ADD TABLE {listed}".encode())


def unpublish(session: Session, name: str) -> bool:
    """Drop the publication; return whether there was one."""
    there = session.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", (name,)).fetchone()
    if there is not None:
        session.execute(SQL("DROP PUBLICATION {}").format(Identifier(name)))
    return there is not None


def check_reread(session: Session, tables: list[PgTable], request: RereadRequest) -> None:
    """Return if one of the tables can be read again as it is asked for.

    Raises:
        ConfigError: it is not captured, or the condition cannot be asked of it.
    """
    name = f"{request.database}.{request.table}"
    found = [one for one in tables if (one.schema, one.table) == (request.database, request.table)]
    if not found:
        raise ConfigError(
            f"the table {name} is not captured, so it cannot be read again. Name one that --tables has."
        )
    if not request.where:
        return
    if not found[0].key:
        raise ConfigError(
            f"the table {name} has no key, so single rows of it cannot be read again. Leave the condition out."
        )
    try:
        with session.transaction():
            session.execute("SET TRANSACTION READ ONLY")
            session.execute(
                f"SELECT 1 FROM {found[0].quoted} WHERE ({request.where}) LIMIT 0".encode()  # noqa: S608 - the operator's own
            )
    except psycopg.Error as error:
        raise ConfigError(
            f"the condition {request.where!r} cannot be asked of {name}: {str(error).splitlines()[0]}. Give an expression "
            "of PostgreSQL's over its columns."
        ) from None
