"""Appends that must have an offset: the log compares its end with it, where appends are ordered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.errors import EndMovedError, MillstreamError, TopicRecreatedError
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.group_commit import PendingAppend
from millstream.log.reader import LogReader
from millstream.log.writer import LogWriter
from millstream.ownership.frames import error_from_plain
from millstream.ownership.requests import append_request, excise_request, handle_request
from millstream.record import TopicPartition

NAME = TopicPartition("t", 0)


def batch(*values: bytes) -> EncodedBatch:
    return encode_records([SimpleRecord(0, b"k", value) for value in values])


def append_at(writer: LogWriter, end: int, *values: bytes) -> int | MillstreamError:
    append = PendingAppend(NAME, batch(*values), expected_end=end)
    writer.commit([append])
    return append.error or append.offset


def test_an_append_at_another_offset_than_the_end_is_refused_and_says_where_the_end_is(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        assert append_at(writer, 0, b"a", b"b") == 0
        for wrong in (0, 1, 3):
            error = append_at(writer, wrong, b"x")
            assert isinstance(error, EndMovedError)
            assert error.end == 2
        assert append_at(writer, 2, b"c") == 2
    assert LogReader(tmp_path).offsets("t") == [(0, 3)]


def test_the_end_counts_what_the_same_group_appends_before(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        one, two, three = (PendingAppend(NAME, batch(b"x"), expected_end=end) for end in (0, 0, 1))
        writer.commit([one, two, three])
        assert (one.offset, three.offset) == (0, 1)
        assert isinstance(two.error, EndMovedError)


def test_of_many_threads_that_append_at_one_offset_one_succeeds(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer, ThreadPoolExecutor(8) as pool:
        writer.create_topic("t")
        for end in range(30):
            found = list(pool.map(lambda _, end=end: append_at(writer, end, b"x"), range(8)))
            assert sum(offset == end for offset in found) == 1
            assert sum(isinstance(one, EndMovedError) for one in found) == 7


def test_a_request_that_is_sent_again_finds_its_batch_though_the_end_has_moved(
    tmp_path: Path,
) -> None:
    stamped = stamp(batch(b"x"), ProducerStamp(9, 0, 0), transactional=False)
    request = append_request([(NAME, stamped)], "synced", [0])
    assert request.name == "append_at"
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        assert handle_request(writer, request) == [0]
        writer.append("t", 0, [batch(b"other")])
        assert handle_request(writer, replace(request, retry=True)) == [0]
        late = stamp(batch(b"y"), ProducerStamp(9, 0, 1), transactional=False)
        (refused,) = handle_request(writer, append_request([(NAME, late)], "synced", [1]))
        error = error_from_plain(refused)
        assert isinstance(error, EndMovedError)
        assert error.end == 2
        # the sequence was not used
        assert handle_request(writer, append_request([(NAME, late)], "synced", [2])) == [2]


@pytest.mark.parametrize("durability", ["written", "periodic"])
def test_what_is_written_and_not_yet_seen_counts(tmp_path: Path, durability) -> None:
    with LogWriter(tmp_path, background=False) as writer:
        writer.create_topic("t")
        writer.append("t", 0, [batch(b"x")], durability=durability)
        assert isinstance(append_at(writer, 0, b"y"), EndMovedError)
        assert LogReader(tmp_path).offsets("t") == [(0, 1)]  # it was synced with the refusal
        assert append_at(writer, 1, b"y") == 1


def test_an_append_for_a_topic_of_another_id_is_refused_also_through_the_owner(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path) as writer:
        old = writer.create_topic("t").topic_id
        writer.delete_topic("t")
        new = writer.create_topic("t").topic_id
        late = PendingAppend(NAME, batch(b"x"), expected_end=0, topic_id=old)
        writer.commit([late])
        assert isinstance(late.error, TopicRecreatedError)
        stamped = stamp(batch(b"x"), ProducerStamp(9, 0, 0), transactional=False)
        request = append_request([(NAME, stamped)], "synced", [0], [old])
        (refused,) = handle_request(writer, request)
        assert isinstance(error_from_plain(refused), TopicRecreatedError)
        with pytest.raises(TopicRecreatedError):
            handle_request(writer, excise_request(NAME, {0: b"y"}, old))
        assert handle_request(writer, append_request([(NAME, stamped)], "synced", [0], [new])) == [
            0
        ]
    assert LogReader(tmp_path).offsets("t") == [(0, 1)]
