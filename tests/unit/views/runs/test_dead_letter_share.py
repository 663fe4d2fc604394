"""A run fails when at some step more rows are dead than the app allows."""

from collections import Counter

import pytest

import millstream as ms
from millstream.errors import ConfigError
from millstream.views.runs.dead_letter_share import DeadLetterShare


def counts(**steps):
    return {step: Counter(read=read, dead=dead) for step, (read, dead) in steps.items()}


def test_a_step_fails_when_more_of_what_the_run_read_is_dead_than_the_share():
    said = []
    watch = DeadLetterShare(0.5, said.append)
    watch.observe(counts(clicks=(10, 5), map=(5, 0)))
    assert watch.failed_steps() == {}
    watch.observe(counts(clicks=(10, 6), map=(4, 0)))
    assert list(watch.failed_steps()) == ["clicks"]
    assert "11 of the 20 rows that clicks read are dead letters, more than 50%" in said[0]


def test_a_step_behind_a_filter_fails_though_few_of_all_records_are_dead():
    watch = DeadLetterShare(0.5)
    watch.observe(counts(clicks=(1000, 0), parse=(3, 3)))
    assert list(watch.failed_steps()) == ["parse"]


def test_each_step_is_spoken_of_once_and_what_comes_well_later_takes_the_failure_back():
    said = []
    watch = DeadLetterShare(0.5, said.append)
    watch.observe(counts(clicks=(2, 2)))
    watch.observe(counts(clicks=(2, 2)))
    watch.observe(counts(clicks=(100, 0)))
    assert (len(said), watch.failed_steps()) == (1, {})


def test_with_a_share_of_1_no_run_fails():
    watch = DeadLetterShare(1.0)
    watch.observe(counts(clicks=(30, 30)))
    assert watch.failed_steps() == {}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "0.5", True, None])
def test_a_share_that_is_none_is_refused_where_the_app_is_declared(share):
    with pytest.raises(ConfigError, match="dead_max is"):
        ms.App("a", log="unused", dead_max=share)
