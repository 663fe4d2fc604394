"""An app on a cluster of Spark's own kind: a master and two workers, each a process of its own here.

They share this machine's disk, as machines of a cluster would share a mounted folder; what else differs
between several machines is not tested, and docs/cluster.md says so.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from datetime import timedelta

import on_cluster
import polars as pl
import pytest
from clusters import Cluster, end

import millstream as ms

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as opened:
        yield Cluster(folder, opened)


def send(log, numbers):
    with ms.connect(log) as opened:
        if "clicks" not in opened.topics():
            opened.create_topic("clicks", partitions=4)
        with opened.producer() as producer:
            for number in numbers:
                producer.send("clicks", on_cluster.event(number), key=str(number % 7))


def counted(events):
    """Count the events of each minute and ad."""
    counts = Counter()
    for number in range(events):
        at = on_cluster.NOON + timedelta(milliseconds=5 * number)
        counts[at.replace(second=0, microsecond=0), number % 7] += 1
    return [(at, ad, n) for (at, ad), n in sorted(counts.items())]


def minutes(log):
    return (
        ms.view("minutes", log=log).scan().select("window_start", "ad", "n").sort(pl.all()).rows()
    )


def test_an_app_runs_on_both_workers_of_a_cluster_and_goes_on_when_one_has_died(
    no_spark, cluster, tmp_path
):
    log, program = tmp_path / "data", on_cluster.__file__
    send(log, range(100_000))
    cluster.run(log, program, cluster.master)
    assert minutes(log) == counted(100_000)
    assert ms.view("executors", log=log).scan()["executor"].sort().to_list() == ["0", "1"]
    end(cluster.workers[0])
    cluster.wait_for(1)
    cluster.worker("three")
    cluster.wait_for(2)
    send(log, range(100_000, 200_000))
    cluster.run(log, program, cluster.master)
    assert minutes(log) == counted(200_000)
