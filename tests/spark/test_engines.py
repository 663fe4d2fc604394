"""The engine without a JVM killed at every named point; and an app that moves between the engines, killed on both."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import every_join
import pytest
from cases import joins, tables, trends
from cases.case import EVERY, PARTITIONS, trials_of
from cases.case import run as run_cases
from cases.on_spark import ON_SPARK, WITHOUT_RUNNING_TIME
from crash_points import COMMIT_POINTS, PLAN_POINTS, RESTART_POINTS
from every_sink import BATCH, calls_of_functions, held, pipeline, rows, send, wanted

from millstream import testing

HERE = Path(__file__).parent
SOURCE = Path(testing.__file__).parents[2]
EVENTS = rows(900)
FEW = rows(400)


def run(folder, url, point, number, engine, module="every_sink"):
    """Run the app on an engine in a process of its own, which dies when it comes to a point."""
    (folder / "marks").mkdir(exist_ok=True)
    for mark in (folder / "marks").iterdir():  # this run's times are counted anew
        mark.unlink()
    program = [sys.executable, HERE / "crash_points.py", folder, url or ""]
    ended = subprocess.run(
        [*program, point, str(number), "SIGKILL", "topics"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
            "CRASH_PIPELINE": module,
            "MILLSTREAM_ENGINE": engine,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -9, (point, ended.stdout, ended.stderr)


def check(folder, url, events):
    now = held(folder, url)
    assert now.outputs == wanted(folder, events, url=url)
    assert (now.read, now.balanced) == (len(events), True)


def die_everywhere(folder, url, points):
    """Run it again and again: each run completes what the one before it left, and dies in its next batch."""
    for place, point in enumerate(points):
        number = 1 if place == 0 or point in RESTART_POINTS else 2
        run(folder, url, point, number, "local")
        if place > 0:
            now = held(folder, url)
            assert (now.doubled(), now.balanced) == ([], True), point


@pytest.mark.quick
def test_a_run_without_a_jvm_that_dies_goes_on_as_planned(tmp_path):
    send(tmp_path, FEW)
    die_everywhere(tmp_path, None, ["driver after topics", "driver in plan", "driver in commit"])
    pipeline(tmp_path).run(until="caught-up", engine="local")
    check(tmp_path, None, FEW)


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_a_run_without_a_jvm_that_dies_at_every_point_changes_nothing(tmp_path, url):
    send(tmp_path, EVENTS)
    points = [point for point in COMMIT_POINTS if url or "database" not in point]
    third = points.index("driver after dataset") + 1
    points = [*PLAN_POINTS, *points[:third], *RESTART_POINTS, *points[third:]]
    die_everywhere(tmp_path, url, points)
    pipeline(tmp_path, url).run(until="caught-up", engine="local")
    check(tmp_path, url, EVENTS)
    calls = calls_of_functions(tmp_path)
    assert 1 <= len(calls) - len(set(calls)) <= len(points)  # at most once for each death


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_joins_and_tables_are_the_same_in_every_place_after_deaths_without_a_jvm(tmp_path):
    every_join.send(tmp_path)
    points = [point for point in COMMIT_POINTS if point.split()[-1] not in ("database", "function")]
    for place, point in enumerate([*PLAN_POINTS, *points]):
        run(tmp_path, None, point, 1 if place == 0 else 2, "local", "every_join")
    every_join.pipeline(tmp_path).run(until="caught-up", engine="local")
    now, meant = every_join.held(tmp_path), every_join.wanted(tmp_path)
    assert (now.read, now.balanced) == (sum(map(len, every_join.rows().values())), True)
    for name, places in now.results.items():
        (bag,) = {frozenset(bag.items()) for bag in places.values()}
        assert name == "looked_up" or bag == meant[name].items(), name


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_an_app_moves_between_the_engines_from_run_to_run(spark, tmp_path, in_turns):
    send(tmp_path, EVENTS)
    seen, engines = [], itertools.cycle(["local", "spark"])
    for engine in itertools.islice(engines, 4):
        options = {"until": lambda _: True, "rows_per_batch": BATCH, "on_progress": seen.append}
        pipeline(tmp_path).run(engine=engine, **options)  # one batch; of Spark perhaps one more
    assert [progress.batch_id for progress in seen] == list(range(len(seen)))
    assert 4 * BATCH <= sum(progress.read for progress in seen) < len(EVENTS)
    pipeline(tmp_path).run(engine="spark", until="caught-up", on_progress=seen.append)
    count = len(seen)  # nothing is new for either: it plans no batch of its own
    for engine in ("local", "spark"):
        pipeline(tmp_path).run(engine=engine, until="caught-up", on_progress=seen.append)
    assert len(seen) == count
    check(tmp_path, None, EVENTS)


@pytest.mark.thorough
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(6 if EVERY else 1))
def test_an_app_that_dies_on_one_engine_goes_on_as_planned_on_the_other(spark, tmp_path, seed):
    """Before the next run more records arrive, so a batch that is planned anew would be another one."""
    dice = random.Random(seed)
    points = [point for point in COMMIT_POINTS if "database" not in point]
    both = ["driver after topics", *dice.sample(points, len(points))]
    send(tmp_path, EVENTS[:120])
    sent = 120
    for number, (engine, point) in enumerate(zip(itertools.cycle(["spark", "local"]), both[:5])):
        run(tmp_path, None, point, 1 if number == 0 else 2, engine)
        add(tmp_path, EVENTS[sent : sent + 130])
        sent += 130
        if number > 0:
            assert held(tmp_path).doubled() == [], (number, point)
    pipeline(tmp_path).run(engine="spark", until="caught-up", rows_per_batch=BATCH, count=1)
    pipeline(tmp_path).run(engine="local", until="caught-up")
    check(tmp_path, None, EVENTS[:sent])


def add(folder, events):
    import millstream as ms

    with ms.connect(folder) as log, log.producer() as producer:
        for event in events:
            producer.send("events", event, key=event["user"])


FEW_CASES = [case for case in WITHOUT_RUNNING_TIME if case.id in ("A4", "C3", "D4", "E12", "F2")]


@pytest.mark.quick
def test_a_few_cases_have_the_same_answers_without_a_jvm():
    run_cases(trials_of(FEW_CASES, [2, 4]), batches=3, seed=1, engine="local")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_every_case_without_running_time_has_the_same_answer_without_a_jvm(seed):
    cases = WITHOUT_RUNNING_TIME
    if seed:
        cases = [case for case in cases if case.id in ON_SPARK]
    partitions = PARTITIONS if seed else [4]
    run_cases(trials_of(cases, partitions), batches=1 + 2 * seed % 5, seed=seed, engine="local")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_joins_tables_and_trends_have_the_same_answers_without_a_jvm(seed):
    batches = 2 + 3 * seed
    run_cases(trials_of(joins.CASES), batches=batches, seed=seed, engine="local")
    for partitions in PARTITIONS:
        trials = tables.trials_of(tables.CASES, [partitions])
        tables.run(trials, batches=batches, seed=seed, engine="local")
    options = {"batches": batches, "partitions": 4, "seed": seed}
    trends.check(testing.run(trends.app(), trends.inputs(), engine="local", **options))
