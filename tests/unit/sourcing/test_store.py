"""Commands through the store of a log in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sourcing.ledger import (
    ACCOUNT,
    Balance,
    Paid,
    before_its_append,
    event_types,
    model,
    open_store,
)

import millstream as ms
from millstream.errors import VersionConflictError
from millstream.sourcing import aggregate
from millstream.sourcing import store as module
from millstream.sourcing.command_queue import PendingCommand
from millstream.sourcing.partition_log import Append
from millstream.sourcing.store import EventStore
from millstream.sourcing.stored_event import (
    Metadata,
    RawEvent,
    decode_event,
    decode_events,
    encode_event,
)


def totals(store: EventStore) -> dict[str, tuple[int, int]]:
    found = {name: store.load(name) for name in store.stream_ids()}
    return {name: (one.version, one.state.total) for name, one in found.items()}


def check_versions(store: EventStore) -> None:
    for name in store.stream_ids():
        versions = [event.version for event in store.history(name)]
        assert versions == list(range(1, len(versions) + 1))


def test_a_command_appends_what_was_decided_and_the_state_is_the_fold_of_it(
    store: EventStore,
) -> None:
    done = store.handle("ada", [5, -3])
    assert (done.version, done.events, done.repeated) == (2, [Paid(5), Paid(-3)], False)
    assert store.load("ada").state == Balance(2, 2)
    assert store.load("nobody").version == 0


def test_a_refused_command_leaves_nothing(store: EventStore, log: ms.EventLog) -> None:
    store.handle("ada", [5])
    before = log.offsets("ledger")
    with pytest.raises(ms.CommandRejectedError, match="holds 5"):
        store.handle("ada", [3, -9])
    assert log.offsets("ledger") == before
    assert store.load("ada").state == Balance(5, 1)
    assert "ledger.rejections" not in log.topics()


def test_a_refusal_is_recorded_if_asked(log: ms.EventLog) -> None:
    with open_store(log, rejections="record") as store, pytest.raises(ms.CommandRejectedError):
        store.handle("ada", [-1], who="eve", command_id="c1")
    (record,) = log.consumer("ledger.rejections", follow=False)
    found = record.json()
    assert (found["stream"], found["command"], found["metadata"]["who"]) == ("ada", [-1], "eve")
    assert "holds 0" in found["reason"]
    assert log.offsets("ledger") == [(0, 0), (0, 0)]


def test_a_command_with_an_id_is_handled_once_across_restarts_too(log: ms.EventLog) -> None:
    with open_store(log) as store:
        first = store.handle("ada", [5, 1], command_id="c1")
        again = store.handle("ada", [5, 1], command_id="c1")
        assert (again.events, again.version, again.position) == (
            first.events,
            first.version,
            first.position,
        )
        assert again.repeated
        store.handle("bob", [1], command_id="c1")  # another stream: another command
    with open_store(log) as store:
        assert store.handle("ada", [5, 1], command_id="c1").repeated
        assert totals(store) == {"ada": (2, 6), "bob": (1, 1)}


def test_an_expected_version_is_compared(store: EventStore) -> None:
    store.handle("ada", [5], expected_version=0)
    with pytest.raises(VersionConflictError) as refused:
        store.handle("ada", [5], expected_version=0)
    assert (refused.value.version, refused.value.expected) == (1, 0)
    assert store.handle("ada", [5], expected_version=1).version == 2


def test_eight_threads_on_one_hot_stream_lose_no_update(store: EventStore) -> None:
    def pay(number: int) -> None:
        for at in range(50):
            store.handle("hot", [1], command_id=f"{number}-{at}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pay, range(8)))
    assert store.load("hot").state == Balance(400, 400)
    check_versions(store)


def test_an_account_is_never_overdrawn_by_threads_that_decide_at_once(store: EventStore) -> None:
    store.handle("pot", [10])
    start = threading.Barrier(8)

    def take(_: int) -> int:
        start.wait()
        taken = 0
        for _ in range(5):
            try:
                store.handle("pot", [-1])
                taken += 1
            except ms.CommandRejectedError:
                pass
        return taken

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 10
    assert store.load("pot").state.total == 0


def test_two_stores_with_memories_of_their_own_see_each_other(log: ms.EventLog) -> None:
    with open_store(log) as one, open_store(log) as other:
        for _ in range(5):
            one.handle("ada", [1])
            other.handle("ada", [1])
        assert one.load("ada").state == other.load("ada").state == Balance(10, 10)
        with pytest.raises(ms.CommandRejectedError):
            one.handle("ada", [-11])


def test_two_stores_that_decide_at_once_lose_no_update(log: ms.EventLog) -> None:
    with open_store(log) as one, open_store(log) as other, ThreadPoolExecutor(4) as pool:
        stores = [one, other] * 2

        def pay(number: int) -> None:
            for at in range(25):
                stores[number].handle("hot", [1], command_id=f"{number}-{at}")

        list(pool.map(pay, range(4)))
        assert one.load("hot").state == other.load("hot").state == Balance(100, 100)
        check_versions(one)


def test_on_conflict_raise_raises_where_retry_decides_again(log: ms.EventLog, monkeypatch) -> None:
    with open_store(log) as one, open_store(log) as other:
        one.handle("ada", [1])

        def interfere() -> None:  # from another thread: in this one a command is being decided
            with ThreadPoolExecutor(1) as thread:
                thread.submit(other.handle, "ada", [1]).result()

        before_its_append(one, monkeypatch, interfere)
        with pytest.raises(VersionConflictError, match="is at version 2, not at 1"):
            one.handle("ada", [1], on_conflict="raise")
        before_its_append(one, monkeypatch, interfere)
        assert one.handle("ada", [1]).version == 4


@dataclass
class Tally:
    counts: dict[str, int]


class ByIdentity(dict):
    """It equals nothing but itself, so no copy of it can be trusted."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@pytest.mark.parametrize("fresh", [dict, ByIdentity, lambda: Tally({})])
@pytest.mark.parametrize("changes", [False, True])
def test_a_writer_that_is_never_first_folds_a_long_stream_no_more_than_twice(
    log: ms.EventLog, monkeypatch, fresh, changes: bool
) -> None:
    folded = [0]

    def counts(state: Any) -> dict[str, int]:
        return state.counts if isinstance(state, Tally) else state

    def evolve(state: Any, event: Paid) -> Any:
        folded[0] += 1
        counts(state)["total"] = counts(state).get("total", 0) + event.amount
        return state

    def decide(amount: int, state: Any) -> list[Paid]:
        paid = Paid(amount + counts(state).get("total", 0))
        if changes:
            counts(state)["total"] = -1_000_000  # against the rule
        return [paid]

    def open_tally() -> EventStore:
        return EventStore(log, "tally", ms.Decider(fresh, decide, evolve), event_types())

    with EventStore(log, "tally", ACCOUNT, event_types()) as other, open_tally() as late:
        for _ in range(200):
            other.handle("one", [1])
        conflicts, total = 8, 200

        def first() -> None:
            nonlocal conflicts, total
            with ThreadPoolExecutor(1) as thread:
                thread.submit(other.handle, "one", [1]).result()
            conflicts, total = conflicts - 1, total + 1
            if conflicts:
                before_its_append(late, monkeypatch, first)

        before_its_append(late, monkeypatch, first)
        assert late.handle("one", 5).version == 209
        assert [event.data.amount for event in late.history("one")][-2:] == [1, 5 + total]
        assert (folded[0] < 2 * 209 + 100) == (fresh is not ByIdentity)
        assert counts(late.load("one").state)["total"] == 2 * total + 5


class Renewed(dict):
    """A copy of it lacks what it does not pickle, and equals it all the same."""

    limit = 0

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


class Itself(dict):
    """It gives itself as a copy."""

    def __deepcopy__(self, _memo: Any) -> Any:
        return self


@pytest.mark.parametrize("fresh", [dict, Renewed, Itself])
@pytest.mark.parametrize("freezes", [False, True])
def test_what_is_decided_after_conflicts_rests_on_the_log_alone(
    log: ms.EventLog, monkeypatch, fresh, freezes: bool
) -> None:
    def initial() -> Any:
        state = fresh(total=0)
        if fresh is Renewed:
            state.limit = 1_000
        return state

    def evolve(state: Any, event: Paid) -> Any:
        if isinstance(state, int):
            return state + event.amount
        state["total"] += event.amount
        return state["total"] if freezes and event.note else state

    def decide(note: str, state: Any) -> list[Paid]:
        total = state if isinstance(state, int) else state["total"]
        return [Paid(total + getattr(state, "limit", 0), note)]

    with (
        EventStore(log, "tally", ACCOUNT, event_types()) as other,
        EventStore(log, "tally", ms.Decider(initial, decide, evolve), event_types()) as late,
    ):
        other.handle("one", [3])
        late.load("one")

        def first() -> None:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(other.handle, "one", [1]).result()

        for _ in range(2):
            before_its_append(late, monkeypatch, first)
            late.handle("one", "last")
        amounts = [event.data.amount for event in late.history("one")]
        limit = 1_000 if fresh is Renewed else 0
        assert amounts[2] == sum(amounts[:2]) + limit
        assert amounts[4] == sum(amounts[:4]) + (0 if freezes else limit)


@pytest.mark.parametrize("loss", ["deleted", "damaged", "of another topic", "ahead of the log"])
def test_an_index_that_does_not_fit_is_made_from_the_log(
    tmp_path: Path, log: ms.EventLog, loss: str
) -> None:
    index = tmp_path / "index"
    with open_store(log, index=index, partitions=1) as store:
        for at in range(20):
            store.handle(f"s{at % 3}", [at], command_id=f"c{at}")
        wanted = totals(store)
        file = index / store.topic_id / "0.db"
    if loss == "deleted":
        shutil.rmtree(index)
    elif loss == "damaged":
        file.write_bytes(b"no database" * 1000)
        for name in ("0.db-wal", "0.db-shm"):
            (file.parent / name).unlink(missing_ok=True)
    elif loss == "of another topic":
        log.delete_topic("ledger")
        with open_store(log, index=tmp_path / "other", partitions=1) as store:
            store.handle("s1", [7])
            wanted = totals(store)
            (index / store.topic_id).mkdir()
            shutil.copy(file, index / store.topic_id / "0.db")
    else:
        shutil.copytree(
            tmp_path / "log", tmp_path / "backup", ignore=shutil.ignore_patterns("owner.sock")
        )
        with open_store(log, index=index, partitions=1) as store:
            store.handle("s9", [1])
        with (
            ms.connect(tmp_path / "backup") as restored,
            open_store(restored, index=index, partitions=1) as store,
        ):
            assert totals(store) == wanted  # the log of then, under the index of later
            store.handle("s8", [4])
        with (
            ms.connect(tmp_path / "backup") as restored,
            open_store(restored, index=index, partitions=1) as store,
        ):
            assert totals(store) == {**wanted, "s8": (1, 4)}
        wanted = {**wanted, "s9": (1, 1)}  # as many offsets, and another last event
    with open_store(log, index=index, partitions=1) as store:
        assert totals(store) == wanted
        check_versions(store)


def test_reading_one_stream_reads_few_of_the_others(log: ms.EventLog, monkeypatch) -> None:
    with open_store(log, partitions=1, cache=1) as store:
        for at in range(300):
            store.handle(f"s{at % 150}", [1])
    with open_store(log, partitions=1) as store:
        lane = store.lane(0)
        lane.catch_up()
        read, spans = lane.log.read, []

        def counted(start, end, runs):
            found = list(read(start, end, runs))
            spans.append((end - start, len(found)))
            return found

        monkeypatch.setattr(lane.log, "read", counted)
        assert store.load("s7").state == Balance(2, 2)
        assert spans == [(151, 2)]  # the others between the two are passed over, and not decoded
        spans.clear()
        monkeypatch.setattr(aggregate, "READ_THROUGH", 64)
        assert len(list(store.history("s7"))) == 2
        assert spans == [(1, 1), (1, 1)]


@pytest.mark.long
def test_two_hundred_thousand_aggregates_in_one_topic(log: ms.EventLog, monkeypatch) -> None:
    count = 200_000
    with open_store(log, partitions=4) as store:
        for version in (1, 2):
            records = defaultdict(list)
            for at in range(count):
                stream_id, command_id = f"s{at}", f"c{at}-{version}"
                fields = {"amount": at % 7 + version}
                event = RawEvent(-1, 1, stream_id, version, "paid", 1, fields, command_id, {})
                records[store.partition_of(stream_id)].append(encode_event(event))
            for partition, found in records.items():
                appending = store.lane(partition).log
                for first in range(0, len(found), 5000):
                    some = Append(appending, found[first : first + 5000], appending.bounds()[1])
                    store._appender.append_all([some])
    with open_store(log) as store:
        assert len(store.stream_ids()) == count
        for at in (0, 1, count // 2, count - 1):
            lane = store.lane_of(f"s{at}")
            read, spans = lane.log.read, []
            with monkeypatch.context() as patch:
                patch.setattr(
                    lane.log,
                    "read",
                    lambda *given, read=read, spans=spans: spans.append(given[:2]) or read(*given),
                )
                expected = 2 * (at % 7) + 3
                assert store.load(f"s{at}").state == Balance(expected, 2)
            assert [end - start for start, end in spans] == [1, 1]  # two events, of 100,000
        assert store.handle("s5", [1], command_id="c5-2").repeated


class Interrupted(PendingCommand):
    def wait(self) -> None:
        raise KeyboardInterrupt


def test_a_command_that_was_interrupted_while_it_waited_holds_up_no_other(
    store: EventStore,
) -> None:
    """The thread that waits gets an interrupt as from Ctrl-C; whether it was to lead or not."""
    for interrupted in range(3):
        deciding, going_on = threading.Event(), threading.Event()

        class Slow(list):
            def __iter__(self, deciding=deciding, going_on=going_on):
                deciding.set()
                assert going_on.wait(30)
                return super().__iter__()

        threads = [threading.Thread(target=store.handle, args=("hot", Slow([1])))]
        threads[0].start()
        assert deciding.wait(30)
        lane, number = store.lane_of("hot"), store.partition_of("hot")
        handle = partial(store._queues[number].handle, lane)
        kinds = [Interrupted if at == interrupted else PendingCommand for at in range(3)]
        waiting = [
            kind("hot", [1], Metadata(f"w{interrupted}{at}")) for at, kind in enumerate(kinds)
        ]
        for at, one in enumerate(waiting):
            if at == interrupted:
                with pytest.raises(KeyboardInterrupt):
                    handle(one)
                continue
            threads.append(threading.Thread(target=handle, args=(one,)))
            threads[-1].start()
        going_on.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert [one.done for one in waiting] == [at != interrupted for at in range(3)]
        assert store.handle("hot", [1]).version == 4 * (interrupted + 1)


def test_a_record_that_is_no_event_is_refused_loudly(log: ms.EventLog, store: EventStore) -> None:
    store.handle("ada", [1])
    with log.producer() as producer:
        producer.send("ledger", {"not": "an event"}, partition=store.partition_of("ada"))
    with pytest.raises(ms.CorruptionError, match="is no event of a store"):
        store.handle("ada", [1])


def test_a_topic_that_would_lose_events_is_refused(log: ms.EventLog) -> None:
    log.create_topic("ledger", retention="7 days")
    with pytest.raises(ms.ConfigError, match=r"retention\.ms=604800000, and would lose events"):
        open_store(log)


def test_events_that_were_deleted_are_missed(log: ms.EventLog, tmp_path: Path) -> None:
    with open_store(log, partitions=1) as store:
        for at in range(3):
            store.handle("ada", [1])
            store.handle(f"only {at}", [1])
    log.delete_records("ledger", 0, 2)
    with open_store(log, partitions=1, index=tmp_path / "fresh") as store:
        gone = r"\[0, 2\) of ledger/0 were deleted"
        with pytest.raises(ms.CorruptionError, match=gone):
            store.load("only 0")  # nothing of its stream is left that would miss it
        with pytest.raises(ms.CorruptionError, match=gone):
            store.handle("only 0", [1])
        totals = ms.Projection("totals", {"totals": "account TEXT"}, lambda event, tables: None)
        with (
            store.project(totals, tmp_path / "views.db") as view,
            pytest.raises(ms.CorruptionError, match=gone),
        ):
            view.catch_up()


def test_partitions_that_were_added_are_refused(log: ms.EventLog) -> None:
    with open_store(log, partitions=1) as store:
        store.handle("ada", [1])
    log.alter_topic("ledger", partitions=2)
    with (
        open_store(log) as store,
        pytest.raises(ms.ConfigError, match="had 1 partitions and has 2"),
    ):
        store.lane(0)


def test_a_bug_in_a_decider_touches_no_other_command_and_leaves_nothing(log: ms.EventLog) -> None:
    def decide(command, state):
        state["seen"] = command  # which a decider must not do
        if command == 13:
            raise ZeroDivisionError
        return [Paid(command)]

    def evolve(state, event):
        state["total"] = state.get("total", 0) + event.amount
        if event.amount == 99:
            raise KeyError("evolve")
        return state

    decider = ms.Decider(initial=dict, decide=decide, evolve=evolve)
    with EventStore(log, "ledger", decider, event_types(), partitions=1) as store:
        store.handle("a", 1)
        for bad, error in ((13, ZeroDivisionError), (99, KeyError)):
            with pytest.raises(error):
                store.handle("a", bad)
        assert store.load("a").state == {"total": 1}
        store.handle("a", 2)
        assert store.load("a").version == 2
        assert store.load("a").state["total"] == 3


def test_a_command_from_within_a_decider_is_refused(log: ms.EventLog) -> None:
    def decide(command, state):
        return store.handle("a", command).events

    decider = ms.Decider(initial=int, decide=decide, evolve=lambda s, e: s)
    with (
        EventStore(log, "ledger", decider, event_types(), partitions=1) as store,
        pytest.raises(ms.ConfigError, match="from within decide"),
    ):
        store.handle("a", 1)


@pytest.mark.parametrize("other", ["same", "another"])
def test_a_look_at_the_store_from_within_a_decider_is_refused_and_waits_for_nothing(
    log: ms.EventLog, other: str
) -> None:
    found: dict[str, EventStore] = {}

    def decide(command, state):
        looked_at = found[other]
        return [Paid(looked_at.load("a").version)]

    decider = ms.Decider(initial=int, decide=decide, evolve=lambda s, e: s)
    with (
        EventStore(log, "ledger", decider, event_types(), partitions=1) as found["same"],
        EventStore(log, "more", decider, event_types(), partitions=1) as found["another"],
    ):
        errors: list[BaseException] = []

        def send() -> None:
            try:
                found["same"].handle("a", 1)
            except ms.ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(30)
        assert [str(error)[:36] for error in errors] == ["a store was used from within decide "]


def test_an_index_of_a_log_that_was_restored_and_went_on_otherwise_is_made_anew(
    tmp_path: Path, log: ms.EventLog
) -> None:
    options = {"partitions": 1, "snapshot_every": 1, "index": tmp_path / "index"}
    with open_store(log, **options) as store:
        store.handle("ada", [1])
    skip = shutil.ignore_patterns("owner.sock")
    shutil.copytree(tmp_path / "log", tmp_path / "backup", ignore=skip)
    with open_store(log, **options) as store:
        store.handle("ada", [100], command_id="lost")
    with ms.connect(tmp_path / "backup") as restored:
        with open_store(restored, **{**options, "index": tmp_path / "other"}) as store:
            store.handle("ada", [7])
        with open_store(restored, **options) as store:
            assert store.load("ada").state == Balance(8, 2)
            assert not store.handle("ada", [100], command_id="lost").repeated


def test_a_clock_that_goes_back_does_not_take_a_stream_back(log: ms.EventLog) -> None:
    now = [5000]
    with open_store(log, clock_ms=lambda: now[0]) as store:
        for time in (5000, 3000, 9000):
            now[0] = time
            store.handle("ada", [1])
        times = [round(event.recorded_at.timestamp() * 1000) for event in store.history("ada")]
    assert times == [5000, 5000, 9000]


def test_an_event_that_is_too_large_fails_alone(log: ms.EventLog) -> None:
    decider = ms.Decider(
        initial=int, decide=lambda c, s: [Paid(1, "x" * c)], evolve=lambda s, e: s + 1
    )
    with EventStore(log, "ledger", decider, event_types(), partitions=1) as store:
        start = threading.Barrier(4)

        def send(size: int) -> object:
            start.wait()
            try:
                return store.handle(f"s{size}", size).version
            except ms.MillstreamError as error:
                return type(error).__name__

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(send, [1, 2, 70 << 20, 3]))
    assert found == [1, 1, "RecordTooLargeError", 1]


def test_ids_and_deciders_that_are_not_possible_are_refused(log: ms.EventLog) -> None:
    with open_store(log) as store:
        for wrong in ("", None, 7):
            with pytest.raises(ms.ConfigError, match="stream id"):
                store.handle(wrong, [1])
    with pytest.raises(ms.ConfigError, match="lacks decide, evolve"):
        EventStore(log, "ledger", type("D", (), {"initial": int})(), event_types())
    with pytest.raises(ms.ConfigError, match="is a class"):
        EventStore(log, "ledger", type("D", (), vars(ACCOUNT)), event_types())
    with pytest.raises(ms.FencedError, match="was closed"):
        store.load("ada")


@pytest.mark.parametrize("wrong", ["1", 1.0, float("nan"), True, -1])
def test_a_version_that_is_no_whole_number_is_refused(store: EventStore, wrong) -> None:
    with pytest.raises(ms.ConfigError, match=f"expected_version is {wrong!r}; give 0"):
        store.handle("ada", [5], expected_version=wrong)
    assert store.load("ada").version == 0


@pytest.mark.parametrize("wrong", [17, b"eve", object(), "\ud800"])
@pytest.mark.parametrize("name", ["causation_id", "correlation_id", "who", "why"])
def test_what_is_known_of_a_command_is_text(store: EventStore, name, wrong) -> None:
    with pytest.raises(ms.ConfigError, match=f"{name} is .*; give a text, or leave it out"):
        store.handle("ada", [5], **{name: wrong})
    assert store.load("ada").version == 0


@pytest.mark.parametrize("wrong", ["", 17, b"c", uuid.UUID(int=7), "\ud800"])
def test_a_command_id_that_would_not_be_found_again_is_refused(store: EventStore, wrong) -> None:
    """An empty one was none; others are stored as another value than they are looked for."""
    with pytest.raises(ms.ConfigError, match="command id"):
        store.handle("ada", [5], command_id=wrong)
    assert store.load("ada").version == 0


def test_an_index_fits_a_log_that_has_a_number_as_a_command_id(
    log: ms.EventLog, monkeypatch
) -> None:
    """Emptied under a store that uses it, it would say that streams have no events."""
    monkeypatch.setattr(module, "_check_command_id", lambda given: given)  # as it was once
    with open_store(log, partitions=1) as one:
        one.handle("ada", [5], command_id=17)
        one.lane(0).index.flush()
        one.lane(0)._cache.clear()
        with open_store(log, partitions=1) as two:
            assert two.load("ada").version == 1
            assert one.load("ada").version == 1
            assert one.handle("ada", [5]).version == 2


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.integers(-5, 9), min_size=0, max_size=3),
        st.sampled_from(["", "again", "reopen"]),
    ),
    max_size=25,
)


@settings(max_examples=some(25))
@given(COMMANDS)
def test_any_commands_leave_what_the_rule_says(tmp_path_factory, commands) -> None:
    folder = tmp_path_factory.mktemp("rule")
    with ms.connect(folder) as log:
        store = open_store(log, snapshot_every=2)
        try:
            for number, (stream_id, amounts, then) in enumerate(commands):
                for _ in range(2 if then == "again" else 1):
                    with contextlib.suppress(ms.CommandRejectedError):
                        store.handle(stream_id, amounts, command_id=f"c{number}")
                if then == "reopen":
                    store.close()
                    store = open_store(log, snapshot_every=2)
            wanted = model([(name, amounts) for name, amounts, _ in commands])
            assert totals(store) == wanted
            check_versions(store)
        finally:
            store.close()


EVENT = b'{"type":"paid","schema":1,"stream":"s","version":%d,"command":"c","data":{"note":"\\n"}}'
WRITTEN_OTHERWISE = EVENT.replace(b",", b",\n ")


@given(st.lists(st.sampled_from([EVENT, WRITTEN_OTHERWISE, b" " + EVENT + b" "]), max_size=6))
def test_events_that_are_read_together_are_what_each_is_by_itself(values) -> None:
    values = [value % at for at, value in enumerate(values)]
    count = len(values)
    found = list(decode_events("t", 0, range(count), range(count), values))
    assert found == [decode_event("t", 0, at, at, value) for at, value in enumerate(values)]


@pytest.mark.parametrize("bad", [None, b"", b"{}", b"[1]", b"7", b"\xff", EVENT + b"\n" + EVENT])
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_event_is_named_by_its_place_among_others(bad, place: int) -> None:
    values = [EVENT % 1, EVENT % 2]
    values.insert(place, bad)
    reading = decode_events("t", 0, range(3), range(3), values)
    assert [next(reading).offset for _ in range(place)] == list(range(place))
    with pytest.raises(ms.MillstreamError, match=f"at offset {place} of t/0 is no event"):
        next(reading)


def test_values_that_only_together_are_events_are_none(log: ms.EventLog) -> None:
    first, second = EVENT % 1, EVENT % 2
    halves = [first + b",\n" + second[:9], second[9:]]
    with pytest.raises(ms.MillstreamError, match="is no event"):
        list(decode_events("t", 0, range(2), range(2), halves))


@dataclass
class Items:
    names: list[str]


@dataclass(frozen=True)
class Tagged:
    tags: tuple[str, ...]
    by: Items


@pytest.mark.parametrize("event", [Items(["tea"]), Tagged(("a",), Items(["tea"]))])
def test_what_a_caller_does_to_its_events_changes_no_state_and_no_other_caller(
    log: ms.EventLog, event: Items | Tagged
) -> None:
    types = ms.EventTypes()
    types.register("items")(type(event))
    decided_on = []

    def decide(command, state):
        decided_on.append(deepcopy(state))
        return [command]

    decider = ms.Decider(tuple, decide, lambda state, event: (*state, event))
    with EventStore(log, "t", decider, types, partitions=1) as store:
        found = [store.handle("a", event, command_id=name) for name in ("b", "c", "c")]
        for one in found:
            (mine,) = one.events
            (mine if isinstance(mine, Items) else mine.by).names.append("cake")
        assert found[1].events == found[2].events != [event]
        store.handle("a", event)
        assert decided_on == [(), (event,), (event, event)]
        assert store.load("a").state == (event,) * 3


def test_two_callers_of_one_command_at_once_share_no_event(log: ms.EventLog) -> None:
    types = ms.EventTypes()
    types.register("items")(Items)
    decider = ms.Decider(tuple, lambda c, _: [c], lambda state, event: (*state, event))
    with EventStore(log, "t", decider, types, partitions=1) as store:
        lane = store.lane(0)
        first, second = (
            PendingCommand("a", Items(["tea"]), Metadata("c"), nonce="n") for _ in range(2)
        )
        steps = lane.handle([first, second])
        store._appender.append_all([next(steps)])
        with pytest.raises(StopIteration):
            steps.send(0)
        assert (first.repeated, second.repeated) == (False, True)
        first.data[0].names.append("cake")
        assert second.data == [Items(["tea"])]


def test_a_stream_id_that_is_not_unicode_is_refused(store: EventStore) -> None:
    for call in (lambda: store.handle("\ud800", [1]), lambda: store.load("a\udfff")):
        with pytest.raises(ms.ConfigError, match="the stream id"):
            call()


def adding() -> tuple[ms.Decider, list[Exception | type[BaseException] | None]]:
    """Return a decider whose state is changed in place, and a list of what its next evolve is to raise."""
    raised: list[Any] = []

    def evolve(state: list[int], event: Paid) -> list[int]:
        state.append(event.amount)
        if raised:
            raise raised.pop()
        return state

    def decide(_: int, state: list[int]) -> list[Paid]:
        return [Paid(1 + sum(state))]

    return ms.Decider(initial=list, decide=decide, evolve=evolve), raised


def test_an_interrupt_while_another_writers_events_are_folded_counts_none_twice(
    log: ms.EventLog, tmp_path: Path
) -> None:
    decider, raised = adding()
    with (
        EventStore(log, "ledger", decider, event_types()) as store,
        EventStore(log, "ledger", decider, event_types(), index=tmp_path / "other") as other,
    ):
        store.handle("a", 0)
        other.handle("a", 0)
        raised.append(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            store.load("a")
        assert store.handle("a", 0).events == [Paid(4)]


def test_a_look_at_the_store_from_within_evolve_is_refused_and_waits_for_nothing(
    log: ms.EventLog, tmp_path: Path
) -> None:
    found: list[EventStore] = []

    def evolve(state: int, event: Paid) -> int:
        for store in found:
            store.load("b")
        return state + event.amount

    decider = ms.Decider(initial=int, decide=lambda n, _: [Paid(n)], evolve=evolve)
    with (
        EventStore(log, "ledger", decider, event_types()) as store,
        EventStore(log, "ledger", decider, event_types(), index=tmp_path / "other") as other,
    ):
        store.handle("a", 1)
        other.handle("a", 1)
        found.append(store)
        errors: list[BaseException] = []

        def look() -> None:
            try:
                store.load("a")
            except ms.ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(30)
        assert [str(error)[:36] for error in errors] == ["a store was used from within decide "]


def test_a_store_is_refused_in_a_child_that_was_forked_in_the_middle_of_a_command(
    log: ms.EventLog,
) -> None:
    begun, going_on = threading.Event(), threading.Event()

    def decide(amount: int, _: int) -> list[Paid]:
        begun.set()
        going_on.wait(30)
        return [Paid(amount)]

    decider = ms.Decider(initial=int, decide=decide, evolve=lambda total, e: total + e.amount)
    with EventStore(log, "ledger", decider, event_types(), partitions=1) as store:
        thread = threading.Thread(target=store.handle, args=("a", 1))
        thread.start()
        begun.wait(30)
        child = os.fork()
        if not child:
            signal.alarm(20)  # it would wait for ever
            refused = 0
            for call in (lambda: store.load("a"), lambda: store.handle("a", 1)):
                with contextlib.suppress(ms.FencedError):
                    call()
                    continue
                refused += 1
            store.close()
            os._exit(refused)
        going_on.set()
        thread.join(30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert store.load("a").state == 1
