"""`millstream bloom` answers what a rate of false positives costs, from any two of three numbers."""

import json

import pytest

from millstream import bloom, expected_loss
from millstream.errors import ConfigError

HALF_HOUR = ("bloom", "--within", "30 minutes")


def test_of_memory_and_event_rate_it_tells_the_events_lost(done):
    out = done(*HALF_HOUR, "--events-per-second", "20000", "--memory", "64MB")
    assert "5 generations of 7 minutes 30 seconds hold at most 45,000,000 ids" in out
    asked = next(line for line in out.splitlines() if line.startswith("→"))
    assert "61 MiB" in asked
    assert "20,960" in asked  # lost per million
    assert len([line for line in out.splitlines() if "MiB" in line]) == 5


def test_rows_for_programs_have_plain_numbers_and_say_which_was_asked_for(done):
    rows = json.loads(done(*HALF_HOUR, "--events-per-second", "100", "--fpr", "1e-4", "--json"))
    assert [row["fpr"] for row in rows] == pytest.approx([1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
    assert [row["asked"] for row in rows] == [False, False, True, False, False]
    asked = rows[2]
    assert asked["generations"] == 5
    assert asked["lost_per_million"] == pytest.approx(100)
    assert asked["lost_per_hour"] == pytest.approx(36)
    assert asked["lost_per_day"] == pytest.approx(864)


def test_rates_that_make_no_sense_are_left_out_of_the_rows(done):
    rows = json.loads(done(*HALF_HOUR, "--memory", "1MB", "--fpr", "0.1", "--json"))
    assert [row["fpr"] for row in rows] == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fpr", "0.1"), "1 are given. Give two"),
        (("--fpr", "0.1", "--memory", "1MB", "--events-per-second", "9"), "3 are given"),
        (("--fpr", "2", "--memory", "1MB"), "fpr is 2.0. Give a rate from 1e-18 to 0.5"),
        (("--fpr", "0.1", "--memory", "much"), "--memory is 'much'"),
        (("--fpr", "0.1", "--memory", "0"), "memory is 0 bytes"),
        (("--fpr", "0.1", "--events-per-second", "-1"), "events_per_second is -1.0"),
        (("--fpr", "0.1", "--memory", "1MB", "--rotate", "1 hour"), "not longer than within"),
    ],
)
def test_a_wrong_call_is_told_how_to_be_right(call, options, said):
    answer = call(*HALF_HOUR, *options)
    assert answer.code == 2
    assert said in answer.err


def test_a_horizon_that_is_no_duration_is_refused(call):
    answer = call("bloom", "--within", "soon", "--fpr", "0.1", "--memory", "1MB")
    assert answer.code == 2
    assert "within is 'soon'" in answer.err


def test_help_shows_calls_that_work(done, call):
    examples = [
        line.split("bloom ")[1]
        for line in done("bloom", "--help").splitlines()
        if "  millstream bloom" in line
    ]
    assert len(examples) == 3
    for example in examples:
        words = [word.strip() for word in example.split('"')]
        parted = [
            part for n, word in enumerate(words) for part in ([word] if n % 2 else word.split())
        ]
        assert call("bloom", *parted).code == 0


# The function behind it.


@pytest.mark.parametrize("rotate", ["1 hour", "7 minutes", None])
def test_each_of_the_three_numbers_follows_from_the_other_two(rotate):
    times = {"within": "1 hour", "rotate": rotate}
    asked = expected_loss(events_per_second=5000, fpr=1e-5, **times)
    by_memory = expected_loss(memory_bytes=asked.memory_bytes, fpr=1e-5, **times)
    by_rate = expected_loss(events_per_second=5000, memory_bytes=asked.memory_bytes, **times)
    assert by_memory.events_per_second == pytest.approx(5000)
    assert by_rate.fpr == pytest.approx(1e-5, rel=0.01)


def test_more_memory_loses_fewer_events_and_more_events_lose_more():
    def rate(memory_bytes, events_per_second):
        return expected_loss(
            within="1 hour", memory_bytes=memory_bytes, events_per_second=events_per_second
        ).fpr

    assert rate(10**8, 9000) < rate(10**7, 9000) < rate(10**7, 90_000) <= 1


def test_it_is_the_memory_of_the_filters_that_dedup_makes():
    asked = expected_loss(within="7 days", rotate="12 hours", events_per_second=330, fpr=1e-4)
    expect = 330 * 7 * 86_400
    filters = bloom(fpr=1e-4, rotate="12 hours", expect=expect)
    rule = filters.rule(7 * 86_400_000_000, 0, buckets=4)
    made = rule.shape.size_bytes * 4 * asked.generations
    assert made == pytest.approx(asked.memory_bytes, rel=0.005)
    assert rule.shape.hashes == asked.hashes


def test_a_loss_is_asked_for_with_two_numbers():
    with pytest.raises(ConfigError, match="0 are given"):
        expected_loss(within="1 hour")
