"""What the log says when very many connections are closed."""

from __future__ import annotations

import logging

import pytest

from millstream.broker.log_limiter import LINES_MAX, PERIOD_S, ConnectionLogLimiter


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_many_in_one_period_are_a_few_lines_and_a_number(clock, caplog) -> None:
    closings = ConnectionLogLimiter(clock)
    for number in range(1000):
        closings.log_closed(f"closed {number}")
    assert [one.message for one in caplog.records] == [f"closed {n}" for n in range(LINES_MAX)]
    closings.log_suppressed()
    assert len(caplog.records) == LINES_MAX
    clock.now_s += PERIOD_S
    closings.log_suppressed()
    closings.log_suppressed()
    assert [one.message for one in caplog.records[LINES_MAX:]] == [
        f"closed {1000 - LINES_MAX} more connections in 60 s; the last: closed 999"
    ]


def test_the_next_period_has_lines_of_its_own(clock, caplog) -> None:
    closings = ConnectionLogLimiter(clock)
    for _ in range(LINES_MAX + 1):
        closings.log_closed("one")
    clock.now_s += PERIOD_S
    closings.log_closed("two")
    assert [one.message for one in caplog.records[LINES_MAX:]] == [
        "closed 1 more connections in 60 s; the last: one",
        "two",
    ]


def test_what_is_not_said_yet_is_said_at_the_end(clock, caplog) -> None:
    closings = ConnectionLogLimiter(clock)
    for _ in range(LINES_MAX + 2):
        closings.log_closed("one")
    closings.log_suppressed(at_end=True)
    assert "closed 2 more connections" in caplog.records[-1].message
    closings.log_suppressed(at_end=True)
    assert len(caplog.records) == LINES_MAX + 1


def test_a_fault_of_ours_is_shown_with_its_place(clock, caplog) -> None:
    closings = ConnectionLogLimiter(clock)
    try:
        raise ZeroDivisionError("of ours")
    except ZeroDivisionError as error:
        closings.log_closed("a request failed", fault=error)
    assert caplog.records[0].levelno == logging.ERROR
    assert "ZeroDivisionError: of ours" in caplog.text
