"""Large outputs to a topic on a cluster: an executor and a driver are killed while tasks send."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

import topics_on_cluster
from broker.broker_process import AsProcess
from broker.shared_topics import written
from clusters import Cluster, end

import millstream as ms

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

EVENTS = 600  # of 1,000 rows: each batch has more than the driver writes


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    with ExitStack() as opened:
        yield Cluster(folder, opened)


def send(address, start):
    with ms.connect(address) as log:
        if "events" not in log.topics():
            log.create_topic("events", partitions=4)
            log.create_topic("rows", partitions=6)
        with log.producer() as producer:
            for number in range(start, start + EVENTS):
                producer.send("events", {"id": number}, key=str(number))


def ends(log):
    """Count the records of the topic, those of open transactions too."""
    return sum(end for _, end in log._reader("read_uncommitted").offsets("rows"))


def sending(process, log, before):
    """Wait until tasks have sent something that is not committed."""
    pause = threading.Event()
    while ends(log) == before:
        assert process.poll() is None, "it ended without a large output"
        pause.wait(0.01)


def test_each_row_is_there_once_when_an_executor_or_the_driver_dies(no_spark, cluster, tmp_path):
    with AsProcess(tmp_path / "log") as broker:
        address = f"kafka://{broker.address}"

        def start():
            places = [cluster.master, address, str(tmp_path / "app")]
            with (tmp_path / "said").open("ab") as said:
                return subprocess.Popen(
                    [sys.executable, topics_on_cluster.__file__, *places],
                    env=cluster.environment,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )

        def killed_while_sending(number, kill):
            send(address, number * EVENTS)
            with ms.connect(address) as log:
                before = ends(log)
                process = start()
                try:
                    sending(process, log, before)
                    kill(process)
                    if process.wait() < 0:
                        process = start()
                    assert process.wait() == 0, (tmp_path / "said").read_text()[-4000:]
                finally:
                    end(process)
            found = [
                int(key) for records in written(address, "rows", ("key",)) for (key,) in records
            ]
            rows = (number + 1) * EVENTS * topics_on_cluster.FAN_OUT
            assert len(found) == rows
            assert set(found) == set(range(rows))

        def kill_worker(_process):
            end(cluster.workers[0])
            cluster.worker("three")

        killed_while_sending(0, kill_worker)
        killed_while_sending(1, lambda process: os.killpg(process.pid, signal.SIGKILL))
        assert "through the driver" not in (tmp_path / "said").read_text()
