"""The same commands through the package `eventsourcing` lead to the same accounts, versions and refusals."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID, uuid5

import pytest
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import IntegrityError
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sourcing.ledger import open_store

import millstream as ms


class Account(Aggregate):
    def __init__(self, name: str) -> None:
        self.name, self.total = name, 0

    @staticmethod
    def create_id(name: str) -> UUID:
        return uuid5(NAMESPACE_URL, name)

    @event("Paid")
    def pay(self, amount: int) -> None:
        self.total += amount


class Bank(Application):
    def pay(self, name: str, amounts: list[int]) -> bool:
        """Pay all of it or nothing, as a decider decides."""
        account = self.repository.get(Account.create_id(name))
        for amount in amounts:
            if account.total + amount < 0:
                return False
            account.pay(amount)
        self.save(account)
        return True


COMMANDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.integers(-5, 9), min_size=1, max_size=3)),
    max_size=30,
)


@settings(max_examples=some(15))
@given(COMMANDS)
def test_any_commands_lead_to_the_same_accounts(tmp_path_factory, commands) -> None:
    bank = Bank()
    for name in "abc":
        bank.save(Account(name))
    with ms.connect(tmp_path_factory.mktemp("peer")) as log, open_store(log) as store:
        for name, amounts in commands:
            try:
                store.handle(name, amounts)
                accepted = True
            except ms.CommandRejectedError:
                accepted = False
            assert accepted == bank.pay(name, amounts)
        for name in "abc":
            theirs, ours = bank.repository.get(Account.create_id(name)), store.load(name)
            assert (ours.state.total, ours.version) == (theirs.total, theirs.version - 1)
            paid = [one.amount for one in bank.events.get(theirs.id) if hasattr(one, "amount")]
            assert [one.data.amount for one in store.history(name)] == paid
            for version in range(ours.version + 1):
                then = bank.repository.get(theirs.id, version=version + 1)
                assert store.state_at(name, version).state.total == then.total


def test_what_was_decided_on_an_old_version_is_refused_by_both(store) -> None:
    bank = Bank()
    bank.save(Account("a"))
    first, second = (bank.repository.get(Account.create_id("a")) for _ in range(2))
    store.handle("a", [1], expected_version=0)
    first.pay(1)
    bank.save(first)
    second.pay(2)
    with pytest.raises(IntegrityError):
        bank.save(second)
    with pytest.raises(ms.VersionConflictError):
        store.handle("a", [2], expected_version=0)
    assert bank.repository.get(first.id).total == store.load("a").state.total == 1
