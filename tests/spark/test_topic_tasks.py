"""Topics of a broker that tasks of Spark write, as on a cluster: the records that the driver writes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from broker.broker_process import InProcess
from broker.shared_topics import written

import millstream as ms
from millstream.engine import frame_files
from millstream.spark import frame_blocks, job, output_tasks
from millstream.spark.output_tasks import OutputTasks

START = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = 3000
OUTPUTS = ("thirds", "minutes", "latest")


def declare(name, address, folder):
    app = ms.App(name, log=address, state=folder, buckets=3)
    events = app.topic("events", {"id": int, "user": str, "at": datetime}, key="user", partitions=2)
    stream = events.stream(time="at", watermark=ms.watermark("30 seconds", idle=None))
    stream.with_columns(third=pl.col("id") % 3).to(f"{name}-thirds", key="user", partitions=3)
    minutes = stream.window(ms.tumbling("1 minute"), by="user").agg(n=ms.count())
    minutes.to(f"{name}-minutes", key="user", partitions=2)
    minutes.window(ms.tumbling("5 minutes"), by="n").emit("update").agg(users=ms.count()).to(
        f"{name}-latest", key="n", partitions=2, cleanup="compact"
    )
    return app


def send(address):
    with ms.connect(address) as log:
        log.create_topic("events", partitions=2)
        with log.producer() as producer:
            for i in range(EVENTS):
                at = (START + timedelta(seconds=i // 8)).isoformat()
                event = {"id": i, "user": f"u{i % 37}", "at": at}
                producer.send("events", event, partition=i // 5 % 2)


def outputs(name, address):
    """Return the records of each output by partition, in order.

    Where windows end at the same time, the hash of their keys orders them, which no two apps have alike.
    """
    found = {output: written(address, f"{name}-{output}", ("key", "value")) for output in OUTPUTS}
    return found | {"minutes": [sorted(records) for records in found["minutes"]]}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_tasks_write_the_records_that_the_driver_writes(spark, tmp_path, monkeypatch):
    staged = []
    real = OutputTasks.stage

    def stage(self, batch_id, rows):
        left, found = real(self, batch_id, rows)
        staged.append(set(found))
        return left, found

    monkeypatch.setattr(OutputTasks, "stage", stage)
    with InProcess(tmp_path / "log") as broker:
        address = f"kafka://{broker.address}"
        send(address)
        declare("driver", address, tmp_path / "driver").run(until="caught-up", rows_per_batch=1500)
        expected = outputs("driver", address)
        assert not staged
        monkeypatch.setattr(job, "tasks_write_outputs", lambda _: True)
        monkeypatch.setattr(output_tasks, "DRIVER_BYTES_MAX", -1)
        monkeypatch.setattr(frame_files, "_BYTES_MIN", 3000)
        declare("files", address, tmp_path / "files").run(until="caught-up", rows_per_batch=1500)
        monkeypatch.setattr(job, "shares_disk", lambda *_: False)
        monkeypatch.setattr(frame_blocks, "_NAMED_BYTES_MIN", 3000)
        monkeypatch.setattr(frame_blocks, "_FETCHED_BYTES_MAX", -1)
        declare("blocks", address, tmp_path / "blocks").run(until="caught-up", rows_per_batch=1500)
        assert all(map(len, staged))
        assert len(set.union(*staged)) == 2 * len(OUTPUTS)
        for name in ("files", "blocks"):
            assert outputs(name, address) == expected, name
