from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import calendar
from millstream.durations import format_us, to_signed_us, to_us
from millstream.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("10 minutes", 600_000_000),
        ("1 hour 30 minutes", 5_400_000_000),
        ("1.5 seconds", 1_500_000),
        ("250ms", 250_000),
        ("0 seconds", 0),
        ("7 days", 604_800_000_000),
        (timedelta(milliseconds=5), 5_000),
        ("5m", 300_000_000),
        ("10s", 10_000_000),
        ("5 min", 300_000_000),
        ("5 Mins", 300_000_000),
        ("1h30m", 5_400_000_000),
        ("1 hr 30 secs", 3_630_000_000),
        ("2d", 172_800_000_000),
        ("1w", 604_800_000_000),
        ("3µs", 3),
    ],
)
def test_durations_are_read_as_people_write_them(text, microseconds):
    assert to_us(text, what="x") == microseconds


@pytest.mark.parametrize(
    "bad",
    ["ten minutes", "10", 10, "10 parsecs", "", None, timedelta(-1), "5 M", "1h30", "-5m", "5mo"],
)
def test_anything_else_is_refused_with_what_is_allowed(bad):
    with pytest.raises(ConfigError, match=r"window's size is .*10 minutes"):
        to_us(bad, what="window's size")


def test_a_duration_is_described_in_the_units_that_state_it():
    assert format_us(5_400_000_000) == "1 hour 30 minutes"
    assert format_us(0) == "0 seconds"
    assert format_us(to_us("2 weeks 1 millisecond", what="x")) == "14 days 1 millisecond"
    assert format_us(to_us("30 days", what="x")) == "30 days"
    assert format_us(to_us("14 days", what="x")) == "2 weeks"


def test_a_unit_that_is_misspelt_is_told_and_one_beyond_all_reason_refused():
    with pytest.raises(ConfigError, match="Did you mean 'minute'"):
        to_us("10 minuts 5 s", what="x")
    with pytest.raises(ConfigError):
        to_us("9" * 400 + " days", what="x")


@given(st.integers(0, 10**15))
def test_what_a_duration_is_described_as_is_read_as_that_duration(microseconds):
    assert to_us(format_us(microseconds), what="x") == microseconds


@pytest.mark.parametrize(
    ("span", "same"),
    [("15m", "15 minutes"), ("1d", "1 day"), ("2 hrs", "2 hours"), ("1w", "1 week")],
)
def test_calendar_windows_take_the_same_units(span, same):
    assert calendar(span, tz="UTC") == calendar(same, tz="UTC")


def test_a_letter_is_no_month():
    with pytest.raises(ConfigError, match="calendar's span is '1M'"):
        calendar("1M", tz="UTC")


def test_a_duration_with_a_sign_may_be_below_zero():
    assert to_signed_us("-1h30m", what="it") == -5_400_000_000
    assert to_signed_us(" - 5 seconds", what="it") == -5_000_000
    assert to_signed_us(timedelta(seconds=-5), what="it") == -5_000_000
    assert to_signed_us("5 seconds", what="it") == 5_000_000
    assert format_us(-5_400_000_000) == "-1 hour 30 minutes"
    for bad in ("--5 seconds", "-", "5 seconds -1 minute", "-5"):
        with pytest.raises(ConfigError, match=f"it is {bad!r}"):
            to_signed_us(bad, what="it")
    with pytest.raises(ConfigError):
        to_us("-5 seconds", what="it")
