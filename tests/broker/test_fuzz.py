"""Malformed frames and batches from seeds; `broker/fuzz.py` runs as many of them as are wanted.

What was found once is kept here, with what it did.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from broker.fuzz import (
    PEER,
    Outcome,
    by_sockets,
    handle_frames,
    read,
    read_frames,
    rss_mib,
    take,
    take_batches,
)
from broker.fuzz_inputs import APIS, Frames, stream
from broker.raw_client import RawClient, batch, create, produce, raw

from millstream.broker.call import Call
from millstream.broker.dispatch import handle_request
from millstream.broker.node import BrokerNode
from millstream.broker.protocol import messages_transactions
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.settings import BrokerSettings
from millstream.errors import CorruptBatchError
from millstream.log.batch import finish
from millstream.log.compression import COMPRESSIONS, decompress
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.writer import LogWriter


@pytest.fixture(scope="module")
def frames() -> Frames:
    return Frames(seed=11)


def test_every_frame_is_read_or_refused(frames) -> None:
    outcome = Outcome()
    read_frames(frames, range(15_000), outcome)
    assert outcome.found == []
    assert min(outcome.counts[one] for one in ("read", "MalformedError", "UnknownRequestError")) > 0


def test_valid_requests_of_every_api_and_version_are_among_them(frames) -> None:
    read_well = {
        (api.key, version)
        for api, version, pieces in frames.requests
        if not isinstance(read(b"".join(piece.data for piece in pieces)), str)
    }
    assert read_well == {
        (api.key, version)
        for api in APIS
        for version in range(api.versions[0], api.versions[1] + 1)
    }


def test_every_batch_is_refused_or_can_be_read_by_everybody(frames) -> None:
    outcome = Outcome()
    take_batches(frames, range(5_000), outcome)
    assert outcome.found == []
    assert outcome.counts["taken"] > 100
    assert outcome.counts["INVALID_RECORD"] > 1000


def test_what_can_be_decoded_gets_a_response(frames, tmp_path: Path) -> None:
    outcome = Outcome()
    asyncio.run(handle_frames(frames, range(2_000), outcome, tmp_path / "log"))
    assert outcome.found == []
    assert len(outcome.counts) > 25


def test_a_frame_is_always_the_same() -> None:
    one, other = Frames(seed=3), Frames(seed=3)
    assert one.frame(1) != one.frame(2)
    assert [one.frame(n) for n in (7, 100)] == [other.frame(n) for n in (7, 100)]
    assert b"".join(stream(one, 0, 20)) == b"".join(stream(other, 0, 20))


def test_a_good_client_is_served_beside_malformed_streams(frames, tmp_path: Path) -> None:
    outcome = Outcome()
    by_sockets(frames, 3.0, tmp_path, outcome)
    assert outcome.found == []
    assert outcome.counts["connections closed by the broker"] > 0


# -- found ------------------------------------------------------------------------------------


def late(count: int, base_ms: int) -> bytes:
    """Return a batch whose timestamps add up to more than 64 bits."""
    rows = [SimpleRecord(1000 * number, b"k", b"v") for number in range(count)]
    last_ms = 1000 * (count - 1)
    made = finish(encode_records(rows).tail[44:], records=count, timestamps_ms=(base_ms, last_ms))
    return raw(made)


@pytest.mark.parametrize("count", [2, 100])
def test_timestamps_beyond_64_bits_are_refused_and_no_other_batch_with_them(broker, count) -> None:
    """One that could not be packed was the failure of all that were appended with it."""
    wrong = late(count, (1 << 63) - 1)
    assert take(wrong) == "INVALID_RECORD"
    assert take(late(count, (1 << 63) - 1 - 1000 * (count - 1))) == "taken"
    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create(partitions=2))
        response = client.request("Produce", 8, produce(wrong, batch(b"good")))
        (topic,) = response["responses"]
        codes = [one["error_code"] for one in topic["partition_responses"]]
        assert codes == [ErrorCode.INVALID_RECORD, ErrorCode.NONE]


def test_a_defect_that_one_batch_brings_to_light_is_its_own_failure(
    broker, monkeypatch, caplog
) -> None:
    import millstream.broker.records.appender as appender

    good = appender.validate_batch

    def validate(data: bytes, *limits: object) -> object:
        if b"defect" in data:
            raise ZeroDivisionError
        return good(data, *limits)

    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create(partitions=2))
        monkeypatch.setattr(appender, "validate_batch", validate)
        response = client.request("Produce", 8, produce(batch(b"defect"), batch(b"good")))
        (topic,) = response["responses"]
        codes = [one["error_code"] for one in topic["partition_responses"]]
        assert codes == [ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.NONE]
    assert "could not be validated" in caplog.text


@pytest.mark.parametrize("name", ["gzip", "lz4", "zstd"])
def test_what_cannot_be_decompressed_leaves_nothing_in_memory(name) -> None:
    """pyarrow kept what it had allocated for each, which was 64 KiB and could be a hundred MiB."""
    packed = random.Random(1).randbytes(200)
    code = COMPRESSIONS.index(name)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(CorruptBatchError):
                decompress(packed, code)

    fail(100)
    before = rss_mib()
    fail(1000)
    assert rss_mib() - before < 3


def test_who_names_any_number_of_producers_fills_no_memory(tmp_path: Path) -> None:
    async def ask() -> int:
        with LogWriter(tmp_path / "log") as writer:
            node = BrokerNode(writer, BrokerSettings(), on_failure=print)
            node.start()
            try:
                for number in range(20_000):
                    request = {"transactional_id": "x", "producer_id": number, "producer_epoch": 0}
                    call = Call(messages_transactions.ADD_OFFSETS_TO_TXN, 3, 1, "", request, *PEER)
                    request["group_id"] = "g"
                    if number % 1000 == 0:
                        await handle_request(node, call)
                    else:
                        is_held_up(node, call)
                return len(node.producer_connections)
            finally:
                await asyncio.to_thread(node.close)

    from millstream.broker.requests.transactions import _is_stale_connection as is_held_up

    assert asyncio.run(ask()) == 10_000
