"""Tables with a column of every type that is captured, of each server, and rows of ordinary, extreme and odd values."""

_COLUMNS = {
    "ti": ("TINYINT", ["-128", "127", "0"]),
    "tu": ("TINYINT UNSIGNED ZEROFILL", ["255", "0", "7"]),
    "yy": ("YEAR", ["2026", "0", "1901"]),
    "sm": ("SMALLINT UNSIGNED", ["65535", "0", "1"]),
    "me": ("MEDIUMINT", ["-8388608", "8388607", "0"]),
    "it": ("INT", ["-2147483648", "2147483647", "0"]),
    "bi": ("BIGINT", ["-9223372036854775808", "9223372036854775807", "0"]),
    "bu": ("BIGINT UNSIGNED", ["18446744073709551615", "9223372036854775808", "0"]),
    "fl": ("FLOAT", ["1.1", "-3.402823e38", "16777217"]),
    "f2": ("FLOAT", ["0.1", "1e-45", "123456789"]),
    "db": ("DOUBLE", ["2.5", "-1.7976931348623157e308", "0.1"]),
    "d2": ("DOUBLE", ["1e-300", "123456789.123456789", "-0.0"]),
    "de": ("DECIMAL(20,5)", ["-12345.678", "999999999999999.99999", "0"]),
    "dn": ("DECIMAL(10,10)", ["0.0123456789", "-0.9999999999", "0"]),
    "dz": ("DECIMAL(12,0) ZEROFILL", ["5", "999999999999", "0"]),
    "dl": ("DECIMAL(65,30)", ["-0.5", "99999999999999999999999999999999999.999999999999999999999999999999", "1"]),
    "b1": ("BIT(1)", ["1", "0", "1"]),
    "bt": ("BIT(10)", ["b'1010101010'", "0", "1"]),
    "bx": ("BIT(64)", ["18446744073709551615", "0", "1"]),
    "da": ("DATE", ["'2026-02-28'", "'0000-00-00'", "'9999-12-31'"]),
    "dd": ("DATE", ["'2026-00-31'", "'1000-01-01'", "'0001-01-01'"]),
    "t0": ("TIME", ["'-838:59:59'", "'838:59:59'", "'00:00:00'"]),
    "t2": ("TIME(2)", ["'-00:00:00.25'", "'12:34:56.78'", "'-10:00:00'"]),
    "t6": ("TIME(6)", ["'-10:00:00.000001'", "'838:59:59.999999'", "'00:00:00.5'"]),
    "dt": ("DATETIME", ["'0000-00-00'", "'9999-12-31 23:59:59'", "'1000-01-01'"]),
    "d6": ("DATETIME(6)", ["'2026-01-02 03:04:05.000006'", "'1969-12-31 23:59:59.999999'", "'0000-00-00'"]),
    "ts": ("TIMESTAMP NULL", ["'2026-10-25 00:30:00'", "'0000-00-00'", "'2038-01-19 03:14:07'"]),
    "t3": ("TIMESTAMP(3) NULL", ["'2026-01-02 03:04:05.678'", "'1970-01-01 00:00:01'", "NULL"]),
    "ch": ("CHAR(10)", ["'ab  '", "''", "'   '"]),
    "cl": ("CHAR(10) CHARACTER SET latin1", ["'é€'", "x'8190'", "''"]),
    "cu": ("CHAR(5) CHARACTER SET ucs2", ["'é'", "'日本'", "''"]),
    "cw": ("VARCHAR(5) CHARACTER SET cp1251", ["'привет'", "'Ж'", "''"]),
    "vc": ("VARCHAR(300)", ["'üñ🎉'", "'a  '", "REPEAT('ä', 300)"]),
    "vs": ("VARCHAR(20) CHARACTER SET latin1", ["'ÿ€'", "'\\\\\\''", "'\\n\\0x'"]),
    "tx": ("TEXT", ["'text'", "REPEAT('x', 60000)", "''"]),
    "lt": ("LONGTEXT CHARACTER SET utf8mb3", ["'lt'", "REPEAT('é', 70000)", "''"]),
    "bn": ("BINARY(4)", ["'a'", "x'00000000'", "x'ff00'"]),
    "b6": ("BINARY(16)", ["'a'", "x'00000000'", "x'ff00'"]),
    "vb": ("VARBINARY(10)", ["'b'", "''", "x'00ff00'"]),
    "bl": ("BLOB", ["x'00ff'", "''", "x'5c27'"]),
    "en": ("ENUM('a','b','ü')", ["'ü'", "''", "'a'"]),
    "st": ("SET('x','y','z')", ["'x,z'", "''", "'y'"]),
    "js": ("JSON", ["'{\"a\": 1, \"a\": 1e400}'", "'[]'", "'\"é\"'"]),
    "uu": ("UUID", ["'123e4567-e89b-12d3-a456-426614174000'", "'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-4fff-bfff-ffffffffffff'"]),
    "i6": ("INET6", ["'::1'", "'2001:db8::ff00:42:8329'", "'::ffff:1.2.3.4'"]),
    "i4": ("INET4", ["'1.2.3.4'", "'0.0.0.0'", "'255.255.255.255'"]),
    "bo": ("BOOLEAN", ["TRUE", "FALSE", "TRUE"]),
    "gs": ("INT AS (ti + 1) STORED", ["DEFAULT", "DEFAULT", "DEFAULT"]),
    "gv": ("INT AS (ti + 2) VIRTUAL", ["DEFAULT", "DEFAULT", "DEFAULT"]),
}  # fmt: skip

# Of MySQL: without the types that only MariaDB has, and with those that only it has.
_OF_MYSQL = {
    name: column for name, column in _COLUMNS.items() if name not in ("js", "uu", "i6", "i4")
}
_OF_MYSQL |= {
    "js": ("JSON", ["'{\"b\": [1.5, -1, 18446744073709551615, null, true], \"a\": \"\\\\n\\\\u0000é🎉\"}'", "'[]'", "'\"é\"'"]),
    "jn": ("JSON", ["JSON_ARRAY(1.50, 1e100, 1e-7, -0e0, CAST('2026-01-02' AS DATE))", "CONCAT('\"', REPEAT('x', 70000), '\"')", "JSON_OBJECT('t', CAST('-838:59:59' AS TIME), 'b', REPEAT(x'41', 100))"]),
    "jm": ("JSON", ["JSON_ARRAY(CAST('2026-01-02 03:04:05.6' AS DATETIME(6)), b'101', ST_GeomFromText('POINT(1 2)'))", "'{}'", "'-2147483649'"]),
    "vn": ("VARCHAR(30) COLLATE utf8mb4_0900_as_cs", ["'a  '", "'Ä🎉'", "''"]),
    "vj": ("VARCHAR(30) COLLATE utf8mb4_ja_0900_as_cs", ["'日本'", "'a'", "'A'"]),
    "vb0": ("VARCHAR(30) COLLATE utf8mb4_bin", ["'a '", "'a'", "''"]),
}  # fmt: skip


def _table(columns):
    listed = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    return f"CREATE TABLE {{}} (id INT PRIMARY KEY, {listed})"


def _rows(columns):
    rows = [", ".join(values[row] for _, values in columns.values()) for row in range(3)]
    nulls = [
        values[0] if name in ("gs", "gv", "ti") else "NULL" for name, (_, values) in columns.items()
    ]
    return [*rows, ", ".join(nulls)]


EVERY_TYPE = {"mariadb": _table(_COLUMNS), "mysql": _table(_OF_MYSQL)}
ALL_VALUES = {"mariadb": _rows(_COLUMNS), "mysql": _rows(_OF_MYSQL)}
