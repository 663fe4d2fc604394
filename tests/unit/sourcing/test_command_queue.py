"""The queue by itself, over lanes that only count: every command gets its result, once, whoever is interrupted."""

from __future__ import annotations

import dis
import random
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sourcing.ledger import before_its_append, open_store

import millstream as ms
from millstream.errors import EndMovedError
from millstream.log.group_commit import GroupCommit
from millstream.sourcing import command_queue
from millstream.sourcing.command_queue import CommandQueue, PendingCommand
from millstream.sourcing.partition_log import Append
from millstream.sourcing.stored_event import Metadata


class CountingLane:
    """Appends the names of its commands, again and again until its append is accepted."""

    def __init__(self) -> None:
        self.appended: list[str] = []
        self.held = threading.Lock()

    def handle(self, commands: list[PendingCommand]) -> Generator[Append | None, int, None]:
        assert self.held.acquire(blocking=False), "a lane works on one group at a time"
        names = [one.stream_id for one in commands]
        try:
            while True:
                try:
                    offset = yield Append(self, names, len(self.appended))  # type: ignore[arg-type]
                except EndMovedError:
                    yield None
                else:
                    break
            assert offset == len(self.appended)
            self.appended += names
            for one in commands:
                one.version, one.done = offset + 1, True
        finally:
            self.held.release()


def pending(name: str, kind: type[PendingCommand] = PendingCommand) -> PendingCommand:
    return kind(name, None, Metadata(name))


class Interrupted(PendingCommand):
    def wait(self) -> None:
        raise KeyboardInterrupt


def accept(appends: list[Append]) -> list[int | EndMovedError]:
    return [one.expected_end for one in appends]


@settings(max_examples=some(25), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 10**6),
    st.floats(0, 0.6),
    st.floats(0, 0.4),
)
def test_every_command_is_handled_once_whatever_conflicts_and_whoever_is_interrupted(
    lanes: int, threads: int, seed: int, conflicts: float, interrupts: float
) -> None:
    chance = random.Random(seed)
    found = [CountingLane() for _ in range(lanes)]

    def append(appends: list[Append]) -> list[int | EndMovedError]:
        assert len({id(one.log) for one in appends}) == len(appends)
        return [
            EndMovedError("", end=0) if chance.random() < conflicts else one.expected_end
            for one in appends
        ]

    queue = CommandQueue(append)
    interrupted: list[str] = []

    def send(number: int) -> list[str]:
        mine, own = [], random.Random(seed * 31 + number)
        for at in range(8):
            kind = Interrupted if own.random() < interrupts else PendingCommand
            one = pending(f"{number}-{at}", kind)
            try:
                queue.handle(own.choice(found), one)
                assert one.done
                assert one.error is None or one.abandoned
                mine.append(one.stream_id)
            except KeyboardInterrupt:
                interrupted.append(one.stream_id)
        return mine

    with ThreadPoolExecutor(threads) as pool:
        handled = [name for mine in pool.map(send, range(threads)) for name in mine]
    counts = Counter(name for lane in found for name in lane.appended)
    assert all(counts[name] == 1 for name in handled)
    assert set(counts) - set(handled) <= set(interrupted)
    assert max(counts.values(), default=1) == 1
    assert not any(lane.held.locked() for lane in found)
    assert queue._running == {}
    assert queue._queue == queue._unfinished == []


def test_a_lane_that_was_second_holds_up_no_other_lane() -> None:
    stuck, free = CountingLane(), CountingLane()
    going_on = threading.Event()

    def append(appends: list[Append]) -> list[int | EndMovedError]:
        return [
            one.expected_end if one.log is free or going_on.is_set() else EndMovedError("", end=0)
            for one in appends
        ]

    queue = CommandQueue(append)
    late = pending("late")
    thread = threading.Thread(target=queue.handle, args=(stuck, late))
    thread.start()
    while not queue._running:
        going_on.wait(0.001)
    for at in range(20):
        queue.handle(free, pending(f"c{at}"))
    assert not late.done
    going_on.set()
    thread.join(30)
    assert late.done
    assert free.appended == [f"c{at}" for at in range(20)]


def test_a_queue_whose_leader_is_interrupted_ends_what_it_began_and_goes_on() -> None:
    lanes = CountingLane(), CountingLane()
    queue = CommandQueue(interrupt_once())
    held = pending("held")
    queue._leader = nobody = pending("nobody")  # until both wait
    threads = [
        threading.Thread(target=swallow, args=(queue, lane, one))
        for lane, one in zip(lanes, (held, pending("other")), strict=True)
    ]
    for thread in threads:
        thread.start()
    while len(queue._queue) < 2:
        threads[0].join(0.001)
    queue._leave(nobody)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert held.done
    assert "may have been handled" in str(held.error)
    assert not any(lane.held.locked() for lane in lanes)
    last = pending("last")
    queue.handle(lanes[0], last)
    assert last.error is None
    assert lanes[0].appended == ["last"]


def interrupt_once():
    calls = []

    def append(appends: list[Append]) -> list[int | EndMovedError]:
        calls.append(appends)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return accept(appends)

    return append


def swallow(queue: CommandQueue, lane: CountingLane, one: PendingCommand) -> None:
    with suppress(KeyboardInterrupt):
        queue.handle(lane, one)


def interruptible(code: CodeType) -> set[int]:
    """Return the places where Python looks for interrupts: at the start, behind calls, and where a loop goes on."""
    steps = list(dis.get_instructions(code))
    found = {step.offset for step in steps if step.opname.startswith("JUMP_BACKWARD")}
    for before, step in pairwise(steps):
        if before.opname.startswith(("CALL", "RESUME", "BEFORE_WITH", "SEND")):
            found.add(step.offset)
    return found


class InterruptAt:
    """Interrupts a thread at the n-th such place in the queue."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, _event: str, _arg: object) -> Any:
        code = frame.f_code
        if code.co_filename != command_queue.__file__ or code.co_name == "__post_init__":
            return None
        frame.f_trace_opcodes = True
        places = interruptible(code)

        def step(frame: FrameType, event: str, _arg: object) -> Any:
            if event == "opcode" and frame.f_lasti in places:
                self.left -= 1
                if not self.left:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return step

        return step


@pytest.mark.parametrize("victim", ["leader", "first", "second"])
def test_an_interrupt_at_any_place_leaves_nobody_waiting(victim: str) -> None:
    places = 0
    for number in range(1, 1000):
        at = InterruptAt(number)
        all_are_handled_but(victim, at)
        if at.left > 0:
            break
        places = number
    assert places > 15


def is_on_its_way(queue: CommandQueue, one: PendingCommand) -> bool:
    return one in queue._unfinished or one in [queued for _, queued in queue._queue]


def all_are_handled_but(victim: str, at: InterruptAt) -> None:
    lanes = CountingLane(), CountingLane()
    begun, going_on = threading.Event(), threading.Event()  # of the first append

    def append(appends: list[Append]) -> list[int | EndMovedError]:
        begun.set()
        going_on.wait(30)
        return accept(appends)

    queue = CommandQueue(append)
    sent = [
        (lanes[0], pending("leader")),
        (lanes[0], pending("first")),
        (lanes[1], pending("second")),
    ]

    def send(lane: CountingLane, one: PendingCommand) -> None:
        if one.stream_id == victim:
            sys.settrace(at)
        try:
            swallow(queue, lane, one)
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=send, args=one, daemon=True) for one in sent]
    for thread, (_, one) in zip(threads, sent, strict=True):
        thread.start()
        # The first one leads, and is at its append when the others come; if it is interrupted before, the next one.
        while thread.is_alive() and not (begun.is_set() and is_on_its_way(queue, one)):
            thread.join(0.0005)
    going_on.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    last = pending("last")
    queue.handle(lanes[0], last)
    names = [name for lane in lanes for name in lane.appended]
    assert len(names) == len(set(names))
    assert "last" in names
    for _, one in sent:
        assert one.done or one.stream_id == victim
        assert one.error is not None or one.stream_id in {victim, *names}
    assert not any(lane.held.locked() for lane in lanes)
    assert queue._running == {}
    assert queue._queue == queue._unfinished == []


def test_streams_of_all_partitions_are_committed_together(log: ms.EventLog, monkeypatch) -> None:
    commits = []
    append = GroupCommit.append

    def counted(commit, appends, durability="synced"):
        commits.append(len(appends))
        return append(commit, appends, durability)

    with open_store(log, partitions=4) as store, ThreadPoolExecutor(8) as pool:
        names = [f"s{at}" for at in range(12)]
        assert len({store.partition_of(name) for name in names}) > 2
        list(pool.map(lambda name: store.handle(name, [1]), names))
        monkeypatch.setattr(GroupCommit, "append", counted)
        for _ in range(25):
            list(pool.map(lambda name: store.handle(name, [1]), names))
        assert max(commits) > 1
        assert all(store.load(name).version == 26 for name in names)


def test_a_lane_is_in_a_round_once() -> None:
    lane = CountingLane()
    seen = []

    def append(appends: list[Append]) -> list[int | EndMovedError]:
        seen.append([list(one.records) for one in appends])
        return accept(appends)

    queue = CommandQueue(append)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: queue.handle(lane, pending(f"c{at}")), range(40)))
    assert sorted(lane.appended) == sorted(f"c{at}" for at in range(40))
    assert all(len(round_) == 1 for round_ in seen)


def test_what_fails_in_one_lane_ends_nothing_of_another(
    log: ms.EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(**_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    with open_store(log, partitions=2) as store:
        names = {store.partition_of(name): name for name in map(str, range(20))}
        monkeypatch.setattr(store.lane(1), "_catch_up", locked)
        results: dict[int, list[str]] = {0: [], 1: []}

        def send(partition: int) -> None:
            for _ in range(50):
                try:
                    store.handle(names[partition], [1])
                    results[partition].append("")
                except ms.MillstreamError as error:
                    results[partition].append(str(error))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, (0, 1, 0, 1)))
        assert results[0] == [""] * 100
        assert len(results[1]) == 100
        assert all("database is locked" in one for one in results[1])
        assert store.load(names[0]).version == 100


def test_who_leads_has_the_result_of_its_own_command_whatever_fails_in_another_lane(
    log: ms.EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(log, partitions=2) as store:
        names = {store.partition_of(name): name for name in map(str, range(20))}
        other = store.lane(1)
        catch_up, looks = other._catch_up, []

        def locked_once_it_has_lost(**given: bool) -> None:
            looks.append(given)
            if len(looks) == 3:
                raise sqlite3.OperationalError("database is locked")
            catch_up(**given)

        def first() -> None:
            with open_store(log, partitions=2, index=tmp_path / "index") as second:
                second.handle(names[1], [7])

        def in_a_thread() -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(first).result()

        monkeypatch.setattr(other, "_catch_up", locked_once_it_has_lost)
        before_its_append(store, monkeypatch, in_a_thread)
        waiting = PendingCommand(names[1], [1], Metadata("c"))
        store._queues[0]._queue.append((other, waiting))
        assert store.handle(names[0], [1]).version == 1
        assert "database is locked" in str(waiting.error)
        assert store.load(names[0]).version == 1
