"""Transactions request by request: what is sent twice, too late, by the wrong one, or on an old connection."""

from __future__ import annotations

import pytest
from broker.broker_process import InProcess
from broker.raw_client import RawClient, create, fetch, fetched, only, produce, produced, raw

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.errors import DiskFullError
from millstream.log.batch import ProducerStamp, stamp
from millstream.log.control import ControlDb
from millstream.log.encoding import SimpleRecord, encode_records


@pytest.fixture
def raw_client(broker: InProcess):
    with RawClient(broker.address) as client:
        client.request("CreateTopics", 4, create())
        yield client


class Producer:
    """A transactional producer, one request at a time."""

    def __init__(self, raw_client: RawClient, name: str = "x", **resumes: int) -> None:
        self.raw_client, self.name, self.sequence = raw_client, name, 0
        request = {"transactional_id": name, "transaction_timeout_ms": 60_000, **resumes}
        response = raw_client.request("InitProducerId", 4, request)
        self.code = response["error_code"]
        self.producer_id, self.producer_epoch = response["producer_id"], response["producer_epoch"]

    def who(self, prefix: str = "") -> Message:
        return {
            f"{prefix}transactional_id": self.name,
            f"{prefix}producer_id": self.producer_id,
            f"{prefix}producer_epoch": self.producer_epoch,
        }

    def add(self, *partitions: int, topic: str = "t", version: int = 3) -> list[int]:
        topics = [{"name": topic, "partitions": list(partitions)}]
        request = {**self.who("v3_and_below_"), "v3_and_below_topics": topics}
        response = self.raw_client.request("AddPartitionsToTxn", version, request)
        (found,) = response["results_by_topic_v3_and_below"]
        return [one["partition_error_code"] for one in found["results_by_partition"]]

    def send(self, value: bytes) -> int:
        made = encode_records([SimpleRecord(0, b"k", value)])
        sent = ProducerStamp(self.producer_id, self.producer_epoch, self.sequence)
        data = raw(stamp(made, sent, transactional=True))
        code = produced(self.raw_client.request("Produce", 7, produce(data)))["error_code"]
        self.sequence += not code
        return code

    def end(self, *, commit: bool, version: int = 3, raw_client: RawClient | None = None) -> int:
        request = {**self.who(), "committed": commit}
        return (raw_client or self.raw_client).request("EndTxn", version, request)["error_code"]

    def commit_offset(self, offset: int, **member: object) -> int:
        partitions = [{"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}]
        topics = [{"name": "t", "partitions": partitions}]
        request = {**self.who(), "group_id": "g", "topics": topics, "generation_id": -1, **member}
        response = self.raw_client.request("TxnOffsetCommit", 3, request)
        return only(response, "topics", "partitions")["error_code"]


def stable_end(raw_client: RawClient) -> int:
    return fetched(raw_client.request("Fetch", 11, fetch(0, isolation_level=1)))[
        "last_stable_offset"
    ]


def test_an_end_that_is_asked_for_again_is_answered_as_before(raw_client) -> None:
    made = Producer(raw_client)
    assert made.end(commit=True) == ErrorCode.INVALID_TXN_STATE  # there was none
    for commit in (True, False):
        assert made.add(0) == [0]
        assert made.send(b"v") == 0
        assert [made.end(commit=commit) for _ in range(2)] == [0, 0]
        assert made.end(commit=not commit) == ErrorCode.INVALID_TXN_STATE


def test_an_end_that_was_held_up_does_not_end_the_next_transaction(broker, raw_client) -> None:
    """The producer gave its connection up, sent the end again on another, and went on."""
    made = Producer(raw_client)
    with RawClient(broker.address) as later:
        made.add(0)
        made.send(b"first")
        assert made.end(commit=True, raw_client=later) == 0
        old, made.raw_client = made.raw_client, later
        made.add(0)
        made.send(b"second")
        assert made.end(commit=True, raw_client=old) == ErrorCode.NOT_COORDINATOR
        assert stable_end(later) == 2  # the first and its marker: the second is open
        assert made.end(commit=False) == 0


def test_a_later_connection_of_the_one_who_was_replaced_holds_nothing_up(
    broker, raw_client
) -> None:
    """A producer that was cut off looks for its broker again, after the next one has begun."""
    old = Producer(raw_client)
    new = Producer(raw_client)
    assert new.add(0) == [0]
    with RawClient(broker.address) as later:
        assert old.end(commit=False, raw_client=later) == ErrorCode.PRODUCER_FENCED
    assert new.send(b"v") == 0
    assert new.end(commit=True) == 0


def test_records_outside_of_a_transaction_are_refused(raw_client) -> None:
    made = Producer(raw_client)
    assert made.send(b"early") == ErrorCode.INVALID_TXN_STATE
    made.add(0)
    assert made.send(b"in time") == 0
    made.end(commit=True)
    assert made.send(b"late") == ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize(
    ("version", "code"), [(0, ErrorCode.INVALID_PRODUCER_EPOCH), (3, ErrorCode.PRODUCER_FENCED)]
)
def test_who_was_replaced_is_told_so_in_every_answer(raw_client, version, code) -> None:
    old = Producer(raw_client)
    old.add(0)
    old.send(b"zombie")
    new = Producer(raw_client)
    # One for the life that ends, one for the end of the transaction that was taken back with it.
    assert (new.producer_id, new.producer_epoch) == (old.producer_id, old.producer_epoch + 2)
    assert old.add(0, version=version) == [code]
    assert old.end(commit=True, version=version) == code
    assert old.send(b"zombie") == ErrorCode.INVALID_PRODUCER_EPOCH
    assert old.commit_offset(1) == ErrorCode.INVALID_PRODUCER_EPOCH
    identity = {"producer_id": old.producer_id, "producer_epoch": old.producer_epoch}
    assert Producer(raw_client, **identity).code == ErrorCode.PRODUCER_FENCED
    assert stable_end(raw_client) == 2  # what it left open was taken back


def test_a_name_belongs_to_one_producer(raw_client) -> None:
    made = Producer(raw_client)
    stranger = Producer(raw_client, "y")
    stranger.name = "x"
    assert stranger.add(0) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    assert stranger.end(commit=True) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert stranger.commit_offset(1) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    made.name = "nobody"
    assert made.add(0) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]


def test_partitions_are_added_all_or_none(raw_client) -> None:
    made = Producer(raw_client)
    assert made.add(0, 7) == [
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert made.send(b"v") == ErrorCode.INVALID_TXN_STATE
    assert made.add(0) == [0]


def test_a_next_life_of_which_a_producer_was_not_told_is_told_again(broker, raw_client) -> None:
    made = Producer(raw_client)
    made.add(0)
    made.send(b"taken back")
    identity = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}
    with RawClient(broker.address) as later:
        first, again = Producer(raw_client, **identity), Producer(later, **identity)
    assert (first.code, again.code) == (0, 0)
    assert again.who() == first.who() != made.who()


def test_while_the_disk_is_full_a_coordinator_is_to_be_asked_again(raw_client, monkeypatch) -> None:
    made = Producer(raw_client)
    made.add(0)
    made.send(b"v")

    def full(*_: object, **__: object) -> object:
        raise DiskFullError("no room")

    offsets = {"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}]}
    of_group = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": [offsets]}
    with monkeypatch.context() as patch:
        patch.setattr(ControlDb, "commit", full)
        codes = [
            made.end(commit=True),
            made.end(commit=False),
            Producer(raw_client, "y").code,
            made.commit_offset(1),
            *Producer.add(made, 0),
            only(raw_client.request("OffsetCommit", 8, of_group), "topics", "partitions")[
                "error_code"
            ],
            only(raw_client.request("DeleteGroups", 2, {"groups_names": ["g"]}), "results")[
                "error_code"
            ],
        ]
    assert codes == [*[ErrorCode.COORDINATOR_NOT_AVAILABLE] * 4, 0, *codes[-2:]]
    assert codes[-2:] == [ErrorCode.COORDINATOR_NOT_AVAILABLE] * 2
    assert made.end(commit=True) == 0


@pytest.mark.parametrize("timeout_ms", [0, -1, 15 * 60_000 + 1])
def test_a_timeout_that_cannot_be_is_refused(raw_client, timeout_ms) -> None:
    request = {"transactional_id": "x", "transaction_timeout_ms": timeout_ms}
    response = raw_client.request("InitProducerId", 4, request)
    assert (response["error_code"], response["producer_id"]) == (
        ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        -1,
    )


def test_offsets_of_an_open_transaction_are_not_stable(raw_client) -> None:
    made = Producer(raw_client)
    assert made.commit_offset(3) == ErrorCode.INVALID_TXN_STATE
    request = {**made.who(), "group_id": "g"}
    assert raw_client.request("AddOffsetsToTxn", 3, request)["error_code"] == 0
    assert made.commit_offset(3) == 0
    topics = [{"name": "t", "partition_indexes": [0]}]

    def committed(*, stable: bool) -> tuple[int, int]:
        asked = {"groups": [{"group_id": "g", "topics": topics}], "require_stable": stable}
        found = only(raw_client.request("OffsetFetch", 8, asked), "groups", "topics", "partitions")
        return found["error_code"], found["committed_offset"]

    assert committed(stable=True) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert committed(stable=False) == (0, -1)
    assert made.end(commit=True) == 0
    assert committed(stable=True) == committed(stable=False) == (0, 3)


def test_a_stale_member_commits_nothing_by_a_transaction_either(raw_client) -> None:
    made = Producer(raw_client)
    made.add(0)
    stale = {"generation_id": 4, "member_id": "gone", "group_instance_id": None}
    assert made.commit_offset(3, **stale) == ErrorCode.ILLEGAL_GENERATION


def test_transactions_are_described_and_listed(raw_client) -> None:
    made = Producer(raw_client)
    Producer(raw_client, "idle")
    made.add(0)
    made.send(b"v")
    request = {"transactional_ids": ["x", "nope"]}
    found, missing = raw_client.request("DescribeTransactions", 0, request)["transaction_states"]
    assert missing["error_code"] == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    assert (found["transaction_state"], found["producer_id"]) == ("Ongoing", made.producer_id)
    assert found["topics"] == [{"topic": "t", "partitions": [0]}]
    assert found["transaction_timeout_ms"] == 60_000

    def listed(**filters: object) -> dict[str, str]:
        response = raw_client.request("ListTransactions", 1, filters)
        return {
            one["transactional_id"]: one["transaction_state"]
            for one in response["transaction_states"]
        }

    assert listed() == {"idle": "Empty", "x": "Ongoing"}
    assert listed(state_filters=["Ongoing"]) == {"x": "Ongoing"}
    assert listed(duration_filter=3_600_000) == {}
    made.end(commit=False)
    assert listed(producer_id_filters=[made.producer_id]) == {"x": "CompleteAbort"}
    response = raw_client.request("ListTransactions", 0, {"state_filters": ["Sleeping"]})
    assert response["unknown_state_filters"] == ["Sleeping"]
