from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millstream.client import connect
from millstream.errors import ConfigError, DiskFullError, OffsetOutOfRangeError
from millstream.log import aborted
from millstream.log import maintenance as maintenance_module
from millstream.log import writer as writer_module
from millstream.log.clocks import wall_clock_ms
from millstream.log.config import TopicConfig
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.reader import LogReader
from millstream.log.retention import BoundedClock, PartitionContents, start_after_pass
from millstream.log.seal import Seal
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

DAY_MS = 86_400_000
NAME = TopicPartition("t", 0)


def fill(writer: LogWriter, count: int, *, first_ms: int = 0, step_ms: int = 1000) -> None:
    for number in range(count):
        row = SimpleRecord(first_ms + number * step_ms, b"k", b"v" * 100)
        writer.append("t", 0, [encode_records([row])])


def opened(
    folder: Path, *, clock_ms: Callable[[], int] = wall_clock_ms, **settings: str
) -> LogWriter:
    writer = LogWriter(folder, background=False, clock_ms=clock_ms)
    given = {name.replace("_", "."): value for name, value in settings.items()}
    writer.create_topic("t", settings={"segment.bytes": "600", **given})
    return writer


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("t/*/0/*.log"))


def test_without_a_limit_nothing_is_ever_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        fill(writer, 50)
        for day in range(40):
            assert writer.run_maintenance(day * DAY_MS).segments_removed == 0
        assert LogReader(tmp_path).offsets("t") == [(0, 50)]


def test_by_size_the_oldest_segments_go_until_the_rest_is_just_enough(tmp_path: Path) -> None:
    with opened(tmp_path, retention_bytes="2000") as writer:
        fill(writer, 50)
        before = sum(path.stat().st_size for path in segments(tmp_path))
        report = writer.run_maintenance(0)
        after = [path.stat().st_size for path in segments(tmp_path)]
        assert report.segments_removed > 5
        assert before > sum(after) >= 2000 > sum(after[1:])
        (start, end) = LogReader(tmp_path).offsets("t")[0]
        assert (start, end) == (int(segments(tmp_path)[0].stem), 50)


def test_by_age_only_segments_whose_last_record_is_too_old_go_and_few_at_a_time(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, retention_ms="20000") as writer:
        fill(writer, 50)
        reader = LogReader(tmp_path)
        assert writer.maintenance.run_pass(20_000, running_ms=0).segments_removed == 0
        starts = []
        for minute in range(1, 40):
            now_ms = 20_000 + minute * 60_000
            writer.maintenance.run_pass(now_ms, running_ms=minute * 60_000)
            starts.append(reader.offsets("t")[0][0])
        assert starts == sorted(starts)
        assert len(set(starts)) >= 5, "a pass takes only a tenth"
        last_base = int(segments(tmp_path)[-1].stem)
        assert starts[-1] == last_base, "the growing segment stays"


def test_a_clock_that_jumps_ahead_empties_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, retention_ms=str(DAY_MS)) as writer:
        fill(writer, 50)
        for minute in range(20):
            jumped = 10 * DAY_MS if minute else 0
            writer.maintenance.run_pass(
                50_000 + minute * 60_000 + jumped, running_ms=minute * 60_000
            )
        assert LogReader(tmp_path).offsets("t") == [(0, 50)]


def test_a_running_clock_follows_a_jump_back_and_not_one_ahead() -> None:
    clock = BoundedClock(1_000_000, 0)
    assert clock.read(1_005_000, 5_000) == 1_005_000
    assert clock.read(9_000_000, 10_000) == 1_070_000
    assert clock.read(500_000, 20_000) == 500_000


def test_a_reader_below_the_start_is_told_what_it_missed_and_how_many(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        fill(writer, 50)
        reader = LogReader(tmp_path)
        stream = reader.read("t", 0, 0, 50, bytes_max=200)
        first = next(stream)
        assert writer.delete_records(NAME, 30) == 30
        assert reader.offsets("t") == [(30, 50)]
        with pytest.raises(OffsetOutOfRangeError, match=r"offsets \[3, 30\) of t/0 are gone, 27"):
            list(reader.read("t", 0, 3, 50))
        with pytest.raises(OffsetOutOfRangeError, match="are gone") as caught:
            while True:
                first = next(stream)
        assert caught.value.start == 30
        assert first.num_rows
        with pytest.raises(OffsetOutOfRangeError, match="ends at 50"):
            writer.delete_records(NAME, 51)
        assert writer.delete_records(NAME, 3) == 30
    with LogWriter(tmp_path):
        assert LogReader(tmp_path).offsets("t") == [(30, 50)]
        assert LogReader(tmp_path).read("t", 0, 30, 31)


def test_records_below_the_start_stay_gone_after_a_power_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        fill(writer, 50)
        writer.delete_records(NAME, 7)
    for path in tmp_path.glob("t/*/0/*.seal"):
        path.unlink()
    with LogWriter(tmp_path):
        assert LogReader(tmp_path).offsets("t") == [(7, 50)]


def test_segments_that_get_old_are_closed_so_that_retention_can_take_them(tmp_path: Path) -> None:
    now_ms = [0]
    settings = {"segment_ms": "60000", "retention_ms": "100000"}
    with opened(tmp_path, clock_ms=lambda: now_ms[0], **settings) as writer:
        fill(writer, 2)
        now_ms[0] = 59_000
        assert writer.run_maintenance().rolled == 0
        now_ms[0] = 61_000
        assert writer.run_maintenance().rolled == 1
        now_ms[0] = 300_000
        fill(writer, 1, first_ms=300_000)
        writer.run_maintenance()
        assert LogReader(tmp_path).offsets("t") == [(2, 3)]
        fill(writer, 1, first_ms=361_000)
        assert len(segments(tmp_path)) == 2, "a record far younger than the first begins another"


def test_a_group_is_told_before_it_loses_records_and_when_it_has(tmp_path: Path) -> None:
    with opened(tmp_path, retention_bytes="4000") as writer:
        reported: list[str] = []
        writer.maintenance.on_risk(lambda risk: reported.append(str(risk)))
        fill(writer, 5)
        writer.commit_offsets("g", {NAME: 5})
        writer.commit_offsets("quick", {NAME: 5})
        assert writer.run_maintenance(0).risks == []
        while not reported:
            fill(writer, 1)
            writer.commit_offsets("quick", {NAME: LogReader(tmp_path).end_offset("t", 0)})
            writer.run_maintenance(0)
        assert LogReader(tmp_path).offsets("t")[0][0] <= 5, "before the loss"
        assert "group 'g' in t/0 is about to lose" in reported[0]
        writer.run_maintenance(0)
        assert len(reported) == 1, "once"
        fill(writer, 40)
        writer.run_maintenance(0)
        assert "has lost" in reported[-1]
        lost = {risk.group: risk.records_lost for risk in writer.run_maintenance(0).risks}
        assert lost["g"] == LogReader(tmp_path).offsets("t")[0][0] - 5


def test_one_pass_takes_what_is_too_much_and_a_tenth_of_what_is_too_old() -> None:
    sealed = [Seal((n + 1) * 10, 100, n, n, 0) for n in range(40)]
    config = TopicConfig.parse({"retention.ms": "1"})
    holding = PartitionContents(NAME, config, 0, 400, sealed, 0)
    assert start_after_pass(holding, DAY_MS) == 40
    bound = PartitionContents(NAME, config, 0, 25, sealed, 0)
    assert start_after_pass(bound, DAY_MS) == 20, "never past an open transaction"
    by_size = TopicConfig.parse({"retention.bytes": "950"})
    assert start_after_pass(PartitionContents(NAME, by_size, 0, 400, sealed, 0), DAY_MS) == 300


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("retention.ms", "x", "whole number from -1"),
        ("segment.bytes", "0", "from 1"),
        ("cleanup.policy", "shred", 'Choose "delete" or "compact"'),
        ("min.cleanable.dirty.ratio", "2", "from 0 to 1"),
        ("nope", "1", 'Choose "cleanup.policy"'),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    tmp_path: Path, name: str, value: str, reported: str
) -> None:
    with LogWriter(tmp_path) as writer:
        with pytest.raises(ConfigError, match=reported):
            writer.create_topic("t", settings={name: value})
        writer.create_topic("t")
        with pytest.raises(ConfigError, match=reported):
            writer.alter_topic("t", settings={name: value})


def test_settings_are_changed_and_taken_back_and_partitions_added(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t", settings={"retention.ms": "5"})
        reader = LogReader(tmp_path)
        assert (
            writer.alter_topic("t", settings={"segment.bytes": "1"}, partitions=3).partitions == 3
        )
        assert reader.offsets("t") == [(0, 0)] * 3
        writer.append("t", 2, [encode_records([SimpleRecord(0, None, b"x")])])
        assert reader.settings("t")["segment.bytes"] == "1"
        writer.alter_topic("t", settings={"retention.ms": None})
        assert writer.settings("t")["retention.ms"] == "-1"
        with pytest.raises(ConfigError, match="has 3 partitions and cannot have 2"):
            writer.alter_topic("t", partitions=2)
    with LogWriter(tmp_path) as writer:
        assert writer.settings("t")["segment.bytes"] == "1"
        assert writer.partition_count("t") == 3


def test_old_records_that_come_today_close_a_segment_no_sooner_than_new_ones(
    tmp_path: Path,
) -> None:
    now_ms = [2_000_000_000_000]
    hour_ms = 3_600_000

    def pass_time(writer: LogWriter, hours: int, first_ms: int | None) -> int:
        rolled = 0
        for _ in range(hours):
            now_ms[0] += hour_ms
            if first_ms is not None:
                fill(writer, 1, first_ms=first_ms)
            rolled += writer.run_maintenance().rolled
        return rolled

    def clock_ms() -> int:
        return now_ms[0]

    settings = {"segment_ms": str(10 * hour_ms), "segment_bytes": "1000000"}
    with opened(tmp_path, clock_ms=clock_ms, **settings) as writer:
        assert pass_time(writer, 9, first_ms=1_000) == 0
        assert pass_time(writer, 31, first_ms=1_000) == 3, "by the time that they came"
        assert pass_time(writer, 50, first_ms=None) == 1, "also when no other comes"
        fill(writer, 1, first_ms=1_000)
    # When the records of a segment came is not known to the next owner. It goes by their own time.
    with LogWriter(tmp_path, background=False, clock_ms=clock_ms) as writer:
        assert pass_time(writer, 1, first_ms=None) == 1
        assert pass_time(writer, 9, first_ms=1_000) == 0
        fill(writer, 1, first_ms=now_ms[0])
    with LogWriter(tmp_path, background=False, clock_ms=clock_ms) as writer:
        assert pass_time(writer, 9, first_ms=None) == 0


def test_only_the_groups_that_are_behind_are_looked_up_and_appends_do_not_wait_for_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, retention_bytes="2000") as writer:
        writer.create_topic("kept", partitions=3)
        fill(writer, 50)
        writer.commit_offsets("behind", {NAME: 2, TopicPartition("kept", 1): 0})
        writer.commit_offsets("level", {NAME: 50})
        held = []
        exclusively = writer.exclusively

        def counted(action: Callable[[], None]) -> None:
            exclusively(lambda: (held.append(1), action(), held.pop()))

        rows = writer.control.rows

        def looked_up(query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
            assert not held, "a look into control.db while appends wait"
            return rows(query, values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "exclusively", counted)
            patch.setattr(writer.control, "rows", looked_up)
            found = writer.run_maintenance().risks
        assert [(one.group, one.topic) for one in found] == [("behind", "t")]
        assert found[0].records_lost == writer.partition(NAME).log_start - 2 > 0


class StubbornFiles(DiskFiles):
    """Fails to remove one file, once or for as long as it is set."""

    def __init__(self) -> None:
        self.stuck: str | None = None

    def remove(self, path: Path) -> None:
        if self.stuck is not None and self.stuck in path.name:
            raise OSError(errno.EIO, "input/output error", str(path))
        super().remove(path)


@pytest.mark.parametrize("suffix", [".log", ".idx", ".seal"])
def test_a_file_that_cannot_be_removed_keeps_nothing_else_and_goes_later(
    tmp_path: Path, suffix: str
) -> None:
    files = StubbornFiles()
    with LogWriter(tmp_path, background=False, files=files) as writer:
        settings = {"segment.bytes": "600", "retention.bytes": "1500"}
        writer.create_topic("t", settings=settings)
        writer.create_topic("u", settings=settings)
        files.stuck = f"{0:019d}0{suffix}"  # of both topics; then of none
        for topic in ("t", "u"):
            for number in range(40):
                writer.append(topic, 0, [encode_records([SimpleRecord(number, b"k", b"v" * 100)])])
        before = len(list(tmp_path.glob("t/*/0/*.log")))
        report = writer.run_maintenance()
        assert len(report.deferred) == 2
        start = writer.partition(NAME).log_start
        assert start > 0
        assert LogReader(tmp_path).offsets("t") == [(start, 40)]
        assert writer.delete_records(NAME, start + 1) == start + 1
        files.stuck = None
        report = writer.run_maintenance()
        assert report.deferred == []
        assert len(list(tmp_path.glob("t/*/0/*.log"))) < before
        assert not list(tmp_path.glob(f"t/*/0/{0:020d}.*"))


def test_a_pass_that_fails_is_counted_and_the_next_one_is_done(tmp_path: Path) -> None:
    requested = threading.Semaphore(0)

    def fail(*_: object) -> None:
        requested.release()
        raise ZeroDivisionError("what nobody expected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "MAINTENANCE_S", 0.001)
        with LogWriter(tmp_path) as writer:
            keeper = writer.maintenance
            patch.setattr(keeper, "run_pass", fail)
            for _ in range(3):
                assert requested.acquire(timeout=30)
            assert keeper.health.passes_failed >= 2
            assert keeper.health.last_failure == ("ZeroDivisionError: what nobody expected",)


def test_a_group_that_has_only_markers_of_transactions_left_is_not_at_risk(tmp_path: Path) -> None:
    with connect(tmp_path) as log:
        log.create_topic("t", retention="1 day", settings={"segment.bytes": "1"})
        with log.producer(transactional_id="x") as producer:
            for _ in range(3):
                with producer.transaction():
                    producer.send("t", b"x", timestamp_ms=0)
        log.commit_offsets("g", {TopicPartition("t", 0): 5})
        assert (log.run_maintenance().risks, log.lag("g")[0].behind) == ([], 0)
        log.commit_offsets("g", {TopicPartition("t", 0): 4})
        assert log.lag("g")[0].behind == 1


class FullFiles(DiskFiles):
    """A disk without room for another file, while it is ``full``."""

    full = False

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if self.full and create and not path.exists():
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        return super().open(path, write=write, create=create)


def test_a_full_disk_is_made_room_on_though_nothing_can_be_noted_or_begun(tmp_path: Path) -> None:
    files, now_ms = FullFiles(), [0]

    def full() -> None:
        raise DiskFullError("no room in control.db")

    with LogWriter(tmp_path, background=False, files=files, clock_ms=lambda: now_ms[0]) as writer:
        settings = {"segment.bytes": "600", "retention.bytes": "2000", "segment.ms": "60000"}
        writer.create_topic("t", settings=settings)
        slow = writer.transactions.register("slow", in_process=False, timeout_ms=1000)
        writer.transactions.begin(slow)
        fill(writer, 50)
        before = len(segments(tmp_path))
        now_ms[0] = 61_000
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "full", True)
            patch.setattr(writer.control, "_before_commit", full)
            report = writer.run_maintenance()
        assert [one.rpartition(": ")[0] for one in report.deferred][0::2] == [
            "transactions",
            "unused producers",
        ]
        assert report.segments_removed > 5
        assert len(segments(tmp_path)) == before - report.segments_removed
        report = writer.run_maintenance()
        assert (report.deferred, report.rolled, report.transactions_aborted) == ([], 1, 1)


def at_risk(writer: LogWriter, *topics: str) -> None:
    """Fill topics so that the group g is behind in each, and about to lose records."""
    for topic in topics:
        writer.create_topic(topic, settings={"segment.bytes": "600", "retention.bytes": "20000"})
        for number in range(120):
            writer.append(topic, 0, [encode_records([SimpleRecord(number, b"k", b"v" * 100)])])
    writer.run_maintenance()
    for topic in topics:
        name = TopicPartition(topic, 0)
        writer.commit_offsets("g", {name: writer.partition(name).log_start})


def test_a_topic_that_goes_while_risks_are_looked_at_keeps_no_other_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogWriter(tmp_path, background=False) as writer:
        at_risk(writer, "gone", "there")
        assert {one.topic for one in writer.run_maintenance().risks} == {"gone", "there"}
        real = maintenance_module.count_unread

        def late(*args: object) -> int:
            if "gone" in writer.topics():
                writer.delete_topic("gone")
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(maintenance_module, "count_unread", late)
        assert {one.topic for one in writer.run_maintenance().risks} == {"there"}


def test_a_group_is_told_of_a_risk_where_what_it_loses_cannot_be_read(tmp_path: Path) -> None:
    with LogWriter(tmp_path, background=False) as writer:
        at_risk(writer, "t", "u")
        first = segments(tmp_path)[0]
        first.with_suffix(aborted.SUFFIX).write_bytes(bytes(aborted.ENTRY_BYTES))
        assert {one.topic for one in writer.run_maintenance().risks} == {"t", "u"}
