"""Repair: what is whole stays as it was, what is lost is named, whatever interrupts it."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, CorruptBatchError, DiskFullError, FolderOwnedError
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp, walk
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DISK, DiskFiles, Files, read_whole
from millstream.log.reader import LogReader
from millstream.log.repair.inspection import inspect
from millstream.log.repair.repair import RepairedRange, repair
from millstream.log.segment import segment_offsets
from millstream.log.takeover import NEEDS_VERIFY
from millstream.log.writer import LogWriter
from millstream.testing.disk import SimulatedCrash, SimulatedDisk

SEGMENT_BYTES = 600
FOLDER = Path("/log")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every opening reports the damage that it finds, which is a lot here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def batch_of(*values: bytes) -> EncodedBatch:
    return encode_records([SimpleRecord(1, b"k", value) for value in values])


def fill(writer: LogWriter, *, rounds: int = 12) -> None:
    """Write plain batches, and transactions that are committed and aborted in turn."""
    writer.create_topic("t")
    writer.create_topic("other")
    identity = writer.transactions.register("p")
    for number in range(rounds):
        writer.append("t", 0, [batch_of(b"%d" % number * 40, b"second %d" % number)])
        writer.append("other", 0, [batch_of(b"other %d" % number)])
        writer.transactions.begin(identity)
        sent = stamp(batch_of(b"in %d" % number), ProducerStamp(*identity, 0), transactional=True)
        writer.append("t", 0, [sent])
        identity = writer.transactions.end(identity, commit=number % 3 != 1)
    for number in range(3):
        writer.append("t", 0, [batch_of(b"last %d" % number)])


def make_log(folder: Path) -> Path:
    with LogWriter(
        folder, segment_bytes=SEGMENT_BYTES, background=False, clock_ms=lambda: 1
    ) as writer:
        fill(writer)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "log")
    return tmp_path / "log"


def segments(folder: Path, topic: str = "t") -> list[Path]:
    return sorted(folder.glob(f"t/{topic}.*/0/*.log"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def visible(
    folder: Path, files: Files = DISK, control: ControlDb | None = None, topic: str = "t"
) -> dict[int, bytes]:
    """Return what a reader of committed records sees."""
    reader = LogReader(folder, files=files, control=control)
    found: dict[int, bytes] = {}
    (start, end), *_ = reader.offsets(topic)
    for batch in reader.read(topic, 0, start, end, columns=("offset", "value")):
        found.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return found


def batches(folder: Path) -> dict[int, bytes]:
    """Return every batch of topic t by its base offset."""
    found = {}
    for path in segments(folder):
        data = path.read_bytes()
        for at, header in walk(data, int(path.stem)):
            found[header.base_offset] = data[at : at + header.size]
    return found


def lost_in(repaired: list[RepairedRange]) -> set[int]:
    return {offset for one in repaired for offset in range(one.start, one.end)}


def findings(folder: Path, files: Files = DISK, control: ControlDb | None = None) -> list[str]:
    found = inspect(folder, files, control=control, owner_lives=lambda _: False)
    return [f"{one.kind}: {one.where}: {one.text}" for one in found if one.kind != "quarantine"]


# -- one damage at a time -----------------------------------------------------------------------


def test_a_whole_log_is_left_as_it_is(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("t/**/*") if path.is_file()}
    assert repair(folder) == []
    assert {path: path.read_bytes() for path in folder.glob("t/**/*") if path.is_file()} == before
    assert not (folder / "quarantine").exists()


def test_damage_is_covered_and_everything_else_stays_byte_for_byte(folder: Path) -> None:
    seen, whole = visible(folder), batches(folder)
    path = segments(folder)[1]
    (_, _), (at, header), *_ = walk(path.read_bytes(), int(path.stem))
    flip(path, at + 70)
    damaged = path.read_bytes()
    with pytest.raises(CorruptBatchError):
        visible(folder)
    (one,) = repair(folder)
    assert (one.topic, one.partition) == ("t", 0)
    assert (one.start, one.end) == (header.base_offset, header.next_offset)
    lost = lost_in([one])
    assert visible(folder) == {
        offset: value for offset, value in seen.items() if offset not in lost
    }
    after = batches(folder)
    assert {base: data for base, data in after.items() if base not in lost} == {
        base: data for base, data in whole.items() if base not in lost
    }
    assert one.quarantined is not None
    assert one.quarantined.read_bytes() == damaged
    note = json.loads(one.note.read_text())
    assert note["lost"] == [[header.base_offset, header.next_offset]]
    assert (note["topic"], note["partition"], note["quarantined"]) == ("t", 0, one.quarantined.name)
    assert folder / note["segment"] == path
    assert not findings(folder)


def test_a_second_repair_finds_nothing_and_appends_go_on_behind(folder: Path) -> None:
    end = LogReader(folder).offsets("t")[0][1]
    flip(segments(folder)[-1], 100)
    assert repair(folder)
    before = {path: path.read_bytes() for path in segments(folder)}
    assert repair(folder) == []
    assert {path: path.read_bytes() for path in segments(folder)} == before
    with LogWriter(folder, background=False) as writer:
        assert writer.append("t", 0, [batch_of(b"next")]) == [end]
    assert visible(folder)[end] == b"next"


def test_a_missing_segment_is_replaced_by_one_without_records(folder: Path) -> None:
    seen = visible(folder)
    gone, following = segments(folder)[2:4]
    others = {path: path.read_bytes() for path in segments(folder) if path != gone}
    gone.unlink()
    (one,) = repair(folder)
    assert (one.start, one.end) == (int(gone.stem), int(following.stem))
    assert one.quarantined is None
    assert {path: path.read_bytes() for path in others} == others
    assert gone.exists()
    lost = lost_in([one])
    assert visible(folder) == {
        offset: value for offset, value in seen.items() if offset not in lost
    }
    assert not findings(folder)


@pytest.mark.parametrize("which", ["first", "last", "all", "all but the last"])
def test_segments_missing_at_an_end_are_replaced_too(folder: Path, which: str) -> None:
    seen, end = visible(folder), LogReader(folder).offsets("t")[0][1]
    paths = segments(folder)
    chosen = {"first": paths[:1], "last": paths[-1:], "all": paths, "all but the last": paths[:-1]}
    for path in chosen[which]:
        path.unlink()
    repaired = repair(folder)
    lost = lost_in(repaired)
    kept = [path for path in paths if path not in chosen[which]]
    assert lost >= {int(path.stem) for path in chosen[which]}
    assert not lost & {int(path.stem) for path in kept}
    assert visible(folder) == {
        offset: value for offset, value in seen.items() if offset not in lost
    }
    assert LogReader(folder).offsets("t") == [(0, end)]
    assert not findings(folder)
    with LogWriter(folder, background=False) as writer:
        assert writer.append("t", 0, [batch_of(b"next")]) == [end]


def test_what_lies_behind_stray_bytes_is_given_up_and_kept(folder: Path) -> None:
    seen, end = visible(folder), LogReader(folder).offsets("t")[0][1]
    bases = [int(path.stem) for path in segments(folder)]
    lost = set()
    for path, following in ((segments(folder)[1], bases[2]), (segments(folder)[-1], end)):
        data = path.read_bytes()
        (_, _), (at, header), *_ = walk(data, int(path.stem))
        path.write_bytes(data[:at] + b"stray" * 30 + data[at:])
        lost |= set(range(header.base_offset, following))
    repaired = repair(folder)
    assert lost_in(repaired) == lost
    kept = [path for path in (folder / "quarantine").rglob("*") if path.is_file()]
    assert sum(b"straystray" in path.read_bytes() for path in kept) == 2
    assert visible(folder) == {at: value for at, value in seen.items() if at not in lost}
    assert not findings(folder)


@pytest.mark.parametrize("ending", [".idx", ".seal", ".aborted"])
def test_what_lies_beside_a_segment_is_made_again(folder: Path, ending: str) -> None:
    seen = visible(folder)
    paths = sorted(folder.glob(f"t/t.*/0/*{ending}"))
    before = {path: path.read_bytes() for path in paths}
    for number, path in enumerate(paths):
        path.unlink() if number % 2 else path.write_bytes(b"\1" * 40)
    assert findings(folder)
    assert repair(folder) == []
    assert {path: path.read_bytes() for path in paths} == before
    assert visible(folder) == seen
    assert not findings(folder)


def test_files_whose_segment_is_gone_are_removed_with_a_repair(folder: Path) -> None:
    orphan = segments(folder)[0].with_name(f"{999:020d}.idx")
    orphan.touch()
    assert repair(folder) == []
    assert not orphan.exists()
    assert not findings(folder)


def test_offsets_that_were_deleted_anyway_are_not_given_up(folder: Path) -> None:
    with LogWriter(folder, background=False) as writer:
        writer.delete_records(writer.partitions()[-1].name, 3)
    start, _ = LogReader(folder).offsets("t")[0]
    assert start == 3
    flip(segments(folder)[0], 100)
    assert not lost_in(repair(folder))
    assert not findings(folder)


def test_what_an_earlier_repair_kept_is_not_overwritten_by_a_later_one(folder: Path) -> None:
    path = segments(folder)[1]
    places = [at for at, _ in walk(path.read_bytes(), int(path.stem))]
    flip(path, places[1] + 70)
    (first,) = repair(folder)
    places = [at for at, _ in walk(path.read_bytes(), int(path.stem))]
    flip(path, places[-1] + 70)
    (second,) = repair(folder)
    assert first.quarantined is not None
    assert second.quarantined is not None
    assert first.quarantined != second.quarantined
    assert first.quarantined.exists()
    assert first.note.exists()


# -- transactions -------------------------------------------------------------------------------


def markers(folder: Path) -> list[tuple[Path, int, int]]:
    """Return file, place and offset of every marker."""
    found = []
    for path in segments(folder):
        for at, header in walk(path.read_bytes(), int(path.stem)):
            if header.attributes & 0x20:
                found.append((path, at, header.base_offset))
    return found


@pytest.mark.parametrize("which", range(12))
def test_a_lost_marker_neither_hides_what_was_committed_nor_shows_what_was_aborted(
    folder: Path, which: int
) -> None:
    seen = visible(folder)
    path, at, offset = markers(folder)[which]
    flip(path, at + 70)
    (folder / NEEDS_VERIFY).touch()  # recovery reads the segments, and so meets the damage
    LogWriter(folder, background=False, segment_bytes=SEGMENT_BYTES).close()
    assert lost_in(repair(folder)) == {offset}
    assert visible(folder) == seen
    # What was kept beside the segment is in the segment again: made from it, it says the same.
    for beside in folder.glob("t/t.*/0/*"):
        if beside.suffix in (".aborted", ".seal", ".idx"):
            beside.unlink()
    (folder / NEEDS_VERIFY).touch()
    LogWriter(folder, background=False, segment_bytes=SEGMENT_BYTES).close()
    assert visible(folder) == seen


def test_a_transaction_whose_marker_went_with_its_whole_segment_keeps_its_end(
    tmp_path: Path,
) -> None:
    for commit in (True, False):
        folder = tmp_path / str(commit)
        with LogWriter(
            folder, segment_bytes=SEGMENT_BYTES, background=False, clock_ms=lambda: 1
        ) as writer:
            writer.create_topic("t")
            identity = writer.transactions.register("p")
            for ended in (commit, not commit):
                writer.transactions.begin(identity)
                for number in range(12):
                    sent = stamp(
                        batch_of(b"%s %d" % (str(ended).encode(), number) * 5),
                        ProducerStamp(*identity, number),
                        transactional=True,
                    )
                    writer.append("t", 0, [sent])
                identity = writer.transactions.end(identity, commit=ended)
        seen = visible(folder)
        path, _, _ = markers(folder)[0]
        path.unlink()
        lost = lost_in(repair(folder))
        left = {offset: value for offset, value in seen.items() if offset not in lost}
        assert left
        assert visible(folder) == left
        assert not findings(folder)


# -- refusals -----------------------------------------------------------------------------------


def test_a_folder_that_is_owned_is_refused_with_its_owners_process_id(folder: Path) -> None:
    flip(segments(folder)[0], 100)
    before = segments(folder)[0].read_bytes()
    program = (
        "import sys; from millstream.log.writer import LogWriter\n"
        f"writer = LogWriter({str(folder)!r}); print('owned', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"owned\n"
        with pytest.raises(FolderOwnedError, match=f"process {child.pid};"):
            repair(folder)
        assert segments(folder)[0].read_bytes() == before
    finally:
        child.communicate()
    assert repair(folder)


def test_what_only_a_backup_has_is_asked_for_and_nothing_is_changed(folder: Path) -> None:
    flip(segments(folder)[0], 100)
    before = {path: path.read_bytes() for path in folder.glob("t/**/*") if path.is_file()}
    with pytest.raises(ConfigError, match="is not a log"):
        repair(folder / "quarantine")
    content = (folder / "control.db").read_bytes()
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"restore control\.db"):
        repair(folder)
    assert not (folder / "control.db").exists()
    (folder / "control.db").write_bytes(content)
    identity = (folder / "FORMAT").read_bytes()
    (folder / "FORMAT").unlink()
    with pytest.raises(ConfigError, match="restore FORMAT"):
        repair(folder)
    (folder / "FORMAT").write_bytes(identity)
    assert {path: path.read_bytes() for path in folder.glob("t/**/*") if path.is_file()} == before
    assert repair(folder)


class Full(DiskFiles):
    """A disk on which no file in quarantine/ has room."""

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if "quarantine" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(28, "no space left on device")
        return super().pwrite(handle, data, position)


def test_without_room_for_the_copy_nothing_is_replaced(folder: Path) -> None:
    path = segments(folder)[1]
    flip(path, 100)
    damaged = path.read_bytes()
    with pytest.raises(DiskFullError, match="could not be repaired"):
        repair(folder, files=Full())
    assert path.read_bytes() == damaged
    assert repair(folder)
    assert not findings(folder)


# -- any damage ---------------------------------------------------------------------------------


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, float, float, bytes]:
    """What is done to a segment, to which, where, and with which bytes."""
    kind = draw(st.sampled_from(["overwrite", "zeros", "insert", "cut", "remove"]))
    share = st.floats(0, 1, exclude_max=True)
    return kind, draw(share), draw(share), draw(st.binary(min_size=1, max_size=40))


def harm(folder: Path, kind: str, which: float, where: float, content: bytes) -> tuple[int, int]:
    """Damage a segment; return which, and the first byte of it that is not as it was."""
    paths = segments(folder)
    path = paths[int(which * len(paths))]
    data = path.read_bytes()
    at = int(where * len(data))
    if kind == "remove":
        at = 0
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[:at])
    elif kind == "insert":
        path.write_bytes(data[:at] + content + data[at:])
    else:
        fresh = content if kind == "overwrite" else bytes(len(content) * 5)
        path.write_bytes((data[:at] + fresh + data[at + len(fresh) :])[: len(data)])
    return int(path.stem), at


def still_there(folder: Path, whole: dict[int, bytes]) -> set[int]:
    """Return the base offsets of batches whose bytes are in their segment, wherever they are."""
    contents = {int(path.stem): path.read_bytes() for path in segments(folder)}
    bases = sorted(contents)
    found = set()
    for base, data in whole.items():
        # Bytes 12 to 16 are the leader epoch, which says nothing about the records.
        places = [
            at
            for segment in bases
            for at in _places(contents[segment], data[16:])
            if contents[segment][at - 16 : at - 4] == data[:12]
        ]
        if places:
            found.add(base)
    return found


def _places(content: bytes, part: bytes) -> list[int]:
    found, at = [], content.find(part, 16)
    while at != -1:
        found.append(at)
        at = content.find(part, at + 1)
    return found


@given(what=st.lists(damages(), min_size=1, max_size=4), crashed=st.booleans())
@settings(max_examples=some(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_damage_what_was_touched_is_given_up_and_no_more_than_its_segment(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    what: list[tuple[str, float, float, bytes]],
    crashed: bool,
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "log"
    shutil.copytree(model, folder)
    seen, whole = visible(folder), batches(folder)
    end = LogReader(folder).offsets("t")[0][1]
    others = visible(folder, topic="other")
    places = [
        (header.base_offset, int(path.stem), at + header.size)
        for path in segments(folder)
        for at, header in walk(path.read_bytes(), int(path.stem))
    ]
    harmed: dict[int, int] = {}
    for one in what:
        if segments(folder):
            base, at = harm(folder, *one)
            harmed[base] = min(at, harmed.get(base, at))
    if crashed:
        (folder / NEEDS_VERIFY).touch()
    there = still_there(folder, whole)
    lost = lost_in(repair(folder))
    kept = set(whole) - lost
    assert kept <= there
    # What lies behind damage is kept where something says that it was no value.
    assert kept >= {offset for offset, base, stop in places if stop <= harmed.get(base, stop)}
    assert visible(folder) == {
        offset: value for offset, value in seen.items() if offset not in lost
    }
    after = batches(folder)
    for base in kept:
        assert after[base][:12] + after[base][16:] == whole[base][:12] + whole[base][16:]
    assert visible(folder, topic="other") == others
    assert LogReader(folder).offsets("t") == [(0, end)]
    assert not findings(folder)
    assert repair(folder) == []
    shutil.rmtree(folder)


# -- killed at every step -----------------------------------------------------------------------


class Simulated:
    """A log on a disk that crashes, with damage in it: a segment is missing, two are harmed."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(0)
        self._open_control(None)
        with self.writer(clock_ms=lambda: 1) as writer:
            fill(writer, rounds=8)
        self.seen = visible(FOLDER, self.disk, self.control)
        (topic,) = (name for name in self.disk.names(FOLDER / "t") if name.startswith("t."))
        partition = FOLDER / "t" / topic / "0"
        paths = [partition / f"{b:020d}.log" for b in segment_offsets(self.disk.names(partition))]
        for path in (paths[1], paths[-1]):
            self.disk.damage(path, 100, b"\xff")
        self.damaged = {read_whole(self.disk, path) for path in (paths[1], paths[-1])}
        self.disk.remove(paths[3])
        self.disk.sync_folder(partition)
        self.disk.restart(power_lost=False)

    def _open_control(self, before: sqlite3.Connection | None) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if before is not None:
            before.backup(self.connection)
        self.control = ControlDb(self.connection, write=True, before_commit=self.disk.step)

    def copy(self) -> Simulated:
        same = copy.copy(self)
        same.disk = copy.deepcopy(self.disk)
        same._open_control(self.connection)
        same.disk.restart(power_lost=False)
        return same

    def writer(self, clock_ms: Callable[[], int] = lambda: 1) -> LogWriter:
        return LogWriter(
            FOLDER,
            files=self.disk,
            control=self.control,
            segment_bytes=SEGMENT_BYTES,
            clock_ms=clock_ms,
            sync_threads=1,
            background=False,
        )

    def repair(self) -> list[RepairedRange]:
        return repair(FOLDER, files=self.disk, control=self.control, clock_ms=lambda: 1)

    def kept(self) -> set[bytes]:
        """Return the damaged files that are kept in quarantine/: whole, or from where they were cut."""
        names = self.disk.names(FOLDER / "quarantine")
        found = {name: read_whole(self.disk, FOLDER / "quarantine" / name) for name in names}
        cut = [(int(n.split(".")[-2]), b) for n, b in found.items() if n.endswith(".bytes")]
        return {content for name, content in found.items() if name.endswith(".log")} | {
            one for one in self.damaged if any(one[at:] == rest for at, rest in cut)
        }

    def noted(self) -> set[int]:
        """Return the offsets that the notes in quarantine/ name."""
        names = self.disk.names(FOLDER / "quarantine")
        contents = [
            read_whole(self.disk, FOLDER / "quarantine" / name)
            for name in names
            if name.endswith(".json")
        ]
        parts = [part for content in contents for part in json.loads(content)["lost"]]
        return {offset for start, end in parts for offset in range(start, end)}


@pytest.mark.parametrize("power_lost", [False, True])
def test_killed_at_any_step_a_repair_leaves_what_can_be_repaired_again(power_lost: bool) -> None:
    template = Simulated()
    first = template.copy()
    expected = lost_in(first.repair())
    steps = first.disk.steps
    assert len(expected) > 3
    assert steps > 60
    wanted = {offset: value for offset, value in first.seen.items() if offset not in expected}
    for crash_at in range(1, steps + 1):
        log = template.copy()
        log.disk.crash_at = crash_at
        with pytest.raises(SimulatedCrash):
            log.repair()
        log.disk.restart(power_lost=power_lost)
        log.writer().close()  # it opens
        # What the first attempt finished is not given up twice; together they give up the same.
        assert lost_in(log.repair()) <= expected
        assert not findings(FOLDER, log.disk, log.control), f"killed at {crash_at}"
        assert visible(FOLDER, log.disk, log.control) == wanted, f"killed at {crash_at}"
        assert log.noted() == expected, f"killed at {crash_at}"
        assert log.kept() >= log.damaged, f"killed at {crash_at}"
        # Nor does the next loss of power take anything of it.
        log.disk.restart(power_lost=True)
        assert log.kept() >= log.damaged, f"killed at {crash_at}"
        assert log.noted() == expected, f"killed at {crash_at}"
