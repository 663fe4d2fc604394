"""What the sink tells of a batch."""

from __future__ import annotations

from types import SimpleNamespace

import millstream as ms
from millstream.engine.frame_files import FrameFiles
from millstream.engine.source.event_times import EventTimesFile
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.log.reader import LogReader
from millstream.spark.sink import CommitSink
from millstream.views.commit.committer import BatchCommitter, BatchResult
from millstream.views.state_store.sqlite_store import SqliteStateStore


def test_lag_counts_what_came_into_partitions_that_a_batch_did_not_touch(tmp_path):
    def send(partition, count):
        for _ in range(count):
            producer.send("t", b"x", partition=partition)
        producer.flush()

    with (
        ms.connect(tmp_path) as log,
        log.producer() as producer,
        SqliteStateStore(tmp_path / "views.db") as state_store,
    ):
        log.create_topic("t", partitions=2)
        send(0, 5)
        send(1, 3)
        plan = JobPlan("app", (), (), (), (), Buckets(1))
        earlier, committer = (
            BatchCommitter(plan, state_store, []),
            BatchCommitter(plan, state_store, []),
        )
        earlier.begin_run("main", "c")
        before = BatchResult(())
        before.position["t"] = {"0": 4}
        assert earlier.commit(0, before, {})
        committer.begin_run("main", "c")
        sink = CommitSink(
            plan=SimpleNamespace(app="app", sources=[SimpleNamespace(topic="t")]),
            committer=committer,
            log=LogReader(tmp_path),
            on_progress=None,
            event_times=EventTimesFile(tmp_path / "times"),
            frame_files=FrameFiles(None),
        )
        nothing = BatchResult(())
        assert sink._lag(nothing) == {"t/0": 1, "t/1": 3}
        moved = BatchResult(())
        moved.position["t"] = {"1": 3}
        assert sink._lag(moved) == {"t/0": 1, "t/1": 0}
        assert committer.commit(1, moved, {})
        send(1, 2)
        assert sink._lag(nothing) == {"t/0": 1, "t/1": 2}


def test_a_batch_begins_where_it_was_planned_and_neither_start_nor_idle_time_is_booked_on_it(
    monkeypatch,
):
    now, planned = [0.0], {}
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1000.0 + now[0])
    monkeypatch.setattr("millstream.engine.batch_runner.time", clock)
    sink = CommitSink(None, None, None, None, None, None, planned_offset=planned.get)
    sink._ended = 0.0  # made now, and then Java and Spark start for 20 seconds
    now[0] = 20.0
    sink.start()
    planned[0] = {"wall_ms": 1_025_000}  # and the batch is planned 5 seconds later
    now[0] = 26.0
    assert sink._batch_start(0) == 25.0
    sink._ended = 26.0
    planned[1] = {"wall_ms": 1_100_000}  # nothing came for a while
    now[0] = 101.0
    assert sink._batch_start(1) == 100.0
    planned[2] = {"wall_ms": 50_000}  # run again: it was planned in an earlier run
    assert sink._batch_start(2) == 26.0
    assert sink._batch_start(3) == 26.0, "of DataFrames alone nobody knows"
