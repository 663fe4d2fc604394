"""Spark reads the files that are a table of a lake, as each format lists them."""

import pytest
from applied_model import KEY, ModelDatabase, write

import millstream as ms
from millstream.client import connect


@pytest.fixture
def folder(tmp_path):
    database, states = ModelDatabase(8), []
    with connect(tmp_path / "log") as log:
        for _ in range(2):
            write(log, [database.unit() for _ in range(10)])
            for kind in ("parquet", "delta", "iceberg"):
                run = ms.apply("shop", f"{kind}:///{tmp_path}/{kind}", log=tmp_path / "log")
                run.run(until="caught-up")
            states.append(database.states[-1]["users"])
    return tmp_path, states


def files_of(folder, version):
    """Yield the files that a table was after so many runs of each format."""
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    from millstream.capture.apply.parquet import parquet_files

    yield parquet_files(folder / "parquet" / "public.users", version)
    yield DeltaTable(folder / "delta" / "public.users", version=version).file_uris()
    catalog = SqlCatalog(
        "millstream", uri=f"sqlite:///{folder}/iceberg/catalog.db", warehouse=str(folder)
    )
    table = catalog.load_table(("public", "users"))
    ends = [one for one in table.snapshots() if one.summary.operation.value == "append"]
    tasks = table.scan(snapshot_id=ends[version].snapshot_id).plan_files()
    yield [task.file.file_path for task in tasks]


@pytest.mark.parametrize("version", [0, 1])
def test_spark_reads_what_was_applied_now_and_before(folder, spark, version):
    path, states = folder
    expected = {key: row["big"] for key, row in states[version].items()}
    for files in files_of(path, version):
        rows = spark.read.option("mergeSchema", "true").parquet(*files).collect()
        assert {tuple(row[name] for name in KEY): row["big"] for row in rows} == expected
        assert len(rows) == len(expected)
