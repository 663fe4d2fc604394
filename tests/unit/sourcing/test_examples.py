"""The examples do what they say."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from unit.sourcing.example import load_example

import millstream as ms

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
