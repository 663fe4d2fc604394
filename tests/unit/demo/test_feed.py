"""The feed writes the sequence, the whole sequence, and nothing twice, however often it dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest

from millstream.client import connect
from millstream.demo import feed
from millstream.demo.ads_events import PARTITIONS, TOPIC
from millstream.demo.ads_input import AdsInput
from millstream.errors import ConfigError, FolderOwnedError
from millstream.log.reader import LogReader

GIVEN = AdsInput("generated", seed=1, rate=100, minutes=1)
MINUTES = 2.0  # with what comes after the last impression
SOURCE = Path(__file__).resolve().parents[3] / "src"
PROGRAM = """
import sys, time
from millstream.client import connect
from millstream.demo import feed
from millstream.demo.ads_input import AdsInput
with connect(sys.argv[1]) as log:
    given = AdsInput("generated", seed=1, rate=100, minutes=1)
    feed.feed(log, given.disorder(), speed=float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def travel():
    return GIVEN.disorder()


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def assert_whole(folder: Path, travel) -> None:
    records = travel.records(travel.order)
    with connect(folder) as log:
        assert log.end_offsets(TOPIC) == travel.lengths
        for partition in range(PARTITIONS):
            found = pl.from_arrow(log.read(TOPIC, partition))
            expected = records.filter(travel.order["partition"] == partition)
            assert found["key"].equals(expected["key"])
            assert found["value"].equals(expected["value"])
            assert found["timestamp"].to_physical().to_list() == expected["timestamp_ms"].to_list()


def test_chunks_come_when_their_time_has_come(travel):
    clock = Clock()
    sizes, spans = [], []
    for chunk in feed.chunks(travel.order, speed=10.0, clock=clock, pause=clock.pause):
        sizes.append(chunk.height)
        spans.append(chunk["arrival_us"][-1] - chunk["arrival_us"][0])
        assert chunk["arrival_us"][-1] <= travel.order["arrival_us"][0] + clock.now * 10e6 + 1
    assert sum(sizes) == travel.order.height
    assert max(spans) <= 1_000_001  # a tenth of a second, ten times as fast
    assert MINUTES * 6 <= clock.now < MINUTES * 6 + 0.3
    assert list(feed.chunks(travel.order.clear(), speed=1, clock=clock, pause=clock.pause)) == []


def test_the_log_holds_the_sequence_in_every_partition(tmp_path, travel):
    clock = Clock()
    given = {"speed": 10.0, "clock": clock, "pause": clock.pause}
    with connect(tmp_path) as log:
        assert feed.feed(log, travel, **given) == travel.order.height
        assert feed.feed(log, travel, **given) == 0
    assert_whole(tmp_path, travel)


def test_a_stopped_feed_goes_on_where_it_was(tmp_path, travel):
    clock = Clock()
    given = {"speed": 10.0, "clock": clock, "pause": clock.pause}
    with connect(tmp_path) as log:
        first = feed.feed(log, travel, stopped=lambda: clock.now > 5, **given)
        assert 0 < first < travel.order.height
        assert first + feed.feed(log, travel, **given) == travel.order.height
    assert_whole(tmp_path, travel)


def test_any_beginning_of_each_partition_can_be_gone_on_from(travel):
    rng = random.Random(1)
    ends = [rng.randrange(length) for length in travel.lengths]
    rest = feed.remaining(travel, ends)
    assert rest["arrival_us"].is_sorted()
    for partition, part in rest.partition_by("partition", as_dict=True).items():
        assert part["place"][0] == ends[partition[0]]
    assert rest.height == travel.order.height - sum(ends)


def test_a_topic_with_more_records_than_the_demo_has_is_refused(travel):
    ends = travel.lengths
    assert feed.remaining(travel, ends).is_empty()
    ends[2] += 1
    with pytest.raises(ConfigError, match=r"Partition 2 .*Another program"):
        feed.remaining(travel, ends)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a feed in a process; whatever still runs at the end is killed."""
    processes = []

    def begin(speed: float) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(speed)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def test_a_killed_feed_goes_on_exactly(tmp_path, travel, start):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    reader = LogReader(tmp_path)
    seen = [0] * PARTITIONS
    for _ in range(2):
        process = start(speed=20)
        assert reader.wait(TOPIC, [end + 100 for end in seen], 60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = [end for _, end in reader.offsets(TOPIC)]
    assert sum(seen) < travel.order.height
    process = start(speed=1e6)
    assert process.wait(60) == 0
    assert_whole(tmp_path, travel)


def test_a_folder_in_which_another_feed_is_at_work_is_refused(tmp_path, start):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    start(speed=0.001)
    assert LogReader(tmp_path).wait(TOPIC, [0] * PARTITIONS, 60)
    with connect(tmp_path) as log, pytest.raises(FolderOwnedError):
        feed.create_topic(log, wait_s=0.2)


def test_feeding_begins_and_then_waits_until_somebody_reads(tmp_path, travel):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    reader = LogReader(tmp_path)
    with feed.FeedThread(tmp_path, travel, speed=1e6) as feeding:
        assert reader.wait(TOPIC, [0] * PARTITIONS, 60)
        held = sum(end for _, end in reader.offsets(TOPIC))
        assert held < travel.order.height
        feeding.start()
        while (ends := [end for _, end in reader.offsets(TOPIC)]) != travel.lengths:
            assert reader.wait(TOPIC, ends, 60)
        feeding.check()
    assert_whole(tmp_path, travel)


def test_feeding_ends_with_the_block(tmp_path, travel):
    with connect(tmp_path) as log:
        feed.create_topic(log)
    with feed.FeedThread(tmp_path, travel, speed=0.001):
        assert LogReader(tmp_path).wait(TOPIC, [0] * PARTITIONS, 60)
    with connect(tmp_path) as log:  # it owns the folder no longer
        feed.create_topic(log, wait_s=0.0)
    assert "millstream-demo-feed" not in {thread.name for thread in threading.enumerate()}


def test_feeding_that_fails_interrupts_and_says_why(tmp_path, travel):
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    told = threading.Event()
    with feed.FeedThread(not_a_folder, travel, speed=1.0, interrupt=told.set) as feeding:
        assert told.wait(60)
        with pytest.raises(ConfigError, match="is not a folder"):
            feeding.check()


def test_a_program_whose_feed_fails_is_interrupted_as_by_ctrl_c(tmp_path):
    (tmp_path / "file").write_text("")
    program = """
import sys, time
from pathlib import Path
from millstream.demo.ads_input import AdsInput
from millstream.demo.feed import FeedThread
travel = AdsInput("generated", seed=1, rate=1, minutes=1).disorder()
try:
    with FeedThread(Path(sys.argv[1]), travel, 1.0):
        while True:  # as a run of an app waits
            time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file")],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "interrupted\n", done.stderr
