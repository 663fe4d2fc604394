"""A random workload on tables that have every type, for two readers of one server to be compared."""

import random

SCHEMA = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
    "CREATE DOMAIN whole AS int CHECK (VALUE >= 0)",
    "CREATE TYPE pair AS (x int, y text)",
    """CREATE TABLE types (
        id int PRIMARY KEY, int2 int2, int4 int4, int8 int8, float4 float4, float8 float8, numeric numeric,
        decimal numeric(10, 2), money money, bool bool, char5 char(5), varchar varchar(20), text text, bytea bytea,
        bit bit(3), varbit varbit, date date, time time, timetz timetz, timestamp timestamp, timestamptz timestamptz,
        interval interval, uuid uuid, json json, jsonb jsonb, inet inet, cidr cidr, macaddr macaddr, xml xml,
        tsvector tsvector, pg_lsn pg_lsn, point point, int4range int4range, tstzrange tstzrange, mood mood,
        whole whole, pair pair, text_array text[], int_array int[], numeric_array numeric[], oid oid)""",
    "CREATE TABLE rows (x text, y int, n numeric(8,2), big text, PRIMARY KEY (x, y))",
    "ALTER TABLE rows ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE whole_rows (a int, b text)",
    "ALTER TABLE whole_rows REPLICA IDENTITY FULL",
)
VALUES = {
    "int2": ("0", "-32768", "32767"),
    "int4": ("0", "-2147483648", "7"),
    "int8": ("9223372036854775807", "-9223372036854775808", "1"),
    "float4": ("'NaN'", "'Infinity'", "1.1", "-0", "3.4e38", "1e-40"),
    "float8": ("'NaN'", "'-Infinity'", "0.1", "1e308", "5e-324", "123456789.125"),
    "numeric": ("'NaN'", "'Infinity'", "12345678901234567890.0123456789", "0", "-1.10"),
    "decimal": ("12.30", "-99999999.99", "0"),
    "money": ("12.34", "-0.01"),
    "bool": ("true", "false"),
    "char5": ("'ab'", "'é'", "''"),
    "varchar": ("'x'", "'a\"b\\c'", "E'tab\\tline\\n'"),
    "text": ("''", "'NULL'", "E'\\u0001\\u2028😀'", "repeat('long ', 50)"),
    "bytea": ("'\\x00ff'", "''", "'\\xdeadbeef'"),
    "bit": ("B'101'", "B'000'"),
    "varbit": ("B'1'", "B''", "B'101010101010'"),
    "date": ("'2026-02-28'", "'infinity'", "'0044-03-15 BC'", "'21016-01-01'", "'1969-12-31'"),
    "time": ("'00:00'", "'24:00'", "'12:34:56.789012'"),
    "timetz": ("'10:00+02'", "'23:59:59.999999-11:30'"),
    "timestamp": (
        "'2026-01-01 00:00:00.123456'",
        "'infinity'",
        "'0044-03-15 12:00 BC'",
        "'294276-12-31'",
    ),
    "timestamptz": ("'2026-01-01 00:00+05:30'", "'-infinity'", "'1900-01-01 00:00Z'", "'epoch'"),
    "interval": ("'1 year 2 mons 3 days 04:05:06.7'", "'-1 day'", "'0'"),
    "uuid": ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",),
    "json": ('\'{"a": 1, "a": 2}\'', "'1e400'", "'null'"),
    "jsonb": ('\'{"b": [1, null], "a": "ü"}\'', "'1e400'", "'\"text\"'"),
    "inet": ("'10.0.0.1/24'", "'::1'"),
    "cidr": ("'10.0.0.0/8'",),
    "macaddr": ("'08:00:2b:01:02:03'",),
    "xml": ("'<a>1</a>'",),
    "tsvector": ("'a fat cat'::tsvector",),
    "pg_lsn": ("'16/B374D848'",),
    "point": ("'(1,2)'", "'(0.1,-1e300)'"),
    "int4range": ("'[1,5)'", "'empty'", "'(,3]'"),
    "tstzrange": ("'[2026-01-01Z,)'",),
    "mood": ("'sad'", "'happy'"),
    "whole": ("0", "2147483647"),
    "pair": ("'(1,\"a b\")'", "'(,)'"),
    "text_array": ("'{}'", '\'{a,NULL,"NULL","c,d\\"e"}\'', "'{{a,b},{c,d}}'", "'[2:3]={x,y}'"),
    "int_array": ("'{1,NULL,-3}'", "'{}'"),
    "numeric_array": ("'{1.10,2}'", "'{1.10,Infinity}'"),
    "oid": ("0", "4294967295"),
}


def each_value():
    """Yield an insertion for each value of each type, all others null."""
    number = 0
    for column, values in VALUES.items():
        for value in (*values, "NULL"):
            number += 1
            yield f"INSERT INTO types (id, {column}) VALUES ({number}, {value})"


def change(rng: random.Random) -> str:
    """Return a statement that changes rows."""
    key, other, number = rng.randrange(200), rng.randrange(200), rng.randrange(1000)
    column = rng.choice(list(VALUES))
    value = rng.choice((*VALUES[column], "NULL"))
    x, y, z = f"k{key % 20}", key % 3, f"k{other % 20}"
    return rng.choice(
        [
            f"UPDATE types SET {column} = {value} WHERE id = {key}",
            f"UPDATE types SET {column} = {value} WHERE id % 40 = {key % 40}",
            f"INSERT INTO rows VALUES ('{x}', {y}, {number}.5, repeat('big', {number * 5})) ON CONFLICT DO NOTHING",
            f"UPDATE rows SET n = {number} WHERE x = '{x}'",
            f"UPDATE rows SET big = 'small' WHERE x = '{x}' AND y = {y}",
            f"UPDATE rows SET x = '{z}' WHERE x = '{x}' AND y = {y} AND NOT EXISTS (SELECT 1 FROM rows WHERE x = '{z}')",
            f"DELETE FROM rows WHERE y = {y} AND x = '{x}'",
            f"INSERT INTO rows SELECT 'bulk' || n, {number}, n, NULL FROM generate_series(1, 70) n ON CONFLICT DO NOTHING",
            f"DELETE FROM rows WHERE x LIKE 'bulk%' AND y = {number}",
            f"INSERT INTO whole_rows VALUES ({key}, {value if column == 'text' else number})",
            f"UPDATE whole_rows SET a = a + 1 WHERE a % 5 = {key % 5}",
            f"DELETE FROM whole_rows WHERE a = {key}",
        ]
    )


def transactions(seed: int, count: int):
    """Yield lists of statements, each of one transaction; the last statement ends it."""
    rng = random.Random(seed)
    for number in range(count):
        statements = [change(rng) for _ in range(rng.choice([1, 1, 2, 10]))]
        if rng.random() < 0.2:
            statements += ["SAVEPOINT s", change(rng), "ROLLBACK TO s"]
        if rng.random() < 0.03:
            statements.append("TRUNCATE rows, whole_rows")
        if rng.random() < 0.1:
            ending = rng.choice(["COMMIT", "ROLLBACK"])
            statements += [f"PREPARE TRANSACTION 'two{number}'", f"{ending} PREPARED 'two{number}'"]
        else:
            statements.append(rng.choice(["COMMIT"] * 5 + ["ROLLBACK"]))
        yield statements
