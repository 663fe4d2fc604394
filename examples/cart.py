"""A shopping cart: what was put in and taken out again is no longer in the cart, and still known.

    python examples/cart.py

The cart's state forgets what was removed; the events do not. A second view of the same events counts it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import millstream as ms

events = ms.EventTypes()


@events.register("item-added")
@dataclass(frozen=True)
class ItemAdded:
    """An item was put into the cart."""

    item: str


@events.register("item-removed")
@dataclass(frozen=True)
class ItemRemoved:
    """An item was taken out again."""

    item: str


@events.register("checked-out")
@dataclass(frozen=True)
class CheckedOut:
    """The cart was bought."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Cart:
    """What is in the cart."""

    items: tuple[str, ...] = ()
    open: bool = True


def decide(command: tuple[str, str], cart: Cart) -> list[Any]:
    """Answer ("add", item), ("remove", item) and ("check out", "")."""
    if not cart.open:
        raise ms.CommandRejectedError("the cart was bought; open another one")
    match command:
        case ("add", item):
            return [ItemAdded(item)]
        case ("remove", item) if item in cart.items:
            return [ItemRemoved(item)]
        case ("check out", _) if cart.items:
            return [CheckedOut(cart.items)]
    raise ms.CommandRejectedError(f"{' '.join(command)} is not possible with {cart.items}")


def evolve(cart: Cart, event: Any) -> Cart:
    """Return the cart after an event."""
    match event:
        case ItemAdded(item):
            return Cart((*cart.items, item))
        case ItemRemoved(item):
            at = cart.items.index(item)
            return Cart((*cart.items[:at], *cart.items[at + 1 :]))
    return Cart(cart.items, open=False)


def count_doubts(event: ms.SourcedEvent, tables: Any) -> None:
    """Count how often an item was taken out again."""
    if isinstance(event.data, ItemRemoved):
        tables.execute(
            "INSERT INTO {doubts} VALUES (?, 1) ON CONFLICT (item) DO UPDATE SET times = times + 1",
            (event.data.item,),
        )


CARTS = ms.Decider(Cart, decide, evolve, state=Cart)
DOUBTS = ms.Projection("doubts", {"doubts": "item TEXT PRIMARY KEY, times INTEGER"}, count_doubts)


def main(folder: Path) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return what was bought, and how often each item was taken out again."""
    with (
        ms.connect(folder / "log") as log,
        ms.EventStore(log, "carts", CARTS, events) as carts,
        carts.project(DOUBTS, folder / "views.db") as doubts,
    ):
        for command in (
            ("add", "tea"),
            ("add", "cake"),
            ("remove", "cake"),
            ("add", "cake"),
            ("remove", "cake"),
        ):
            carts.handle("cart-1", command)
        done = carts.handle("cart-1", ("check out", ""))
        doubts.wait_for(done.position)
        return carts.load("cart-1").state.items, doubts.query("SELECT * FROM doubts")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(*main(Path(place)), sep="\n")
