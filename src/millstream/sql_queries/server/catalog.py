"""The catalogs that PostgreSQL's clients look in: pg_catalog and information_schema, over the tables of an app.

The engine has a pg_catalog of its own, which says less than clients ask. This one is views in the schema ``pgc`` (and
``information_schema`` in ``pgi``) over two small tables, which say what tables there are; statements are rewritten to
it (`catalog_rewrite.py`). Of what an app has nothing of (roles, rules, policies, extensions) there are empty tables with the
columns that clients name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from millstream.sql_queries.server.pg_types import ARRAY_OF, pg_type
from millstream.sql_queries.server.session_commands import SERVER_VERSION
from millstream.sql_queries.sql_table import SqlTable, quote_text

_NAMESPACES = {"pg_catalog": 11, "information_schema": 13000, "views": 16384, "topics": 16385}
_FIRST_OID = 20_000
_INDEX_OIDS = 1_000_000  # of a table's key: its own and this

# oid, name, length, category, name of the function that reads it
_TYPES: Sequence[tuple[int, str, int, str]] = (
    (16, "bool", 1, "B"),
    (17, "bytea", -1, "U"),
    (18, "char", 1, "Z"),
    (19, "name", 64, "S"),
    (20, "int8", 8, "N"),
    (21, "int2", 2, "N"),
    (23, "int4", 4, "N"),
    (24, "regproc", 4, "N"),
    (25, "text", -1, "S"),
    (26, "oid", 4, "N"),
    (114, "json", -1, "U"),
    (700, "float4", 4, "N"),
    (701, "float8", 8, "N"),
    (705, "unknown", -2, "X"),
    (1042, "bpchar", -1, "S"),
    (1043, "varchar", -1, "S"),
    (1082, "date", 4, "D"),
    (1083, "time", 8, "D"),
    (1114, "timestamp", 8, "D"),
    (1184, "timestamptz", 8, "D"),
    (1186, "interval", 16, "T"),
    (1700, "numeric", -1, "N"),
    (2205, "regclass", 4, "N"),
    (2206, "regtype", 4, "N"),
    (2950, "uuid", 16, "U"),
    (3802, "jsonb", -1, "U"),
)
_FULL_NAMES = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
    "varchar": "character varying",
    "bpchar": "character",
    "time": "time without time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}

_VIEWS: Sequence[tuple[str, str]] = (
    (
        "pg_namespace",
        "SELECT oid::BIGINT AS oid, nspname, 10::BIGINT AS nspowner, NULL::VARCHAR AS nspacl FROM (VALUES "
        + ", ".join(f"({oid}, '{name}')" for name, oid in _NAMESPACES.items())
        + ") AS n(oid, nspname)",
    ),
    (
        "pg_class",
        (
            "SELECT oid, name AS relname, nsp AS relnamespace, 0::BIGINT AS reltype, 0::BIGINT AS reloftype, 10::BIGINT AS relowner, "
            "CASE kind WHEN 'r' THEN 2 ELSE 403 END::BIGINT AS relam, oid AS relfilenode, 0::BIGINT AS reltablespace, 0 AS relpages, "
            "-1::FLOAT AS reltuples, 0 AS relallvisible, 0::BIGINT AS reltoastrelid, has_key AND kind = 'r' AS relhasindex, "
            "false AS relisshared, 'p' AS relpersistence, kind AS relkind, natts::SMALLINT AS relnatts, 0::SMALLINT AS relchecks, "
            "false AS relhasrules, false AS relhastriggers, false AS relhassubclass, false AS relrowsecurity, "
            "false AS relforcerowsecurity, true AS relispopulated, 'd' AS relreplident, false AS relispartition, "
            "false AS relhasoids, NULL::VARCHAR AS relacl, NULL::VARCHAR[] AS reloptions, NULL::VARCHAR AS relpartbound "
            "FROM pgc._relation"
        ),
    ),
    (
        "pg_attribute",
        (
            "SELECT rel AS attrelid, name AS attname, typ AS atttypid, -1 AS attstattarget, -1::SMALLINT AS attlen, "
            "num::SMALLINT AS attnum, 0 AS attndims, -1 AS attcacheoff, typmod AS atttypmod, false AS attbyval, 'i' AS attalign, "
            "'x' AS attstorage, '' AS attcompression, false AS attnotnull, false AS atthasdef, false AS atthasmissing, "
            "'' AS attidentity, '' AS attgenerated, false AS attisdropped, true AS attislocal, 0 AS attinhcount, "
            "0::BIGINT AS attcollation, NULL::VARCHAR AS attacl, NULL::VARCHAR[] AS attoptions FROM pgc._attribute"
        ),
    ),
    (
        "pg_type",
        (
            "SELECT oid, name AS typname, 11::BIGINT AS typnamespace, 10::BIGINT AS typowner, len::SMALLINT AS typlen, "
            "len > 0 AS typbyval, 'b' AS typtype, category AS typcategory, false AS typispreferred, true AS typisdefined, "
            "',' AS typdelim, 0::BIGINT AS typrelid, elem AS typelem, arr AS typarray, "
            "CASE WHEN elem > 0 THEN 'array_in' ELSE name || 'in' END AS typinput, name || 'out' AS typoutput, "
            "name || 'recv' AS typreceive, name || 'send' AS typsend, 'i' AS typalign, 'x' AS typstorage, false AS typnotnull, "
            "0::BIGINT AS typbasetype, -1 AS typtypmod, 0 AS typndims, 0::BIGINT AS typcollation, NULL::VARCHAR AS typdefault, "
            "NULL::VARCHAR AS typacl, full_name FROM pgc._type"
        ),
    ),
    (
        "pg_index",
        (
            f"SELECT oid + {_INDEX_OIDS} AS indexrelid, oid AS indrelid, len(key)::SMALLINT AS indnatts, "
            "len(key)::SMALLINT AS indnkeyatts, true AS indisunique, true AS indisprimary, false AS indisexclusion, "
            "true AS indimmediate, false AS indisclustered, true AS indisvalid, true AS indisready, true AS indislive, "
            "false AS indisreplident, false AS indcheckxmin, false AS indnullsnotdistinct, key AS indkey, NULL::BIGINT[] AS indcollation, "
            "NULL::BIGINT[] AS indclass, list_transform(key, lambda one: 0) AS indoption, NULL::VARCHAR AS indexprs, NULL::VARCHAR AS indpred "
            "FROM pgc._relation WHERE kind = 'r' AND has_key"
        ),
    ),
    (
        "pg_constraint",
        (
            f"SELECT oid + {2 * _INDEX_OIDS} AS oid, name || '_pkey' AS conname, nsp AS connamespace, 'p' AS contype, "
            "false AS condeferrable, false AS condeferred, true AS convalidated, oid AS conrelid, 0::BIGINT AS contypid, "
            f"oid + {_INDEX_OIDS} AS conindid, 0::BIGINT AS conparentid, 0::BIGINT AS confrelid, ' ' AS confupdtype, ' ' AS confdeltype, "
            "' ' AS confmatchtype, true AS conislocal, 0 AS coninhcount, true AS connoinherit, key AS conkey, NULL::BIGINT[] AS confkey, "
            "NULL::VARCHAR AS conbin FROM pgc._relation WHERE kind = 'r' AND has_key"
        ),
    ),
    (
        "pg_database",
        (
            "SELECT 16000::BIGINT AS oid, name AS datname, 10::BIGINT AS datdba, 6 AS encoding, 'c' AS datlocprovider, "
            "false AS datistemplate, true AS datallowconn, -1 AS datconnlimit, 'C' AS datcollate, 'C' AS datctype, "
            "NULL::VARCHAR AS daticulocale, NULL::VARCHAR AS datacl, 0::BIGINT AS dattablespace FROM pgc._database"
        ),
    ),
    (
        "pg_roles",
        (
            "SELECT 10::BIGINT AS oid, 'millstream' AS rolname, false AS rolsuper, true AS rolinherit, false AS rolcreaterole, "
            "false AS rolcreatedb, true AS rolcanlogin, false AS rolreplication, -1 AS rolconnlimit, NULL::VARCHAR AS rolpassword, "
            "NULL::TIMESTAMPTZ AS rolvaliduntil, false AS rolbypassrls, NULL::VARCHAR[] AS rolconfig"
        ),
    ),
    (
        "pg_user",
        "SELECT 'millstream' AS usename, 10::BIGINT AS usesysid, false AS usecreatedb, false AS usesuper, NULL::VARCHAR AS passwd",
    ),
    (
        "pg_am",
        "SELECT * FROM (VALUES (2::BIGINT, 'heap', 't'), (403, 'btree', 'i')) AS am(oid, amname, amtype)",
    ),
    (
        "pg_settings",
        (
            "SELECT * FROM (VALUES ('max_index_keys', '32', 'integer'), ('server_version_num', '150000', 'integer')) "
            "AS s(name, setting, vartype)"
        ),
    ),
    (
        "pg_tables",
        (
            "SELECT n.nspname AS schemaname, c.relname AS tablename, 'millstream' AS tableowner, NULL::VARCHAR AS tablespace, "
            "c.relhasindex AS hasindexes, false AS hasrules, false AS hastriggers, false AS rowsecurity FROM pgc.pg_class c "
            "JOIN pgc.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r'"
        ),
    ),
    (
        "pg_stat_activity",
        (
            "SELECT 0 AS pid, name AS datname, 'millstream' AS usename, '' AS application_name, 'active' AS state, '' AS query "
            "FROM pgc._database"
        ),
    ),
)

# Tables of what there is not, with the columns that clients name.
_EMPTY: Sequence[tuple[str, str]] = (
    ("pg_auth_members", "roleid BIGINT, member BIGINT, grantor BIGINT, admin_option BOOLEAN"),
    ("pg_language", "oid BIGINT, lanname VARCHAR"),
    ("pg_attrdef", "oid BIGINT, adrelid BIGINT, adnum SMALLINT, adbin VARCHAR"),
    ("pg_collation", "oid BIGINT, collname VARCHAR, collnamespace BIGINT"),
    ("pg_description", "objoid BIGINT, classoid BIGINT, objsubid INTEGER, description VARCHAR"),
    ("pg_shdescription", "objoid BIGINT, classoid BIGINT, description VARCHAR"),
    (
        "pg_depend",
        "classid BIGINT, objid BIGINT, objsubid INTEGER, refclassid BIGINT, refobjid BIGINT, refobjsubid INTEGER, deptype VARCHAR",
    ),
    ("pg_enum", "oid BIGINT, enumtypid BIGINT, enumsortorder FLOAT, enumlabel VARCHAR"),
    ("pg_extension", "oid BIGINT, extname VARCHAR, extnamespace BIGINT, extversion VARCHAR"),
    (
        "pg_inherits",
        "inhrelid BIGINT, inhparent BIGINT, inhseqno INTEGER, inhdetachpending BOOLEAN",
    ),
    (
        "pg_policy",
        "oid BIGINT, polname VARCHAR, polrelid BIGINT, polcmd VARCHAR, polpermissive BOOLEAN, polroles BIGINT[], polqual VARCHAR, polwithcheck VARCHAR",
    ),
    (
        "pg_proc",
        "oid BIGINT, proname VARCHAR, pronamespace BIGINT, prorettype BIGINT, proargtypes BIGINT[], proargnames VARCHAR[], proallargtypes BIGINT[], proargmodes VARCHAR[], prokind VARCHAR, proretset BOOLEAN, prosrc VARCHAR",
    ),
    ("pg_publication", "oid BIGINT, pubname VARCHAR, puballtables BOOLEAN"),
    (
        "pg_publication_rel",
        "oid BIGINT, prpubid BIGINT, prrelid BIGINT, prqual VARCHAR, prattrs SMALLINT[]",
    ),
    ("pg_publication_namespace", "oid BIGINT, pnpubid BIGINT, pnnspid BIGINT"),
    ("pg_range", "rngtypid BIGINT, rngsubtype BIGINT"),
    (
        "pg_rewrite",
        "oid BIGINT, rulename VARCHAR, ev_class BIGINT, ev_type VARCHAR, ev_enabled VARCHAR, is_instead BOOLEAN",
    ),
    ("pg_sequence", "seqrelid BIGINT, seqtypid BIGINT"),
    (
        "pg_statistic_ext",
        "oid BIGINT, stxrelid BIGINT, stxnamespace BIGINT, stxname VARCHAR, stxkind VARCHAR[], stxstattarget INTEGER",
    ),
    ("pg_tablespace", "oid BIGINT, spcname VARCHAR, spcowner BIGINT"),
    (
        "pg_trigger",
        "oid BIGINT, tgname VARCHAR, tgrelid BIGINT, tgenabled VARCHAR, tgisinternal BOOLEAN, tgparentid BIGINT, tgconstraint BIGINT, tgdeferrable BOOLEAN, tginitdeferred BOOLEAN",
    ),
    ("pg_foreign_table", "ftrelid BIGINT, ftserver BIGINT, ftoptions VARCHAR[]"),
    ("pg_foreign_server", "oid BIGINT, srvname VARCHAR"),
    ("pg_partitioned_table", "partrelid BIGINT, partstrat VARCHAR"),
    ("pg_views", "schemaname VARCHAR, viewname VARCHAR, viewowner VARCHAR, definition VARCHAR"),
    (
        "pg_matviews",
        "schemaname VARCHAR, matviewname VARCHAR, matviewowner VARCHAR, definition VARCHAR",
    ),
)

# Functions, each with its parameters and what it is.
_FUNCTIONS: Sequence[tuple[str, str]] = (
    ("version", "() AS 'PostgreSQL " + SERVER_VERSION + " (Millstream, whose SQL is DuckDB''s)'"),
    ("current_database", "() AS (SELECT name FROM pgc._database)"),
    (
        "current_schemas",
        "(implicit) AS CASE WHEN implicit THEN ['pg_catalog', 'views', 'topics'] ELSE ['views', 'topics'] END",
    ),
    ("pg_get_userbyid", "(id) AS 'millstream'"),
    ("pg_table_is_visible", "(id) AS true"),
    ("pg_type_is_visible", "(id) AS true"),
    ("pg_function_is_visible", "(id) AS true"),
    (
        "format_type",
        (
            "(id, modifier) AS (SELECT CASE WHEN t.oid = 1700 AND modifier > 0 THEN "
            "'numeric(' || ((modifier - 4) >> 16) || ',' || ((modifier - 4) & 65535) || ')' ELSE t.full_name END "
            "FROM pgc.pg_type t WHERE t.oid = id)"
        ),
    ),
    ("pg_get_expr", "(tree, id) AS NULL::VARCHAR, (tree, id, pretty) AS NULL::VARCHAR"),
    (
        "pg_get_indexdef",
        (
            "(id) AS (SELECT 'CREATE UNIQUE INDEX ON ' || r.name || ' USING btree (' || r.key_names || ')' FROM "
            f"pgc._relation r WHERE r.oid = id - {_INDEX_OIDS}), (id, col, pretty) AS (SELECT CASE WHEN col = 0 THEN "
            "'CREATE UNIQUE INDEX ON ' || r.name || ' USING btree (' || r.key_names || ')' ELSE "
            "(SELECT a.name FROM pgc._attribute a WHERE a.rel = r.oid AND a.num = r.key[col]) END FROM "
            f"pgc._relation r WHERE r.oid = id - {_INDEX_OIDS})"
        ),
    ),
    (
        "pg_get_constraintdef",
        (
            "(id) AS (SELECT 'PRIMARY KEY (' || r.key_names || ')' FROM pgc._relation r WHERE r.oid = id - "
            f"{2 * _INDEX_OIDS}), (id, pretty) AS (SELECT 'PRIMARY KEY (' || r.key_names || ')' FROM pgc._relation r WHERE r.oid = id - {2 * _INDEX_OIDS})"
        ),
    ),
    ("pg_get_viewdef", "(id) AS NULL::VARCHAR, (id, pretty) AS NULL::VARCHAR"),
    ("pg_get_partkeydef", "(id) AS NULL::VARCHAR"),
    ("pg_get_statisticsobjdef_columns", "(id) AS NULL::VARCHAR"),
    ("pg_get_serial_sequence", "(tab, col) AS NULL::VARCHAR"),
    ("pg_get_function_identity_arguments", "(id) AS ''"),
    ("pg_get_function_arguments", "(id) AS ''"),
    ("pg_get_function_result", "(id) AS ''"),
    ("obj_description", "(id) AS NULL::VARCHAR, (id, catalog) AS NULL::VARCHAR"),
    ("col_description", "(id, col) AS NULL::VARCHAR"),
    ("shobj_description", "(id, catalog) AS NULL::VARCHAR"),
    ("pg_encoding_to_char", "(id) AS 'UTF8'"),
    ("pg_is_in_recovery", "() AS false"),
    ("pg_relation_is_publishable", "(id) AS true"),
    ("pg_relation_size", "(id) AS 0::BIGINT, (id, fork) AS 0::BIGINT"),
    ("pg_total_relation_size", "(id) AS 0::BIGINT"),
    ("pg_table_size", "(id) AS 0::BIGINT"),
    ("pg_database_size", "(id) AS 0::BIGINT"),
    ("pg_size_pretty", "(bytes) AS bytes || ' bytes'"),
    ("has_table_privilege", "(one, two) AS true, (one, two, three) AS true"),
    ("has_schema_privilege", "(one, two) AS true, (one, two, three) AS true"),
    ("has_database_privilege", "(one, two) AS true, (one, two, three) AS true"),
    ("has_column_privilege", "(one, two, three) AS true"),
    ("has_any_column_privilege", "(one, two) AS true"),
    (
        "to_regclass",
        (
            "(said) AS (SELECT min(c.oid) FROM pgc.pg_class c JOIN pgc.pg_namespace n ON n.oid = c.relnamespace WHERE "
            "replace(said, '\"', '') IN (c.relname, n.nspname || '.' || c.relname))"
        ),
    ),
    (
        "to_regtype",
        "(said) AS (SELECT min(t.oid) FROM pgc.pg_type t WHERE lower(said) IN (t.typname, t.full_name))",
    ),
    ("array_upper", "(list, dimension) AS nullif(len(list), 0)"),
    ("array_lower", "(list, dimension) AS CASE WHEN len(list) > 0 THEN 1 END"),
    ("quote_ident", "(name) AS '\"' || replace(name, '\"', '\"\"') || '\"'"),
    (
        "_pg_expandarray",
        "(list) AS unnest(list_transform(range(1, len(list) + 1), lambda n: {'x': list[n], 'n': n}))",
    ),
    (
        "pg_get_keywords",
        "() AS TABLE SELECT keyword_name AS word, 'R' AS catcode, '' AS catdesc FROM duckdb_keywords()",
    ),
    ("pg_backend_pid", "() AS 0"),
    ("pg_postmaster_start_time", "() AS now()"),
    ("txid_current", "() AS 0::BIGINT"),
    ("inet_server_addr", "() AS NULL::VARCHAR"),
    ("inet_server_port", "() AS NULL::INTEGER"),
    ("pg_listening_channels", "() AS TABLE SELECT '' AS channel WHERE false"),
)
_NAMED_TYPES = (
    ("name", "VARCHAR"),
    ("oid", "BIGINT"),
    ("regtype", "VARCHAR"),
    ("regclass", "VARCHAR"),
    ("regproc", "VARCHAR"),
    ("regprocedure", "VARCHAR"),
    ("regnamespace", "VARCHAR"),
    ("regrole", "VARCHAR"),
    ("jsonb", "JSON"),
    ("xid", "BIGINT"),
    ("pg_node_tree", "VARCHAR"),
)
_INFORMATION: Sequence[tuple[str, str]] = (
    (
        "schemata",
        "SELECT current_database() AS catalog_name, nspname AS schema_name, 'millstream' AS schema_owner FROM pgc.pg_namespace",
    ),
    (
        "tables",
        (
            "SELECT current_database() AS table_catalog, n.nspname AS table_schema, c.relname AS table_name, "
            "'BASE TABLE' AS table_type, NULL::VARCHAR AS self_referencing_column_name, 'NO' AS is_insertable_into, 'NO' AS is_typed "
            "FROM pgc.pg_class c JOIN pgc.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r'"
        ),
    ),
    (
        "columns",
        (
            "SELECT current_database() AS table_catalog, n.nspname AS table_schema, r.name AS table_name, a.name AS column_name, "
            "a.num AS ordinal_position, NULL::VARCHAR AS column_default, 'YES' AS is_nullable, "
            "CASE WHEN t.elem > 0 THEN 'ARRAY' ELSE t.full_name END AS data_type, NULL::INTEGER AS character_maximum_length, "
            "CASE WHEN a.typmod > 0 THEN (a.typmod - 4) >> 16 END AS numeric_precision, "
            "CASE WHEN a.typmod > 0 THEN (a.typmod - 4) & 65535 END AS numeric_scale, "
            "CASE WHEN t.oid IN (1114, 1184) THEN 6 END AS datetime_precision, 'pg_catalog' AS udt_schema, t.name AS udt_name, "
            "'NO' AS is_identity, 'NEVER' AS is_generated, 'NO' AS is_updatable FROM pgc._attribute a "
            "JOIN pgc._relation r ON r.oid = a.rel AND r.kind = 'r' JOIN pgc.pg_namespace n ON n.oid = r.nsp JOIN pgc._type t ON t.oid = a.typ"
        ),
    ),
    (
        "table_constraints",
        (
            "SELECT current_database() AS constraint_catalog, n.nspname AS constraint_schema, r.name || '_pkey' AS constraint_name, "
            "current_database() AS table_catalog, n.nspname AS table_schema, r.name AS table_name, 'PRIMARY KEY' AS constraint_type "
            "FROM pgc._relation r JOIN pgc.pg_namespace n ON n.oid = r.nsp WHERE r.kind = 'r' AND r.has_key"
        ),
    ),
    (
        "key_column_usage",
        (
            "SELECT n.nspname AS constraint_schema, r.name || '_pkey' AS constraint_name, n.nspname AS table_schema, "
            "r.name AS table_name, a.name AS column_name, list_position(r.key, a.num) AS ordinal_position FROM pgc._relation r "
            "JOIN pgc.pg_namespace n ON n.oid = r.nsp JOIN pgc._attribute a ON a.rel = r.oid AND list_contains(r.key, a.num) "
            "WHERE r.kind = 'r'"
        ),
    ),
    (
        "views",
        "SELECT '' AS table_catalog, '' AS table_schema, '' AS table_name, '' AS view_definition WHERE false",
    ),
    (
        "referential_constraints",
        "SELECT '' AS constraint_schema, '' AS constraint_name, '' AS unique_constraint_name WHERE false",
    ),
    ("routines", "SELECT '' AS routine_schema, '' AS routine_name, '' AS routine_type WHERE false"),
)

CATALOG_NAMES = frozenset({name for group in (_VIEWS, _EMPTY, _FUNCTIONS) for name, _ in group})
"""The names in ``pgc``, which ``pg_catalog.NAME`` means."""

INFORMATION_NAMES = frozenset(name for name, _ in _INFORMATION)


# The small tables that say what tables there are, with their columns in the order of the engine's.
_RELATION = pa.schema(
    [
        ("oid", pa.int64()),
        ("nsp", pa.int64()),
        ("name", pa.string()),
        ("kind", pa.string()),
        ("natts", pa.int32()),
        ("has_key", pa.bool_()),
        ("key", pa.list_(pa.int32())),
        ("key_names", pa.string()),
    ]
)
_ATTRIBUTE = pa.schema(
    [
        ("rel", pa.int64()),
        ("num", pa.int32()),
        ("name", pa.string()),
        ("typ", pa.int64()),
        ("typmod", pa.int32()),
    ]
)


def preparation(database: str) -> list[str]:
    """Return the statements that make the catalogs of a session, with no tables of an app yet."""
    types = [
        f"({oid}, '{name}', {length}, '{category}', 0, {ARRAY_OF.get(oid, 0)}, '{_FULL_NAMES.get(name, name)}')"
        for oid, name, length, category in _TYPES
    ]
    names = {oid: name for oid, name, _, _ in _TYPES}
    types += [
        f"({array}, '_{names[oid]}', -1, 'A', {oid}, 0, '{_FULL_NAMES.get(names[oid], names[oid])}[]')"
        for oid, array in ARRAY_OF.items()
    ]
    return [
        "CREATE SCHEMA pgc",
        "CREATE SCHEMA pgi",
        "SET search_path = 'views,topics,pgc'",
        (
            "CREATE TABLE pgc._relation (oid BIGINT, nsp BIGINT, name VARCHAR, kind VARCHAR, natts INTEGER, has_key BOOLEAN, "
            "key INTEGER[], key_names VARCHAR)"
        ),
        "CREATE TABLE pgc._attribute (rel BIGINT, num INTEGER, name VARCHAR, typ BIGINT, typmod INTEGER)",
        "CREATE TABLE pgc._type (oid BIGINT, name VARCHAR, len INTEGER, category VARCHAR, elem BIGINT, arr BIGINT, full_name VARCHAR)",
        f"INSERT INTO pgc._type VALUES {', '.join(types)}",
        f"CREATE TABLE pgc._database AS SELECT {quote_text(database)} AS name",
        *(f"CREATE TYPE pgc.{name} AS {kind}" for name, kind in _NAMED_TYPES),
        *(f"CREATE TABLE pgc.{name} ({columns})" for name, columns in _EMPTY),
        *(f"CREATE VIEW pgc.{name} AS {select}" for name, select in _VIEWS),
        *(f"CREATE MACRO pgc.{name}{meaning}" for name, meaning in _FUNCTIONS),
        *(f"CREATE VIEW pgi.{name} AS {select}" for name, select in _INFORMATION),
    ]


def fill_catalog(engine: Any, tables: tuple[SqlTable, ...]) -> None:
    """Make the catalogs of a session say which tables there are."""
    for name, rows in _catalog_rows(tables).items():
        engine.execute(f"DELETE FROM pgc.{name}")
        engine.register("_catalog_rows", rows)
        engine.execute(f"INSERT INTO pgc.{name} SELECT * FROM _catalog_rows")
        engine.unregister("_catalog_rows")


@lru_cache(maxsize=8)
def _catalog_rows(tables: tuple[SqlTable, ...]) -> dict[str, pa.Table]:
    """Return the rows of the small tables; all sessions over the same tables share them."""
    relations: list[tuple[Any, ...]] = []
    attributes: list[tuple[Any, ...]] = []
    for number, table in enumerate(tables):
        oid = _FIRST_OID + number
        namespace = _NAMESPACES[table.schema]
        numbers = {name: at for at, (name, _) in enumerate(table.columns, 1)}
        key = [numbers[name] for name in table.key]
        names = ", ".join(table.key)
        relations.append((oid, namespace, table.name, "r", len(numbers), bool(key), key, names))
        if key:
            index = oid + _INDEX_OIDS
            relations.append((index, namespace, f"{table.name}_pkey", "i", len(key), False, [], ""))
        for name, kind in table.columns:
            found = pg_type(kind)
            attributes.append((oid, numbers[name], name, found.oid, found.modifier))
    return {
        "_relation": _to_arrow(relations, _RELATION),
        "_attribute": _to_arrow(attributes, _ATTRIBUTE),
    }


def _to_arrow(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.table([list(values) for values in columns], schema=schema)
