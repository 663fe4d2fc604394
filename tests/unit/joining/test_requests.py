"""What a guest asks, how it travels, and what the owner does when it comes a second time."""

from __future__ import annotations

import inspect
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from millstream import errors
from millstream.errors import (
    ConfigError,
    CorruptBatchError,
    FencePassedError,
    FolderOwnedError,
    MillstreamError,
    ProducerFencedError,
    TransactionAbortedError,
)
from millstream.joining.frames import (
    OwnerGone,
    error_as_plain,
    error_from_plain,
    receive_frame,
    send_frame,
)
from millstream.joining.guest import dial
from millstream.joining.requests import Asked, answer, append_question, arrived
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.encoding import Row, encode_rows
from millstream.log.named_producers import ProducerIdentity
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, MillstreamError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_arrives_as_what_it_was(kind: type[MillstreamError]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "why")
    error.__dict__["batch_id"] = 7
    found = error_from_plain(error_as_plain(error))
    assert (type(found), str(found), vars(found)) == (kind, "why", {"batch_id": 7})


def test_an_error_of_another_version_is_the_root_of_all() -> None:
    for name in ("NoSuchError", "annotations"):
        found = error_from_plain({"kind": name, "message": "why", "attributes": {}})
        assert (type(found), str(found)) == (MillstreamError, "why")


def test_frames_keep_their_bytes_and_what_is_no_frame_ends_the_connection() -> None:
    one, other = socket.socketpair()
    with one, other:
        send_frame(one, {"a": [1, "é"]}, b"\0" * 100_000)
        assert receive_frame(other) == ({"a": [1, "é"]}, b"\0" * 100_000)
        one.sendall(b"\0\0\0\4\0\0\0\0[1]x")
        with pytest.raises(OwnerGone, match="not JSON"):
            receive_frame(other)
        one.sendall(b"\0\0\0\3\0\0\0\0[1]")
        with pytest.raises(OwnerGone, match="not an object"):
            receive_frame(other)
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(OwnerGone, match="none of ours"):
            receive_frame(other)
    one, other = socket.socketpair()
    with other:
        one.sendall(b"\0\0\0\4\0\0")
        one.close()
        with pytest.raises(OwnerGone, match="ended"):
            receive_frame(other)


def question(values: list[bytes], sequence: int = 0) -> Asked:
    batch = encode_rows([Row(0, b"k", value) for value in values])
    stamped = stamp(batch, ProducerStamp(9, 0, sequence), transactional=False)
    return append_question([(TopicPartition("t", 0), stamped)], "synced")


def test_a_batch_that_is_damaged_on_its_way_is_not_appended(tmp_path: Path) -> None:
    asked = question([b"value"])
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        for at in range(len(asked.payload)):
            bent = bytearray(asked.payload)
            bent[at] ^= 1
            with pytest.raises(CorruptBatchError, match="nothing was appended"):
                answer(writer, replace(asked, payload=bytes(bent)))
        with pytest.raises(CorruptBatchError):
            answer(writer, replace(asked, payload=asked.payload[:20]))
        assert answer(writer, asked) == [0]
        assert answer(writer, replace(asked, again=True)) == [0]
        assert answer(writer, question([b"next"], sequence=1)) == [1]
    ((name, batch),) = arrived(asked)
    assert (name, batch.count, batch.producer) == (TopicPartition("t", 0), 1, (9, 0, 0))


def test_what_cannot_be_asked_is_said_by_name(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer, pytest.raises(ConfigError, match="'dance'"):
        answer(writer, Asked("dance", {}))


class Producing:
    """A guest's producer, as the owner sees it."""

    def __init__(self, writer: LogWriter) -> None:
        self.writer = writer
        args = {"transactional_id": "x", "timeout_ms": 60_000}
        self.identity = ProducerIdentity(*answer(writer, Asked("register", args)))

    def begin(self) -> None:
        answer(self.writer, Asked("begin", {"identity": list(self.identity)}))

    def end(self, *, commit: bool, again: bool, fence: int | None = None) -> ProducerIdentity:
        args = {
            "identity": list(self.identity),
            "commit": commit,
            "offsets": [],
            "fence": None if fence is None else ["w", fence],
            "transactional_id": "x",
            "timeout_ms": 60_000,
        }
        return ProducerIdentity(*answer(self.writer, Asked("end", args, again=again)))


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_whose_answer_was_lost_is_told_again(tmp_path: Path, commit: bool) -> None:
    with LogWriter(tmp_path) as writer:
        one = Producing(writer)
        one.begin()
        following = one.end(commit=commit, again=False)
        assert one.end(commit=commit, again=True) == following
        with pytest.raises(ProducerFencedError):
            one.end(commit=not commit, again=True)  # it ended otherwise
        with pytest.raises(ProducerFencedError):
            one.end(commit=commit, again=False)  # who asks for the first time comes too late
        one.identity = following
        one.begin()


def test_a_producer_that_was_replaced_is_not_taken_for_the_one_that_replaced_it(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path) as writer:
        one = Producing(writer)
        one.begin()
        newer = Producing(writer)
        for commit in (True, False):
            with pytest.raises(ProducerFencedError):
                one.end(commit=commit, again=True)
        newer.begin()
        following = newer.end(commit=True, again=False)
        newest = Producing(writer)
        assert newer.end(commit=True, again=True) == following  # it was committed, and is fenced
        assert newest.identity.producer_epoch > following.producer_epoch


def test_a_fence_that_the_lost_end_has_passed_itself_does_not_refuse_it(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        one = Producing(writer)
        one.begin()
        following = one.end(commit=True, again=False, fence=3)
        assert one.end(commit=True, again=True, fence=3) == following
        one.identity = following
        one.begin()
        with pytest.raises(FencePassedError):
            one.end(commit=True, again=False, fence=3)
        with pytest.raises((ProducerFencedError, TransactionAbortedError)):
            one.end(commit=True, again=True, fence=3)


def test_an_owner_that_does_not_greet_is_named(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path)
    owners.stop(owner)
    with pytest.raises(FolderOwnedError, match=f"process {owner}, which has not answered"):
        dial(tmp_path, 0.1)
    os.kill(owner, signal.SIGCONT)
    guest = dial(tmp_path)
    assert guest is not None
    assert guest.owner == owner
    guest.close()
