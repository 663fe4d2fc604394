"""The cases of the semantics on Spark: the answers are the cases' own, which the kernel runner gives.

A run holds every case once in a topic of 1, once of 4 and once of 7 partitions, each cut at places of
its own: 7 runs are 21 batchings. Of joins and tables `make test-long` makes 20 runs, and 60
batchings, and of trends.
"""

import pytest
from cases import joins, tables, trends
from cases.case import EVERY, PARTITIONS, run, trials_of
from cases.on_spark import ON_SPARK, WITHOUT_RUNNING_TIME

from millstream import testing

THIRD = [case for case in WITHOUT_RUNNING_TIME if case.id in ON_SPARK]
QUICK = [case for case in WITHOUT_RUNNING_TIME if case.id in ("A4", "C3", "D4", "E12", "F2")]


@pytest.mark.quick
def test_a_few_cases_have_the_same_answers_on_spark(spark, in_turns):
    run(trials_of(QUICK, [2, 4]), batches=3, seed=1, engine="spark")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_case_without_running_time_has_the_same_answer_on_spark(spark, in_workers):
    run(trials_of(WITHOUT_RUNNING_TIME, [4]), batches=3, seed=2, engine="spark")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(7))
def test_a_third_of_the_cases_have_one_answer_whatever_the_batches_and_partitions(
    spark, seed, request
):
    if seed % 2:
        request.getfixturevalue("in_turns")
    run(trials_of(THIRD), batches=1 + 2 * seed % 5, seed=seed, engine="spark")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20 if EVERY else 2))
def test_every_case_of_a_join_has_one_answer_whatever_the_batches_and_partitions(
    spark, in_turns, seed
):
    run(trials_of(joins.CASES), batches=1 + 3 * seed % 7, seed=seed, engine="spark")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("partitions", "seed"),
    [(count, seed) for seed in range(20) for count in PARTITIONS]
    if EVERY
    else [(1, 1), (4, 2), (7, 3)],
)
def test_tables_hold_on_spark_after_each_step_what_was_published(spark, in_turns, partitions, seed):
    trials = tables.trials_of(tables.CASES, [partitions])
    tables.run(trials, batches=1 + seed % 5, seed=seed, engine="spark")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("partitions", "seed"),
    [(count, seed) for seed in range(20) for count in PARTITIONS] if EVERY else [(4, 2)],
)
def test_trends_and_alerts_are_on_spark_what_was_published(spark, in_turns, partitions, seed):
    out = testing.run(
        trends.app(),
        trends.inputs(),
        batches=1 + seed % 5,
        partitions=partitions,
        seed=seed,
        engine="spark",
    )
    trends.check(out)
