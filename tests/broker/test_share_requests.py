"""What members of share groups are answered, request by request, and what is left after a crash."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker.asking import Asking, batch, create, produce, raw
from broker.running import AsProcess, InProcess
from broker.sharing import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Member,
    configure,
    given,
    prepare,
    until,
    where,
)

from millstream.broker.codes import Code
from millstream.broker.wire import Message
from millstream.cli.main import run
from millstream.log.batch import ProducerStamp, stamp, walk
from millstream.log.encoding import Row, encode_rows


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


# -- giving and taking ------------------------------------------------------------------------


def test_each_record_goes_to_one_member_and_comes_again_if_it_is_released(ann, bob, five) -> None:
    assert ann.given(max_records=2) == [(0, 2, 1)]
    assert bob.given() == [(2, 5, 1)]
    assert ann.given((0, 1, ACCEPT), (1, 2, RELEASE)) == [(1, 2, 2)]
    assert bob.acknowledge((2, 5, ACCEPT)) == 0
    assert where(five.address) == (1, 1)
    assert ann.given((1, 2, ACCEPT)) == []
    assert where(five.address) == (5, 0)


def test_the_bytes_of_a_fetch_are_the_batches_of_what_was_acquired(ann, five) -> None:
    with Asking(five.address) as client:
        client.ask("Produce", 7, produce(batch(b"5", b"6")))
        client.ask("Produce", 7, produce(batch(b"7")))
    assert ann.given(max_records=5) == [(0, 5, 1)]
    found = ann.fetch(max_records=1)
    assert given(found) == [(5, 6, 1)]
    assert [header.base_offset for _, header in walk(found["records"], 5)] == [5]
    assert ann.given(share_acquire_mode=0, max_records=1) == [(6, 7, 1)]
    assert ann.given((5, 7, REJECT), (0, 5, ACCEPT)) == [(7, 8, 1)]
    assert where(five.address) == (7, 1)


def test_a_member_speaks_only_of_what_it_has(ann, bob) -> None:
    assert ann.given() == [(0, 5, 1)]
    assert bob.given() == []
    assert bob.acknowledge((0, 5, ACCEPT)) == Code.INVALID_RECORD_STATE
    assert ann.acknowledge((3, 7, ACCEPT)) == Code.INVALID_RECORD_STATE
    assert ann.acknowledge((0, 5, 9)) == Code.INVALID_REQUEST
    assert ann.acknowledge((0, 5, RENEW)) == Code.INVALID_REQUEST, "not in a request that renews"
    found = ann.fetch((4, 5, ACCEPT), (5, 6, ACCEPT))
    assert (found["acknowledge_error_code"], found["error_code"]) == (Code.INVALID_RECORD_STATE, 0)
    assert ann.acknowledge((0, 5, ACCEPT)) == 0
    assert ann.acknowledge((0, 5, ACCEPT)) == 0, "what is done with is passed over"


def test_verdicts_are_given_one_by_one_or_for_all(ann, five) -> None:
    assert ann.given() == [(0, 5, 1)]
    kinds = [ACCEPT, RELEASE, RELEASE, REJECT, 0]
    one = {"first_offset": 0, "last_offset": 4, "acknowledge_types": kinds}
    topics = ann.topics(())
    topics[0]["partitions"][0]["acknowledgement_batches"] = [one]
    assert ann.given(topics=topics) == [(1, 3, 2)]
    one["acknowledge_types"] = kinds[:2]
    assert ann.acknowledge(topics=topics) == Code.INVALID_REQUEST


def test_a_fetch_waits_for_records_and_for_those_that_become_available_again(
    ann, bob, five
) -> None:
    assert ann.given() == [(0, 5, 1)]
    bob.say("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    assert ann.acknowledge((1, 2, RELEASE)) == 0
    assert given(bob.heard()) == [(1, 2, 2)]
    bob.say("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    with Asking(five.address) as client:
        client.ask("Produce", 7, produce(batch(b"5")))
    assert given(bob.heard()) == [(5, 6, 1)]


def test_no_more_than_so_many_records_are_in_flight(ann, bob, five) -> None:
    configure(five.address, share_partition_max_record_locks=3)
    assert ann.given(share_acquire_mode=0) == [(0, 3, 1)]
    assert bob.given() == []
    assert ann.acknowledge((1, 2, ACCEPT)) == 0
    assert bob.given() == [(3, 4, 1)]


# -- members that go --------------------------------------------------------------------------


def test_a_connection_that_ends_gives_back_what_its_member_had(ann, bob, five) -> None:
    assert ann.given() == [(0, 5, 1)]
    bob.say("ShareFetch", 2, bob.fetching(max_wait_ms=20_000))
    ann.socket.close()
    assert given(bob.heard())[0] == (0, 5, 2)


def test_a_session_that_ends_gives_back_what_its_member_had(ann, bob) -> None:
    assert ann.given(max_records=3) == [(0, 3, 1)]
    assert ann.acknowledge((0, 1, ACCEPT), share_session_epoch=-1) == 0
    assert bob.given() == [(1, 3, 2), (3, 5, 1)]
    ann.turn = 2
    assert ann.fetch() == {"error": Code.SHARE_SESSION_NOT_FOUND}


def test_a_session_goes_turn_by_turn(ann) -> None:
    assert ann.fetch(share_session_epoch=1) == {"error": Code.SHARE_SESSION_NOT_FOUND}
    assert ann.acknowledge(share_session_epoch=0) == Code.INVALID_SHARE_SESSION_EPOCH
    assert ann.given(share_session_epoch=0, max_records=1) == [(0, 1, 1)]
    assert ann.fetch(share_session_epoch=3) == {"error": Code.INVALID_SHARE_SESSION_EPOCH}
    assert ann.given(share_session_epoch=1, max_records=1) == [(1, 2, 1)]
    assert ann.fetch(share_session_epoch=1) == {"error": Code.INVALID_SHARE_SESSION_EPOCH}
    assert ann.given(share_session_epoch=0, max_records=1) == [(2, 3, 1)]
    assert ann.acknowledge((0, 3, ACCEPT)) == 0, "what it had before is its own"
    assert ann.given(topics=[], max_records=1) == [(3, 4, 1)], "the session knows what it fetches"
    gone = [{"topic_id": ann.topic_id, "partitions": [0]}]
    assert ann.given(topics=[], forgotten_topics_data=gone) == []
    assert ann.fetch(group_id="") == {"error": Code.INVALID_GROUP_ID}
    assert ann.fetch(member_id="") == {"error": Code.INVALID_REQUEST}


def test_members_come_and_go_and_the_group_is_seen(five) -> None:
    def beat(client: Asking, member: str, generation: int, topics: list | None = None) -> Message:
        return client.ask(
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
        assert beat(client, "ann", 3)["error_code"] == Code.UNKNOWN_MEMBER_ID
        ann = beat(client, "ann", 0, ["t", "not there"])
        topic = {"topic_id": client.topic_id, "partitions": [0]}
        assert ann["assignment"] == {"topic_partitions": [topic]}
        assert beat(client, "bob", 0, ["t"])["assignment"] == {"topic_partitions": [topic]}
        assert beat(client, "ann", 1)["assignment"] is None or ann["member_epoch"] == 1
        (seen,) = client.ask("ShareGroupDescribe", 1, {"group_ids": ["g"]})["groups"]
        assert (seen["group_state"], len(seen["members"])) == ("Stable", 2)
        listed = client.ask("ListGroups", 5, {"types_filter": ["Share"]})["groups"]
        assert listed == [
            {
                "group_id": "g",
                "protocol_type": "share",
                "group_state": "Stable",
                "group_type": "share",
            }
        ]
        (gone,) = client.ask("DeleteGroups", 2, {"groups_names": ["g"]})["results"]
        assert gone["error_code"] == Code.NON_EMPTY_GROUP
        join = {"group_id": "g", "session_timeout_ms": 6000, "protocol_type": "consumer"}
        refused = client.ask(
            "JoinGroup", 7, {**join, "protocols": [{"name": "range", "metadata": b""}]}
        )
        assert refused["error_code"] == Code.INCONSISTENT_GROUP_PROTOCOL
        for member in ("ann", "bob"):
            assert beat(client, member, -1)["error_code"] == 0
        assert client.given(max_records=1) == [(0, 1, 1)]
        (seen, none) = client.ask("ShareGroupDescribe", 1, {"group_ids": ["g", "h"]})["groups"]
        assert (seen["group_state"], none["error_code"]) == ("Empty", Code.GROUP_ID_NOT_FOUND)


def test_a_group_without_members_goes_on_elsewhere_or_is_forgotten(ann, five) -> None:
    def ask(name: str, offset: int | None = None) -> Message:
        topic: Message = {"topic_name": "t"}
        if offset is not None:
            topic["partitions"] = [{"partition_index": 0, "start_offset": offset}]
        with Asking(five.address) as client:
            return client.ask(name, 0, {"group_id": "g", "topics": [topic]})

    assert ann.given() == [(0, 5, 1)]
    assert ann.acknowledge((1, 3, ACCEPT), share_session_epoch=-1) == 0
    assert where(five.address) == (0, 3)
    assert ask("AlterShareGroupOffsets", 4)["responses"][0]["partitions"][0]["error_code"] == 0
    assert where(five.address) == (4, 1)
    bad = ask("AlterShareGroupOffsets", 9)["responses"][0]["partitions"][0]
    assert bad["error_code"] == Code.OFFSET_OUT_OF_RANGE
    ann.turn = 0
    assert ann.given() == [(4, 5, 1)]
    assert ask("DeleteShareGroupOffsets")["responses"][0]["error_code"] == 0
    assert ask("DeleteShareGroupOffsets")["error_code"] == Code.GROUP_ID_NOT_FOUND
    ann.turn = 0
    assert ann.given() == [(0, 5, 1)], "it begins where its settings say"
    with Asking(five.address) as client:
        assert (
            client.ask("DeleteGroups", 2, {"groups_names": ["g"]})["results"][0]["error_code"] == 0
        )
        assert client.ask("ListGroups", 5, {})["groups"] == []


# -- topics -----------------------------------------------------------------------------------


def test_a_topic_made_anew_is_read_from_its_beginning(ann, five) -> None:
    assert ann.given() == [(0, 5, 1)]
    with Asking(five.address) as client:
        client.ask("DeleteTopics", 4, {"topic_names": ["t"]})
        assert ann.fetch((0, 5, ACCEPT))["acknowledge_error_code"] == Code.UNKNOWN_TOPIC_ID
        client.ask("CreateTopics", 4, create())
        client.ask("Produce", 7, produce(batch(b"new")))
    with Member(five.address, "eve") as eve:
        assert eve.given() == [(0, 1, 1)]


def test_what_was_removed_from_the_log_is_done_with(ann, bob, five) -> None:
    assert ann.given(max_records=4) == [(0, 4, 1)]
    with Asking(five.address) as client:
        part = {"partition_index": 0, "offset": 3}
        client.ask("DeleteRecords", 2, {"topics": [{"name": "t", "partitions": [part]}]})
    assert ann.acknowledge((0, 4, RELEASE)) == 0
    assert bob.given() == [(3, 4, 2), (4, 5, 1)]
    assert bob.acknowledge((3, 5, ACCEPT)) == 0
    assert where(five.address) == (5, 0)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_open_transactions_are_waited_for_and_aborted_ones_are_not_given(broker, isolation) -> None:
    prepare(broker.address, share_isolation_level=isolation)
    with Asking(broker.address) as client, Member(broker.address) as ann:

        def transaction(sequence: int, *values: bytes) -> None:
            made = encode_rows([Row(0, None, value) for value in values])
            part = stamp(made, ProducerStamp(*identity, sequence), transactional=True)
            request = {**produce(raw(part)), "transactional_id": "x"}
            answer = client.ask("Produce", 7, request)
            assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0

        def end(*, committed: bool) -> None:
            request = {"transactional_id": "x", "committed": committed}
            told = {"producer_id": identity[0], "producer_epoch": identity[1]}
            assert client.ask("EndTxn", 1, {**request, **told})["error_code"] == 0

        named = client.ask(
            "InitProducerId", 1, {"transactional_id": "x", "transaction_timeout_ms": 60_000}
        )
        identity = (named["producer_id"], named["producer_epoch"])
        taking = {
            "v3_and_below_transactional_id": "x",
            "v3_and_below_producer_id": identity[0],
            "v3_and_below_producer_epoch": identity[1],
            "v3_and_below_topics": [{"name": "t", "partitions": [0]}],
        }
        client.ask("AddPartitionsToTxn", 0, taking)
        transaction(0, b"0", b"1")  # marker: 2
        if isolation == "read_committed":
            assert ann.given() == []
        end(committed=False)
        client.ask("AddPartitionsToTxn", 0, taking)
        transaction(2, b"3")  # marker: 4
        end(committed=True)
        client.ask("Produce", 7, produce(batch(b"5")))
        mine = ann.given()
        if isolation == "read_committed":
            assert mine == [(3, 4, 1), (5, 6, 1)]
        else:
            assert mine == [(0, 2, 1), (3, 4, 1), (5, 6, 1)]
        assert ann.acknowledge(*((first, last, ACCEPT) for first, last, _ in mine)) == 0
        assert where(broker.address) == (6, 0)
        client.ask("AddPartitionsToTxn", 0, taking)
        transaction(3, b"6")
        end(committed=True)
        assert where(broker.address) == (6, 1)
        assert ann.given() == [(6, 7, 1)]
        assert ann.acknowledge((6, 7, ACCEPT)) == 0
        assert where(broker.address)[1] == 0, "the marker at the end is no record"


# -- crashes and disks ------------------------------------------------------------------------


def test_what_was_acknowledged_before_a_crash_does_not_come_again(folder: Path) -> None:
    with AsProcess(folder) as broker:
        prepare(broker.address, *(b"%d" % number for number in range(6)))
        with Member(broker.address) as ann:
            assert ann.given() == [(0, 6, 1)]
            said = ((0, 1, ACCEPT), (2, 3, ACCEPT), (4, 5, REJECT), (5, 6, RELEASE))
            assert ann.acknowledge(*said) == 0
        broker.kill()
    with AsProcess(folder) as broker, Member(broker.address) as ann:
        assert ann.given() == [(1, 2, 2), (3, 4, 2), (5, 6, 2)]


def test_where_nothing_can_be_written_nothing_is_given_and_nobody_is_told_it_is_done(
    ann, five
) -> None:
    control = five._writer.control
    assert ann.given(max_records=1) == [(0, 1, 1)]

    def full() -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    control._before_commit = full
    assert ann.acknowledge((0, 1, ACCEPT)) == Code.KAFKA_STORAGE_ERROR
    for _ in range(7):
        assert ann.fetch()["error_code"] == Code.KAFKA_STORAGE_ERROR
    control._before_commit = lambda: None
    assert ann.given() == [(1, 5, 1)], "deliveries that were not made do not count"


def test_many_members_fetch_and_die_at_once_and_every_record_is_processed(five) -> None:
    values = [b"%d" % number for number in range(300)]
    with Asking(five.address) as client:
        for at in range(0, 300, 7):
            client.ask("Produce", 7, produce(batch(*values[at : at + 7])))
    done: list[int] = []

    def live(name: str, dies: bool) -> None:
        while not done or where(five.address)[1]:
            with Member(five.address, name) as member:
                for _ in range(4):
                    found = member.given(max_records=9, max_wait_ms=50)
                    if dies and found:
                        break  # with records in hand
                    said = [(first, end, ACCEPT) for first, end, _ in found]
                    if said and member.acknowledge(*said) == 0:
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
    def told(*words: str, code: int = 0) -> str:
        assert run(["group", *words, "--log", str(folder)]) == code
        out, errors = capsys.readouterr()
        return out + errors

    joining = {
        "group_id": "g",
        "member_id": "ann",
        "member_epoch": 0,
        "subscribed_topic_names": ["t"],
    }
    assert ann.ask("ShareGroupHeartbeat", 1, joining)["error_code"] == 0
    assert ann.given() == [(0, 5, 1)]
    assert ann.acknowledge((0, 1, ACCEPT), (2, 3, ACCEPT), (3, 4, RELEASE)) == 0
    assert ann.given() == [(3, 4, 2)]
    (listed,) = json.loads(told("list", "--json"))
    assert (listed["group"], listed["behind"]) == ("g", 3)
    until(lambda: "t/0" in told("describe", "g"))
    seen = json.loads(told("describe", "g", "--json"))
    assert seen["state"] == "Stable"
    assert seen["members"][0]["assignment"] == {"t": [0]}
    (one,) = seen["partitions"]
    assert (one["start_offset"], one["end_offset"], one["behind"]) == (1, 5, 3)
    assert (one["in_flight"], one["deliveries_max"], one["doomed"]) == (3, 2, 0)
    assert "share group, 1 member" in told("list")
    assert "share group g: Stable" in told("describe", "g")
    assert "kafka-share-groups.sh" in told("delete", "g", "--yes", code=2)
