"""Requests to the owner, their frames, and what the owner does with a retry."""

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
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.producer_identity import ProducerIdentity
from millstream.log.writer import LogWriter
from millstream.ownership.connection import connect_to_owner
from millstream.ownership.frames import (
    PeerGoneError,
    error_as_plain,
    error_from_plain,
    receive_frame,
    send_frame,
)
from millstream.ownership.requests import (
    OwnerRequest,
    append_request,
    decode_batches,
    handle_request,
)
from millstream.record import TopicPartition

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, MillstreamError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_keeps_its_class_message_and_attributes(kind: type[MillstreamError]) -> None:
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
        with pytest.raises(PeerGoneError, match="not JSON"):
            receive_frame(other)
        one.sendall(b"\0\0\0\3\0\0\0\0[1]")
        with pytest.raises(PeerGoneError, match="not an object"):
            receive_frame(other)
        one.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(PeerGoneError, match="none of ours"):
            receive_frame(other)
    one, other = socket.socketpair()
    with other:
        one.sendall(b"\0\0\0\4\0\0")
        one.close()
        with pytest.raises(PeerGoneError, match="ended"):
            receive_frame(other)


def append_of(values: list[bytes], sequence: int = 0) -> OwnerRequest:
    batch = encode_records([SimpleRecord(0, b"k", value) for value in values])
    stamped = stamp(batch, ProducerStamp(9, 0, sequence), transactional=False)
    return append_request([(TopicPartition("t", 0), stamped)], "synced")


def test_a_batch_that_is_damaged_in_transit_is_not_appended(tmp_path: Path) -> None:
    request = append_of([b"value"])
    with LogWriter(tmp_path) as writer:
        writer.create_topic("t")
        for at in range(len(request.payload)):
            bent = bytearray(request.payload)
            bent[at] ^= 1
            with pytest.raises(CorruptBatchError, match="nothing was appended"):
                handle_request(writer, replace(request, payload=bytes(bent)))
        with pytest.raises(CorruptBatchError):
            handle_request(writer, replace(request, payload=request.payload[:20]))
        assert handle_request(writer, request) == [0]
        assert handle_request(writer, replace(request, retry=True)) == [0]
        assert handle_request(writer, append_of([b"next"], sequence=1)) == [1]
    ((name, batch),) = decode_batches(request)
    assert (name, batch.count, batch.producer) == (TopicPartition("t", 0), 1, (9, 0, 0))


def test_an_unknown_request_is_refused_by_name(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer, pytest.raises(ConfigError, match="'dance'"):
        handle_request(writer, OwnerRequest("dance", {}))


class ClientProducer:
    """A producer of a client, from the owner's side."""

    def __init__(self, writer: LogWriter) -> None:
        self.writer = writer
        args = {"transactional_id": "x", "timeout_ms": 60_000}
        self.identity = ProducerIdentity(*handle_request(writer, OwnerRequest("register", args)))

    def begin(self) -> None:
        handle_request(self.writer, OwnerRequest("begin", {"identity": list(self.identity)}))

    def end(self, *, commit: bool, retry: bool, fence: int | None = None) -> ProducerIdentity:
        args = {
            "identity": list(self.identity),
            "commit": commit,
            "offsets": [],
            "fence": None if fence is None else ["w", fence],
            "transactional_id": "x",
            "timeout_ms": 60_000,
        }
        return ProducerIdentity(
            *handle_request(self.writer, OwnerRequest("end", args, retry=retry))
        )


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_whose_response_was_lost_has_the_same_result_when_retried(
    tmp_path: Path, commit: bool
) -> None:
    with LogWriter(tmp_path) as writer:
        one = ClientProducer(writer)
        one.begin()
        following = one.end(commit=commit, retry=False)
        assert one.end(commit=commit, retry=True) == following
        with pytest.raises(ProducerFencedError):
            one.end(commit=not commit, retry=True)  # it ended otherwise
        with pytest.raises(ProducerFencedError):
            one.end(commit=commit, retry=False)  # a first attempt is too late
        one.identity = following
        one.begin()


def test_a_producer_that_was_replaced_is_not_taken_for_the_one_that_replaced_it(
    tmp_path: Path,
) -> None:
    with LogWriter(tmp_path) as writer:
        one = ClientProducer(writer)
        one.begin()
        newer = ClientProducer(writer)
        for commit in (True, False):
            with pytest.raises(ProducerFencedError):
                one.end(commit=commit, retry=True)
        newer.begin()
        following = newer.end(commit=True, retry=False)
        newest = ClientProducer(writer)
        assert newer.end(commit=True, retry=True) == following  # it was committed, and is fenced
        assert newest.identity.producer_epoch > following.producer_epoch


def test_a_fence_that_the_lost_end_itself_has_set_does_not_refuse_its_retry(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as writer:
        one = ClientProducer(writer)
        one.begin()
        following = one.end(commit=True, retry=False, fence=3)
        assert one.end(commit=True, retry=True, fence=3) == following
        one.identity = following
        one.begin()
        with pytest.raises(FencePassedError):
            one.end(commit=True, retry=False, fence=3)
        with pytest.raises((ProducerFencedError, TransactionAbortedError)):
            one.end(commit=True, retry=True, fence=3)


def test_an_owner_that_does_not_greet_is_named(tmp_path: Path, owners) -> None:
    owner = owners.start(tmp_path)
    owners.stop(owner)
    with pytest.raises(FolderOwnedError, match=f"process {owner}, which has not responded"):
        connect_to_owner(tmp_path, 0.1)
    os.kill(owner, signal.SIGCONT)
    client = connect_to_owner(tmp_path)
    assert client is not None
    assert client.owner == owner
    client.close()
