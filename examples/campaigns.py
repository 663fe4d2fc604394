"""Revenue by campaign: orders of a database, joined to clicks in the log, corrected as the database changes.

    pip install "millstream[spark]"
    python examples/campaigns.py                                            # with a database of SQLite
    python examples/campaigns.py postgresql://user@localhost:5432/shop      # with yours: it makes the table orders

An order is placed, its amount is corrected, it is cancelled: the program that does so writes to its database, and knows
nothing of this one. `ms.capture` writes what it commits into the log, and `app.table(…, capture=…)` is that table, as it
changes: the join takes back what was true before. What comes out is compared with what the database says.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import millstream as ms
from millstream.capture.run import Capture


@dataclass(frozen=True)
class Click:
    """A visitor has come from an advertisement of a campaign."""

    id: int
    campaign: str


@dataclass(frozen=True)
class Order:
    """A row of the table: an order, its amount in cents, and the click that led to it."""

    id: int
    click: int | None
    cents: int


CLICKS = [Click(1, "spring"), Click(2, "spring"), Click(3, "shoes")]
CREATE = "CREATE TABLE orders (id INTEGER PRIMARY KEY, click INTEGER, cents INTEGER NOT NULL)"
PLACED = [
    "INSERT INTO orders VALUES (10, 1, 5000)",
    "INSERT INTO orders VALUES (11, 2, 2500), (12, 3, 9900), (13, NULL, 700)",
    "INSERT INTO orders VALUES (14, 4, 100)",  # a click that the log does not have yet
]
CORRECTED = [
    "UPDATE orders SET cents = 4000 WHERE id = 10",
    "DELETE FROM orders WHERE id = 12",
    "UPDATE orders SET click = 3 WHERE id = 13",
]
LATE_CLICK = Click(4, "autumn")


def pipeline(folder: Path | str, shop: Capture | str) -> ms.App:
    """Declare the view ``revenue``: the orders of a captured database, by campaign."""
    app = ms.App("campaigns", log=folder)
    clicks = app.topic("clicks", Click, key="id", partitions=1).table()
    orders = app.table("orders", Order, key="id", capture=shop)
    (
        orders.join(clicks.rename({"id": "clicked"}), {"click": "clicked"})
        .group_by("campaign")
        .agg(orders=ms.count(), cents=ms.sum("cents"))
        .view("revenue")
    )
    return app


def revenue(orders: Iterable[tuple[int, int | None, int]], clicks: Iterable[Click]) -> list[Any]:
    """Return the same from a plain list of rows: (campaign, orders, cents)."""
    campaign_of = {click.id: click.campaign for click in clicks}
    found: dict[str, list[int]] = {}
    for _, click, cents in orders:
        if click in campaign_of:
            found.setdefault(campaign_of[click], []).append(cents)
    return sorted((name, len(amounts), sum(amounts)) for name, amounts in found.items())


def execute(url: str, *statements: str) -> list[Any]:
    """Run statements in a transaction of their own each, as the shop's programs do; return the rows of the last."""
    if url.startswith("sqlite:"):
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"))
    else:
        import psycopg  # noqa: PLC0415 - of the extra "postgres"

        connection = psycopg.connect(url)
    with closing(connection):
        for statement in statements:
            cursor = connection.execute(statement)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
    return rows


def send(folder: Path | str, clicks: Iterable[Click]) -> None:
    """Write clicks into the log."""
    with ms.connect(folder) as log, log.producer() as producer:
        log.create_topic("clicks", partitions=1, exist_ok=True)
        for click in clicks:
            producer.send("clicks", click, key=str(click.id))


def step(folder: Path | str, url: str, clicks: list[Click]) -> list[Any]:
    """Capture what there is, run the pipeline, compare; return the view."""
    shop = ms.capture(url, tables="orders", to=folder, name="shop")
    shop.run(until="caught-up")
    pipeline(folder, shop).run(until="caught-up")
    found = sorted(ms.view("revenue", log=folder).scan()["campaign", "orders", "cents"].rows())
    expected = revenue(execute(url, "SELECT id, click, cents FROM orders"), clicks)
    if [(name, n, Decimal(cents)) for name, n, cents in found] != expected:
        raise SystemExit(f"the view has {found}, and the database {expected}")
    print(*found, sep="\n", end="\n\n")
    return found


def main(url: str | None) -> None:
    """Place orders, correct them, and show the view each time."""
    with TemporaryDirectory() as work:
        folder = Path(work) / "data"
        url = url or f"sqlite:///{work}/shop.db"
        execute(url, CREATE)
        send(folder, CLICKS)
        execute(url, *PLACED)
        step(folder, url, CLICKS)
        execute(url, *CORRECTED)
        send(folder, [LATE_CLICK])
        step(folder, url, [*CLICKS, LATE_CLICK])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
