"""The feed writes the sequence, the whole sequence, and nothing twice, however often it dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from millstream.client import connect
from millstream.demo import feed
from millstream.demo.ads_events import HOUR_US, PARTITIONS, TOPIC, arrivals
from millstream.errors import ConfigError, FolderOwnedError
from millstream.log.reader import LogReader

SEED = 1


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def _assert_whole(folder: Path) -> None:
    records = arrivals(SEED)
    with connect(folder) as log:
        assert log.end_offsets(TOPIC) == feed.lengths(records)
        for partition in range(PARTITIONS):
            found = pl.from_arrow(log.read(TOPIC, partition))
            expected = records.filter(pl.col("partition") == partition)
            assert found["key"].equals(expected["key"])
            assert found["value"].equals(expected["value"])
            assert found["timestamp"].to_physical().to_list() == expected["timestamp_ms"].to_list()


def test_chunks_come_when_their_time_has_come():
    records = arrivals(SEED)
    clock = Clock()
    sizes, spans = [], []
    for chunk in feed.chunks(records, speed=10.0, clock=clock, pause=clock.pause):
        sizes.append(chunk.height)
        spans.append(chunk["arrival_us"][-1] - chunk["arrival_us"][0])
        assert chunk["arrival_us"][-1] <= records["arrival_us"][0] + clock.now * 10 * HOUR_US
    assert sum(sizes) == records.height
    assert max(spans) <= HOUR_US  # a tenth of a second at ten hours a second
    assert 23 < clock.now < 25
    assert list(feed.chunks(records.clear(), speed=1, clock=clock, pause=clock.pause)) == []


def test_the_log_holds_the_sequence_in_every_partition(tmp_path):
    clock = Clock()
    with connect(tmp_path) as log:
        written = feed.feed(log, SEED, clock=clock, pause=clock.pause)
        assert written == arrivals(SEED).height
        assert feed.feed(log, SEED, clock=clock, pause=clock.pause) == 0
    _assert_whole(tmp_path)


def test_a_stopped_feed_goes_on_where_it_was(tmp_path):
    clock = Clock()
    with connect(tmp_path) as log:
        first = feed.feed(log, SEED, clock=clock, pause=clock.pause, stopped=lambda: clock.now > 5)
        assert 0 < first < arrivals(SEED).height
        second = feed.feed(log, SEED, clock=clock, pause=clock.pause)
    assert first + second == arrivals(SEED).height
    _assert_whole(tmp_path)


def test_any_beginning_of_each_partition_can_be_gone_on_from():
    records = arrivals(SEED)
    rng = random.Random(1)
    ends = [rng.randrange(length) for length in feed.lengths(records)]
    rest = feed.remaining(records, ends)
    assert rest["arrival_us"].is_sorted()
    for partition, part in rest.partition_by("partition", as_dict=True).items():
        assert part["place"][0] == ends[partition[0]]
    assert rest.height == records.height - sum(ends)


def test_a_topic_with_more_records_than_the_demo_has_is_refused():
    records = arrivals(SEED)
    ends = feed.lengths(records)
    assert feed.remaining(records, ends).is_empty()
    ends[2] += 1
    with pytest.raises(ConfigError, match=r"Partition 2 .*Another program"):
        feed.remaining(records, ends)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a feed process; whatever still runs at the end is killed."""
    source = Path(__file__).resolve().parents[3] / "src"
    command = [sys.executable, "-m", "millstream.demo.feed", "--log", str(tmp_path)]
    processes = []

    def begin(speed: float, *, go_on: bool = True) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*command, "--speed", str(speed)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        processes.append(process)
        if go_on:
            os.write(process.stdin.fileno(), b"g")
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()


def test_a_killed_feed_goes_on_exactly(tmp_path, start):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    reader = LogReader(tmp_path)
    seen = [0] * PARTITIONS
    for _ in range(2):
        process = start(speed=4)
        assert reader.wait(TOPIC, [end + 100 for end in seen], 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = [end for _, end in reader.offsets(TOPIC)]
    assert sum(seen) < arrivals(SEED).height
    process = start(speed=1e6)
    assert process.wait(60) == 0
    _assert_whole(tmp_path)


def test_the_feed_begins_and_then_waits_until_somebody_reads(tmp_path, start):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    process = start(speed=1e6, go_on=False)
    reader = LogReader(tmp_path)
    seen = [0] * PARTITIONS
    while seen != [1] * PARTITIONS:
        assert reader.wait(TOPIC, seen, 60)
        seen = [end for _, end in reader.offsets(TOPIC)]
    os.write(process.stdin.fileno(), b"g")
    assert process.wait(60) == 0
    _assert_whole(tmp_path)


def test_a_folder_in_which_another_feed_is_at_work_is_refused(tmp_path, start):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    start(speed=0.001)
    assert LogReader(tmp_path).wait(TOPIC, [0] * PARTITIONS, 60)
    with connect(tmp_path) as log, pytest.raises(FolderOwnedError):
        feed.create_topic(log, wait_s=0.2)


def test_the_feed_ends_when_its_parent_is_gone(start):
    process = start(speed=0.001)
    process.stdin.close()
    assert process.wait(60) == 0
