"""An account of money: the aggregate of these tests, and its rule, written down naively."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import millstream as ms
from millstream.sourcing.store import EventStore


@dataclass(frozen=True)
class Paid:
    amount: int
    note: str = ""


@dataclass(frozen=True)
class Balance:
    total: int = 0
    payments: int = 0


def decide(command: list[int], state: Balance) -> list[Paid]:
    """Each amount is an event; an account is never overdrawn."""
    total = state.total
    for amount in command:
        total += amount
        if total < 0:
            raise ms.CommandRejectedError(
                f"the account holds {state.total}; pay {-amount} in first"
            )
    return [Paid(amount) for amount in command]


def evolve(state: Balance, event: Paid) -> Balance:
    return Balance(state.total + event.amount, state.payments + 1)


def event_types() -> ms.EventTypes:
    found = ms.EventTypes()
    found.register("paid")(Paid)
    return found


ACCOUNT = ms.Decider(initial=Balance, decide=decide, evolve=evolve, state=Balance)


def open_store(log: ms.EventLog, **options) -> EventStore:
    return EventStore(log, "ledger", ACCOUNT, event_types(), **{"partitions": 2, **options})


def before_its_append(store: EventStore, monkeypatch: Any, action: Callable[[], object]) -> None:
    """Have something happen between the next decision of a store's first partition and its append."""
    store.lane(0)
    queue = store._queues[0]
    append = queue._append

    def late(appends: Any) -> Any:
        monkeypatch.setattr(queue, "_append", append)
        action()
        return append(appends)

    monkeypatch.setattr(queue, "_append", late)


def model(commands: list[tuple[str, list[int]]]) -> dict[str, tuple[int, int]]:
    """What the accounts hold after these commands: (version, total)."""
    found: dict[str, tuple[int, int]] = {}
    for stream_id, amounts in commands:
        version, total = found.get(stream_id, (0, 0))
        sums = [total + sum(amounts[: n + 1]) for n in range(len(amounts))]
        if sums and min(sums) >= 0:
            found[stream_id] = version + len(amounts), sums[-1]
    return found
