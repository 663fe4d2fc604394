"""Orders in euros, at the rate of the moment in which each was placed, whatever comes late.

    pip install "millstream[spark]"
    python examples/orders.py

A rate holds from its time until the next one of its currency. An order takes the rate that held when it was
placed, also when the rate is written after the order, or when all is read again next year. It waits until the
watermark says that no earlier rate can come. Rates are written in the order of their times here; where they
are not, give their table a watermark with a delay, such as `ms.watermark("1 day")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

import millstream as ms

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Rate:
    """What one unit of a currency is worth in euros, from a time on."""

    currency: str
    euros: Decimal
    since: datetime


@dataclass(frozen=True)
class Order:
    """An order, in its own currency."""

    id: int
    currency: str
    amount: Decimal
    placed: datetime


def pipeline(folder: Path | str) -> ms.App:
    """Declare the view ``orders_in_euros``."""
    app = ms.App("orders", log=folder)
    rates = app.table("rates", Rate, key="currency", time="since", partitions=1)
    orders = app.topic("orders", Order, key="currency", partitions=1).stream(time="placed")
    (
        orders.join_asof(rates, on="currency")
        .with_columns(in_euros=(pl.col("amount") * pl.col("euros")).cast(pl.Decimal(38, 2)))
        .view("orders_in_euros", key="id")
    )
    return app


def hour(count: float) -> datetime:
    """Return the time so many hours after New Year."""
    return NEW_YEAR + timedelta(hours=count)


RATES = [
    Rate("USD", Decimal("0.92"), hour(-24)),
    Rate("CHF", Decimal("1.06"), hour(-24)),
    Rate("USD", Decimal("0.94"), hour(0)),
    Rate("CHF", Decimal("1.07"), hour(5)),
]
ORDERS = [
    Order(1, "USD", Decimal(100), hour(-1)),  # at the old year's rate
    Order(2, "USD", Decimal(100), hour(0)),  # a rate holds from its own time on
    Order(3, "CHF", Decimal(100), hour(4)),
    Order(4, "JPY", Decimal(100), hour(4)),  # there is no rate
    Order(5, "CHF", Decimal(100), hour(6)),  # it waits: a rate of before six may still come
]


def main() -> None:
    """Write orders and rates, run the pipeline, show the view."""
    with TemporaryDirectory() as folder:
        with ms.connect(folder) as log:
            for topic in ("rates", "orders"):
                log.create_topic(topic, partitions=1)
            with log.producer() as producer:
                for rate in RATES:
                    producer.send("rates", rate, key=rate.currency)
                for order in ORDERS:
                    producer.send("orders", order, key=order.currency)
        app = pipeline(folder)
        app.run(until="caught-up", show=True)
        print(ms.view("orders_in_euros", log=folder).scan().sort("id"))


if __name__ == "__main__":
    main()
