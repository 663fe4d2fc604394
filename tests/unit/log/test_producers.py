"""Idempotence: the table in ``millstream.log.producers``, by the log and against a naive model."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DiskFullError, OutOfOrderSequenceError, ProducerFencedError
from millstream.log.batch import SEQUENCE_MAX, EncodedBatch, ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.files import DiskFiles
from millstream.log.group_commit import PendingAppend
from millstream.log.producers import BATCHES_KEPT, PRODUCER_EXPIRES_MS, ProducerStates
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

NAME = TopicPartition("t", 0)


def batch(producer: ProducerStamp, count: int = 1) -> EncodedBatch:
    rows = [SimpleRecord(0, b"k", b"%d" % (producer.base_sequence + n)) for n in range(count)]
    return stamp(encode_records(rows), producer, transactional=False)


def send(writer: LogWriter, producer: ProducerStamp, count: int = 1) -> int:
    return writer.append("t", 0, [batch(producer, count)])[0]


def test_a_batch_that_comes_again_gets_its_first_offset_and_a_gap_is_refused(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        assert send(writer, ProducerStamp(7, 0, 0), 3) == 0
        assert send(writer, ProducerStamp(7, 0, 3), 2) == 3
        assert send(writer, ProducerStamp(7, 0, 0), 3) == 0
        assert send(writer, ProducerStamp(7, 0, 3), 2) == 3
        with pytest.raises(OutOfOrderSequenceError, match="begins at sequence 6, but 5 must"):
            send(writer, ProducerStamp(7, 0, 6))
        with pytest.raises(OutOfOrderSequenceError):
            send(writer, ProducerStamp(7, 0, 3), 1)  # overlaps, but is not the batch that was sent
        assert send(writer, ProducerStamp(7, 0, 5)) == 5
        assert LogReader(tmp_path).offsets("t") == [(0, 6)]


def test_two_copies_in_one_commit_are_written_once(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        copies = [batch(ProducerStamp(7, 0, 0), 2) for _ in range(3)]
        assert writer.append("t", 0, copies) == [0, 0, 0]
        assert LogReader(tmp_path).offsets("t") == [(0, 2)]


class FullDisk(DiskFiles):
    """Takes nothing into segments, or makes no new ones, while it is ``full``."""

    def __init__(self) -> None:
        self.full: set[str] = set()

    def pwrite(self, handle: int, data: bytes | memoryview, position: int) -> int:
        if "write" in self.full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().pwrite(handle, data, position)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> int:
        if "create" in self.full and create and path.suffix == ".log":
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().open(path, write=write, create=create)


@pytest.mark.parametrize("kind", ["write", "create"])
def test_a_batch_that_came_twice_into_a_full_disk_is_refused_both_times(
    tmp_path: Path, kind: str
) -> None:
    files = FullDisk()
    with LogWriter(tmp_path, files=files, segment_bytes=100, background=False) as writer:
        writer.create_topic("t")
        assert send(writer, ProducerStamp(7, 0, 0)) == 0
        files.full = {kind}
        # The second copy of sequence 1 comes before the write that fails, that of 2 after it.
        appends = [
            PendingAppend(TopicPartition("t", 0), batch(ProducerStamp(7, 0, n)))
            for n in (0, 1, 1, 2, 2)
        ]
        writer.commit(appends)
        assert (appends[0].offset, appends[0].error) == (0, None)
        assert [type(one.error) for one in appends[1:]] == [DiskFullError] * 4
        files.full = set()
        assert writer.append("t", 0, [encode_records([SimpleRecord(0, b"k", b"of another")])]) == [
            1
        ]
        assert [send(writer, ProducerStamp(7, 0, n)) for n in (1, 1, 2)] == [2, 2, 3]
        read = LogReader(tmp_path).read("t", 0, 1, 4, columns=("value",))
        assert [v for part in read for v in part["value"].to_pylist()] == [
            b"of another",
            b"1",
            b"2",
        ]


def test_a_new_epoch_begins_at_sequence_0_and_fences_the_older(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        send(writer, ProducerStamp(7, 0, 0))
        with pytest.raises(OutOfOrderSequenceError, match="but 0 must follow"):
            send(writer, ProducerStamp(7, 1, 1))
        assert send(writer, ProducerStamp(7, 1, 0)) == 1
        with pytest.raises(
            ProducerFencedError, match="with producer epoch 1; this batch has producer epoch 0"
        ):
            send(writer, ProducerStamp(7, 0, 1))


def test_an_unknown_producer_may_begin_anywhere(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        assert send(writer, ProducerStamp(8, 4, 1000)) == 0
        assert send(writer, ProducerStamp(8, 4, 1001)) == 1


def test_sequences_go_on_at_0_after_the_largest(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        send(writer, ProducerStamp(7, 0, SEQUENCE_MAX - 1), 3)  # ..., max, 0
        assert send(writer, ProducerStamp(7, 0, 1)) == 3
        assert send(writer, ProducerStamp(7, 0, SEQUENCE_MAX - 1), 3) == 0


@pytest.mark.parametrize("cleanly", [True, False])
@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_known_of_producers_survives_a_restart(
    tmp_path: Path, cleanly: bool, sealed: bool
) -> None:
    with LogWriter(tmp_path, segment_bytes=400) as writer:
        writer.create_topic("t")
        for sequence in range(20):
            send(writer, ProducerStamp(7, 0, sequence))
            send(writer, ProducerStamp(9, 2, sequence))
        state = (tmp_path / "state.mm").read_bytes()
    if not cleanly:
        (tmp_path / "state.mm").write_bytes(state)
        max(tmp_path.glob("t/*/0/*.seal")).unlink()
    if not sealed:
        for path in tmp_path.glob("t/*/0/*.seal"):
            path.unlink()
    assert len(list(tmp_path.glob("t/*/0/*.log"))) > 4
    with LogWriter(tmp_path) as writer:
        assert send(writer, ProducerStamp(7, 0, 19)) == 38
        assert send(writer, ProducerStamp(7, 0, 20 - BATCHES_KEPT)) == 40 - 2 * BATCHES_KEPT
        with pytest.raises(OutOfOrderSequenceError):
            send(writer, ProducerStamp(7, 0, 22))
        with pytest.raises(ProducerFencedError):
            send(writer, ProducerStamp(9, 1, 20))
        assert send(writer, ProducerStamp(9, 2, 20)) == 40


class Model:
    """Every batch ever taken, by producer: what the log must agree with, said plainly."""

    def __init__(self) -> None:
        self.taken: dict[int, list[tuple[int, int, int, int]]] = {}
        self.end = 0

    def answer(self, producer: ProducerStamp, count: int) -> int | str:
        known = self.taken.setdefault(producer.producer_id, [])
        if known:
            epoch = known[-1][0]
            if producer.producer_epoch < epoch:
                return "fenced"
            if producer.producer_epoch > epoch:
                if producer.base_sequence != 0:
                    return "out of order"
            else:
                current = [one for one in known if one[0] == epoch]
                for _, first, length, offset in current[-BATCHES_KEPT:]:
                    if (first, length) == (producer.base_sequence, count):
                        return offset
                if producer.base_sequence != current[-1][1] + current[-1][2]:
                    return "out of order"
        known.append((producer.producer_epoch, producer.base_sequence, count, self.end))
        self.end += count
        return self.end - count


@settings(max_examples=some(300), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 12), st.integers(1, 2)),
        max_size=40,
    ),
    st.sets(st.integers(0, 40)),
)
def test_any_order_of_batches_is_answered_as_the_model_says(
    sent: list[tuple[int, int, int, int]], restarts: set[int]
) -> None:
    model, states, end = Model(), ProducerStates(), 0
    for step, (producer_id, epoch, sequence, count) in enumerate(sent):
        if step in restarts:
            states = ProducerStates.from_rows(states.to_rows())
        one = batch(ProducerStamp(producer_id, epoch, sequence), count)
        try:
            known = states.duplicate_of(NAME, one)
        except ProducerFencedError:
            found: int | str = "fenced"
        except OutOfOrderSequenceError:
            found = "out of order"
        else:
            found = end if known is None else known
            if known is None:
                states.add(
                    base_offset=end,
                    count=one.count,
                    attributes=one.attributes,
                    producer=one.producer,
                    used_ms=0,
                )
                end += count
        assert found == model.answer(one.producer, count)


def test_a_producer_is_forgotten_by_when_it_wrote_not_by_how_old_its_records_are(
    tmp_path: Path,
) -> None:
    now_ms = [100 * 86_400_000]
    with LogWriter(tmp_path, background=False, clock_ms=lambda: now_ms[0]) as writer:
        writer.create_topic("t")
        assert send(writer, ProducerStamp(7, 0, 0)) == 0  # its record is of 1970
        writer.run_maintenance()
        assert send(writer, ProducerStamp(7, 0, 0)) == 0
    for path in tmp_path.glob("t/*/0/*.seal"):
        path.unlink()
    (tmp_path / "state.mm").unlink()
    with LogWriter(tmp_path, background=False, clock_ms=lambda: now_ms[0]) as writer:
        writer.run_maintenance()
        assert send(writer, ProducerStamp(7, 0, 0)) == 0
        now_ms[0] += PRODUCER_EXPIRES_MS + 1
        writer.maintenance.run_pass(now_ms[0], running_ms=now_ms[0])
        assert send(writer, ProducerStamp(7, 0, 0)) == 1
