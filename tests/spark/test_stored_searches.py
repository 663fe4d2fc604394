"""Stored searches on Spark: the matches are those of the kernels in process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import millstream as ms
from millstream import testing

START = datetime(2026, 1, 1, tzinfo=UTC)
QUERIES = [
    "x",
    '"y z"',
    "x n:>20",
    "NOT y",
    "n:[5 TO 9] OR z",
    "q:(",
    "/[xy]/",
    "AT LEAST 2 OF (x, y, n:<9)",
]


def app_of_searches():
    app = ms.App("searches", log="unused")
    rows = app.topic("rows", {"n": int, "text": str, "at": datetime}, partitions=3, key="n")
    stored = {"key": int, "query": str, "since": datetime}
    table = app.table("queries", stored, key="key", time="since", partitions=2)
    stream = rows.stream(time="at")
    found = stream.percolate(table, "query", default="text", highlight="shown", shards=3)
    found.view("out", key=("n", "key"))
    return app


def inputs():
    def at(seconds):
        return (START + timedelta(seconds=seconds)).isoformat()

    texts = ["x", "y z", "x y", "z y", "x y z"]
    rows = [{"n": n, "text": texts[n % 5], "at": at(n)} for n in range(40)]
    queries = [
        {"key": n % 5, "query": QUERIES[n % len(QUERIES)], "since": at(n)} for n in range(60)
    ]
    return {"rows": rows, "queries": queries}


@pytest.mark.timeout(600)
def test_rows_match_on_spark_as_in_process():
    on_spark = testing.run(app_of_searches(), inputs(), batches=4, engine="spark")
    in_process = testing.run(app_of_searches(), inputs(), batches=5, seed=3, crash=1)
    found = [sorted(out["out"].rows(), key=repr) for out in (on_spark, in_process)]
    assert found[0] == found[1]
    assert len(found[0]) > 40
    assert on_spark.dead.height == in_process.dead.height == 7
