"""Requests of members of share groups, one by one, and the state after a crash."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker.broker_process import AsProcess, InProcess
from broker.raw_client import RawClient, batch, create, produce, raw
from broker.share_member import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Member,
    acquired,
    configure,
    prepare,
    start_and_lag,
    until,
)

from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.protocol.wire import Message
from millstream.cli.main import run
from millstream.log.batch import ProducerStamp, stamp, walk
from millstream.log.encoding import SimpleRecord, encode_records


@pytest.fixture
def five(broker: InProcess) -> InProcess:
    prepare(broker.address, b"0", b"1", b"2", b"3", b"4")
    return broker


@pytest.fixture
def ann(five: InProcess) -> Iterator[Member]:
    with Member(five.address) as member:
        yield member


@pytest.fixture
def bob(five: InProcess) -> Iterator[Member]:
    with Member(five.address, "bob") as member:
        yield member


# -- acquiring and acknowledging --------------------------------------------------------------


def test_each_record_goes_to_one_member_and_is_redelivered_if_it_is_released(
    ann, bob, five
) -> None:
    assert ann.acquire(max_records=2) == [(0, 2, 1)]
    assert bob.acquire() == [(2, 5, 1)]
    assert ann.acquire((0, 1, ACCEPT), (1, 2, RELEASE)) == [(1, 2, 2)]
    assert bob.acknowledge((2, 5, ACCEPT)) == 0
    assert start_and_lag(five.address) == (1, 1)
    assert ann.acquire((1, 2, ACCEPT)) == []
    assert start_and_lag(five.address) == (5, 0)


def test_the_bytes_of_a_fetch_are_the_batches_of_what_was_acquired(ann, five) -> None:
    with RawClient(five.address) as client:
        client.request("Produce", 7, produce(batch(b"5", b"6")))
        client.request("Produce", 7, produce(batch(b"7")))
    assert ann.acquire(max_records=5) == [(0, 5, 1)]
    found = ann.fetch(max_records=1)
    assert acquired(found) == [(5, 6, 1)]
    assert [header.base_offset for _, header in walk(found["records"], 5)] == [5]
    assert ann.acquire(share_acquire_mode=0, max_records=1) == [(6, 7, 1)]
    assert ann.acquire((5, 7, REJECT), (0, 5, ACCEPT)) == [(7, 8, 1)]
    assert start_and_lag(five.address) == (7, 1)


def test_a_member_acknowledges_only_what_it_has_acquired(ann, bob) -> None:
    assert ann.acquire() == [(0, 5, 1)]
    assert bob.acquire() == []
    assert bob.acknowledge((0, 5, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
    assert ann.acknowledge((3, 7, ACCEPT)) == ErrorCode.INVALID_RECORD_STATE
    assert ann.acknowledge((0, 5, 9)) == ErrorCode.INVALID_REQUEST
    assert ann.acknowledge((0, 5, RENEW)) == ErrorCode.INVALID_REQUEST, (
        "not in a request that renews"
    )
    found = ann.fetch((4, 5, ACCEPT), (5, 6, ACCEPT))
    assert (found["acknowledge_error_code"], found["error_code"]) == (
        ErrorCode.INVALID_RECORD_STATE,
        0,
    )
    assert ann.acknowledge((0, 5, ACCEPT)) == 0
    assert ann.acknowledge((0, 5, ACCEPT)) == 0, "records that are done are skipped"


def test_acknowledge_types_are_one_for_each_record_or_one_for_all(ann, five) -> None:
    assert ann.acquire() == [(0, 5, 1)]
    kinds = [ACCEPT, RELEASE, RELEASE, REJECT, 0]
    one = {"first_offset": 0, "last_offset": 4, "acknowledge_types": kinds}
    topics = ann.topics(())
    topics[0]["partitions"][0]["acknowledgement_batches"] = [one]
    assert ann.acquire(topics=topics) == [(1, 3, 2)]
    one["acknowledge_types"] = kinds[:2]
    assert ann.acknowledge(topics=topics) == ErrorCode.INVALID_REQUEST


def test_a_fetch_waits_for_records_and_for_those_that_become_available_again(
    ann, bob, five
) -> None:
    assert ann.acquire() == [(0, 5, 1)]
    bob.send("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    assert ann.acknowledge((1, 2, RELEASE)) == 0
    assert acquired(bob.response()) == [(1, 2, 2)]
    bob.send("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    with RawClient(five.address) as client:
        client.request("Produce", 7, produce(batch(b"5")))
    assert acquired(bob.response()) == [(5, 6, 1)]


def test_records_in_flight_are_limited(ann, bob, five) -> None:
    configure(five.address, share_partition_max_record_locks=3)
    assert ann.acquire(share_acquire_mode=0) == [(0, 3, 1)]
    assert bob.acquire() == []
    assert ann.acknowledge((1, 2, ACCEPT)) == 0
    assert bob.acquire() == [(3, 4, 1)]


# -- members that leave -----------------------------------------------------------------------


def test_a_connection_that_ends_releases_what_its_member_has_acquired(ann, bob, five) -> None:
    assert ann.acquire() == [(0, 5, 1)]
    bob.send("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    ann.socket.close()
    assert acquired(bob.response())[0] == (0, 5, 2)


def test_a_session_that_ends_releases_what_its_member_has_acquired(ann, bob) -> None:
    assert ann.acquire(max_records=3) == [(0, 3, 1)]
    assert ann.acknowledge((0, 1, ACCEPT), share_session_epoch=-1) == 0
    assert bob.acquire() == [(1, 3, 2), (3, 5, 1)]
    ann.epoch = 2
    assert ann.fetch() == {"error": ErrorCode.SHARE_SESSION_NOT_FOUND}


def test_requests_of_a_session_have_consecutive_epochs(ann) -> None:
    assert ann.fetch(share_session_epoch=1) == {"error": ErrorCode.SHARE_SESSION_NOT_FOUND}
    assert ann.acknowledge(share_session_epoch=0) == ErrorCode.INVALID_SHARE_SESSION_EPOCH
    assert ann.acquire(share_session_epoch=0, max_records=1) == [(0, 1, 1)]
    assert ann.fetch(share_session_epoch=3) == {"error": ErrorCode.INVALID_SHARE_SESSION_EPOCH}
    assert ann.acquire(share_session_epoch=1, max_records=1) == [(1, 2, 1)]
    assert ann.fetch(share_session_epoch=1) == {"error": ErrorCode.INVALID_SHARE_SESSION_EPOCH}
    assert ann.acquire(share_session_epoch=0, max_records=1) == [(2, 3, 1)]
    assert ann.acknowledge((0, 3, ACCEPT)) == 0, "the member keeps what it has acquired"
    assert ann.acquire(topics=[], max_records=1) == [(3, 4, 1)], "the session knows what it fetches"
    gone = [{"topic_id": ann.topic_id, "partitions": [0]}]
    assert ann.acquire(topics=[], forgotten_topics_data=gone) == []
    assert ann.fetch(group_id="") == {"error": ErrorCode.INVALID_GROUP_ID}
    assert ann.fetch(member_id="") == {"error": ErrorCode.INVALID_REQUEST}


def test_members_join_and_leave_and_the_group_is_described(five) -> None:
    def heartbeat(
        client: RawClient, member: str, generation: int, topics: list | None = None
    ) -> Message:
        return client.request(
            "ShareGroupHeartbeat",
            1,
            {
                "group_id": "g",
                "member_id": member,
                "member_epoch": generation,
                "subscribed_topic_names": topics,
            },
        )

    with Member(five.address) as client:
        assert heartbeat(client, "ann", 3)["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID
        ann = heartbeat(client, "ann", 0, ["t", "not there"])
        topic = {"topic_id": client.topic_id, "partitions": [0]}
        assert ann["assignment"] == {"topic_partitions": [topic]}
        assert heartbeat(client, "bob", 0, ["t"])["assignment"] == {"topic_partitions": [topic]}
        assert heartbeat(client, "ann", 1)["assignment"] is None or ann["member_epoch"] == 1
        (seen,) = client.request("ShareGroupDescribe", 1, {"group_ids": ["g"]})["groups"]
        assert (seen["group_state"], len(seen["members"])) == ("Stable", 2)
        listed = client.request("ListGroups", 5, {"types_filter": ["Share"]})["groups"]
        assert listed == [
            {
                "group_id": "g",
                "protocol_type": "share",
                "group_state": "Stable",
                "group_type": "share",
            }
        ]
        (gone,) = client.request("DeleteGroups", 2, {"groups_names": ["g"]})["results"]
        assert gone["error_code"] == ErrorCode.NON_EMPTY_GROUP
        join = {"group_id": "g", "session_timeout_ms": 6000, "protocol_type": "consumer"}
        refused = client.request(
            "JoinGroup", 7, {**join, "protocols": [{"name": "range", "metadata": b""}]}
        )
        assert refused["error_code"] == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        for member in ("ann", "bob"):
            assert heartbeat(client, member, -1)["error_code"] == 0
        assert client.acquire(max_records=1) == [(0, 1, 1)]
        (seen, none) = client.request("ShareGroupDescribe", 1, {"group_ids": ["g", "h"]})["groups"]
        assert (seen["group_state"], none["error_code"]) == ("Empty", ErrorCode.GROUP_ID_NOT_FOUND)


def test_the_offsets_of_a_group_without_members_are_altered_or_deleted(ann, five) -> None:
    def ask(name: str, offset: int | None = None) -> Message:
        topic: Message = {"topic_name": "t"}
        if offset is not None:
            topic["partitions"] = [{"partition_index": 0, "start_offset": offset}]
        with RawClient(five.address) as client:
            return client.request(name, 0, {"group_id": "g", "topics": [topic]})

    assert ann.acquire() == [(0, 5, 1)]
    assert ann.acknowledge((1, 3, ACCEPT), share_session_epoch=-1) == 0
    assert start_and_lag(five.address) == (0, 3)
    assert ask("AlterShareGroupOffsets", 4)["responses"][0]["partitions"][0]["error_code"] == 0
    assert start_and_lag(five.address) == (4, 1)
    bad = ask("AlterShareGroupOffsets", 9)["responses"][0]["partitions"][0]
    assert bad["error_code"] == ErrorCode.OFFSET_OUT_OF_RANGE
    ann.epoch = 0
    assert ann.acquire() == [(4, 5, 1)]
    assert ask("DeleteShareGroupOffsets")["responses"][0]["error_code"] == 0
    assert ask("DeleteShareGroupOffsets")["error_code"] == ErrorCode.GROUP_ID_NOT_FOUND
    ann.epoch = 0
    assert ann.acquire() == [(0, 5, 1)], "it begins where its settings say"
    with RawClient(five.address) as client:
        assert (
            client.request("DeleteGroups", 2, {"groups_names": ["g"]})["results"][0]["error_code"]
            == 0
        )
        assert client.request("ListGroups", 5, {})["groups"] == []


# -- topics -----------------------------------------------------------------------------------


def test_a_recreated_topic_is_read_from_its_beginning(ann, five) -> None:
    assert ann.acquire() == [(0, 5, 1)]
    with RawClient(five.address) as client:
        client.request("DeleteTopics", 4, {"topic_names": ["t"]})
        assert ann.fetch((0, 5, ACCEPT))["acknowledge_error_code"] == ErrorCode.UNKNOWN_TOPIC_ID
        client.request("CreateTopics", 4, create())
        client.request("Produce", 7, produce(batch(b"new")))
    with Member(five.address, "eve") as eve:
        assert eve.acquire() == [(0, 1, 1)]


def test_records_removed_from_the_log_are_done(ann, bob, five) -> None:
    assert ann.acquire(max_records=4) == [(0, 4, 1)]
    with RawClient(five.address) as client:
        part = {"partition_index": 0, "offset": 3}
        client.request("DeleteRecords", 2, {"topics": [{"name": "t", "partitions": [part]}]})
    assert ann.acknowledge((0, 4, RELEASE)) == 0
    assert bob.acquire() == [(3, 4, 2), (4, 5, 1)]
    assert bob.acknowledge((3, 5, ACCEPT)) == 0
    assert start_and_lag(five.address) == (5, 0)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_open_transactions_are_waited_for_and_aborted_ones_are_not_delivered(
    broker, isolation
) -> None:
    prepare(broker.address, share_isolation_level=isolation)
    with RawClient(broker.address) as client, Member(broker.address) as ann:

        def transaction(sequence: int, *values: bytes) -> None:
            made = encode_records([SimpleRecord(0, None, value) for value in values])
            part = stamp(made, ProducerStamp(*identity, sequence), transactional=True)
            request = {**produce(raw(part)), "transactional_id": "x"}
            response = client.request("Produce", 7, request)
            assert response["responses"][0]["partition_responses"][0]["error_code"] == 0

        def end(*, committed: bool) -> None:
            request = {"transactional_id": "x", "committed": committed}
            producer = {"producer_id": identity[0], "producer_epoch": identity[1]}
            assert client.request("EndTxn", 1, {**request, **producer})["error_code"] == 0

        named = client.request(
            "InitProducerId", 1, {"transactional_id": "x", "transaction_timeout_ms": 60_000}
        )
        identity = (named["producer_id"], named["producer_epoch"])
        taking = {
            "v3_and_below_transactional_id": "x",
            "v3_and_below_producer_id": identity[0],
            "v3_and_below_producer_epoch": identity[1],
            "v3_and_below_topics": [{"name": "t", "partitions": [0]}],
        }
        client.request("AddPartitionsToTxn", 0, taking)
        transaction(0, b"0", b"1")  # marker: 2
        if isolation == "read_committed":
            assert ann.acquire() == []
        end(committed=False)
        client.request("AddPartitionsToTxn", 0, taking)
        transaction(2, b"3")  # marker: 4
        end(committed=True)
        client.request("Produce", 7, produce(batch(b"5")))
        mine = ann.acquire()
        if isolation == "read_committed":
            assert mine == [(3, 4, 1), (5, 6, 1)]
        else:
            assert mine == [(0, 2, 1), (3, 4, 1), (5, 6, 1)]
        assert ann.acknowledge(*((first, last, ACCEPT) for first, last, _ in mine)) == 0
        assert start_and_lag(broker.address) == (6, 0)
        client.request("AddPartitionsToTxn", 0, taking)
        transaction(3, b"6")
        end(committed=True)
        assert start_and_lag(broker.address) == (6, 1)
        assert ann.acquire() == [(6, 7, 1)]
        assert ann.acknowledge((6, 7, ACCEPT)) == 0
        assert start_and_lag(broker.address)[1] == 0, "the marker at the end is no record"


# -- crashes and disks ------------------------------------------------------------------------


def test_records_acknowledged_before_a_crash_are_not_redelivered(folder: Path) -> None:
    with AsProcess(folder) as broker:
        prepare(broker.address, *(b"%d" % number for number in range(6)))
        with Member(broker.address) as ann:
            assert ann.acquire() == [(0, 6, 1)]
            acknowledgements = ((0, 1, ACCEPT), (2, 3, ACCEPT), (4, 5, REJECT), (5, 6, RELEASE))
            assert ann.acknowledge(*acknowledgements) == 0
        broker.kill()
    with AsProcess(folder) as broker, Member(broker.address) as ann:
        assert ann.acquire() == [(1, 2, 2), (3, 4, 2), (5, 6, 2)]


def test_without_disk_space_nothing_is_delivered_or_acknowledged(ann, five) -> None:
    control = five._writer.control
    assert ann.acquire(max_records=1) == [(0, 1, 1)]

    def full() -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    control._before_commit = full
    assert ann.acknowledge((0, 1, ACCEPT)) == ErrorCode.KAFKA_STORAGE_ERROR
    for _ in range(7):
        assert ann.fetch()["error_code"] == ErrorCode.KAFKA_STORAGE_ERROR
    control._before_commit = lambda: None
    assert ann.acquire() == [(1, 5, 1)], "deliveries that were not made do not count"


def test_many_members_fetch_and_die_at_once_and_every_record_is_processed(five) -> None:
    values = [b"%d" % number for number in range(300)]
    with RawClient(five.address) as client:
        for at in range(0, 300, 7):
            client.request("Produce", 7, produce(batch(*values[at : at + 7])))
    done: list[int] = []

    def live(name: str, dies: bool) -> None:
        while not done or start_and_lag(five.address)[1]:
            with Member(five.address, name) as member:
                for _ in range(4):
                    found = member.acquire(max_records=9, max_wait_ms=50)
                    if dies and found:
                        break  # with acquired records
                    acknowledgements = [(first, end, ACCEPT) for first, end, _ in found]
                    if acknowledgements and member.acknowledge(*acknowledgements) == 0:
                        done.extend(at for first, end, _ in found for at in range(first, end))

    configure(five.address, share_delivery_count_limit=100)
    threads = [threading.Thread(target=live, args=(f"m{one}", one == 0)) for one in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(done) == list(range(305))


# -- the command ------------------------------------------------------------------------------


def test_the_command_shows_members_progress_and_what_is_in_flight(
    ann, five, folder, capsys
) -> None:
    def output(*words: str, code: int = 0) -> str:
        assert run(["group", *words, "--log", str(folder)]) == code
        out, errors = capsys.readouterr()
        return out + errors

    join = {
        "group_id": "g",
        "member_id": "ann",
        "member_epoch": 0,
        "subscribed_topic_names": ["t"],
    }
    assert ann.request("ShareGroupHeartbeat", 1, join)["error_code"] == 0
    assert ann.acquire() == [(0, 5, 1)]
    assert ann.acknowledge((0, 1, ACCEPT), (2, 3, ACCEPT), (3, 4, RELEASE)) == 0
    assert ann.acquire() == [(3, 4, 2)]
    (listed,) = json.loads(output("list", "--json"))
    assert (listed["group"], listed["behind"]) == ("g", 3)
    until(lambda: "t/0" in output("describe", "g"))
    seen = json.loads(output("describe", "g", "--json"))
    assert seen["state"] == "Stable"
    assert seen["members"][0]["assignment"] == {"t": [0]}
    (one,) = seen["partitions"]
    assert (one["start_offset"], one["end_offset"], one["behind"]) == (1, 5, 3)
    assert (one["in_flight"], one["delivery_count_max"], one["undeliverable"]) == (3, 2, 0)
    assert "share group, 1 member" in output("list")
    assert "share group g: Stable" in output("describe", "g")
    assert "kafka-share-groups.sh" in output("delete", "g", "--yes", code=2)
