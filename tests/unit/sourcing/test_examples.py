"""The examples do what they say."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from unit.sourcing.example import load_example

import millstream as ms
from millstream import testing

bank, cart = load_example("bank"), load_example("cart")


def test_the_bank_corrects_by_another_posting_and_tells_who_and_why(tmp_path: Path) -> None:
    assert bank.main(tmp_path) == [
        "1 +100 by till 3: cash",
        "2 -40.50 by till 3: cash",
        "3 +40.50 by audit: it was another account",
        "at version 2: 59.50, now: 100.00",
    ]


def test_the_bank_corrects_a_posting_once_and_overdraws_nothing(log: ms.EventLog) -> None:
    with ms.EventStore(log, "accounts", bank.BANK, bank.events, snapshot_every=1) as store:
        store.handle("ada", bank.Post(Decimal(10)))
        with pytest.raises(ms.CommandRejectedError, match="holds 10"):
            store.handle("ada", bank.Post(Decimal(-11)))
        store.handle("ada", bank.Correct(1))
        with pytest.raises(ms.CommandRejectedError, match="does not stand"):
            store.handle("ada", bank.Correct(1))
    with ms.EventStore(log, "accounts", bank.BANK, bank.events, snapshot_every=1) as store:
        assert store.load("ada").state == bank.Account(Decimal(0), 2, {})


def test_the_cart_forgets_what_was_removed_and_the_events_do_not(tmp_path: Path) -> None:
    assert cart.main(tmp_path) == (("tea",), [("cake", 2)])


@dataclass
class Item:
    item: str = ""


@dataclass
class CartEvent:
    type: str
    stream: str
    version: int
    data: Item


def test_a_pipeline_reads_the_events_of_a_store_as_any_topic(tmp_path: Path) -> None:
    cart.main(tmp_path)
    app = ms.App("analysis", log=str(tmp_path / "log"))
    carts = app.topic("carts", CartEvent, key="stream").stream()
    removed = carts.filter(pl.col("type") == "item-removed")
    items = removed.with_columns(item=pl.col("data").struct.field("item"))
    items.select("stream", "version", "item").view("removed", key=("stream", "version"))
    with ms.connect(tmp_path / "log") as log, log.consumer("carts", follow=False) as consumer:
        values = [record.value for record in consumer]
    out = testing.run(app, {"carts": values})
    assert out["removed"].rows() == [("cart-1", 3, "cake"), ("cart-1", 5, "cake")]
    assert not len(out.dead)
