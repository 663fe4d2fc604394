"""The cinema: a seat is never sold twice, and an expiry is handled once, whatever crashes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from unit.sourcing.example import load_example
from unit.sourcing.ledger import ACCOUNT, Balance, event_types

import millstream as ms
from millstream.sourcing import projection_target
from millstream.sourcing.aggregate import Folding
from millstream.sourcing.store import EventStore
from millstream.testing.disk import SimulatedCrash

cinema = load_example("cinema")
CINEMA, events, expire_holds = cinema.CINEMA, cinema.events, cinema.expire_holds
Confirm, Hold = cinema.Confirm, cinema.Hold
MINUTE_MS = 60_000


@pytest.fixture
def now_ms() -> list[int]:
    return [1_800_000_000_000]


@pytest.fixture
def seats(log: ms.EventLog, now_ms: list[int]):
    with EventStore(log, "seats", CINEMA, events, clock_ms=lambda: now_ms[0]) as store:
        yield store


def manager(seats: EventStore, folder: Path, now_ms: list[int], react=expire_holds, **options):
    state = folder / "expiry.db"
    clock = lambda: now_ms[0]  # noqa: E731
    return ms.ProcessManager("expiry", seats, react, state=state, clock_ms=clock, **options)


def kinds(seats: EventStore) -> list[str]:
    return [event.type for event in seats.history("A7")]


def test_a_seat_is_never_sold_twice_though_many_ask_at_once(seats: EventStore) -> None:
    start = threading.Barrier(8)

    def buy(customer: int) -> list[str]:
        start.wait()
        bought = []
        for seat in [f"A{n}" for n in range(6)]:
            try:
                seats.handle(seat, Hold(str(customer)))
                seats.handle(seat, Confirm(str(customer)))
                bought.append(seat)
            except ms.CommandRejectedError:
                pass
        return bought

    with ThreadPoolExecutor(8) as pool:
        bought = [seat for seats_of_one in pool.map(buy, range(8)) for seat in seats_of_one]
    assert sorted(bought) == [f"A{n}" for n in range(6)]
    for seat in bought:
        assert [event.type for event in seats.history(seat)] == ["seat-held", "seat-sold"]


def test_a_hold_expires_at_its_time_and_not_before(seats, tmp_path: Path, now_ms) -> None:
    with manager(seats, tmp_path, now_ms) as expiry:
        seats.handle("A7", Hold("ada"), correlation_id="visit")
        assert expiry.run_due() == 0
        assert expiry.next_due_ms() == now_ms[0] + 10 * MINUTE_MS
        now_ms[0] += 10 * MINUTE_MS
        assert (expiry.run_due(), expiry.run_due()) == (1, 0)
        assert kinds(seats) == ["seat-held", "hold-expired"]
        *_, event = seats.history("A7")
        assert event.metadata.causation_id == "A7/1"
        assert (event.metadata.correlation_id, event.metadata.who) == ("visit", "expiry")


def test_an_expiry_of_an_earlier_hold_leaves_a_later_one(seats, tmp_path: Path, now_ms) -> None:
    with manager(seats, tmp_path, now_ms) as expiry:
        seats.handle("A7", Hold("ada"))
        seats.handle("A7", Confirm("ada"))
        now_ms[0] += 11 * MINUTE_MS
        assert expiry.run_due() == 1
        assert kinds(seats) == ["seat-held", "seat-sold"]


def test_a_crash_before_or_after_the_command_sends_it_once_in_effect(
    seats, tmp_path: Path, now_ms, monkeypatch
) -> None:
    seats.handle("A7", Hold("ada"))
    now_ms[0] += 11 * MINUTE_MS
    handle = seats.handle
    for handles in (False, True):

        def die(*given, handles=handles, **more):
            if handles:
                handle(*given, **more)
            raise SimulatedCrash

        with manager(seats, tmp_path, now_ms) as expiry, monkeypatch.context() as patch:
            patch.setattr(seats, "handle", die)
            with pytest.raises(SimulatedCrash):
                expiry.run_due()
    with manager(seats, tmp_path, now_ms) as expiry:
        assert (expiry.run_due(), expiry.run_due()) == (1, 0)
    assert kinds(seats) == ["seat-held", "hold-expired"]


def test_a_process_that_was_changed_is_refused_until_it_is_rebuilt(
    seats, tmp_path: Path, now_ms
) -> None:
    seats.handle("A7", Hold("ada"))
    with manager(seats, tmp_path, now_ms) as expiry:
        expiry.run_due()

    def sooner(event):
        return [ms.Send(one.stream_id, one.command) for one in expire_holds(event)]

    with pytest.raises(ms.ConfigError, match="filled by other code"):
        manager(seats, tmp_path, now_ms, sooner)
    with manager(seats, tmp_path, now_ms, sooner, rebuild=True) as expiry:
        assert expiry.run_due() == 1
    assert kinds(seats) == ["seat-held", "hold-expired"]


def test_a_command_that_fails_holds_up_only_its_own_stream(
    seats, tmp_path: Path, now_ms, monkeypatch
) -> None:
    for seat in ("A1", "A2", "A3"):
        seats.handle(seat, Hold("ada"))
    seats.handle("A1", Confirm("ada"))
    handle, sent = seats.handle, []

    def fail(stream_id, command, **more):
        sent.append(stream_id)
        if stream_id == "A1":
            raise ZeroDivisionError
        return handle(stream_id, command, **more)

    def twice(event):
        return [one for one in expire_holds(event) for _ in range(2)]

    now_ms[0] += 11 * MINUTE_MS
    with manager(seats, tmp_path, now_ms, twice) as expiry:
        with monkeypatch.context() as patch:
            patch.setattr(seats, "handle", fail)
            with pytest.raises(ZeroDivisionError) as failed:
                expiry.run_due()
        assert sorted(sent) == [
            "A1",
            "A2",
            "A2",
            "A3",
            "A3",
        ]  # the second of A1 waits for the first
        (note,) = failed.value.__notes__
        assert "the command after A1/1, for stream 'A1'. 1 commands failed" in note
        assert "4 others were sent" in note
        assert (expiry.run_due(), expiry.run_due()) == (2, 0)


def test_an_event_that_cannot_be_read_any_more_holds_up_no_other_command(
    seats, tmp_path: Path, now_ms, monkeypatch
) -> None:
    for seat in ("A1", "A2"):
        seats.handle(seat, Hold("ada"))
    now_ms[0] += 11 * MINUTE_MS
    with manager(seats, tmp_path, now_ms) as expiry:
        expiry._run.catch_up()

        sourced = Folding.sourced

        def unreadable(folding, event):
            if event.stream_id == "A1":
                raise ms.ConfigError("unknown")
            return sourced(folding, event)

        monkeypatch.setattr(Folding, "sourced", unreadable)
        with pytest.raises(ms.ConfigError, match="unknown") as failed:
            expiry.run_due()
        assert "the event at offset 0 of partition" in failed.value.__notes__[0]
        monkeypatch.undo()
        assert [event.type for event in seats.history("A2")] == ["seat-held", "hold-expired"]


def test_without_a_connection_nothing_more_is_tried(
    seats, tmp_path: Path, now_ms, monkeypatch
) -> None:
    tried = []

    def unreachable(stream_id, *_, **__):
        tried.append(stream_id)
        raise ms.RetriableError("no broker responds")

    for seat in ("A1", "A2"):
        seats.handle(seat, Hold("ada"))
    now_ms[0] += 11 * MINUTE_MS
    with manager(seats, tmp_path, now_ms) as expiry:
        with monkeypatch.context() as patch:
            patch.setattr(seats, "handle", unreachable)
            with pytest.raises(ms.RetriableError):
                expiry.run_due()
        assert len(tried) == 1
        assert expiry.run_due() == 2


@dataclass(frozen=True)
class Asked:
    n: int


@dataclass(frozen=True)
class Opened:
    n: int


def test_a_manager_that_was_stopped_sends_nothing_that_another_one_has_sent(
    log: ms.EventLog, tmp_path: Path, monkeypatch
) -> None:
    """A command that was refused has no events, so its id alone would not tell that it was decided."""
    types = ms.EventTypes()
    types.register("asked")(Asked)
    types.register("opened")(Opened)

    def decide(command, opened):
        if isinstance(command, Asked) and command.n == 1 and not opened:
            raise ms.CommandRejectedError("it is closed")
        return [command]

    decider = ms.Decider(bool, decide, lambda state, event: state or isinstance(event, Opened))

    def react(event):
        return [ms.Send("door", Asked(1))] if event.stream_id == "visitor" else []

    with EventStore(log, "doors", decider, types) as store:
        store.handle("visitor", Asked(0))

        def open_manager():
            return ms.ProcessManager("knock", store, react, state=tmp_path / "k.db")

        with open_manager() as stopped, open_manager() as other:
            stopped._run.catch_up()
            query = stopped._run.query

            def stop_after_the_look(*given):
                rows = query(*given)
                assert other.run_due() == 1  # refused
                store.handle("door", Opened(1))
                return rows

            monkeypatch.setattr(stopped._run, "query", stop_after_the_look)
            assert stopped.run_due() == 0
        assert [event.type for event in store.history("door")] == ["opened"]


def test_a_manager_that_is_stopped_while_it_sends_keeps_the_others_from_sending(
    seats, tmp_path: Path, now_ms, monkeypatch
) -> None:
    seats.handle("A7", Hold("ada"))
    now_ms[0] += 11 * MINUTE_MS
    handle, sent = seats.handle, []
    monkeypatch.setattr(projection_target, "LOCK_TIMEOUT_S", 0.05)

    with manager(seats, tmp_path, now_ms) as stopped, manager(seats, tmp_path, now_ms) as other:
        stopped._run.catch_up()

        def stop_in_the_middle(*given, **more):
            sent.append(given)
            with pytest.raises(ms.RetriableError, match="Another process has it"):
                other.run_due()
            return handle(*given, **more)

        monkeypatch.setattr(seats, "handle", stop_in_the_middle)
        assert (stopped.run_due(), other.run_due()) == (1, 0)
    assert len(sent) == 1
    assert kinds(seats) == ["seat-held", "hold-expired"]


def test_commands_that_follow_from_two_sources_are_two_commands(
    log: ms.EventLog, tmp_path: Path
) -> None:
    def react(event):
        return [ms.Send("bank", [event.data.amount])]

    with (
        EventStore(log, "till-1", ACCOUNT, event_types()) as one,
        EventStore(log, "till-2", ACCOUNT, event_types()) as two,
        EventStore(log, "bank", ACCOUNT, event_types()) as bank,
    ):
        for source, amount in ((one, 5), (two, 7)):
            source.handle("monday", [amount])
            state = tmp_path / f"{source.topic}.db"
            with ms.ProcessManager("pay_in", source, react, state=state, target=bank) as pay_in:
                assert pay_in.run_due() == 1
            with ms.ProcessManager(
                "pay_in", source, react, state=state, target=bank, rebuild=True
            ) as pay_in:
                assert pay_in.run_due() == 1  # a repeat
        assert bank.load("bank").state == Balance(12, 2)


def test_the_example_says_what_happened(tmp_path: Path) -> None:
    assert cinema.main(tmp_path) == [
        "seat-held ada",
        "hold-expired ada",
        "seat-held bob",
        "seat-sold bob",
    ]
