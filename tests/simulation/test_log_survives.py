"""Seeded histories of a log on a disk that crashes, loses power, fills up and fails.

Every history prints its seed when an invariant breaks; ``run_history(seed)`` repeats it exactly.

NoLostAck               an acknowledged record is at its offset, whatever happened since
OffsetsImmutable        an offset that was seen with one record is never seen with another
HighWatermarkMonotonic  what could be read once can be read for ever
NoPhantomRecord         every record was sent, and none is there twice
"""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from millstream.errors import ConfigError, CorruptionError, DiskFullError, SyncFailedError
from millstream.log.encoding import Row, encode_rows
from millstream.log.reader import LogReader
from millstream.log.topics import Catalog
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
PARTITIONS = 2
LIVES = 6


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(seed)
        # SQLite has its own crash tests; here its commits are simply atomic and durable.
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.catalog = Catalog(connection, write=True)
        self.sent: set[bytes] = set()
        self.seen: dict[TopicPartition, dict[int, bytes]] = {}
        self.high: dict[TopicPartition, int] = {}
        self.acknowledged = 0
        self.refused = False
        self.counter = 0

    def open(self) -> LogWriter:
        return LogWriter(
            FOLDER,
            files=self.disk,
            catalog=self.catalog,
            segment_bytes_max=self.rng.choice([400, 3000, 30_000]),
            sync_threads=1,
        )

    def live_once(self) -> None:
        rng, disk = self.rng, self.disk
        disk.crash_at = rng.choice([None, rng.randint(1, 12), rng.randint(1, 160)])
        disk.fail_sync_at = rng.choice([None, None, None, rng.randint(20, 150)])
        disk.short_writes = rng.choice([0.0, 0.5])
        if rng.random() < 0.2:
            disk.capacity_bytes = rng.randint(200, 20_000)
        try:
            writer = self.open()
            self.work(writer)
            if rng.random() < 0.4:
                writer.close()
        except SimulatedCrash:
            pass
        except (ConfigError, DiskFullError, SyncFailedError):
            pass  # a full or broken disk, told as it should be

    def work(self, writer: LogWriter) -> None:
        if "t" not in writer.topics():
            writer.create_topic("t", partitions=PARTITIONS)
        for _ in range(self.rng.randint(1, 25)):
            name = TopicPartition("t", self.rng.randrange(PARTITIONS))
            groups = [self.values() for _ in range(self.rng.randint(1, 3))]
            batches = [encode_rows([Row(0, None, value) for value in group]) for group in groups]
            offsets = writer.append(*name, batches)
            for first, group in zip(offsets, groups, strict=True):
                for offset, value in enumerate(group, start=first):
                    self.note(name, offset, value)
                    self.acknowledged += 1
            if self.rng.random() < 0.1:
                self.check()

    def values(self) -> list[bytes]:
        group = []
        for _ in range(self.rng.randint(1, 3)):
            self.counter += 1
            padding = bytes([65 + self.counter % 26]) * self.rng.choice([0, 20, 300, 5000])
            group.append(b"%d:" % self.counter + padding)
        self.sent |= set(group)
        return group

    def note(self, name: TopicPartition, offset: int, value: bytes) -> None:
        known = self.seen.setdefault(name, {}).setdefault(offset, value)
        assert known == value, (
            f"OffsetsImmutable: {name} {offset} was {known!r:.40}, is {value!r:.40}"
        )

    def check(self) -> None:
        reader = LogReader(FOLDER, files=self.disk, catalog=self.catalog)
        if "t" not in reader.topics():
            assert not self.acknowledged, "NoLostAck: the topic is gone"
            return
        everything: list[bytes] = []
        for number, (start, end) in enumerate(reader.offsets("t")):
            name = TopicPartition("t", number)
            assert end >= self.high.get(name, 0), f"HighWatermarkMonotonic: {name} fell to {end}"
            self.high[name] = end
            found: dict[int, bytes] = {}
            for batch in reader.read("t", number, start, end, columns=("offset", "value")):
                found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
            assert sorted(found) == list(range(end)), f"a gap in {name}"
            for offset, value in found.items():
                self.note(name, offset, value)
            missing = self.seen.get(name, {}).keys() - found.keys()
            assert not missing, f"NoLostAck: {name} lost {sorted(missing)}"
            everything += found.values()
        assert set(everything) <= self.sent, "NoPhantomRecord: never sent"
        assert len(set(everything)) == len(everything), "NoPhantomRecord: there twice"

    def reopen(self, *, power_lost: bool) -> None:
        self.disk.restart(power_lost=power_lost)
        try:
            writer = self.open()
        except CorruptionError:
            # After a power cut, bytes that may or may not have been acknowledged: it must not guess.
            assert power_lost, "refused though the machine never stopped"
            self.refused = True
            return
        self.check()
        writer.close()
        self.disk.restart(power_lost=False)


def run_history(seed: int) -> History:
    history = History(seed)
    for _ in range(LIVES):
        history.live_once()
        history.reopen(power_lost=history.rng.random() < 0.5)
        if history.refused:
            break
    return history


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_promise_holds_through_crashes_and_power_cuts(first: int) -> None:
    acknowledged, refused = 0, 0
    for seed in range(first, first + 50):
        try:
            history = run_history(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        acknowledged += history.acknowledged
        refused += history.refused
    assert acknowledged > 1000, "the histories did too little to mean anything"
    assert refused <= 5, f"{refused} of 50 histories ended in a refusal"
