"""How many passwords may be tried, by whom, in which time."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.security import authentication, users
from millstream.broker.security.authentication import (
    HOST_FAILURES_MAX,
    HOST_RETRY_S,
    USER_FAILURES_MAX,
    USER_RETRY_S,
    AttemptLimiter,
    Authenticator,
)
from millstream.broker.security.users import UsersFile, Verifier


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_tries_come_back_one_by_one(clock) -> None:
    tries = AttemptLimiter(3, 10.0, clock)
    waits = []
    for _ in range(4):
        waits.append(tries.wait_s("a"))
        tries.record_failure("a")
    assert waits == [0, 0, 0, 10]
    assert tries.wait_s("a") == 20  # one that was made all the same counts, too
    assert tries.wait_s("b") == 0
    clock.now_s += 14
    assert tries.wait_s("a") == 6
    clock.now_s += 6
    assert tries.wait_s("a") == 0
    tries.record_failure("a")
    assert tries.wait_s("a") == 10
    clock.now_s += 1000
    for _ in range(3):
        assert tries.wait_s("a") == 0
        tries.record_failure("a")
    assert tries.wait_s("a") == 10


def test_what_is_kept_of_failures_is_bounded(clock, monkeypatch) -> None:
    monkeypatch.setattr(authentication, "_KEYS_MAX", 5)
    tries = AttemptLimiter(1, 10.0, clock)
    for number in range(50):
        tries.record_failure(number)
    assert list(tries._clean_at) == [45, 46, 47, 48, 49]
    assert tries.wait_s(49) == 10
    clock.now_s += 11
    tries.record_failure("a")
    assert list(tries._clean_at) == ["a"]


@pytest.fixture
def authenticator(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(users, "_COST", 2)
    monkeypatch.setattr(authentication, "NOBODY", Verifier.of("nobody"))
    file = UsersFile(tmp_path / "users.txt")
    file.put("alice", "secret")
    file.put("bob", "secret")
    made = Authenticator(file, clock=clock)
    yield made
    made.close()


def outcome(authenticator: Authenticator, host: str, name: str, password: str) -> str:
    """Return "passed", or why not."""
    try:
        asyncio.run(authenticator.check(host, name, password))
    except ApiError as refused:
        assert refused.code == ErrorCode.SASL_AUTHENTICATION_FAILED
        return str(refused)
    return "passed"


def test_one_client_with_a_wrong_password_keeps_out_only_its_like(authenticator, clock) -> None:
    for number in range(USER_FAILURES_MAX):
        assert "wrong password" in outcome(authenticator, "h", "alice", f"wrong{number}")
    assert "too many" in outcome(authenticator, "h", "alice", "secret")
    assert outcome(authenticator, "h", "bob", "secret") == "passed"
    assert outcome(authenticator, "other", "alice", "secret") == "passed"
    clock.now_s += USER_RETRY_S
    assert outcome(authenticator, "h", "alice", "secret") == "passed"


def test_an_address_that_tries_many_names_is_kept_out(authenticator, clock) -> None:
    for number in range(HOST_FAILURES_MAX):
        assert "wrong password" in outcome(authenticator, "h", f"user{number}", "x")
    assert "too many" in outcome(authenticator, "h", "alice", "secret")
    assert outcome(authenticator, "other", "alice", "secret") == "passed"
    clock.now_s += HOST_RETRY_S
    assert outcome(authenticator, "h", "alice", "secret") == "passed"


def test_who_passes_may_come_as_often_as_it_likes_and_is_hashed_once(
    authenticator, monkeypatch
) -> None:
    hashed: list[str] = []
    real = Verifier.hash
    monkeypatch.setattr(
        Verifier, "hash", lambda self, word: hashed.append(word) or real(self, word)
    )
    for _ in range(3 * HOST_FAILURES_MAX):
        assert outcome(authenticator, "h", "alice", "secret") == "passed"
    assert hashed == ["secret"]
    assert "wrong" in outcome(authenticator, "h", "alice", "Secret")
    assert hashed == ["secret", "Secret"]


def test_a_program_may_come_with_very_many_connections_at_once(authenticator) -> None:
    async def all_at_once() -> None:
        tries = (authenticator.check("h", "alice", "secret") for _ in range(200))
        await asyncio.gather(*tries)

    asyncio.run(all_at_once())


def test_tries_at_the_same_time_are_no_more_than_one_after_the_other(authenticator) -> None:
    async def all_at_once() -> list[str]:
        tries = (authenticator.check("h", "alice", f"wrong{number}") for number in range(200))
        return [str(one) for one in await asyncio.gather(*tries, return_exceptions=True)]

    found = asyncio.run(all_at_once())
    assert sum("wrong password" in one for one in found) == USER_FAILURES_MAX
    assert sum("too many" in one for one in found) == 200 - USER_FAILURES_MAX


def test_a_program_with_an_old_password_keeps_nobody_out(authenticator, monkeypatch) -> None:
    """It says the same again and again, which tells it nothing and costs nothing."""
    hashed: list[str] = []
    real = Verifier.hash
    monkeypatch.setattr(
        Verifier, "hash", lambda self, word: hashed.append(word) or real(self, word)
    )
    for _ in range(10 * USER_FAILURES_MAX):
        assert "wrong password" in outcome(authenticator, "h", "alice", "old")
    assert outcome(authenticator, "h", "alice", "secret") == "passed"
    assert hashed == ["old", "secret"]
    authenticator._users.put("alice", "old", replace=True)
    assert outcome(authenticator, "h", "alice", "old") == "passed"


def test_an_unknown_name_costs_as_much_as_a_wrong_password(authenticator, monkeypatch) -> None:
    costs: list[int] = []
    real = Verifier.hash
    monkeypatch.setattr(
        Verifier, "hash", lambda self, word: costs.append(self.cost) or real(self, word)
    )
    first = outcome(authenticator, "h", "alice", "wrong")
    second = outcome(authenticator, "h", "nobody", "wrong")
    assert (first, costs[0]) == (second, costs[1])
    again = [outcome(authenticator, "h", name, "wrong") for name in ("alice", "nobody")]
    assert again == [first, second]
    assert len(costs) == 2


def test_what_is_kept_of_names_is_bounded(authenticator, monkeypatch) -> None:
    monkeypatch.setattr(authentication, "_KEYS_MAX", 5)
    assert outcome(authenticator, "h", "alice", "secret") == "passed"
    for number in range(20):
        outcome(authenticator, f"h{number}", f"user{number}", "x")
    assert len(authenticator._known) <= 5
    assert "alice" in authenticator._known


def test_a_new_password_ends_what_was_remembered_of_the_old(authenticator) -> None:
    assert outcome(authenticator, "h", "alice", "secret") == "passed"
    authenticator._users.put("alice", "other", replace=True)
    assert "wrong" in outcome(authenticator, "h", "alice", "secret")
    assert outcome(authenticator, "h", "alice", "other") == "passed"


def test_while_the_users_cannot_be_read_nobody_comes_in_and_that_is_said_once(
    authenticator, caplog
) -> None:
    path = authenticator._users.path
    text = path.read_text()
    assert outcome(authenticator, "h", "alice", "secret") == "passed"
    for _ in range(2):
        path.write_text("nonsense\n")
        for _ in range(2 * USER_FAILURES_MAX):
            assert "cannot read its users" in outcome(authenticator, "h", "alice", "secret")
        path.write_text(text)
        assert outcome(authenticator, "h", "alice", "secret") == "passed"
    assert [one.message.split(":")[0] for one in caplog.records] == [
        "no new connection can authenticate"
    ] * 2
