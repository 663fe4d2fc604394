"""A cinema: a seat is held for ten minutes, then confirmed or free again; it is never sold twice.

    python examples/cinema.py

A reservation is two events: a hold, and its confirmation or its expiry. The seat's own stream decides, so two
customers who ask at once are answered one after the other. The process manager sends the expiry when its time
has come; if the hold was confirmed meanwhile, the expiry finds nothing to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import millstream as ms

events = ms.EventTypes()


@events.register("seat-held")
@dataclass(frozen=True)
class SeatHeld:
    """A customer has the seat, for now."""

    customer: str


@events.register("seat-sold")
@dataclass(frozen=True)
class SeatSold:
    """The hold was confirmed, for good."""

    customer: str


@events.register("hold-expired")
@dataclass(frozen=True)
class HoldExpired:
    """The hold was not confirmed in time."""

    customer: str


@dataclass(frozen=True)
class Hold:
    """A customer asks for the seat."""

    customer: str


@dataclass(frozen=True)
class Confirm:
    """The customer pays."""

    customer: str


@dataclass(frozen=True)
class Expire:
    """The time of the hold that is the event ``version`` of the seat is over."""

    customer: str
    version: int


@dataclass(frozen=True)
class Seat:
    """Who has the seat, since which event, and whether for good."""

    customer: str | None = None
    sold: bool = False
    version: int = 0
    held_at: int = 0


def decide(command: object, seat: Seat) -> list[object]:
    """Answer a command."""
    match command:
        case Hold(customer) if seat.customer is None:
            return [SeatHeld(customer)]
        case Hold():
            raise ms.CommandRejectedError("the seat is taken; choose another one")
        case Confirm(customer) if seat.customer == customer and not seat.sold:
            return [SeatSold(customer)]
        case Confirm():
            raise ms.CommandRejectedError("you do not hold this seat; hold it first")
        case Expire(customer, version) if seat.held_at == version and not seat.sold:
            return [HoldExpired(customer)]
    return []


def evolve(seat: Seat, event: object) -> Seat:
    """Return the seat after an event."""
    version = seat.version + 1
    match event:
        case SeatHeld(customer):
            return Seat(customer, version=version, held_at=version)
        case SeatSold(customer):
            return Seat(customer, sold=True, version=version)
    return Seat(version=version)


def expire_holds(event: ms.SourcedEvent) -> Iterable[ms.Send]:
    """Ask for the end of a hold, ten minutes after it began."""
    if isinstance(event.data, SeatHeld):
        expire = Expire(event.data.customer, event.version)
        yield ms.Send(event.stream_id, expire, after="10 minutes")


CINEMA = ms.Decider(Seat, decide, evolve)


def main(folder: Path) -> list[str]:
    """Return what happened to seat A7."""
    now_ms = [1_800_000_000_000]

    def clock_ms() -> int:
        return now_ms[0]

    with (
        ms.connect(folder / "log") as log,
        ms.EventStore(log, "seats", CINEMA, events, clock_ms=clock_ms) as seats,
        ms.ProcessManager(
            "expiry", seats, expire_holds, state=folder / "expiry.db", clock_ms=clock_ms
        ) as expiry,
    ):
        seats.handle("A7", Hold("ada"))
        try:
            seats.handle("A7", Hold("bob"))
        except ms.CommandRejectedError as refused:
            print("bob:", refused)
        now_ms[0] += 11 * 60 * 1000
        expiry.run_due()
        seats.handle("A7", Hold("bob"))
        seats.handle("A7", Confirm("bob"))
        now_ms[0] += 11 * 60 * 1000
        expiry.run_due()
        return [f"{event.type} {event.data.customer}" for event in seats.history("A7")]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(*main(Path(place)), sep="\n")
