"""What `inspect` says about folders that are whole, damaged, half made, and being written to."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError
from millstream.log import aborted, seal
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp, walk
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.findings import Finding
from millstream.log.repair.inspection import inspect
from millstream.log.segment import segment_name
from millstream.log.statistics import measure
from millstream.log.takeover import NEEDS_VERIFY
from millstream.log.writer import LogWriter

RECORDS = 20
SEGMENT_BYTES = 500


def batch_of(*values: bytes, timestamp_ms: int = 0) -> EncodedBatch:
    return encode_records([SimpleRecord(timestamp_ms, b"k", value) for value in values])


def make_log(folder: Path, *, records: int = RECORDS, segment_bytes: int = SEGMENT_BYTES) -> None:
    with LogWriter(folder, segment_bytes=segment_bytes, background=False) as writer:
        writer.create_topic("t")
        for number in range(records):
            writer.append("t", 0, [batch_of(b"%03d" % number * 20)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_log(tmp_path / "log")
    return tmp_path / "log"


def beside(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"t/*/0/*{ending}"))


def segments(folder: Path) -> list[Path]:
    return beside(folder, ".log")


def flip(path: Path, position: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def kinds_found(folder: Path, **options: object) -> list[tuple[str, str]]:
    return [(one.kind, one.severity) for one in inspect(folder, **options)]  # type: ignore[arg-type]


def the_only(folder: Path) -> Finding:
    (found,) = inspect(folder)
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    """Return every file but those that SQLite lays beside its own for any reader."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in found if path.suffix not in (".db-shm", ".db-wal")}


# -- whole folders ------------------------------------------------------------------------------


def test_a_whole_log_has_no_findings_and_is_not_changed(folder: Path) -> None:
    before = contents(folder)
    steps: list[tuple[int, int]] = []
    assert not list(inspect(folder, progress=lambda done, total: steps.append((done, total))))
    total = sum(path.stat().st_size for path in segments(folder))
    assert steps[0] == (0, total)
    assert steps[-1] == (total, total)
    assert contents(folder) == before


def test_a_log_that_was_never_written_to_is_whole(tmp_path: Path) -> None:
    LogWriter(tmp_path).close()
    assert not list(inspect(tmp_path))
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t", partitions=3)
        writer.create_topic("u")
        writer.delete_topic("u")
    assert not list(inspect(tmp_path))


def test_a_log_with_transactions_retention_and_compaction_is_whole(tmp_path: Path) -> None:
    settings_ = {"cleanup.policy": "compact", "segment.bytes": "600"}
    with LogWriter(tmp_path, background=False, clock_ms=lambda: 1000) as writer:
        writer.create_topic("t", settings=settings_)
        identity = writer.transactions.register("p")
        for number in range(30):
            writer.transactions.begin(identity)
            batch = encode_records([SimpleRecord(1000, b"%d" % (number % 4), b"v" * 50)])
            stamped = stamp(batch, ProducerStamp(*identity, 0), transactional=True)
            writer.append("t", 0, [stamped])
            identity = writer.transactions.end(identity, commit=number % 3 > 0)
        assert not list(inspect(tmp_path))
        writer.run_maintenance(1000)
        assert not list(inspect(tmp_path))
    assert not list(inspect(tmp_path))
    with LogWriter(tmp_path, background=False) as writer:
        partition = writer.partitions()[0]
        writer.delete_records(partition.name, partition.log_end_offset - 3)
    assert not list(inspect(tmp_path))


def test_a_folder_that_is_no_log_or_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a log"):
        list(inspect(tmp_path))
    LogWriter(tmp_path).close()
    (tmp_path / "FORMAT").write_text('{"version": 7, "directory_id": "x"}')
    with pytest.raises(ConfigError, match="made by a newer version of Millstream"):
        list(inspect(tmp_path))


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 7, 8, 11, 16, 17, 20, 23, 60, 61, 110])
def test_a_changed_bit_of_a_closed_segment_is_found_with_its_offsets(
    folder: Path, place: int
) -> None:
    path = segments(folder)[1]
    base = int(path.stem)
    (_, (at, header), *_) = walk(path.read_bytes(), base)
    flip(path, at + place, 0x40)
    found = the_only(folder)
    assert (found.kind, found.severity, found.path) == ("damage", "records lost", path)
    assert (found.topic, found.partition, found.position) == ("t", 0, at)
    # Without the last offset delta nothing says which offset the next batch has.
    end = int(segments(folder)[2].stem) if place == 23 else header.next_offset
    assert (found.start, found.end) == (header.base_offset, end)
    assert "log repair" in found.advice


def test_a_changed_leader_epoch_which_no_crc_covers_is_found_by_the_seal(folder: Path) -> None:
    flip(segments(folder)[1], 15)
    assert ("seal", "harmless") in kinds_found(folder)
    assert not any(one.lost for one in inspect(folder))
    assert any("no CRC covers" in one.text for one in inspect(folder))


def test_damage_in_the_growing_segment_below_the_high_watermark_is_a_loss(folder: Path) -> None:
    path = segments(folder)[-1]
    flip(path, 100)
    found = the_only(folder)
    assert (found.kind, found.severity, found.position) == ("damage", "records lost", 0)
    assert (found.start, found.end) == (int(path.stem), int(path.stem) + 1)


def test_a_file_that_was_cut_short_lacks_its_last_offsets(folder: Path) -> None:
    path = segments(folder)[-1]
    os.truncate(path, path.stat().st_size - 1)
    found = the_only(folder)
    assert (found.kind, found.start, found.end) == ("damage", RECORDS - 1, RECORDS)
    closed = segments(folder)[0]
    os.truncate(closed, 10)
    first = next(inspect(folder))
    assert (first.kind, first.start, first.end) == ("damage", 0, int(segments(folder)[1].stem))


def test_everything_is_reported_and_not_only_the_first(folder: Path) -> None:
    paths = segments(folder)
    flip(paths[0], 100)
    flip(paths[2], 100)
    flip(paths[2], 300)
    shutil.copy(paths[1].with_suffix(".seal"), paths[3].with_suffix(".seal"))
    (folder / "state.mm").unlink()
    kinds = [kind for kind, _ in kinds_found(folder)]
    assert kinds == ["state", "damage", "damage", "damage", "seal"]


def test_two_lies_behind_damage_do_not_hide_the_segments_after_it(folder: Path) -> None:
    path = segments(folder)[0]
    *_, (before, header), (last, _) = walk(path.read_bytes(), 0)
    flip(path, before + 100)
    flip(path, last + 4)  # the last batch now claims an offset far behind the following segments
    found = the_only(folder)
    assert (found.start, found.end) == (header.base_offset, int(segments(folder)[1].stem))


def test_what_lies_behind_stray_bytes_cannot_be_told_from_a_value(folder: Path) -> None:
    path = segments(folder)[1]
    data = path.read_bytes()
    (_, (at, _), *_) = walk(data, int(path.stem))
    path.write_bytes(data[:at] + b"stray" * 20 + data[at:])
    found = the_only(folder)
    assert (found.kind, found.severity, found.position) == ("damage", "records lost", at)
    assert (found.start, found.end) == (int(path.stem) + 1, int(segments(folder)[2].stem))


@pytest.mark.parametrize("which", [0, 2, -1])
def test_a_missing_segment_is_found_with_its_offsets(folder: Path, which: int) -> None:
    bases = [int(path.stem) for path in segments(folder)]
    gone = segments(folder)[which]
    for path in (gone, gone.with_suffix(".idx"), gone.with_suffix(".seal")):
        path.unlink()
    found = the_only(folder)
    end = RECORDS if which == -1 else bases[which + 1]
    assert (found.start, found.end) == (int(gone.stem), end)
    assert found.lost
    assert found.kind == ("damage" if which == -1 else "missing segment")


def test_a_partition_without_any_file_is_a_missing_segment(folder: Path) -> None:
    shutil.rmtree(segments(folder)[0].parent)
    found = the_only(folder)
    assert (found.kind, found.start, found.end) == ("missing segment", 0, RECORDS)


def test_offsets_that_were_deleted_anyway_are_not_lost(tmp_path: Path) -> None:
    make_log(tmp_path)
    with LogWriter(tmp_path, background=False) as writer:
        writer.delete_records(writer.partitions()[0].name, 1)
    flip(segments(tmp_path)[0], 100)
    assert kinds_found(tmp_path) == [("damage", "harmless")]


class Unreadable(DiskFiles):
    def __init__(self, *paths: Path) -> None:
        self._paths = paths

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if path in self._paths:
            raise PermissionError(13, "permission denied", str(path))
        return super().open(path, write=write, create=create)


def test_a_segment_that_the_system_refuses_is_told_and_the_rest_is_looked_at(folder: Path) -> None:
    paths = segments(folder)
    flip(paths[2], 100)
    beside_it = paths[1].with_suffix(".seal")
    refused, poor, damaged = inspect(folder, Unreadable(paths[0], beside_it))
    assert (refused.kind, refused.lost) == ("unreadable", True)
    assert (refused.start, refused.end) == (0, int(paths[1].stem))
    assert (poor.kind, poor.lost, poor.path) == ("unreadable", False, beside_it)
    assert (damaged.kind, damaged.path) == ("damage", paths[2])
    with pytest.raises(ConfigError, match="cannot be looked over"):
        list(inspect(folder, Unreadable(folder / "FORMAT")))


# -- the end of the log -------------------------------------------------------------------------


def unseal(folder: Path) -> None:
    """Leave the folder as a crash does, at the end of its last segment."""
    segments(folder)[-1].with_suffix(".seal").unlink()


@pytest.mark.parametrize("rest", [b"\0" * 5000, b"garbage" * 9, b"\0\0\0"])
def test_a_torn_tail_is_harmless(folder: Path, rest: bytes) -> None:
    path = segments(folder)[-1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + rest)
    found = the_only(folder)
    assert (found.kind, found.severity, found.position) == ("torn tail", "harmless", size)
    assert f"last {len(rest)} bytes" in found.text


def test_whole_batches_above_the_high_watermark_are_no_finding(folder: Path) -> None:
    unseal(folder)
    path = segments(folder)[-1]
    more = batch_of(b"never acknowledged")
    path.write_bytes(path.read_bytes() + more.prefix(RECORDS, 1) + more.tail)
    assert not list(inspect(folder))


def test_without_state_damage_before_whole_batches_counts_as_a_loss(folder: Path) -> None:
    unseal(folder)
    (folder / "state.mm").unlink()
    flip(segments(folder)[-1], 100)
    assert kinds_found(folder) == [("state", "harmless"), ("damage", "records lost")]


# -- what lies beside segments ------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".idx", ".seal"])
@pytest.mark.parametrize("content", [None, b"x", b"\0" * 40])
def test_an_index_or_seal_that_is_missing_or_wrong_is_harmless(
    tmp_path: Path, ending: str, content: bytes | None
) -> None:
    make_log(tmp_path, records=300, segment_bytes=12_000)
    path = beside(tmp_path, ending)[0]
    path.unlink() if content is None else path.write_bytes(content)
    found = the_only(tmp_path)
    assert (found.kind, found.severity, found.path) == (
        ending[1:].replace("idx", "index"),
        "harmless",
        path,
    )


def test_an_index_that_points_elsewhere_and_one_that_is_short_are_told_apart(
    tmp_path: Path,
) -> None:
    make_log(tmp_path, records=300, segment_bytes=12_000)
    first, second, *_ = beside(tmp_path, ".idx")
    data = bytearray(first.read_bytes())
    data[4] ^= 1
    first.write_bytes(data)
    second.write_bytes(b"")
    untrue, short = inspect(tmp_path)
    assert "what is not so" in untrue.text
    assert "not complete" in short.text


@pytest.mark.parametrize("change", [{"next_offset": 99}, {"chain": 1}, {"damaged": ((0, 1),)}])
def test_a_seal_that_is_whole_and_says_something_else_is_found(
    folder: Path, change: dict[str, object]
) -> None:
    from dataclasses import replace

    from millstream.log.files import DISK

    path = segments(folder)[0]
    known = seal.read_any(DISK, path)
    assert known is not None
    seal.write(DISK, path, replace(known, **change))  # type: ignore[arg-type]
    assert kinds_found(folder) == [("seal", "harmless")]


def with_an_aborted_transaction(folder: Path) -> Path:
    with LogWriter(folder, background=False, clock_ms=lambda: 1) as writer:
        writer.create_topic("t")
        identity = writer.transactions.register("p")
        writer.transactions.begin(identity)
        sent = stamp(batch_of(b"taken back"), ProducerStamp(*identity, 0), transactional=True)
        writer.append("t", 0, [sent])
        writer.transactions.end(identity, commit=False)
        writer.append("t", 0, [batch_of(b"kept")])
    (path,) = beside(folder, aborted.SUFFIX)
    return path


@pytest.mark.parametrize("content", [None, b"", b"\0" * 28])
def test_aborted_transactions_that_nothing_tells_of_are_found(
    tmp_path: Path, content: bytes | None
) -> None:
    path = with_an_aborted_transaction(tmp_path)
    assert not list(inspect(tmp_path))
    path.unlink() if content is None else path.write_bytes(content)
    found = [one for one in inspect(tmp_path) if one.kind == "aborted index"]
    assert [one.path for one in found] == [path]
    assert "1 aborted" in found[0].text


# -- the folder ---------------------------------------------------------------------------------


def test_leftovers_of_a_crash_are_harmless(folder: Path) -> None:
    partition = segments(folder)[0].parent
    names = ["00000000000000000003.log.new", f"{0:020d}.cleaned", f"{999:020d}.idx", "notes.txt"]
    for name in names:
        (partition / name).write_bytes(b"x")
    (folder / "t" / "half.12345678" / "0").mkdir(parents=True)
    found = list(inspect(folder))
    assert {(one.kind, one.severity) for one in found} == {("leftover", "harmless")}
    assert sorted(one.path.name for one in found) == sorted([*names, "half.12345678"])


def test_segments_below_the_log_start_and_merged_ones_are_leftovers(folder: Path) -> None:
    first, second, *_ = segments(folder)
    merged = first.read_bytes() + second.read_bytes()
    with LogWriter(folder, background=False, segment_bytes=SEGMENT_BYTES) as writer:
        writer.delete_records(writer.partitions()[0].name, int(second.stem))
    first.write_bytes(b"left")
    found = the_only(folder)
    assert (found.kind, found.path) == ("leftover", first)
    make_log(folder.parent / "other")
    first, second, *_ = segments(folder.parent / "other")
    first.write_bytes(merged)
    found = the_only(folder.parent / "other")
    assert (found.kind, found.path) == ("leftover", second)
    assert "merged" in found.text


def test_records_of_an_unknown_topic_are_told(folder: Path) -> None:
    stray = folder / "t" / "stray.12345678" / "0"
    stray.mkdir(parents=True)
    (stray / segment_name(0)).write_bytes(b"records")
    found = the_only(folder)
    assert (found.kind, found.lost, found.path) == ("unknown folder", True, stray.parent)


@pytest.mark.parametrize("content", [None, b"garbage" * 100])
def test_without_control_db_the_segments_are_looked_at_all_the_same(
    folder: Path, content: bytes | None
) -> None:
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / "control.db").write_bytes(content)
    flip(segments(folder)[0], 100)
    assert kinds_found(folder) == [("control", "records lost"), ("damage", "records lost")]


def test_format_state_and_marks_are_told(folder: Path, tmp_path: Path) -> None:
    make_log(tmp_path / "other")
    (folder / NEEDS_VERIFY).touch()
    (folder / "quarantine").mkdir()
    (folder / "quarantine" / "some.bytes").write_bytes(b"12345")
    kinds = {one.kind: one for one in inspect(folder)}
    assert set(kinds) == {"unverified", "quarantine"}
    assert "5 bytes in 1 files" in kinds["quarantine"].text
    (folder / NEEDS_VERIFY).unlink()
    shutil.rmtree(folder / "quarantine")

    state = (folder / "state.mm").read_bytes()
    for content, severity in [
        (b"", "harmless"),
        (b"\0" * len(state), "harmless"),
        ((tmp_path / "other" / "state.mm").read_bytes(), "records lost"),
    ]:
        (folder / "state.mm").write_bytes(content)
        assert kinds_found(folder)[0] == ("state", severity)
    (folder / "state.mm").write_bytes(state)
    (folder / "FORMAT").write_bytes(b"{}")
    assert kinds_found(folder) == [("format", "records lost")]
    (folder / "FORMAT").unlink()
    assert kinds_found(folder) == [("format", "records lost")]


def test_a_slot_of_state_mm_that_is_not_whole_is_harmless(folder: Path) -> None:
    with (folder / "state.mm").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 128)
    found = the_only(folder)
    assert (found.kind, found.severity, found.topic) == ("state", "harmless", "t")


# -- beside an owner ----------------------------------------------------------------------------


def test_beside_an_owner_only_what_is_committed_counts(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES, background=False) as writer:
        writer.create_topic("t")
        for number in range(RECORDS):
            writer.append("t", 0, [batch_of(b"%d" % number * 40)], durability="written")
        writer.sync()
        path = segments(tmp_path)[-1]
        with path.open("ab") as file:
            file.write(b"an append that is on its way")
        assert not list(inspect(tmp_path))
        assert kinds_found(tmp_path, owner_lives=lambda _: False) == [("torn tail", "harmless")]
        flip(segments(tmp_path)[0], 100)
        assert kinds_found(tmp_path) == [("damage", "records lost")]


class Interfering(DiskFiles):
    """The real disk; something happens when a file is first opened, or a folder first listed."""

    def __init__(self, path: Path, action: Callable[[], object]) -> None:
        self._path = path
        self._action = action
        self._skipped = False  # the first listing only counts bytes
        self.happened = False

    def _act(self) -> None:
        if not self.happened:
            self.happened = True
            self._action()

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if path == self._path:
            self._act()
        return super().open(path, write=write, create=create)

    def names(self, path: Path) -> list[str]:
        if path == self._path and self._skipped:
            self._act()
        self._skipped = self._skipped or path == self._path
        return super().names(path)


@pytest.mark.parametrize("ending", [".log", ".seal", ".idx", "folder"])
@pytest.mark.parametrize("what", ["compaction", "retention", "deletion"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_an_owner_does_to_a_segment_just_then_is_no_finding(
    tmp_path: Path, which: int, what: str, ending: str
) -> None:
    policy = "compact" if what == "compaction" else "delete"
    with LogWriter(tmp_path, background=False) as writer:
        options = {"cleanup.policy": policy, "segment.bytes": "600"}
        writer.create_topic("t", settings=options)
        for number in range(30):
            batch = encode_records([SimpleRecord(1, b"%d" % (number % 3), b"%d" % number * 30)])
            writer.append("t", 0, [batch])
        partition = writer.partitions()[0]
        actions: dict[str, Callable[[], object]] = {
            "compaction": lambda: writer.run_maintenance(1),
            "retention": lambda: writer.delete_records(partition.name, partition.active_base),
            "deletion": lambda: writer.delete_topic("t"),
        }
        path = partition.folder if ending == "folder" else beside(tmp_path, ending)[which]
        files = Interfering(path, actions[what])
        assert not list(inspect(tmp_path, files))
        assert files.happened


def test_partitions_that_are_just_being_made_are_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, found = LogWriter._publish_partitions, list[list[Finding]]()

    def look_first(self: LogWriter, *args: Any) -> None:
        found.append(list(inspect(tmp_path)))
        publish(self, *args)

    monkeypatch.setattr(LogWriter, "_publish_partitions", look_first)
    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t", partitions=2)
        writer.alter_topic("t", partitions=3)
    assert found == [[], []]


def test_nothing_is_found_while_an_owner_appends_rolls_removes_and_compacts(
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(writer: LogWriter) -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                value = b"v" * 60
                batch = encode_records([SimpleRecord(number, b"%d" % (number % 7), value)])
                writer.append("keyed", 0, [batch], durability="written")
                writer.append("plain", 0, [batch], durability="written")
                if number % 40 == 0:
                    writer.sync()
                    writer.run_maintenance(number)
                    partition = writer.partitions()[-1]
                    writer.delete_records(partition.name, max(partition.log_end_offset - 50, 0))
                if number % 160 == 0:
                    writer.create_topic(f"passing{number}")
                    writer.delete_topic(f"passing{number}")
        except BaseException as error:  # noqa: BLE001 - reported to the test
            failed.append(error)

    with LogWriter(tmp_path, segment_bytes=1000, background=False) as writer:
        writer.create_topic("keyed", settings={"cleanup.policy": "compact"})
        writer.create_topic("plain")
        thread = threading.Thread(target=work, args=(writer,))
        thread.start()
        try:
            for _ in range(60):
                assert not list(inspect(tmp_path))
        finally:
            stop.set()
            thread.join()
    assert not failed
    assert not list(inspect(tmp_path))


# -- on any damage ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_log(folder)
    return folder


@given(data=st.data())
@settings(max_examples=some(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_of_any_segment_is_found(
    model: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(segments(model)))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    before = path.read_bytes()
    try:
        flip(path, position, data.draw(st.integers(1, 255)))
        found = list(inspect(model))
        assert found, f"byte {position} of {path.name}"
        assert all(one.path.stem == path.stem for one in found)
        (at, header), *_ = [
            (at, header)
            for at, header in walk(before, int(path.stem))
            if at <= position < at + header.size
        ]
        if not 12 <= position - at < 16:  # the leader epoch loses nothing
            later = [int(one.stem) for one in segments(model)] + [RECORDS]
            end = later[later.index(int(path.stem)) + 1]
            end = end if 23 <= position - at < 27 else header.next_offset  # last offset delta
            assert [(one.kind, one.start, one.end) for one in found] == [
                ("damage", header.base_offset, end)
            ]
    finally:
        path.write_bytes(before)


@given(garbage=st.binary(min_size=1, max_size=600), data=st.data())
@settings(max_examples=some(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_inspection_never_fails_on_any_bytes_in_any_file(
    model: Path, garbage: bytes, data: st.DataObject
) -> None:
    files = sorted(path for path in model.rglob("*") if path.is_file() and path.suffix != ".db")
    path = data.draw(st.sampled_from([one for one in files if one.name != "LOCK"]))
    before = path.read_bytes()
    position = data.draw(st.integers(0, len(before)))
    try:
        path.write_bytes(before[:position] + garbage + before[position + len(garbage) :])
        list(inspect(model))
    except ConfigError:
        assert path.name == "FORMAT"
    finally:
        path.write_bytes(before)


# -- figures ------------------------------------------------------------------------------------


def test_measuring_tells_size_offsets_times_transactions_and_known_damage(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES, background=False) as writer:
        writer.create_topic("t", partitions=2)
        for number in range(RECORDS):
            batch = batch_of(b"x" * 60, timestamp_ms=5000 + number)
            writer.append("t", 1, [batch])
        identity = writer.transactions.register("p", in_process=False)
        writer.transactions.begin(identity)
        sent = stamp(batch_of(b"open"), ProducerStamp(*identity, 0), transactional=True)
        writer.append("t", 0, [sent])
        living = measure(tmp_path)
    paths = sorted(tmp_path.glob("t/*/1/*.log"))
    (tmp_path / NEEDS_VERIFY).touch()
    flip(paths[0], 100)
    LogWriter(tmp_path, background=False).close()
    with_open, plain = measure(tmp_path)
    assert with_open.open_transactions == living[0].open_transactions == 1
    assert (plain.topic, plain.partition, plain.segments) == ("t", 1, len(paths))
    assert plain.size_bytes == living[1].size_bytes == sum(path.stat().st_size for path in paths)
    assert (plain.start, plain.end) == (0, RECORDS)
    assert (living[1].oldest_ms, plain.newest_ms) == (5000, 5000 + RECORDS - 1)
    assert (living[1].damaged, plain.damaged) == ((), ((0, 1),))


def test_measuring_a_folder_that_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a log"):
        measure(tmp_path)
    LogWriter(tmp_path).close()
    assert measure(tmp_path) == []
