"""The cinema: a seat is never sold twice, and an expiry is handled once, whatever crashes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from unit.sourcing.example import load_example

import millstream as ms
from millstream.sourcing.store import EventStore

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
    for name in ("handle", "execute"):
        with manager(seats, tmp_path, now_ms) as expiry, monkeypatch.context() as patch:
            patch.setattr(seats if name == "handle" else expiry._run, name, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
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


def test_the_example_says_what_happened(tmp_path: Path) -> None:
    assert cinema.main(tmp_path) == [
        "seat-held ada",
        "hold-expired ada",
        "seat-held bob",
        "seat-sold bob",
    ]
