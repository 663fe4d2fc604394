"""A bank ledger: accounts, a wrong posting and its correction, and who did what, when and why.

    python examples/bank.py

Nothing is ever changed: a wrong posting is put right by another one, which says what it corrects and why.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import millstream as ms

events = ms.EventTypes()


@events.register("posted")
@dataclass(frozen=True)
class Posted:
    """An amount was added to the account, or taken from it; ``corrects`` is the version that was wrong."""

    amount: Decimal
    corrects: int | None = None


@dataclass(frozen=True)
class Post:
    """Add an amount, or take it."""

    amount: Decimal


@dataclass(frozen=True)
class Correct:
    """Take back the posting that is the event ``version`` of the account."""

    version: int


@dataclass(frozen=True)
class Account:
    """The balance, and each posting that still holds, by its version."""

    balance: Decimal = Decimal(0)
    version: int = 0
    standing: dict[int, Decimal] | None = None


def decide(command: Post | Correct, account: Account) -> list[Posted]:
    """Post, or refuse what would overdraw the account or correct a posting twice."""
    match command:
        case Post(amount):
            posted = Posted(amount)
        case Correct(version):
            amount = (account.standing or {}).get(version, Decimal(0))
            if not amount:
                raise ms.CommandRejectedError(
                    f"posting {version} does not stand; name one that does"
                )
            posted = Posted(-amount, corrects=version)
    if posted.corrects is None and account.balance + posted.amount < 0:
        raise ms.CommandRejectedError(
            f"the account holds {account.balance}; take that much or less"
        )
    return [posted]


def evolve(account: Account, event: Posted) -> Account:
    """Return the account after a posting."""
    standing = dict(account.standing or {})
    version = account.version + 1
    if event.corrects is None:
        standing[version] = event.amount
    else:
        del standing[event.corrects]
    return Account(account.balance + event.amount, version, standing)


BANK = ms.Decider(Account, decide, evolve, state=Account)


def main(folder: Path) -> list[str]:
    """Return the history of an account, line by line."""
    with ms.connect(folder) as log, ms.EventStore(log, "accounts", BANK, events) as bank:
        bank.handle("ada", Post(Decimal(100)), who="till 3", why="cash")
        bank.handle("ada", Post(Decimal("-40.50")), who="till 3", why="cash")
        bank.handle("ada", Correct(2), who="audit", why="it was another account")
        lines = [
            f"{event.version} {event.data.amount:+} by {event.metadata.who}: {event.metadata.why}"
            for event in bank.history("ada")
        ]
        then, now = bank.state_at("ada", 2).state, bank.load("ada").state
        return [*lines, f"at version 2: {then.balance}, now: {now.balance}"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(*main(Path(place)), sep="\n")
