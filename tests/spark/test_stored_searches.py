"""Stored searches on Spark: the matches are those of the kernels in process."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import every_search
import pytest
from test_kill_matrix import run

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


def test_the_matches_in_process_are_those_of_every_query_on_every_offer():
    app = every_search.pipeline("unused", topics=False)
    end = [every_search.Offer(-1, "", 999, every_search.at(9999))]
    last = [every_search.Alert(-1, "never", every_search.at(9999))]
    inputs = {"offers": every_search.offers() + end, "alerts": every_search.alerts() + last}
    out = testing.run(app, inputs, batches=5, partitions=1, crash=2)
    found = out["found"].select("id", "key", "query").rows()
    assert every_search.matches() == Counter(found)
    assert len(found) > 100
    assert out.dead.height == sum(n % 11 == 10 for n in range(every_search.QUERIES))


@pytest.mark.long
@pytest.mark.timeout(2400)  # eight times a JVM
def test_each_match_is_there_once_wherever_the_job_was_killed(tmp_path):
    every_search.send(tmp_path)
    points = [
        "driver after stage",
        "driver before commit",
        "driver after topics",
        "driver after dataset",
        "driver in commit",
        "driver after commit",
        "driver after all know the run",
    ]
    meant = every_search.matches()
    for place, point in enumerate(points):
        number = 1 if place == 0 or point.endswith("run") else 2
        assert run(tmp_path, None, [point], number, "every_search")[0] == -9, point
        if place > 1:
            for name, found in every_search.held(tmp_path).items():
                assert not found - meant, (point, name)
    assert run(tmp_path, None, ["worker in stage"], 2, "every_search")[0] == 0
    assert every_search.held(tmp_path) == dict.fromkeys(("view", "dataset", "topic"), meant)
