"""Seeded histories of a log on a disk that crashes, loses power, tears writes, fills up and fails.

One history is a few lives of one log: each opens the folder, works for a while with plain,
idempotent and transactional producers, groups, retention, compaction, and dies at some operation or
closes. After each life the folder is opened again and everything is checked:

NoLostAck               an acknowledged record is at its offset, unless retention took it
OffsetsImmutable        an offset that was seen with one record is never seen with another
HighWatermarkMonotonic  what could be read once can be read for ever; the log start never falls
NoPhantomRecord         every record was sent, and none is there twice
ExactlyOnce             a batch of an idempotent producer that is sent until it is acknowledged is there
                        once, in the order of its sequence
AbortedInvisible        nothing of a transaction that was aborted, or that died, is ever seen
AllOrNothing            of a transaction everything is seen or nothing, with its offsets and its fence
CommittedIsDurable      a transaction, an offset or a fence that was acknowledged is still there
LatestKept              compaction keeps of every key the last record, or one that came after it

    python tests/simulation/histories.py SEED [SEED ...]     runs one history again, telling its story
    python tests/simulation/histories.py --first 0 --count 10000
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    CorruptionError,
    DiskFullError,
    FencePassedError,
    MillstreamError,
    SyncFailedError,
)
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp
from millstream.log.compression import COMPRESSIONS, compress
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.groups import committed_offsets, fence_of
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

FOLDER = Path("/log")
PLAIN, KEYED = "t", "c"
PARTITIONS = 2
LIVES = (1, 2, 3)  # how often the log is opened, worked on and left; histories take turns
STEPS = 12  # at most, in one life
IDEMPOTENT = 2
PLACE = TopicPartition(PLAIN, 0)


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its name."""


def must(holds: object, invariant: str) -> None:
    if not holds:
        raise Broken(invariant)


@dataclass
class Transaction:
    """What one transaction sent where, and how it ended; None: not known yet."""

    number: int
    values: dict[bytes, tuple[TopicPartition, int]] = field(default_factory=dict)
    outcome: bool | None = None


@dataclass
class Sender:
    """An idempotent producer that sends a batch again until it is acknowledged."""

    producer_id: int
    sequence: int = 0
    waiting: tuple[TopicPartition, int, tuple[bytes, ...]] | None = None
    acknowledged: list[bytes] = field(default_factory=list)


class History:
    """One log and all that was ever done to it."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        self.rng = random.Random(seed)
        self.lives = LIVES[seed % len(LIVES)]
        self.disk = SimulatedDisk(seed)
        # SQLite has its own crash tests; here its commits are simply atomic and durable.
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.control = ControlDb(connection, write=True, before_commit=self._before_commit)
        self._tell = tell
        self.now_ms = 1_000_000
        self.counter = 0
        self.sent: set[bytes] = set()
        self.acknowledged: dict[TopicPartition, dict[int, bytes]] = {}
        self.only_written: dict[TopicPartition, dict[int, bytes]] = {}
        self.seen: dict[TopicPartition, dict[int, bytes | None]] = {}
        self.bounds: dict[TopicPartition, tuple[int, int]] = {}
        self.stable: dict[TopicPartition, int] = {}
        self.latest: dict[TopicPartition, dict[bytes, int]] = {}
        self.key_of: dict[bytes, bytes] = {}
        self.senders = [Sender(1000 + n) for n in range(IDEMPOTENT)]
        self.transactions: list[Transaction] = []
        self.offset_by_transaction = False
        self.offset = 0
        self.offset_maybe: set[int] = set()
        self.fence = 0
        self.acknowledgements = 0
        self.damaged = 0

    def say(self, text: str) -> None:
        if self._tell:
            print(f"  step {self.disk.steps}: {text}", file=sys.stderr)

    def _before_commit(self) -> None:
        self.disk.step()

    # -- lives --------------------------------------------------------------------------------

    def run(self) -> History:
        for life in range(self.lives):
            self.live_once()
            power_lost = self.rng.random() < 0.5
            self.say(f"end of life {life}, power {'lost' if power_lost else 'kept'}")
            self.reopen(power_lost=power_lost)
        return self

    def open(self) -> LogWriter:
        return LogWriter(
            FOLDER,
            files=self.disk,
            control=self.control,
            segment_bytes=self.rng.choice([400, 3000, 30_000]),
            clock_ms=lambda: self.now_ms,
            sync_threads=1,
            background=False,
        )

    def live_once(self) -> None:
        rng, disk = self.rng, self.disk
        disk.crash_at = rng.choice([None, rng.randint(1, 12), rng.randint(1, 260)])
        disk.fail_sync_at = rng.choice([None, None, None, rng.randint(20, 200)])
        armed = disk.fail_sync_at is not None
        disk.fail_write_at = rng.choice([None, None, None, rng.randint(1, 200)])
        disk.fail_read_at = rng.choice([None, None, None, rng.randint(1, 200)])
        disk.short_writes = rng.choice([0.0, 0.5])
        if rng.random() < 0.2:
            disk.capacity_bytes = rng.randint(200, 40_000)
        try:
            with told_of_disk(disk):
                writer = self.open()
                self.make_topics(writer)
                for _ in range(rng.randint(1, STEPS)):
                    rng.choice(self.WORK)(self, writer)
                if rng.random() < 0.4:
                    writer.close()
                    self.synced()
        except SimulatedCrash:
            self.say("crash")
        except (DiskFullError, SyncFailedError, ConfigError, CorruptionError) as error:
            self.say(f"stopped: {error}")
        if armed and disk.fail_sync_at is None:
            self.only_written.clear()  # the kernel may have dropped it, as the disk failed

    def reopen(self, *, power_lost: bool) -> None:
        self.disk.restart(power_lost=power_lost)
        if power_lost:
            self.only_written.clear()
        writer = self.open()
        self.synced()
        self.make_topics(writer)
        for sender in self.senders:
            self.send_waiting(writer, sender)
        self.check(after_restart=True)
        writer.close()
        self.disk.restart(power_lost=False)

    def make_topics(self, writer: LogWriter) -> None:
        if PLAIN not in writer.topics():
            writer.create_topic(PLAIN, partitions=PARTITIONS)
        if KEYED not in writer.topics():
            settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
            settings["delete.retention.ms"] = "2000"
            writer.create_topic(KEYED, settings=settings)

    # -- work ---------------------------------------------------------------------------------

    def values(self) -> tuple[bytes, ...]:
        group = []
        for _ in range(self.rng.randint(1, 3)):
            self.counter += 1
            padding = bytes([65 + self.counter % 26]) * self.rng.choice([0, 20, 300, 5000])
            group.append(b"%d:" % self.counter + padding)
        self.sent |= set(group)
        return tuple(group)

    def batch(self, values: tuple[bytes, ...]) -> EncodedBatch:
        rows = [SimpleRecord(self.now_ms, b"k", value) for value in values]
        return compress(encode_records(rows), self.rng.choice(["none", "none", *COMPRESSIONS]))

    def send_plain(self, writer: LogWriter) -> None:
        place = TopicPartition(PLAIN, self.rng.randrange(PARTITIONS))
        groups = [self.values() for _ in range(self.rng.randint(1, 3))]
        durability = self.rng.choice(["synced", "synced", "written", "periodic"])
        batches = [self.batch(group) for group in groups]
        offsets = writer.append(*place, batches, durability=durability)
        self.say(f"{durability} to {place}: {offsets}")
        if durability == "synced":
            self.synced()
        for first, group in zip(offsets, groups, strict=True):
            self.note(place, first, group, synced=durability == "synced")

    def send_waiting(self, writer: LogWriter, sender: Sender) -> None:
        if sender.waiting is None:
            return
        place, sequence, group = sender.waiting
        made = stamp(
            self.batch(group),
            ProducerStamp(sender.producer_id, 0, sequence),
            transactional=False,
        )
        (first,) = writer.append(*place, [made])
        self.synced()
        self.note(place, first, group, synced=True)
        sender.acknowledged += group
        sender.waiting = None
        self.say(f"producer {sender.producer_id} sequence {sequence} at {first}")

    def send_idempotent(self, writer: LogWriter) -> None:
        sender = self.rng.choice(self.senders)
        place = TopicPartition(PLAIN, self.senders.index(sender) % PARTITIONS)
        self.send_waiting(writer, sender)
        group = self.values()
        sender.waiting = place, sender.sequence, group
        sender.sequence += len(group)
        self.send_waiting(writer, sender)
        if self.rng.random() < 0.2:  # once more, as after a lost response
            sender.waiting = place, sender.sequence - len(group), group
            before = len(sender.acknowledged)
            self.send_waiting(writer, sender)
            del sender.acknowledged[before:]

    def send_keyed(self, writer: LogWriter) -> None:
        place = TopicPartition(KEYED, 0)
        for _ in range(self.rng.randint(1, 6)):
            key = b"k%d" % self.rng.randrange(4)
            (value,) = self.values()[:1]
            rows = [SimpleRecord(self.now_ms, key, value)]
            self.key_of[value] = key
            (offset,) = writer.append(*place, [encode_records(rows)])
            self.synced()
            self.note(place, offset, (value,), synced=True)
            self.latest.setdefault(place, {})[key] = offset

    def transact(self, writer: LogWriter) -> None:
        transaction = Transaction(len(self.transactions))
        self.transactions.append(transaction)
        identity = writer.transactions.register("x")
        writer.transactions.begin(identity)
        sequences = [0] * PARTITIONS
        for _ in range(self.rng.randint(0, 4)):
            partition = self.rng.randrange(PARTITIONS)
            group = self.values()
            transaction.values |= dict.fromkeys(group, (TopicPartition(PLAIN, partition), -1))
            made = stamp(
                self.batch(group),
                ProducerStamp(*identity, sequences[partition]),
                transactional=True,
            )
            durability = self.rng.choice(["synced", "written"])
            (first,) = writer.append(PLAIN, partition, [made], durability=durability)
            for offset, value in enumerate(group, start=first):
                transaction.values[value] = TopicPartition(PLAIN, partition), offset
            if durability == "synced":
                self.synced()
            sequences[partition] += len(group)
            if self.rng.random() < 0.2:
                self.send_plain(writer)
        if self.rng.random() < 0.1:
            return  # left open: the next producer of this name takes it back
        self.end(writer, transaction, identity)

    def end(self, writer: LogWriter, transaction: Transaction, identity: ProducerIdentity) -> None:
        commit = self.rng.random() < 0.6
        fence = transaction.number + 1
        if not commit:
            transaction.outcome = False
        self.offset_maybe.add(fence)
        writer.transactions.end(
            identity, commit=commit, offsets={"g": {PLACE: fence}}, fence=("w", fence)
        )
        self.synced()
        self.say(f"transaction {transaction.number} {'committed' if commit else 'aborted'}")
        transaction.outcome = commit
        if commit:
            self.offset = self.fence = fence
            self.offset_maybe = {fence}
            self.acknowledgements += 1
        else:
            self.offset_maybe.discard(fence)
        if commit and self.rng.random() < 0.3:
            self.repeat_fence(writer, fence)

    def repeat_fence(self, writer: LogWriter, fence: int) -> None:
        again = Transaction(len(self.transactions), outcome=False)
        self.transactions.append(again)
        identity = writer.transactions.register("x")
        writer.transactions.begin(identity)
        group = self.values()
        again.values |= dict.fromkeys(group, (PLACE, -1))
        made = stamp(self.batch(group), ProducerStamp(*identity, 0), transactional=True)
        writer.append(PLAIN, 0, [made])
        self.synced()
        try:
            writer.transactions.end(identity, commit=True, fence=("w", fence))
        except FencePassedError:
            return
        raise Broken("AllOrNothing: a fence that was passed let a batch through again")

    def run_maintenance(self, writer: LogWriter) -> None:
        self.now_ms += self.rng.choice([10, 1000, 90_000])
        report = writer.run_maintenance(self.now_ms)
        self.say(f"kept house: {report}")

    def delete(self, writer: LogWriter) -> None:
        place = TopicPartition(PLAIN, self.rng.randrange(PARTITIONS))
        start, end = self.bounds.get(place, (0, 0))
        before = self.rng.randint(start, end)
        if writer.delete_records(place, before) > start:
            self.say(f"deleted {place} below {before}")
        self.bounds[place] = max(start, before), end

    def change_settings(self, writer: LogWriter) -> None:
        kept = self.rng.choice(["-1", "8000", "30000"])
        writer.alter_topic(PLAIN, settings={"retention.bytes": kept})

    def sync(self, writer: LogWriter) -> None:
        writer.sync()
        self.synced()

    def look(self, _writer: LogWriter) -> None:
        self.check(after_restart=False)

    WORK = (
        *[send_plain] * 5,
        *[send_idempotent] * 4,
        *[send_keyed] * 2,
        *[transact] * 4,
        *[run_maintenance] * 2,
        delete,
        change_settings,
        sync,
        *[look] * 2,
    )

    # -- what is known ------------------------------------------------------------------------

    def note(
        self, place: TopicPartition, first: int, group: tuple[bytes, ...], *, synced: bool
    ) -> None:
        target = self.acknowledged if synced else self.only_written
        for offset, value in enumerate(group, start=first):
            target.setdefault(place, {})[offset] = value
            self.acknowledgements += 1
            if synced:
                self.see(place, offset, value)

    def synced(self) -> None:
        """Everything that was acknowledged when it was only written has been synced since."""
        for place, values in self.only_written.items():
            for offset, value in values.items():
                self.see(place, offset, value)
            self.acknowledged.setdefault(place, {}).update(values)
        self.only_written.clear()

    def see(self, place: TopicPartition, offset: int, value: bytes) -> None:
        known = self.seen.setdefault(place, {}).setdefault(offset, value)
        must(
            known == value,
            f"OffsetsImmutable: {place} {offset} was {known!r:.40}, is {value!r:.40}",
        )

    # -- checking -----------------------------------------------------------------------------

    def check(self, *, after_restart: bool) -> None:
        reader = LogReader(FOLDER, files=self.disk, control=self.control)
        everything = LogReader(
            FOLDER, files=self.disk, control=self.control, isolation="read_uncommitted"
        )
        found: list[bytes] = []
        for name, count in ((PLAIN, PARTITIONS), (KEYED, 1)):
            for number in range(count):
                place = TopicPartition(name, number)
                self.check_bounds(place, everything.offsets(name)[number])
                found += self.check_records(place, reader, everything)
        must(set(found) <= self.sent, "NoPhantomRecord: never sent")
        must(len(set(found)) == len(found), "NoPhantomRecord: there twice")
        self.check_order(found)
        self.check_transactions(set(found), after_restart=after_restart)

    def check_bounds(self, place: TopicPartition, now: tuple[int, int]) -> None:
        start, end = self.bounds.get(place, (0, 0))
        must(now[0] >= start, f"HighWatermarkMonotonic: start of {place} fell to {now[0]}")
        must(now[1] >= end, f"HighWatermarkMonotonic: {place} fell from {end} to {now[1]}")
        self.bounds[place] = now

    def check_records(
        self, place: TopicPartition, reader: LogReader, everything: LogReader
    ) -> list[bytes]:
        records = self.read(everything, place)
        committed = self.read(reader, place)
        self.stable[place] = reader.end_offset(*place)
        for offset, value in records.items():
            self.see(place, offset, value)
        for offset, value in committed.items():
            must(records.get(offset) == value, f"OffsetsImmutable: {place} {offset} in two ways")
        start = self.bounds[place][0]
        if place.topic == KEYED:
            # A record that was written and never acknowledged may have taken a later one's place.
            last = {self.key_of[value]: offset for offset, value in sorted(committed.items())}
            for key, offset in self.latest.get(place, {}).items():
                kept = last.get(key, -1) >= offset
                must(kept, f"LatestKept: {key!r} of {place} at {offset}")
        else:
            lost = [
                offset
                for offset in self.acknowledged.get(place, {})
                if offset >= start and offset not in records
            ]
            must(not lost, f"NoLostAck: {place} lost {sorted(lost)}")
        return list(committed.values())

    def read(self, reader: LogReader, place: TopicPartition) -> dict[int, bytes]:
        start, end = reader.offsets(place.topic)[place.partition]
        out: dict[int, bytes] = {}
        while start < end:
            try:
                for batch in reader.read(*place, start, end, columns=("offset", "value")):
                    pairs = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                    for offset, value in pairs:
                        must(offset not in out, f"NoPhantomRecord: {place} {offset} read twice")
                        out[offset] = value
                return out
            except CorruptBatchError as error:
                # After a power cut: bytes that may or may not have been acknowledged are kept, reported
                # of, and read around. What was acknowledged is never among them.
                must(error.start >= start and error.end > error.start, f"no way on: {error}")
                gone = [
                    offset
                    for offset in self.acknowledged.get(place, {})
                    if error.start <= offset < error.end
                ]
                must(not gone, f"NoLostAck: {place} {gone} is damaged")
                self.damaged += 1
                start = error.end
        return out

    def check_order(self, found: list[bytes]) -> None:
        place = {value: n for n, value in enumerate(found)}
        for sender in self.senders:
            there = [place[value] for value in sender.acknowledged if value in place]
            must(there == sorted(there), f"ExactlyOnce: producer {sender.producer_id} out of order")

    def check_transactions(self, found: set[bytes], *, after_restart: bool) -> None:
        offset = committed_offsets(self.control, "g").get(PLACE)
        fence = fence_of(self.control, "w") or 0
        must((offset.offset if offset else 0) == fence, "AllOrNothing: offset without its fence")
        must(fence >= self.fence, f"CommittedIsDurable: fence {fence} below {self.fence}")
        for transaction in self.transactions:
            there = transaction.values.keys() & found
            if transaction.outcome is None and after_restart:
                transaction.outcome = fence == transaction.number + 1
                self.fence = self.offset = fence
            if transaction.outcome is False or transaction.outcome is None:
                must(not there, f"AbortedInvisible: of transaction {transaction.number}")
            else:
                missing = {
                    value
                    for value, (place, offset) in transaction.values.items()
                    if value not in there
                    and self.bounds[place][0] <= offset
                    # Without room for its marker it is committed and not yet to be seen.
                    and (after_restart or offset < self.stable[place])
                }
                must(not missing, f"AllOrNothing: transaction {transaction.number} in part")


@contextmanager
def told_of_disk(disk: SimulatedDisk) -> Iterator[None]:
    """Pass on only errors that a full or broken disk may raise."""
    reads_failed = disk.reads_failed
    try:
        yield
    except MillstreamError as error:
        opening = isinstance(error, ConfigError) and "cannot be opened for writing" in str(error)
        unread = disk.reads_failed > reads_failed and (
            isinstance(error, CorruptionError) or "cannot be read" in str(error)
        )
        if not (opening or unread or isinstance(error, DiskFullError | SyncFailedError)):
            raise Broken(f"an error that the disk does not explain: {error!r}") from error
        raise


def run_history(seed: int, *, tell: bool = False) -> History:
    """Run one history; the error names the seed and how to run it again."""
    try:
        return History(seed, tell=tell).run()
    except Exception as error:
        raise Broken(f"{error} (again: python {sys.argv[0]} {seed})") from error


def run_many(first: int, count: int) -> tuple[int, int]:
    """Run histories; return how many acknowledgements they checked, and damaged ranges they met."""
    logging.disable(logging.ERROR)  # the log reports all that it repairs, which is a lot here
    acknowledged = damaged = 0
    for seed in range(first, first + count):
        history = run_history(seed)
        acknowledged += history.acknowledgements
        damaged += history.damaged
    return acknowledged, damaged


def run_parallel(first: int, count: int, *, processes: int = 2) -> tuple[int, int]:
    """The same, on several processors."""
    step = 50
    starts = range(first, first + count, step)
    sizes = [min(step, first + count - start) for start in starts]
    # A child must not collect the garbage of a parent that has had threads: a client's destructor waits
    # for threads that the child does not have, or crashes.
    gc.collect()
    gc.freeze()
    try:
        with ProcessPoolExecutor(processes, get_context("fork")) as pool:
            found = list(pool.map(run_many, starts, sizes))
    finally:
        gc.unfreeze()
    return sum(one for one, _ in found), sum(two for _, two in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    started = time.monotonic()
    if options.seeds:
        for seed in options.seeds:
            print(f"seed {seed}", file=sys.stderr)
            run_history(seed, tell=True)
        return
    acknowledged, damaged = run_parallel(options.first, options.count)
    print(
        f"{options.count} histories, {acknowledged} acknowledgements checked, {damaged} damaged "
        f"ranges read around, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
