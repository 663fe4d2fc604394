"""Transactions whose producers outlive the owner: they continue with the next one, or get an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import (
    DiskFullError,
    ProducerFencedError,
    TransactionAbortedError,
    UnknownTopicError,
)
from millstream.log import transactions as transactions_module
from millstream.log.batch import EncodedBatch, ProducerStamp, stamp
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.groups import (
    committed_offsets,
    delete_partition_offsets,
    expire_groups,
    group_names,
)
from millstream.log.producer_identity import PRODUCER_EPOCH_MAX, ProducerIdentity
from millstream.log.reader import LogReader
from millstream.log.remote_transactions import (
    RemoteTransaction,
    pending_partitions,
    remote_transaction,
)
from millstream.log.writer import LogWriter
from millstream.record import TopicPartition

IN = TopicPartition("in", 0)


def batch(identity: ProducerIdentity, sequence: int, value: bytes) -> EncodedBatch:
    made = encode_records([SimpleRecord(0, b"k", value)])
    return stamp(made, ProducerStamp(*identity, sequence), transactional=True)


def values(folder: Path) -> list[bytes]:
    reader = LogReader(folder)
    start, end = reader.offsets("a")[0]
    return [
        one
        for part in reader.read("a", 0, start, end, columns=("value",))
        for one in part["value"].to_pylist()
    ]


class Clock:
    now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock):
    """Open the folder as the next owner, after the one before has died."""
    writers: list[LogWriter] = []

    def open_it() -> LogWriter:
        if writers:
            writers[-1].close()
        writers.append(LogWriter(tmp_path, background=False, clock_ms=clock, running_ms=clock))
        if len(writers) == 1:
            for name in ("a", "in"):
                writers[0].create_topic(name)
        return writers[-1]

    yield open_it
    writers[-1].close()


def test_records_and_offsets_of_both_owners_are_committed_together(opened, tmp_path) -> None:
    first = opened()
    identity = first.transactions.register("x", in_process=False)
    first.transactions.begin(identity, again=True)
    first.append("a", 0, [batch(identity, 0, b"one")])
    first.transactions.add_offsets(identity, "g", {IN: (7, "noted")})
    second = opened()
    second.transactions.begin(identity, again=True)  # it goes on with the same
    second.append("a", 0, [batch(identity, 1, b"two")])
    assert (values(tmp_path), committed_offsets(second.control, "g")) == ([], {})
    assert pending_partitions(second.control, "g") == {IN}
    after = second.transactions.end(identity, commit=True, raise_epoch=False)
    assert after == identity
    assert values(tmp_path) == [b"one", b"two"]
    assert committed_offsets(second.control, "g")[IN][:2] == (7, "noted")
    assert pending_partitions(second.control, "g") == set()


def test_one_without_records_is_still_open_for_the_next_owner(opened) -> None:
    identity = opened().transactions.register("x", in_process=False)
    opened().transactions.begin(identity, again=True)
    third = opened()
    third.append("a", 0, [batch(identity, 0, b"one")])
    third.transactions.end(identity, commit=True, raise_epoch=False)


@pytest.mark.parametrize("commit", [True, False])
def test_how_it_ended_is_known_to_the_next_owner(opened, commit) -> None:
    first = opened()
    identity = first.transactions.register("x", in_process=False)
    first.transactions.begin(identity, again=True)
    assert remote_transaction(first.control, identity.producer_id) == (0, "open")
    first.transactions.end(identity, commit=commit, raise_epoch=False)
    second = opened()
    found = remote_transaction(second.control, identity.producer_id)
    assert found == RemoteTransaction(0, "committed" if commit else "aborted")
    with pytest.raises(TransactionAbortedError):
        second.transactions.end(identity, commit=commit, raise_epoch=False)
    with pytest.raises(TransactionAbortedError):
        second.append("a", 0, [batch(identity, 0, b"late")])


@pytest.mark.parametrize("way", ["abort", "timeout", "register", "close"])
def test_offsets_of_one_that_is_not_committed_are_forgotten(opened, clock, way) -> None:
    writer = opened()
    transactions = writer.transactions
    identity = transactions.register("x", in_process=False, timeout_ms=1000)
    transactions.begin(identity, again=True)
    transactions.add_offsets(identity, "g", {IN: 7})
    if way == "abort":
        transactions.end(identity, commit=False, raise_epoch=False)
    elif way == "timeout":
        clock.now_ms += 1001
        assert transactions.expire() == 1
    elif way == "register":
        transactions.register("x", in_process=False)
    else:  # by an owner that dies: the transaction goes on, until its time is over
        writer = opened()
        assert pending_partitions(writer.control, "g") == {IN}
        clock.now_ms += 1001
        assert writer.transactions.expire() == 1
    assert pending_partitions(writer.control, "g") == set()
    assert committed_offsets(writer.control, "g") == {}
    found = remote_transaction(writer.control, identity.producer_id)
    assert found == RemoteTransaction(0, "aborted")


def test_a_producer_resumes_only_its_own_last_life(opened, clock) -> None:
    transactions = opened().transactions
    first = transactions.register("x", in_process=False, timeout_ms=1000)
    second = transactions.register("x", in_process=False, timeout_ms=1000, resumes=first)
    assert second == first._replace(producer_epoch=1)
    third = transactions.register("x", in_process=False, timeout_ms=1000, resumes=second)
    for stranger in (first, ProducerIdentity(99, 0), ProducerIdentity(-1, -1)):
        with pytest.raises(ProducerFencedError):
            transactions.register("x", in_process=False, resumes=stranger)
    with pytest.raises(ProducerFencedError):
        transactions.register("unknown", in_process=False, resumes=first)
    transactions.begin(third, again=True)
    clock.now_ms += 1001
    transactions.expire()  # its time was over, and that ended this life
    with pytest.raises(TransactionAbortedError) as caught:
        transactions.end(third, commit=True, raise_epoch=False)
    assert caught.value.timed_out
    fourth = transactions.register("x", in_process=False, resumes=third)
    assert fourth.producer_epoch > third.producer_epoch


def resumed(writer: LogWriter, identity: ProducerIdentity) -> ProducerIdentity:
    return writer.transactions.register("x", in_process=False, timeout_ms=1000, resumes=identity)


@pytest.mark.parametrize("left_open", [False, True])
def test_one_that_was_not_told_its_next_life_is_told_the_same_when_it_asks_again(
    opened, tmp_path, left_open
) -> None:
    first = opened()
    identity = first.transactions.register("x", in_process=False)
    if left_open:
        first.transactions.begin(identity, again=True)
        first.append("a", 0, [batch(identity, 0, b"taken back")])
    following = resumed(first, identity)
    assert following.producer_epoch > identity.producer_epoch
    assert resumed(first, identity) == following
    second = opened()  # the owner died before it could respond
    assert resumed(second, identity) == following
    second.transactions.begin(following, again=True)
    second.append("a", 0, [batch(following, 0, b"kept")])
    assert resumed(second, identity) == following  # a request that was held up changes nothing
    second.transactions.end(following, commit=True, raise_epoch=False)
    assert values(tmp_path) == [b"kept"]


def test_the_last_life_of_a_number_is_followed_by_one_and_the_same_new_number(opened) -> None:
    writer = opened()
    identity = writer.transactions.register("x", in_process=False)
    with writer.control.commit() as connection:
        connection.execute("UPDATE producers SET producer_epoch = ?", (PRODUCER_EPOCH_MAX - 2,))
    writer = opened()
    identity = resumed(writer, identity._replace(producer_epoch=PRODUCER_EPOCH_MAX - 2))
    following = resumed(writer, identity)
    assert following == (identity.producer_id + 1, 0)
    assert resumed(writer, identity) == resumed(opened(), identity) == following


@pytest.mark.parametrize("open_again", [False, True])
def test_a_producer_that_asks_for_each_life_goes_on_beyond_the_last_one(
    opened, monkeypatch, open_again
) -> None:
    """As one does that has a producer epoch for each transaction; a repeated request changes nothing."""
    monkeypatch.setattr(transactions_module, "PRODUCER_EPOCH_MAX", 7)
    writer = opened()
    transactions = writer.transactions
    identity = transactions.register("x", in_process=False)
    for number in range(20):
        following = resumed(writer, identity)
        assert following not in (identity, None)
        transactions.begin(following, again=True)
        if open_again:
            assert resumed(writer, identity) == following
        writer.append("a", 0, [batch(following, 0, b"%d" % number)])
        transactions.end(following, commit=bool(number % 3), raise_epoch=False)
        with pytest.raises(ProducerFencedError):
            transactions.begin(identity)
        identity = following
    assert identity.producer_id > 2


def test_a_number_whose_lives_are_used_up_with_a_transaction_open_never_lives_again(
    opened,
) -> None:
    writer = opened()
    identity = writer.transactions.register("x", in_process=False)
    with writer.control.commit() as connection:
        connection.execute("UPDATE producers SET producer_epoch = ?", (PRODUCER_EPOCH_MAX - 2,))
    transactions = opened().transactions
    lives = [identity._replace(producer_epoch=PRODUCER_EPOCH_MAX - 2)]
    transactions.begin(lives[0])
    lives.append(transactions.register("x", in_process=False))
    for _ in range(3):
        assert lives[-1].producer_epoch < PRODUCER_EPOCH_MAX
        transactions.begin(lives[-1])
        lives.append(transactions.end(lives[-1], commit=True))
    for old in lives[:-1]:
        with pytest.raises(ProducerFencedError):
            transactions.begin(old)


@pytest.mark.parametrize("timed_out", [False, True])
def test_one_that_was_replaced_does_not_fence_the_newer_by_asking_again(
    opened, clock, timed_out
) -> None:
    writer = opened()
    zombie = writer.transactions.register("x", in_process=False, timeout_ms=1000)
    if timed_out:
        writer.transactions.begin(zombie, again=True)
        clock.now_ms += 1001
        writer.transactions.expire()
    else:
        resumed(writer, zombie)
    newer = writer.transactions.register("x", in_process=False)
    for own in (lambda: writer, opened):
        owner = own()
        with pytest.raises(ProducerFencedError):
            resumed(owner, zombie)
        with pytest.raises((ProducerFencedError, TransactionAbortedError)):
            owner.transactions.begin(zombie, again=True)
        owner.transactions.begin(newer, again=True)
        owner.transactions.end(newer, commit=True, raise_epoch=False)


def test_one_whose_time_was_over_goes_on_with_the_next_owner(opened, clock) -> None:
    first = opened()
    identity = first.transactions.register("x", in_process=False, timeout_ms=1000)
    first.transactions.begin(identity, again=True)
    clock.now_ms += 1001
    first.transactions.expire()
    assert resumed(opened(), identity).producer_epoch > identity.producer_epoch


def test_a_transaction_that_could_not_begin_can_be_aborted_and_only_that(
    opened, monkeypatch
) -> None:
    transactions = opened().transactions
    identity = transactions.register("x", in_process=False)
    transactions.begin(identity, again=True)
    transactions.end(identity, commit=True, raise_epoch=False)

    def full() -> None:
        raise DiskFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(transactions, "_write_unmarked", full)
        with pytest.raises(DiskFullError):
            transactions.begin(identity, again=True)
    with pytest.raises(TransactionAbortedError):
        transactions.end(identity, commit=True, raise_epoch=False)
    for _ in range(2):  # a producer whose response was lost retries
        assert transactions.end(identity, commit=False, raise_epoch=False) == identity
    transactions.begin(identity, again=True)
    transactions.end(identity, commit=True, raise_epoch=False)
    with pytest.raises(TransactionAbortedError):  # it was committed
        transactions.end(identity, commit=False, raise_epoch=False)


def test_offsets_are_added_to_an_open_transaction_of_a_known_topic_only(opened) -> None:
    transactions = opened().transactions
    identity = transactions.register("x", in_process=False)
    with pytest.raises(TransactionAbortedError):
        transactions.add_offsets(identity, "g", {IN: 7})
    transactions.begin(identity, again=True)
    with pytest.raises(UnknownTopicError):
        transactions.add_offsets(identity, "g", {TopicPartition("nope", 0): 7})


def test_a_topic_that_goes_while_its_offsets_are_committed_is_told(opened, monkeypatch) -> None:
    writer = opened()
    transactions, gone = writer.transactions, TopicPartition("gone", 0)
    real = writer.topic_ids

    def late(names) -> dict[str, str]:
        found = real(names)
        if "gone" in names:
            writer.delete_topic("gone")
        return found

    monkeypatch.setattr(writer, "topic_ids", late)
    writer.create_topic("gone")
    with pytest.raises(UnknownTopicError):
        writer.commit_offsets("g", {IN: 1, gone: 1})
    identity = transactions.register("x", in_process=False)
    transactions.begin(identity)
    writer.create_topic("gone")
    with pytest.raises(UnknownTopicError):
        transactions.add_offsets(identity, "g", {IN: 1, gone: 1})
    writer.create_topic("gone")
    with pytest.raises(UnknownTopicError):
        transactions.end(identity, commit=True, offsets={"g": {IN: 1, gone: 1}})
    assert committed_offsets(writer.control, "g") == {}
    transactions.end(identity, commit=True, offsets={"g": {IN: 2}})
    assert committed_offsets(writer.control, "g")[IN].offset == 2


def test_named_producers_are_described(opened, clock) -> None:
    transactions = opened().transactions
    transactions.register(in_process=False)
    identity = transactions.register("x", in_process=False, timeout_ms=1000)
    (found,) = transactions.transactional_producers()
    assert found == ("x", identity, 1000, None)
    transactions.begin(identity, again=True)
    assert transactions.transactional_producers()[0].open_since_ms == clock.now_ms
    assert transactions.identity_of("x") == identity
    assert transactions.identity_of("y") is None


def test_a_group_forgets_partitions_and_silent_groups_are_forgotten(opened, clock) -> None:
    writer = opened()
    writer.create_topic("two", partitions=2)
    places = [TopicPartition("two", 0), TopicPartition("two", 1)]
    writer.commit_offsets("g", {IN: 1, places[0]: 2, places[1]: 3})
    delete_partition_offsets(writer.control, "g", [places[1], TopicPartition("nope", 0)])
    assert set(committed_offsets(writer.control, "g")) == {IN, places[0]}
    clock.now_ms += 1000
    writer.commit_offsets("new", {IN: 1})
    writer.commit_offsets("busy", {IN: 1})
    clock.now_ms += 1000
    writer.commit_offsets("new", {IN: 2})
    gone = expire_groups(writer.control, clock.now_ms, keep=["busy"])
    assert gone == ["g"]
    assert group_names(writer.control) == ["busy", "new"]
