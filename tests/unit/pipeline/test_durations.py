from datetime import timedelta

import pytest

from millstream.durations import describe_us, to_us
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
    ],
)
def test_durations_are_read_as_people_write_them(text, microseconds):
    assert to_us(text, what="x") == microseconds


@pytest.mark.parametrize("bad", ["ten minutes", "10", 10, "10 parsecs", "", None, timedelta(-1)])
def test_anything_else_is_refused_with_what_is_allowed(bad):
    with pytest.raises(ConfigError, match=r"window's size is .*10 minutes"):
        to_us(bad, what="window's size")


def test_a_duration_is_described_in_the_units_that_state_it():
    assert describe_us(5_400_000_000) == "1 hour 30 minutes"
    assert describe_us(0) == "0 seconds"
    assert describe_us(to_us("2 weeks 1 millisecond", what="x")) == "14 days 1 millisecond"
    assert describe_us(to_us("30 days", what="x")) == "30 days"
    assert describe_us(to_us("14 days", what="x")) == "2 weeks"
