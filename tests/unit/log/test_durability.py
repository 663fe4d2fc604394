from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from after_main_thread import run_after_the_main_thread

from millstream.errors import SyncFailedError
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.group_commit import Durability
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter


def batch(value: bytes):
    return encode_records([SimpleRecord(0, b"k", value)])


class CountedSyncs(DiskFiles):
    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, handle: int) -> None:
        self.syncs += 1
        super().sync(handle)


@pytest.mark.parametrize("durability", ["written", "periodic"])
def test_what_was_only_written_is_seen_after_the_sync_and_not_before(
    tmp_path: Path, durability: Durability
) -> None:
    files = CountedSyncs()
    with LogWriter(tmp_path, files=files, background=False) as writer:
        writer.create_topic("t")
        reader, before = LogReader(tmp_path), files.syncs
        for number in range(5):
            assert writer.append("t", 0, [batch(b"x")], durability=durability) == [number]
        assert (files.syncs, reader.offsets("t")) == (before, [(0, 0)])
        writer.sync()
        assert (files.syncs, reader.offsets("t")) == (before + 1, [(0, 5)])
        writer.append("t", 0, [batch(b"x")], durability=durability)
        assert writer.append("t", 0, [batch(b"y")]) == [6]
        assert reader.offsets("t") == [(0, 7)]


@pytest.mark.parametrize("durability", ["written", "periodic"])
def test_the_background_syncs_it_and_so_does_the_close(
    tmp_path: Path, durability: Durability
) -> None:
    writer = LogWriter(tmp_path)
    writer.create_topic("t")
    writer.append("t", 0, [batch(b"x")], durability=durability)
    reader = LogReader(tmp_path)
    assert reader.wait("t", [0], 30)
    writer.append("t", 0, [batch(b"y")], durability=durability)
    writer.close()
    assert reader.offsets("t") == [(0, 2)]


def test_periodic_syncs_are_few(tmp_path: Path) -> None:
    files = CountedSyncs()
    with LogWriter(tmp_path, files=files) as writer:
        writer.create_topic("t")
        before = files.syncs
        for _ in range(300):
            writer.append("t", 0, [batch(b"x")], durability="periodic")
        assert files.syncs - before < 30


class BrokenSync(DiskFiles):
    broken = False

    def sync(self, handle: int) -> None:
        if self.broken:
            self.broken = False  # as a kernel does: the next one would succeed without the data
            raise OSError(5, "input/output error")
        super().sync(handle)


def test_a_failed_background_sync_refuses_every_later_append(tmp_path: Path) -> None:
    files = BrokenSync()
    control = ControlDb.open(tmp_path, write=True)
    writer = LogWriter(tmp_path, files=files, control=control)
    writer.create_topic("t")
    files.broken = True
    writer.append("t", 0, [batch(b"x")], durability="written")
    with pytest.raises(SyncFailedError):
        for _ in range(1000):
            writer.append("t", 0, [batch(b"y")], durability="written")
            time.sleep(0.01)
    with pytest.raises(SyncFailedError):
        writer.append("t", 0, [batch(b"z")])
    assert LogReader(tmp_path, control=control).offsets("t") == [(0, 0)]
    assert (tmp_path / "NEEDS_VERIFY").exists()
    writer.close()
    control.close()


PROGRAM = """
import sys
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.writer import LogWriter
writer = LogWriter(sys.argv[1])
writer.create_topic("t")
for number in range(1_000_000):
    (offset,) = writer.append("t", 0, [encode_records([SimpleRecord(0, b"k", b"%d" % number)])],
                              durability=sys.argv[2])
    assert offset == number
    print(number, flush=True)
"""


@pytest.mark.parametrize("durability", ["synced", "written", "periodic"])
def test_what_was_acknowledged_survives_the_death_of_the_process(
    tmp_path: Path, durability: str
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), durability],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert program.stdout is not None
    acknowledged = -1
    for line in program.stdout:
        acknowledged = int(line)
        if acknowledged == 200:
            program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    with LogWriter(tmp_path):
        reader = LogReader(tmp_path)
        (start, end) = reader.offsets("t")[0]
        assert end > acknowledged >= 200
        found = [v for part in reader.read("t", 0, start, end) for v in part["value"].to_pylist()]
        assert found == [b"%d" % number for number in range(end)]


def test_a_close_that_cannot_sync_what_was_acknowledged_says_so(tmp_path: Path) -> None:
    files = BrokenSync()
    writer = LogWriter(tmp_path, files=files, background=False)
    writer.create_topic("t")
    writer.append("t", 0, [batch(b"x")], durability="written")
    files.broken = True
    with pytest.raises(SyncFailedError, match="failed to keep what was written"):
        writer.close()
    writer.close()
    with LogWriter(tmp_path) as writer:
        assert writer.append("t", 0, [batch(b"y")])


def test_records_of_several_partitions_are_kept_when_the_main_thread_has_ended(
    tmp_path: Path,
) -> None:
    run_after_the_main_thread(
        """
        import millstream as ms
        with ms.connect(sys.argv[1]) as log, log.producer() as producer:
            log.create_topic("t", partitions=4)
            sent = [producer.send("t", b"v", partition=n % 4) for n in range(40)]
            producer.flush()
            assert sorted({one.result().offset for one in sent}) == list(range(10))
        """,
        tmp_path,
    )
    assert not (tmp_path / "NEEDS_VERIFY").exists()
    with LogWriter(tmp_path, background=False):
        assert LogReader(tmp_path).offsets("t") == [(0, 10)] * 4
