"""Spark reads the files that are a table of a lake, as each format lists them."""

import pytest
from applied_model import KEY, ModelDatabase, write

import millstream as ms
from millstream.client import connect


@pytest.fixture
def folder(tmp_path):
    database = ModelDatabase(8)
    with connect(tmp_path / "log") as log:
        for _ in range(2):
            write(log, [database.unit() for _ in range(10)])
            for kind in ("parquet", "delta", "iceberg"):
                run = ms.apply("shop", f"{kind}:///{tmp_path}/{kind}", log=tmp_path / "log")
                run.run(until="caught-up")
    return tmp_path, database


def files_of(folder):
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    from millstream.capture.apply.parquet import parquet_files

    yield parquet_files(folder / "parquet" / "public.users")
    yield DeltaTable(folder / "delta" / "public.users").file_uris()
    catalog = SqlCatalog(
        "millstream", uri=f"sqlite:///{folder}/iceberg/catalog.db", warehouse=str(folder)
    )
    tasks = catalog.load_table(("public", "users")).scan().plan_files()
    yield [task.file.file_path for task in tasks]


def test_spark_reads_what_was_applied(folder, spark):
    path, database = folder
    expected = {key: row["big"] for key, row in database.states[-1]["users"].items()}
    for files in files_of(path):
        rows = spark.read.option("mergeSchema", "true").parquet(*files).collect()
        assert {tuple(row[name] for name in KEY): row["big"] for row in rows} == expected
        assert len(rows) == len(expected)
