"""A row is one row in every target, whatever its key is: written twice it is replaced, and deleted it is gone."""

import pytest

from millstream.capture.apply.applied_table import AppliedTable, RowBatch
from millstream.capture.apply.captured_types import CapturedType
from millstream.capture.apply.targets import target_of

KEYS = {
    "float64": ["NaN", 0.0, 1.5, "Infinity", "-Infinity"],
    "float32": ["NaN", 1.1, -0.5],
    "decimal": ["1.50", "2.00", "-0.01"],
    "text": ["a", "A", "é'\"\\\n", "", "x" * 70_000, "x" * 70_000 + "y"],
    "bytes": ["AP8=", ""],
    "date": ["2026-02-28", "0001-01-01", "9999-12-31"],
    "timestamp": ["2026-01-02T03:04:05.678901", "1900-01-01T00:00:00"],
    "timestamptz": ["2026-01-02T03:04:05.6Z"],
    "boolean": [True, False],
    "int64": [-(2**63), 2**63 - 1],
    "uint64": [2**64 - 1, 0],
}
NUMBER = CapturedType("int32", "int4")


def table_of(kind, key):
    native = {"bytes": "bytea", "float64": "float8"}.get(kind, kind)
    digits = (10, 2) if kind == "decimal" else ()
    columns = (("k", CapturedType(kind, native, *digits)), ("part", NUMBER), ("n", NUMBER))
    return AppliedTable("postgresql", "public", "t", columns, key, 0)


@pytest.mark.parametrize("scheme", ["sqlite", "parquet", "delta", "iceberg", "tantivy"])
@pytest.mark.parametrize("key", [("k",), ("k", "part")])
@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_every_type_are_told_apart_and_found_again(tmp_path, scheme, key, kind):
    pytest.importorskip({"delta": "deltalake", "iceberg": "pyiceberg"}.get(scheme, "pyarrow"))
    if scheme == "tantivy":
        pytest.importorskip("tantivy")
    table, values = table_of(kind, key), KEYS[kind]
    target = target_of(f"{scheme}:///{tmp_path}/copy")()
    target.acquire("shop", "token", again=False)

    def write(upserts, deletes, *, is_first=False):
        target.begin()
        if is_first:
            target.define(table, None)
        target.write(RowBatch(table, upserts, deletes))
        target.commit("{}")

    def rows(n):
        return [{"k": value, "part": 1, "n": n} for value in values]

    keys = [{name: row[name] for name in key} for row in rows(0)]
    write(rows(1), [], is_first=True)
    write(rows(2), [])
    assert sorted(target.scan(table), key=repr) == sorted(rows(2), key=repr)
    assert sorted(target.rows(table, keys), key=repr) == sorted(rows(2), key=repr)
    write([], keys[1:])
    assert list(target.scan(table)) == rows(2)[:1]
    target.close()
